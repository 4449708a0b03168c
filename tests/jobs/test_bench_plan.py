"""What a bench measures and in which order, what it reads off its measurements, and what it refuses to be asked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from vaepar.autoencoders.selection import Selection, select
from vaepar.config import VaeParallelMode
from vaepar.errors import OutputError, UsageError
from vaepar.jobs.bench_plan import STOCK_TILED, STOCK_UNTILED, Case, alone_of, in_order, plan_cases, stock_of
from vaepar.jobs.bench_plot import curves
from vaepar.jobs.bench_presets import FAMILIES, SCALES, load_preset
from vaepar.jobs.bench_report import BenchReport, CaseResult, Sample, ShapeResult, probe, write_json, write_whole
from vaepar.jobs.bench_request import BenchRequest, bind_shape, parse_modes, parse_ranks, parse_shapes

TILE, AUTO = VaeParallelMode.TILE, VaeParallelMode.AUTO
HEIGHT, WIDTH = VaeParallelMode.SPATIAL_SHARD_HEIGHT, VaeParallelMode.SPATIAL_SHARD_WIDTH


def choose(mode: VaeParallelMode, count: int) -> Selection:
    return select(mode, 12, 20, count, count)


def named(cases: list[Case]) -> list[tuple[str, str, int, int]]:
    return [(case.name, case.strategy, case.ranks, case.threads) for case in cases]


def test_every_strategy_is_measured_on_one_rank_too() -> None:
    cases = plan_cases([TILE, AUTO], [2], 1, choose, stock_threads=[1, 2])
    assert named(cases) == [
        (STOCK_UNTILED, STOCK_UNTILED, 1, 1),
        (STOCK_TILED, STOCK_TILED, 1, 1),
        (STOCK_UNTILED, STOCK_UNTILED, 1, 2),
        (STOCK_TILED, STOCK_TILED, 1, 2),
        ("tile", "tile", 1, 1),
        ("spatial_shard_width", "spatial_shard_width", 1, 1),
        ("tile", "tile", 2, 1),
        ("auto", "spatial_shard_width", 2, 1),
    ]


@pytest.mark.parametrize("counts", [[1], [2], [1, 2], [3, 4], [1, 2, 4]])
@pytest.mark.parametrize("modes", [[TILE], [AUTO], [HEIGHT, WIDTH], list(VaeParallelMode)])
def test_every_case_finds_what_it_is_compared_to(counts: list[int], modes: list[VaeParallelMode]) -> None:
    threads = 2
    totals = [1, *(count * threads for count in counts)]
    cases = plan_cases(modes, counts, threads, choose, stock_threads=totals)
    assert len({case.label for case in cases}) == len(cases)
    shared = [case for case in cases if not case.is_stock]
    assert {(case.name, case.ranks) for case in shared} >= {(mode.value, n) for mode in modes for n in counts}
    for case in shared:
        alone = alone_of(case, cases)
        assert alone is not None
        assert (alone.strategy, alone.ranks, alone.threads) == (case.strategy, 1, threads)
        if case.ranks in counts:
            for wanted in (1, case.ranks * threads):
                stock = stock_of(case, cases, wanted)
                assert stock is not None
                assert stock.threads == wanted
                assert stock.name == (STOCK_TILED if case.strategy == "tile" else STOCK_UNTILED)


def test_threads_of_stock_do_not_matter_where_only_one_number_was_measured() -> None:
    cases = plan_cases([TILE, AUTO], [2], 8, choose, stock_threads=[8])
    for case in cases:
        for threads in (1, 16):
            stock = stock_of(case, cases, threads)
            assert stock is not None
            assert stock.threads == 8


def test_a_latent_of_one_tile_is_compared_with_the_direct_way() -> None:
    cases = plan_cases(
        [AUTO], [2], 1, lambda mode, count: Selection(mode="direct", reason="one tile"), stock_threads=[1]
    )
    assert named(cases)[2:] == [("tile", "direct", 1, 1), ("auto", "direct", 2, 1)]


def test_a_mode_that_does_not_fit_the_latent_is_refused() -> None:
    with pytest.raises(UsageError, match=r"spatial_shard_height on 13 rank\(s\) does not fit .* there are 12"):
        plan_cases([HEIGHT], [13], 1, choose, stock_threads=[1])


def test_every_other_repeat_runs_backwards() -> None:
    assert [in_order("abc", repeat) for repeat in range(3)] == [list("abc"), list("cba"), list("abc")]


def sample(seconds: float, *, repeat: int = 0, cpu: tuple[float, ...] = (1.0, 0.0), peak: int | None = 100) -> Sample:
    ranks = len(cpu)
    return Sample(
        repeat=repeat,
        seconds=seconds,
        rank_seconds=[seconds] * ranks,
        rank_cpu_seconds=list(cpu),
        peak_bytes=[peak] * ranks,
        sent_bytes=[10] * ranks,
        messages=[2] * ranks,
        rounds=list(range(ranks)),
    )


def shape_result(seconds: dict[str, list[float]]) -> ShapeResult:
    """Measurements by label for tile and auto on two ranks."""
    cases = plan_cases([TILE, AUTO], [2], 1, choose, stock_threads=[1, 2])
    results = []
    for case in cases:
        peak = 60 if case.ranks == 2 else 100
        values = seconds.get(case.label, [4.0, 4.0])
        cpu = (1.0, 3.0) if case.ranks == 2 else (1.0, 0.04)
        samples = [sample(value, repeat=i, cpu=cpu, peak=peak) for i, value in enumerate(values)]
        results.append(CaseResult(case=case, samples=samples))
    return ShapeResult(shape=(1, 4, 12, 20), cases=results)


def test_rows_read_the_measurements() -> None:
    result = shape_result(
        {"tile, 2 x 1": [2.0, 3.0], "spatial_shard_width, 1 x 1": [3.0, 3.0], "auto, 2 x 1": [1.5, 1.5]}
        | {"stock untiled, 1 x 1": [6.0, 6.0], "stock tiled, 1 x 2": [5.0, 5.0]}
    )
    rows = {row.case.label: row for row in result.rows()}
    auto, tile = rows["auto, 2 x 1"], rows["tile, 2 x 1"]
    assert auto.speed_up is not None
    assert auto.stock_one_thread is not None
    assert auto.stock_same_threads is not None
    assert (auto.speed_up.value, auto.efficiency) == (2.0, 1.0)
    assert (auto.stock_one_thread.value, auto.stock_same_threads.value) == (4.0, pytest.approx(4 / 1.5))
    assert tile.speed_up is not None
    assert tile.stock_same_threads is not None
    assert (tile.speed_up.value, tile.speed_up.minimum, tile.speed_up.maximum) == (1.6, 4 / 3, 2.0)
    assert tile.stock_same_threads.value == 2.0
    assert (tile.peak_bytes, tile.peak_to_one_rank, tile.peak_to_stock) == (60, 0.6, 0.6)
    assert (tile.sent_bytes, tile.messages, tile.rounds, tile.imbalance) == (20, 4, 1, 1.5)
    assert rows["stock tiled, 1 x 1"].speed_up is None


def test_a_case_without_memory_has_a_row_and_leaves_the_others_alone() -> None:
    result = shape_result({})
    lost = next(case for case in result.cases if case.case.label == "stock untiled, 1 x 1")
    lost.samples, lost.failed = [], "out of memory"
    rows = {row.case.label: row for row in result.rows()}
    assert (rows["stock untiled, 1 x 1"].failed, rows["stock untiled, 1 x 1"].latency) == ("out of memory", None)
    assert rows["auto, 2 x 1"].stock_one_thread is None
    assert rows["auto, 2 x 1"].speed_up is not None


def test_memory_that_is_not_measured_is_not_made_up() -> None:
    result = shape_result({})
    for measured in result.cases:
        measured.samples = [replace(one, peak_bytes=[None, None]) for one in measured.samples]
    assert all(row.peak_bytes is row.peak_to_one_rank is row.peak_to_stock is None for row in result.rows())


def test_what_sleeping_ranks_used() -> None:
    report = BenchReport(operation="decode", results=[shape_result({})])
    assert report.idle_share() == pytest.approx(0.01)
    one = CaseResult(case=Case(name="tile", strategy="tile"), samples=[sample(2.0, cpu=(2.0,))])
    assert BenchReport(operation="decode", results=[ShapeResult(shape=(1,), cases=[one])]).idle_share() is None


def test_curves_start_at_the_one_rank_that_does_the_same_work() -> None:
    found = curves(shape_result({}), ["tile", "auto"])
    assert {name: [row.case.label for row in rows] for name, rows in found.items()} == {
        "tile": ["tile, 1 x 1", "tile, 2 x 1"],
        "auto": ["spatial_shard_width, 1 x 1", "auto, 2 x 1"],
    }


@pytest.mark.parametrize(("text", "wanted"), [("1", (1,)), ("4,1,2", (1, 2, 4)), (" 2 , 3", (2, 3))])
def test_ranks(text: str, wanted: tuple[int, ...]) -> None:
    assert parse_ranks(text) == wanted


@pytest.mark.parametrize("text", ["", "0", "-1", "1,1", "two", "1,,2", "1.5", "9" * 30, "²"])
def test_ranks_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--ranks is .+"):
        parse_ranks(text)


def test_shapes() -> None:
    assert parse_shapes(["96x128,3x8X9", "1x16x2x4x5"]) == ((96, 128), (3, 8, 9), (1, 16, 2, 4, 5))
    for text in ("96", "ax3", "1x2x3x4x5x6", "0x4", "8x-1", "", "8x8,", "9999999x2", "8 x8"):
        with pytest.raises(UsageError, match=r"^--shape is "):
            parse_shapes([text])


def test_shapes_are_bound_to_the_family() -> None:
    assert bind_shape((8, 9), True, 16, "V") == (1, 16, 1, 8, 9)
    assert bind_shape((3, 8, 9), True, 16, "V") == (1, 16, 3, 8, 9)
    assert bind_shape((2, 16, 3, 8, 9), True, 16, "V") == (2, 16, 3, 8, 9)
    assert bind_shape((8, 9), False, 4, "P") == (1, 4, 8, 9)
    assert bind_shape((2, 4, 8, 9), False, 4, "P") == (2, 4, 8, 9)
    for dims, frames in (((3, 8, 9), False), ((1, 4, 3, 8, 9), False), ((1, 4, 8, 9), True)):
        with pytest.raises(UsageError, match="does not fit"):
            bind_shape(dims, frames, 4, "P")
    for dims, frames in (((1, 5, 8, 9), False), ((1, 5, 2, 8, 9), True)):
        with pytest.raises(UsageError, match="has 5 channels; P takes 4"):
            bind_shape(dims, frames, 4, "P")


def test_modes() -> None:
    assert parse_modes("tile, auto") == (TILE, AUTO)
    with pytest.raises(UsageError, match="the modes are tile, auto"):
        parse_modes("tile,\x1b[31mred")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"family": "sdxl"}, r"--family is 'sdxl'; it is one of kl, flux2"),
        ({"family": "kl\n\x1b[2J"}, r"--family is 'kl\\n\\x1b\[2J'"),
        ({"scale": "huge"}, r"--scale is 'huge'; it is one of tiny, small, real"),
        ({"model": "demo", "family": "kl"}, "--model and --family were both given"),
        ({"model": "demo", "scale": "tiny"}, "--model and --scale were both given"),
        ({"variant": "fp16"}, "--variant was given without --model"),
        ({"operation": "train"}, "--operation is 'train'; it is one of decode"),
        ({"dtype": "int8"}, "--dtype is 'int8'"),
        ({"modes": ()}, "--modes is ''"),
        ({"modes": (TILE, TILE)}, "different modes"),
        ({"repeats": 0}, "--repeats is 0"),
        ({"warmup": 0}, "--warmup is 0"),
        ({"threads": 0}, "--threads is 0"),
        ({"tile_size": -8}, "--tile-size is -8"),
        ({"tile_stride": 8}, "--tile-stride was given without --tile-size"),
        ({"frames_per_step": 2}, "--frames-per-step was given, but AutoencoderKL takes pictures"),
        ({"family": "wan", "modes": (TILE,), "frames_per_step": 2}, "tile takes a frame a step"),
        ({"ranks": ()}, "ranks are"),
        ({"ranks": (2, 1)}, "ranks are"),
        ({"ranks": (0, 1)}, "ranks are"),
        ({"family": "wan", "shapes": ((1, 4, 8, 8),)}, "does not fit AutoencoderKLWan"),
        ({"family": "kl", "scale": "tiny", "shapes": ((1, 5, 8, 8),)}, "has 5 channels; AutoencoderKL takes 4"),
    ],
)
def test_requests_that_cannot_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        BenchRequest(**arguments)
    assert "\n" not in str(caught.value)
    assert not re.search(r"[\x00-\x1f]", str(caught.value))


def test_tiles_come_from_the_flags_or_the_preset() -> None:
    assert BenchRequest(family="kl").tiles(8) is None
    assert BenchRequest(family="wan", scale="tiny").tiles(8) == (64, 48)
    assert BenchRequest(family="wan", scale="tiny", tile_size=128).tiles(8) == (128, 96)
    assert BenchRequest(family="wan", tile_size=128, tile_stride=64).tiles(8) == (128, 64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", SCALES)
def test_presets_fit_their_classes(family: str, scale: str) -> None:
    preset = load_preset(family, scale)
    with torch.device("meta"):
        model = getattr(diffusers, preset.class_name)(**preset.config)
    assert sum(parameter.numel() for parameter in model.parameters()) == preset.parameters
    channels = model.config.z_dim if "z_dim" in model.config else model.config.latent_channels
    assert bind_shape(preset.shape, len(preset.shape) == 5, channels, preset.class_name) == preset.shape


def test_real_presets_have_the_widths_of_the_released_checkpoints() -> None:
    assert load_preset("kl", "real").config["block_out_channels"] == [128, 256, 512, 512]
    for family in ("flux2", "qwenimage", "wan"):
        preset = load_preset(family, "real")
        with torch.device("meta"):
            default = getattr(diffusers, preset.class_name)()
        assert sum(parameter.numel() for parameter in default.parameters()) == preset.parameters


def test_files_are_written_whole_or_refused_beforehand(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "b.json"
    probe(target)
    assert list(target.parent.iterdir()) == []
    write_whole(target, b"one")
    write_json(target, BenchReport(operation="decode"))
    assert list(target.parent.iterdir()) == [target]
    assert b'"schema": 2' in target.read_bytes()
    for bad in (target.parent, target / "below.json"):
        with pytest.raises(OutputError, match="cannot write"):
            probe(bad)
    assert list(target.parent.iterdir()) == [target]
