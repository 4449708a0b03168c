"""Sharded requests on loopback ranks, and the plain results that they are compared with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from vaepar.autoencoders.spatial import shard_decode_chunks, shard_encode
from vaepar.parallel.group import RankGroup
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import Axis

AXES: tuple[Axis, ...] = ("height", "width")


def joined(chunks: list[Tensor | None]) -> Tensor:
    return torch.cat([chunk for chunk in chunks if chunk is not None], 2)


def shard_decode(vae: Any, z: Tensor, size: int, axis: Axis, **options: Any) -> list[Tensor | None]:
    """What each rank got of the whole picture."""
    models = [copy.deepcopy(vae) for _ in range(size)]

    def work(group: RankGroup) -> Tensor | None:
        chunks = list(shard_decode_chunks(models[group.rank], z, group, axis, **options))
        if chunks[0] is None:
            assert all(chunk is None for chunk in chunks)
            return None
        return joined(chunks) if chunks[0].ndim == 5 else chunks[0]

    return run_loopback(size, work)


def shard_moments(vae: Any, x: Tensor, size: int, axis: Axis, **options: Any) -> list[Tensor | None]:
    models = [copy.deepcopy(vae) for _ in range(size)]
    return run_loopback(size, lambda group: shard_encode(models[group.rank], x, group, axis, **options))


@torch.no_grad()
def plain_decode(vae: Any, z: Tensor) -> Tensor:
    return vae.decode(z).sample


@torch.no_grad()
def plain_moments(vae: Any, x: Tensor) -> Tensor:
    return vae.encode(x).latent_dist.parameters


def close(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    atol = 1e-12 if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)
    assert not actual.requires_grad
