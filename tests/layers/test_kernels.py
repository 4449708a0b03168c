"""Convolutions into memory that is there: the numbers of plain ones, which are taken where that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.layers.shard import random_map
from vaepar.layers.inputs import channels_last
from vaepar.layers.kernels import Result, adds_convolutions, convolve, meta_for_cpu, mix_channels, out_shape
from vaepar.parallel.halo import BufferPool

# Of sums of some hundred float32 products.
_TOLERANCE = 2e-5


def maps(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return channels_last(random_map(*shape, seed=seed, dtype=dtype))


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
    return (F.conv2d if x.ndim == 4 else F.conv3d)(x, weight, bias, *how)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("frames", [None, 3])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 0, 1), (1, 2, 2)])
def test_into_memory(
    frames: int | None, groups: int, stride: int, padding: int, dilation: int, with_bias: bool, adds: bool
) -> None:
    axes = 2 if frames is None else 3
    x = maps(2, 8, *(() if frames is None else (frames,)), 9, 11)
    weight = random_map(6, 8 // groups, *[3] * axes, seed=1, dtype=torch.float32)
    bias = random_map(6, seed=2, dtype=torch.float32) if with_bias else None
    steps, pads, apart = ([n] * axes for n in (stride, padding, dilation))
    if frames is not None:
        pads[0] = 2
    expected = plain(x, weight, bias, (steps, pads, apart, groups))
    assert out_shape(x, weight, steps, pads, apart) == tuple(expected.shape)
    before = maps(*expected.shape, seed=3)
    result = Result(before.clone(memory_format=torch.preserve_format), adds)
    out = convolve(x, weight, bias, steps, pads, apart, groups, result)
    assert result.taken
    assert out.data_ptr() == result.memory.data_ptr()
    assert (out - (expected + before if adds else expected)).abs().max() <= _TOLERANCE


def test_memory_that_does_not_fit_is_left_alone() -> None:
    x, weight = maps(1, 4, 6, 6), random_map(4, 4, 3, 3, dtype=torch.float32)
    how: Any = ((1, 1), (1, 1), (1, 1))
    expected = plain(x, weight, None, how)
    wide = maps(1, 4, 6, 12, seed=1)
    for memory in (
        maps(1, 4, 6, 7, seed=1),  # another shape
        maps(1, 4, 6, 6, seed=1, dtype=torch.float64),
        wide[..., :6],  # gaps
        maps(1, 4, 6, 6, seed=1).contiguous(),  # another order of the axes
    ):
        result, before = Result(memory, adds=True), memory.clone()
        assert (convolve(x, weight, None, *how, result=result) - expected).abs().max() <= _TOLERANCE
        assert not result.taken
        assert torch.equal(memory, before)
    gaps = torch.cat([x, x], -1)[..., :6]
    result = Result(torch.zeros_like(x))
    assert (convolve(gaps, weight, None, *how, result=result) - expected).abs().max() <= _TOLERANCE


def test_where_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    x = maps(1, 4, 6, 6)
    assert adds_convolutions(x)
    assert not adds_convolutions(x.double())
    assert not adds_convolutions(x.bfloat16())
    assert not adds_convolutions(x.to("meta"))
    with meta_for_cpu():
        assert adds_convolutions(x.to("meta"))
    with meta_for_cpu(False):
        assert not adds_convolutions(x.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not adds_convolutions(x)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not adds_convolutions(x)
    weight = random_map(4, 4, 1, 3, 3, dtype=torch.float32)
    out = convolve(x[:, :, None], weight, None, (1, 1, 1), (0, 1, 1), (1, 1, 1))
    assert (out[:, :, 0] - F.conv2d(x, weight[:, :, 0], padding=1)).abs().max() <= _TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_channels_mixed_into_memory(with_bias: bool, adds: bool, dtype: torch.dtype) -> None:
    x, weight = maps(2, 5, 3, 4, dtype=dtype), random_map(7, 5, 1, 1, seed=1, dtype=dtype)
    bias = random_map(7, seed=2, dtype=dtype) if with_bias else None
    expected, before = F.conv2d(x, weight, bias), maps(2, 7, 3, 4, seed=3, dtype=dtype)
    result = Result(before.clone(memory_format=torch.preserve_format), adds)
    out = mix_channels(x, weight, bias, result)
    assert result.taken
    assert out is result.memory
    assert (out - (expected + before if adds else expected)).abs().max() <= _TOLERANCE
    other = Result(maps(2, 7, 3, 5, dtype=dtype), adds)
    assert (mix_channels(x, weight, bias, other) - expected).abs().max() <= _TOLERANCE
    assert not other.taken


def test_the_buffer_for_results() -> None:
    pool, like = BufferPool(), torch.zeros(1)
    assert pool.held_result((2, 3), like) is None
    first = pool.result((2, 3), like)
    assert pool.result((3, 2), like).data_ptr() == first.data_ptr()  # as many values
    part = pool.held_result((2, 2), like)
    assert part is not None
    assert part.data_ptr() == first.data_ptr()  # some of it, for what nobody keeps
    assert pool.held_result((2, 4), like) is None
    assert pool.held_result((2, 3), like.double()) is None
    assert pool.result((2, 2), like).untyped_storage().nbytes() == 16  # no more than what is kept
    assert pool.held_result((2, 3), like) is None
    pool.give_result()
    assert pool.held_result((2, 3), like) is None
    made = maps(1, 3, 2, 2)
    pool.keep_result(made)
    held = pool.held_result((1, 2, 2, 3), like)
    assert held is not None
    assert held.data_ptr() == made.data_ptr()
    pool.clear()
    for odd in (maps(1, 3, 2, 4)[..., :2], random_map(1, 3, 2, 2, dtype=torch.float32)):
        pool.keep_result(odd)  # with gaps, and with channels first: no memory to write a map into
    with torch.inference_mode():
        pool.keep_result(maps(1, 3, 2, 2))
    assert pool.held_result((1, 2, 2, 3), like) is None
