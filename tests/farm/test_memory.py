"""Memory: what the plan expects against what a decode takes, and what a run does when it is not enough."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import models
from tests.cli.conftest import save_latent
from tests.families import ADAPTERS, latent
from tests.farm.ranks import contents, decode_on, start_decode
from tests.memory import PeakBytes
from vaepar.autoencoders.feed import TensorFeed
from vaepar.autoencoders.selection import Selection, axis_of
from vaepar.autoencoders.spatial import shard_decode_chunks
from vaepar.config import VaeParallelMode
from vaepar.jobs.estimate import estimate_peak_bytes, select_for
from vaepar.jobs.farming import Farming
from vaepar.jobs.ghost import META, FusedAttention, LiveBytes
from vaepar.jobs.memory import peak_bytes, reset_peak
from vaepar.jobs.report import RunReport, Silent
from vaepar.jobs.request import DecodeRequest
from vaepar.jobs.retreat import Effort
from vaepar.latents import LatentRequest, LatentState, VaeFacts
from vaepar.launch import World, joined
from vaepar.layers.kernels import meta_for_cpu
from vaepar.parallel.group import SoloGroup

TILE, AUTO, HEIGHT = VaeParallelMode.TILE, VaeParallelMode.AUTO, VaeParallelMode.SPATIAL_SHARD_HEIGHT


def facts_of(vae: torch.nn.Module) -> VaeFacts:
    config = json.loads(json.dumps({k: v for k, v in vae.config.items() if k[:1] != "_"}))  # type: ignore[operator, union-attr]
    return VaeFacts.from_config(type(vae).__name__, config)


def test_live_bytes_are_those_of_living_tensors() -> None:
    live = LiveBytes()
    with live:
        first = torch.empty((1000,), device=META)
        second = first + 1
        view = second[10:]
        del first, second
        assert live.now == 4000  # the view keeps all of its storage
        del view
    assert (live.now, live.peak) == (0, 8000)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (models.make_wan21, (1, 16, 4, 20, 24)),
        (models.make_qwenimage, (1, 16, 1, 40, 24)),
        (models.make_kl, (1, 16, 40, 48)),
        (models.make_flux2, (1, 32, 40, 40)),
        (models.make_wan22, (1, 48, 3, 12, 16)),
    ],
)
def test_estimates_follow_sizes_ranks_and_dtypes(make: object, shape: tuple[int, ...]) -> None:
    facts = facts_of(make(real_topology=True))  # type: ignore[operator]

    def total(shape: tuple[int, ...], mode: str, size: int = 1, dtype: torch.dtype = torch.float32) -> int:
        return estimate_peak_bytes(
            facts, shape, dtype, Selection(mode=mode, reason=""), size, tiles=(128, 96), device="cuda"
        ).activations

    whole = total(shape, "direct")
    assert 1.7 < total((*shape[:-1], 2 * shape[-1]), "direct") / whole < 2.3
    assert total(shape, "direct", dtype=torch.bfloat16) < 0.75 * whole
    alone = total(shape, "spatial_shard_width", 1)
    assert total(shape, "spatial_shard_width", 2) < 0.65 * alone
    if len(shape) == 5 and shape[2] > 1:
        longer = total((*shape[:2], 40, *shape[3:]), "direct")
        assert longer == total((*shape[:2], 80, *shape[3:]), "direct")


@pytest.mark.parametrize("make", [models.make_kl, models.make_flux2, models.make_qwenimage, models.make_wan22])
def test_estimates_of_an_encode_follow_sizes_and_ranks(make: Callable[..., Any]) -> None:
    facts = facts_of(make(real_topology=True))
    shape = (1, facts.latent_channels, *((5,) if facts.takes_frames else ()), 24, 32)

    def total(shape: tuple[int, ...], mode: str, size: int = 1) -> int:
        selection = Selection(mode=mode, axis=axis_of(mode), reason="")
        tiles = (2048, 1536) if mode == "direct" else (128, 96)  # what is direct fits one tile
        return estimate_peak_bytes(
            facts, shape, torch.float32, selection, size, operation="encode", tiles=tiles, device="cuda"
        ).activations

    whole = total(shape, "direct")
    assert 1.7 < total((*shape[:-1], 2 * shape[-1]), "direct") / whole < 2.3
    assert total(shape, "spatial_shard_width", 2) < 0.65 * total(shape, "spatial_shard_width", 1)
    assert total(shape, "tile", 2) <= total(shape, "tile", 1)
    if facts.takes_frames:
        longer, longest = ((*shape[:2], frames, *shape[3:]) for frames in (40, 80))
        assert total(longer, "direct") == total(longest, "direct")


def test_the_selection_of_a_plan_is_that_of_a_run() -> None:
    facts = facts_of(models.make_wan21())
    assert select_for(facts, (1, 16, 3, 9, 12), "auto", 2, (64, 48), "encode").mode == "spatial_shard_width"
    assert select_for(facts, (1, 16, 3, 8, 8), "auto", 2, (64, 48), "encode").mode == "direct"
    assert select_for(facts, (1, 16, 3, 9, 12), "tile", 1, (64, 48)).mode == "tile"
    assert select_for(facts, (1, 16, 3, 9, 12), "tile", 2).mode == "direct"
    assert select_for(facts, (1, 16, 3, 9, 12), "auto", 2, (64, 48)).mode == "spatial_shard_width"


def measure(operation: str, shape: tuple[int, ...], mode: str, tiles: tuple[int, int]) -> tuple[int, int]:
    """(estimated, measured) bytes of activations of a real decode or encode in this process."""
    import psutil

    from vaepar import launch
    from vaepar.autoencoders import adapter_for
    from vaepar.parallel.group import SoloGroup

    with launch.joined(launch.World(), "cpu"):
        torch.set_num_threads(1)
        vae = models.make_wan21(real_topology=True)
        model = adapter_for("AutoencoderKLWan").from_config(vae.config).eval().requires_grad_(False)
        model.init_distributed(SoloGroup())
        model.configure_tiles(*tiles)
        model.set_parallel_size(1, mode=mode)
        facts = facts_of(vae)
        z = torch.randn(shape) if operation == "decode" else torch.rand(facts.pixel_shape(shape)) * 2 - 1
        selection = model.select_mode(z) if operation == "decode" else model.select_encode_mode(z.shape)
        work = model.decode_chunks if operation == "decode" else lambda x: model.encode_chunks(TensorFeed(x))
        ratio = 1 if operation == "decode" else facts.spatial_ratio
        for _ in work(z[..., : 2 * ratio, : 2 * ratio]):
            pass
        before = psutil.Process().memory_info().rss
        reset_peak(torch.device("cpu"))
        for _ in work(z):
            pass
        measured = peak_bytes(torch.device("cpu")) - before
        estimate = estimate_peak_bytes(facts, shape, torch.float32, selection, 1, operation=operation, tiles=tiles)
        return estimate.activations, measured


@pytest.mark.processes
@pytest.mark.parametrize(
    ("operation", "shape", "mode", "tiles"),
    [
        ("decode", (1, 16, 3, 24, 24), "tile", (512, 384)),
        ("decode", (1, 16, 3, 24, 24), "tile", (128, 96)),
        ("decode", (1, 16, 6, 24, 32), "spatial_shard_height", (128, 96)),
        ("encode", (1, 16, 3, 32, 32), "tile", (512, 384)),
        ("encode", (1, 16, 3, 32, 32), "tile", (192, 144)),
        ("encode", (1, 16, 6, 24, 32), "spatial_shard_height", (128, 96)),
    ],
)
def test_the_estimate_is_within_a_factor_of_two(
    operation: str, shape: tuple[int, ...], mode: str, tiles: tuple[int, int]
) -> None:
    """In a process of its own, whose heap holds nothing else."""
    from tests.farm.ranks import apart

    estimated, measured = apart(measure, operation, shape, mode, tiles)
    assert 0.5 < estimated / measured < 2


def test_efforts_become_smaller_and_end() -> None:
    sharded = Effort(mode=HEIGHT, frames_per_step=4, tile=256, stride=192)
    steps: list[tuple[str, int, int]] = []
    effort: Effort | None = sharded
    while effort is not None:
        steps.append((effort.mode.value, effort.frames_per_step, effort.tile))
        used = "tile" if effort.mode is TILE else effort.mode.value
        effort = effort.smaller(used, 2, 8, 512)
    assert steps == [
        ("spatial_shard_height", 4, 256),
        ("spatial_shard_height", 2, 256),
        ("spatial_shard_height", 1, 256),
        ("tile", 1, 256),
        ("tile", 1, 128),
        ("tile", 1, 64),
    ]
    direct = Effort(mode=TILE, frames_per_step=4, tile=1024, stride=768)
    first = direct.smaller("direct", 2, 8, 512)
    assert first is not None
    assert first.mode is AUTO
    assert direct.smaller("direct", 1, 8, 512) == Effort(mode=TILE, frames_per_step=4, tile=256, stride=192)
    assert Effort.from_text(first.to_text()) == first


def limit_data(extra: int) -> None:
    """Let this process have ``extra`` bytes of data beyond what it has."""
    with Path("/proc/self/status").open() as status:
        have = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (have + extra, resource.RLIM_INFINITY))


def kl_request(tmp_path: Path, out: str, side: int = 96, **farming: object) -> DecodeRequest:
    model = tmp_path / "kl"
    if not model.exists():
        models.make_kl(real_topology=True).save_pretrained(model)
        latent = torch.randn((1, 16, side, side), generator=torch.Generator().manual_seed(0))
        save_latent(tmp_path / "in" / "large.safetensors", latent)
        save_latent(tmp_path / "in" / "small.safetensors", latent[..., :8, :8])
    return DecodeRequest(
        inputs=(str(tmp_path / "in"),),
        model=str(model),
        out=tmp_path / out,
        tile_size=1024,
        latent=LatentRequest(state=LatentState.RAW),
        farming=Farming(**farming),  # type: ignore[arg-type]
    )


def limit_area(latents: int) -> None:
    """Let the decoder run out of memory for more than so many latents at once, as a device's allocator would."""
    from diffusers.models.autoencoders.vae import Decoder
    from torch.nn.modules.module import register_module_forward_pre_hook

    def allocate(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, Decoder) and inputs[0].shape[-1] * inputs[0].shape[-2] > latents:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    register_module_forward_pre_hook(allocate)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("latents", "size", "tried"),
    [
        (96 * 50, 2, ["a spatial shard"]),
        (50 * 50, 2, ["a spatial shard"] + ["a spatial shard"] * 2 + ["tiles of 384"]),
        (50 * 50, 1, ["tiles of 384"]),
        (13 * 13, 1, ["tiles of 384", "tiles of 192", "tiles of 96"]),
    ],
)
def test_ranks_retreat_together(latents: int, size: int, tried: list[str], tmp_path: Path) -> None:
    """They say what they try, end with the same picture, and begin the next file as asked."""
    request = kl_request(tmp_path, "out", vae_parallel_size=size)
    results = start_decode(request, 2, tmp_path / "store", prepare=partial(limit_area, latents)).wait()
    for report in results:
        assert isinstance(report, RunReport), report
        assert report.exit_code == 0
        large, small = report.rows
        notes = [note for note in large.notes if "out of memory" in note]
        assert len(notes) == len(tried), notes
        assert all(words in note for words, note in zip(tried, notes, strict=True))
        assert not [note for note in small.notes if "out of memory" in note]
        assert small.mode == "direct"
    decode_on(kl_request(tmp_path, "whole", vae_parallel_size=2), 2, tmp_path / "store2")
    pixels = [np.asarray(Image.open(tmp_path / out / "large.png")).astype(int) for out in ("out", "whole")]
    assert np.abs(pixels[0] - pixels[1]).mean() < 16  # the same picture, perhaps with other tiles
    assert len(contents(tmp_path / "out")) == 2


