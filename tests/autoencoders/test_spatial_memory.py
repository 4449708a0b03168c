"""Peak memory of the activations: what a rank holds at its fullest moment, counted tensor by tensor."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.autoencoders.test_spatial_parity import ADAPTERS, latent
from vaepar.autoencoders.spatial import shard_decode_chunks
from vaepar.parallel.group import RankGroup
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import Axis


class PeakBytes(TorchDispatchMode):
    """Bytes of the storages that were made under this mode and are alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), given)
        return out

    def _count(self, storage: Any, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


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
