"""Run one layer on a map that is cut among loopback ranks, and put the results together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vaepar.layers.context import ShardContext, shard_active
from vaepar.parallel.group import RankGroup
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import Axis, Layout

Call = Callable[[nn.Module, Sequence[Tensor]], Tensor]


def run_sharded(
    layer: nn.Module, maps: Sequence[Tensor], layouts: Sequence[Layout], axis: Axis, call: Call | None = None
) -> Tensor:
    """``call(layer, own parts of maps)`` on every rank of the layouts; the parts joined along the axis."""
    dim = -2 if axis == "height" else -1

    def work(group: RankGroup) -> Tensor:
        mine = copy.deepcopy(layer)
        context = ShardContext(group, axis, layouts)
        start, length = layouts[0].bounds[group.rank], layouts[0].length(group.rank)
        own = [x.narrow(dim, start, length) for x in maps]
        with torch.no_grad(), shard_active(context):
            return call(mine, own) if call is not None else mine(*own)

    return torch.cat(run_loopback(layouts[0].ranks, work), dim)


def random_map(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seeded(build: Callable[[], Any], dtype: torch.dtype = torch.float64) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().to(dtype).eval()


def small_bands(monkeypatch: pytest.MonkeyPatch, size: int = 2500) -> None:
    """Let maps of tests be large enough for bands of a few rows."""
    monkeypatch.setattr("vaepar.layers.bands._BAND_BYTES", size)
    monkeypatch.setattr("vaepar.layers.bands._BAND_PER_WEIGHTS", 0)