@pytest.mark.processes
@pytest.mark.parametrize(("latents", "retreat"), [(20, True), (50 * 50, False)])
def test_code_6_when_the_smallest_does_not_fit(latents: int, retreat: bool, tmp_path: Path) -> None:
    request = kl_request(tmp_path, "out", retreat=retreat, vae_parallel_size=2)
    results = start_decode(request, 2, tmp_path / "store", prepare=partial(limit_area, latents)).wait()
    for report in results:
        assert isinstance(report, RunReport), report
        large = report.rows[0]
        assert (large.status, large.exit_code) == ("failed", 6)
        assert report.exit_code == (6 if retreat else 3)
    assert "large.png" not in contents(tmp_path / "out")


def decode_within(request: DecodeRequest, extra: int) -> RunReport:
    from vaepar.jobs.decode import run_decode

    # As the command does it: only then is what a failed attempt held given back to the system for the next one.
    with joined(World(), "cpu") as group:
        limit_data(extra)
        return run_decode(request, group, Silent())


@pytest.mark.processes
def test_a_limit_of_the_operating_system(tmp_path: Path) -> None:
    """Not injected: the allocator itself refuses, and the rank goes on with tiles that fit."""
    from tests.farm.ranks import apart

    # How much the interpreter holds beside the tensors differs by machine, so the limit is lowered until it bites.
    for megabytes in (320, 260, 210, 170, 140, 110):
        request = kl_request(tmp_path, f"out{megabytes}", side=192)
        report = apart(decode_within, request, megabytes * 2**20)
        if report.rows[0].notes[-1].startswith("out of memory in tile: tried again with tiles of"):
            break
    assert report.counts == {"ok": 2}, [(row.error, row.notes) for row in report.rows]
    assert any("out of memory in tile: tried again with tiles of" in note for note in report.rows[0].notes)


