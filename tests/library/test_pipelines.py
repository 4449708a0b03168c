"""The adapters inside diffusers' pipelines: every rank's pictures are those of the plain pipeline.

Tile mode is compared, bit for bit, with the plain pipeline with the same tiling: each tile is the same arithmetic. A
spatial shard is compared with the plain pipeline without tiling, within 1e-5 of pixels in [0, 1]: convolutions of
other sizes, and sums in another order, round otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.utils import logging as diffusers_logging
from torch import Tensor

from tests.library.pipelines import PIPELINES, enable_tiling, pictures
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
        assert group.traffic.rounds > 0 or group.traffic.messages > 0, "the ranks have not worked together"
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
