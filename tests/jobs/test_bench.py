"""Whole benches on one rank, in this process or (where memory is limited) in one of their own."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.processes import run_processes
from vaepar.autoencoders import adapter_for
from vaepar.config import VaeParallelMode
from vaepar.errors import OutputError, UsageError
from vaepar.jobs.bench import SilentProgress, rank_groups, run_bench
from vaepar.jobs.bench_meter import Meter, Reading, threads_set
from vaepar.jobs.bench_models import BenchModel, random_model
from vaepar.jobs.bench_presets import FAMILIES, load_preset
from vaepar.jobs.bench_report import BenchReport
from vaepar.jobs.bench_request import OPERATIONS, BenchRequest
from vaepar.parallel.group import RankGroup, SoloGroup
from vaepar.parallel.halo import gather_parts
from vaepar.parallel.shards import split_rows

WIDTH = VaeParallelMode.SPATIAL_SHARD_WIDTH

# float32, another order of the sums in convolutions and norms: a few ulp of values of order 1.
SHARD_TOLERANCE = 1e-5


class Told:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.passes, self.steps = 0, list[str]()

    def begin(self, passes: int) -> None:
        self.passes = passes

    def step(self, text: str) -> None:
        self.steps.append(text)

    def stop(self) -> None:
        return None


def solo(request: BenchRequest) -> BenchReport:
    return run_bench(request, SoloGroup(), SilentProgress())


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact_on_one_rank(family: str, operation: str) -> None:
    modes = (VaeParallelMode.TILE, WIDTH)
    told = Told()
    request = BenchRequest(family=family, scale="tiny", operation=operation, modes=modes, repeats=1)
    report = run_bench(request, SoloGroup(), told)
    assert report.operation == operation
    rows = {row.case.name: row for row in report.results[0].rows()}
    assert set(rows) == {"stock untiled", "stock tiled", "tile", "spatial_shard_width"}
    for name, row in rows.items():
        assert row.failed is None
        assert row.to_tiled is not None
        assert row.to_untiled is not None
        assert row.to_untiled.max_abs is not None
        assert (row.to_tiled.max_abs == 0) == (name in ("tile", "stock tiled"))
        assert (row.to_untiled.max_abs <= SHARD_TOLERANCE) == (name in ("spatial_shard_width", "stock untiled"))
        assert (row.estimated_bytes is None) == row.case.is_stock
    assert told.passes == len(told.steps) == 2 + 4 * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_keep_pixels_where_nothing_clamps_them(family: str) -> None:
    preset = load_preset(family, "tiny")
    model = random_model(adapter_for(preset.class_name), preset)
    pixels = model.decode(torch.randn(preset.shape, generator=torch.Generator().manual_seed(0))).sample
    assert 0.02 < float(pixels.std()) < 0.6
    assert float((pixels.abs() >= 1).float().mean()) < 0.01


def test_the_stock_model_is_plain_and_has_weights_of_its_own() -> None:
    model = BenchModel(BenchRequest(family="kl", scale="tiny", tile_size=32), SoloGroup())
    stock = model.stock()
    assert type(stock).__module__.startswith("diffusers.")
    assert (stock.tile_sample_min_size, stock.use_tiling) == (32, True)
    ours = dict(model.adapter.named_parameters())
    for name, parameter in stock.named_parameters():
        assert torch.equal(parameter, ours[name])
        assert parameter.data_ptr() != ours[name].data_ptr()


def test_the_same_seed_gives_the_same_model_whatever_was_drawn_before() -> None:
    preset = load_preset("wan22", "tiny")
    cls = adapter_for(preset.class_name)
    first = random_model(cls, preset).state_dict()
    state = torch.get_rng_state()
    torch.rand(5)
    moved = torch.get_rng_state()
    second = random_model(cls, preset).state_dict()
    assert torch.equal(torch.get_rng_state(), moved)
    torch.set_rng_state(state)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_without_baselines_results_are_compared_all_the_same() -> None:
    report = solo(BenchRequest(family="kl", scale="tiny", baselines=False, modes=(WIDTH,), repeats=2))
    (row,) = report.results[0].rows()
    assert (row.case.name, row.stock_one_thread, row.peak_to_stock) == ("spatial_shard_width", None, None)
    assert row.to_untiled is not None
    assert row.to_untiled.max_abs is not None
    assert row.to_untiled.max_abs <= SHARD_TOLERANCE


def test_several_shapes_and_bfloat16() -> None:
    report = solo(
        BenchRequest(family="kl", scale="tiny", shapes=((10, 13), (2, 4, 9, 9)), dtype="bfloat16", repeats=2, warmup=2)
    )
    assert [result.shape for result in report.results] == [(1, 4, 10, 13), (2, 4, 9, 9)]
    assert report.model["dtype"] == "bfloat16"
    for result in report.results:
        tile = next(row for row in result.rows() if row.case.name == "tile")
        assert tile.to_tiled is not None
        assert tile.to_tiled.max_abs == 0
        assert all([sample.repeat for sample in measured.samples] == [0, 1] for measured in result.cases)


def test_a_latent_of_one_tile_says_so() -> None:
    report = solo(BenchRequest(family="kl", scale="tiny", shapes=((8, 8),), repeats=1))
    assert {measured.case.strategy for measured in report.results[0].cases[2:]} == {"direct"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "demo", "shapes": ((1, 99, 1, 8, 8),)}, "has 99 channels"),
        ({"model": "demo", "shapes": ((1, 4, 8, 8, 8, 8),)}, "does not fit"),
        ({"family": "kl", "scale": "tiny", "dtype": "float16"}, "no fast half"),
        ({"family": "kl", "scale": "tiny", "tile_size": 20}, "multiples of 8"),
        ({"ranks": (1, 2)}, "compares up to 2 ranks, and 1 are there"),
    ],
)
def test_what_does_not_fit_the_model_is_one_line(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        solo(BenchRequest(**arguments))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_written_is_found_before_measuring(tmp_path: Path) -> None:
    told = Told()
    latent = tmp_path / "a.safetensors"
    latent.write_bytes(b"\x08" + bytes(15))
    for path in (tmp_path, latent, latent / "below"):
        with pytest.raises(UsageError, match="--json"):
            run_bench(BenchRequest(family="kl", scale="tiny", json=path), SoloGroup(), told)
        with pytest.raises(OutputError):
            run_bench(BenchRequest(family="kl", scale="tiny", plot=tmp_path), SoloGroup(), told)
    assert latent.read_bytes() == b"\x08" + bytes(15)
    assert told.steps == []


def test_the_meter_sees_memory_that_was_given_back() -> None:
    meter = Meter(torch.device("cpu"))
    size = 64 * 2**20
    for _ in range(2):  # the second time, pages that were kept would look like no memory at all
        meter.settle()
        reading = Reading()
        with meter.timed(reading):
            torch.ones(size // 4).max()
        assert size * 0.95 < reading.peak_bytes < size * 1.5
        assert reading.nanoseconds > 0
    meter.settle()
    reading = Reading()
    with meter.timed(reading):
        pass
    assert 0 <= reading.peak_bytes < 2**20


def test_threads_are_put_back_after_a_failure() -> None:
    before = torch.get_num_threads()
    inside = []

    def fail() -> None:
        with threads_set(before + 1):
            inside.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [before + 1]
    assert torch.get_num_threads() == before


def bench_in_little_memory(group: RankGroup, headroom: int) -> list[tuple[str, str, bool]]:
    """Name, strategy and whether it failed, for every case of a bench with so many bytes left."""
    request = BenchRequest(
        family="kl", scale="tiny", shapes=((128, 128),), modes=(VaeParallelMode.TILE, WIDTH), repeats=1
    )
    solo(BenchRequest(family="kl", scale="tiny", repeats=1))  # what libraries allocate once
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + headroom, resource.RLIM_INFINITY))
    report = solo(request)
    return [(row.case.name, row.case.strategy, row.failed is not None) for row in report.results[0].rows()]


@pytest.mark.processes
def test_what_does_not_fit_in_memory_is_a_result_and_the_rest_goes_on(tmp_path: Path) -> None:
    # One feature map of 16 x 1024 x 1024 numbers has 64 MiB, and a residual block holds three of them; tiles of
    # 64 x 64 pixels need next to nothing beside the picture of 12 MiB.
    (found,) = run_processes(1, bench_in_little_memory, tmp_path, 140 * 2**20)
    assert found == [
        ("stock untiled", "stock untiled", True),
        ("stock tiled", "stock tiled", False),
        ("tile", "tile", False),
        ("spatial_shard_width", "spatial_shard_width", True),
    ]


def nested_groups(group: RankGroup) -> dict[int, tuple[int, int, float]]:
    """Rank, size and the sum of the world ranks in each group that this rank is in."""
    found = {}
    for count, members in rank_groups(group, (1, 2, 3)).items():
        own, layout = torch.tensor([float(group.rank)]), split_rows(members.size, members.size)
        parts = gather_parts(members, layout, own, [(1,)] * members.size)
        found[count] = (members.rank, members.size, float(sum(parts)))
    return found


@pytest.mark.processes
def test_groups_of_fewer_ranks_are_nested(tmp_path: Path) -> None:
    assert run_processes(3, nested_groups, tmp_path) == [
        {3: (0, 3, 3.0), 2: (0, 2, 1.0), 1: (0, 1, 0.0)},
        {3: (1, 3, 3.0), 2: (1, 2, 1.0)},
        {3: (2, 3, 3.0)},
    ]