@pytest.mark.parametrize(
    ("shape", "unfolded"),
    [((1, 8, 16, 16), 1), ((1, 8, 64, 64), 0), ((1, 8, 3, 16, 16), 1), ((1, 8, 3, 1024, 4), 0)],
)
def test_what_one_thread_unfolds(shape: tuple[int, ...], unfolded: int) -> None:
    """Input values once for each tap of the kernel, where the input is too small for oneDNN."""
    x = torch.empty(shape, device=META)
    conv = (torch.nn.Conv2d if len(shape) == 4 else torch.nn.Conv3d)(8, 8, 3, padding=1, device=META)
    live = LiveBytes([x, *conv.parameters()], unfolds=True)
    with torch.no_grad(), live:
        conv(x)
    taps = 3 ** (len(shape) - 2)
    assert live.peak == (1 + unfolded * taps) * x.nbytes


@pytest.mark.parametrize("family", ["kl", "wan21", "qwenimage"])
def test_what_is_counted_is_what_a_shard_makes(family: str) -> None:
    """The walk without memory and a real decode, tensor by tensor: the same operations, so the same peak."""
    z = latent(family, 16, 12, frames=5)
    if family == "kl":
        z = torch.cat([z] * 4, 1)
    peaks = []
    for device in (META, torch.device("cpu")):
        vae, here = ADAPTERS[family](real_topology=True).to(device), z.to(device)
        counted: Any = LiveBytes([*vae.parameters(), *vae.buffers(), here]) if device == META else PeakBytes()
        chunks = shard_decode_chunks(vae, here, SoloGroup(device), "height")
        with FusedAttention(), counted, meta_for_cpu():
            for chunk in chunks:
                del chunk
        peaks.append(counted.peak)
    assert abs(peaks[0] / peaks[1] - 1) < 0.02
