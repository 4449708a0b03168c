"""The adapters inside diffusers' pipelines: every rank's pictures are those of the plain pipeline.

Tile mode is compared, bit for bit, with the plain pipeline with the same tiling: each tile is the same arithmetic. A
spatial shard is compared with the plain pipeline without tiling, within 1e-5 of pixels in [0, 1]: convolutions of
other sizes, and sums in another order, round otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.library.pipelines import PIPELINES, enable_tiling, noise, pictures
from tests.processes import run_processes
from vaepar.autoencoders import adapter_for, distribute
from vaepar.parallel.group import RankGroup
from vaepar.parallel.loopback import LoopbackGroup, run_loopback

SPATIAL = ("spatial_shard_height", "spatial_shard_width", "auto")
TOLERANCE = 1e-5


def wanted(name: str, mode: str, **more: Any) -> Tensor:
    """The plain pipeline's pictures that a mode has to give."""
    pipe, call = PIPELINES[name]()
    if mode == "tile":
        enable_tiling(pipe.vae)
    result: Tensor = pictures(pipe, call, **more)
    return result


def on_threads(name: str, mode: str, ranks: int, **more: Any) -> list[Tensor]:
    """The pictures of each rank of a loopback group; the ranks share nothing."""
    made = [PIPELINES[name]() for _ in range(ranks)]

    def work(group: LoopbackGroup) -> Tensor:
        pipe, call = made[group.rank]
        enable_tiling(pipe.vae)
        distribute(pipe.vae, mode=mode, group=group)
        group.traffic.reset()
        result: Tensor = pictures(pipe, call, **more)
        assert group.traffic.messages + group.traffic.rounds > 0, "the ranks have not worked together"
        return result

    return run_loopback(ranks, work)


@pytest.mark.parametrize("name", list(PIPELINES))
def test_tiles_on_three_ranks_are_the_plain_tiled_pipeline(name: str) -> None:
    want = wanted(name, "tile")
    assert want.std() > 0.01, "a picture without contrast proves nothing"
    assert not torch.equal(want, wanted(name, "untiled"))
    for got in on_threads(name, "tile", 3):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", list(PIPELINES))
@pytest.mark.parametrize("mode", SPATIAL)
def test_shards_on_three_ranks_are_the_plain_untiled_pipeline(name: str, mode: str) -> None:
    want = wanted(name, mode)
    for got in on_threads(name, mode, 3):
        assert got.shape == want.shape
        assert (got - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", list(PIPELINES))
def test_bfloat16_and_slices_on_two_ranks(name: str) -> None:
    """The whole pipeline in bfloat16, two pictures a prompt, the VAE one picture at a time."""
    several = "num_videos_per_prompt" if name.startswith("Wan") else "num_images_per_prompt"
    made = []
    for _ in range(3):
        pipe, call = PIPELINES[name]()
        pipe.to(torch.bfloat16)
        enable_tiling(pipe.vae)
        pipe.vae.enable_slicing()
        embeds = call["prompt_embeds"]
        half = [e.bfloat16() for e in embeds] if isinstance(embeds, list) else embeds.bfloat16()
        call |= {"prompt_embeds": half, several: 2}
        if "pooled_prompt_embeds" in call:
            call["pooled_prompt_embeds"] = call["pooled_prompt_embeds"].bfloat16()
        made.append((pipe, call))
    want = pictures(*made[2])
    assert want.dtype == torch.bfloat16
    assert want.shape[0] == 2
    assert not torch.equal(want[0], want[1])

    def work(group: LoopbackGroup) -> Tensor:
        pipe, call = made[group.rank]
        distribute(pipe.vae, group=group)
        result: Tensor = pictures(pipe, call)
        return result

    assert all(torch.equal(got, want) for got in run_loopback(2, work))


@pytest.mark.parametrize("name", list(PIPELINES))
def test_without_a_process_group_it_is_the_plain_pipeline(name: str, tmp_path: Path) -> None:
    """The same script without torchrun: tiled or not, diffusers' own path."""
    pipe, call = PIPELINES[name]()
    pipe.vae.save_pretrained(tmp_path)
    loaded = adapter_for(type(pipe.vae).__name__).from_pretrained(tmp_path)
    for mode in ("tile", "untiled"):
        want = wanted(name, mode)
        for vae in (distribute(pipe.vae, mode="auto"), loaded):
            pipe.vae = vae
            vae.disable_tiling()
            if mode == "tile":
                enable_tiling(vae)
            got = pictures(pipe, call)
            assert torch.equal(got, want) if vae is not loaded else torch.allclose(got, want, atol=TOLERANCE, rtol=0)


def in_process(group: RankGroup, folder: str) -> dict[tuple[str, str, str], tuple[float, str]]:
    """By pipeline, mode and way: the largest difference from the plain pipeline, and the type of the pictures."""
    found = {}
    for name, make in PIPELINES.items():
        plain = {mode: wanted(name, mode, output_type="np") for mode in ("tile", *SPATIAL)}
        in_memory, call = make()
        loaded, _ = make()
        loaded.vae = adapter_for(type(loaded.vae).__name__).from_pretrained(Path(folder) / name)
        for way, pipe in (("distribute", in_memory), ("from_pretrained", loaded)):
            enable_tiling(pipe.vae)
            for mode, want in plain.items():
                if way == "distribute":
                    distribute(pipe.vae, mode=mode)  # the group: all ranks of the world
                else:
                    pipe.vae.set_parallel_size(2, mode=mode)
                traffic = pipe.vae.distributed_executor.group.traffic
                traffic.reset()
                got = pictures(pipe, call, "np")
                assert traffic.messages + traffic.rounds > 0, "the ranks have not worked together"
                found[name, mode, way] = float(np.abs(got - want).max()), type(got).__name__
    return found


@pytest.mark.processes
def test_two_processes_give_the_plain_pipelines_pictures_on_both(tmp_path: Path) -> None:
    for name, make in PIPELINES.items():
        make()[0].vae.save_pretrained(tmp_path / name)
    for found in run_processes(2, in_process, tmp_path, str(tmp_path)):
        assert len(found) == len(PIPELINES) * (1 + len(SPATIAL)) * 2
        for (name, mode, way), (difference, kind) in found.items():
            # Loaded weights lie at other addresses, where other kernels may multiply them.
            exact = mode == "tile" and way == "distribute"
            assert difference <= (0.0 if exact else TOLERANCE), (name, mode, way, difference)
            assert kind == "ndarray"


def test_pictures_on_the_first_rank_alone() -> None:
    """Without the broadcast the others get an empty tensor from the VAE, whose memory they save."""
    made = [PIPELINES["FluxPipeline"]()[0].vae for _ in range(2)]

    def work(group: LoopbackGroup) -> tuple[int, ...]:
        vae = made[group.rank]
        vae.enable_tiling()
        distribute(vae, group=group).broadcast_result = False
        return tuple(vae.decode(noise(1, 4, 12, 10)).sample.shape)

    assert run_loopback(2, work) == [(1, 3, 96, 80), (0,)]
