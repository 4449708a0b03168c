"""Peak memory of the activations: what a rank holds at its fullest moment, counted tensor by tensor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import Tensor

from tests.families import ADAPTERS, latent
from tests.memory import PeakBytes
from vaepar.autoencoders.spatial import shard_decode_chunks
from vaepar.parallel.group import RankGroup
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import Axis


def peaks(vae: Any, z: Tensor, size: int, axis: Axis) -> list[int]:
    models = [copy.deepcopy(vae) for _ in range(size)]

    def work(group: RankGroup) -> int:
        with PeakBytes() as counted:
            for chunk in shard_decode_chunks(models[group.rank], z, group, axis):
                del chunk
        return counted.peak

    return run_loopback(size, work)


@pytest.mark.parametrize(("family", "frames"), [("kl", 1), ("qwenimage", 1), ("wan21", 9), ("wan22", 5)])
def test_two_ranks_hold_little_more_than_half(family: str, frames: int) -> None:
    vae = ADAPTERS[family](real_topology=family != "kl")
    z = latent(family, 24, 12, frames=frames)
    (alone,) = peaks(vae, z, 1, "height")
    shared = peaks(vae, z, 2, "height")
    assert max(shared) <= 0.58 * alone


def test_memory_does_not_grow_with_frames() -> None:
    vae = ADAPTERS["wan21"]()
    short, long = (max(peaks(vae, latent("wan21", 8, 6, frames=frames), 2, "height")) for frames in (9, 33))
    assert long <= 1.05 * short
