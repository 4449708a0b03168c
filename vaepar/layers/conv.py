"""Convolutions on the rows of one rank: the halo is fetched, padding stands at the picture's edges only.

Shapes: b batch, c channels, t frames, h and w the local height and width; the sharded axis is one of h and w.
The functions take maps of any memory format and give channels_last ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vaepar.errors import UnsupportedModeError
from vaepar.layers.context import ShardContext, Slot, active_shard
from vaepar.layers.inputs import (
    Keep,
    Stencil,
    channels_last,
    fold_frames,
    keep_halos,
    shard_input,
    shard_plan,
    slot_for,
    unfold_frames,
)
from vaepar.layers.kernels import Result, convolve, mix_channels
from vaepar.parallel.halo import HaloExchange, Pieces
from vaepar.parallel.shards import HaloPlan, PadMode, Window

# Where no norm has put the input into a slot, from this many rows on, a rank convolves its own rows at once while the
# halo travels, and computes the rows at its borders again afterwards: a row or two more, but no copy of the map.
_MEND_ROWS = 16


class ShardConv2d(nn.Conv2d):
    """A 2-D convolution that fetches its halo from other ranks while a shard is active."""

    def forward(self, input: Tensor) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(input)
            return direct
        left, right, top, bottom = context.take_padding()
        own = self.stencil()
        stencil = Stencil(own.height.padded(top, bottom), own.width.padded(left, right))
        return convolve_maps(context, input, self.weight, self.bias, stencil, self.groups)

    def stencil(self) -> Stencil:
        left, right, top, bottom = self._reversed_padding_repeated_twice
        mode = pad_mode(self.padding_mode)
        return Stencil(
            Window(self.kernel_size[0], self.stride[0], self.dilation[0], top, bottom, mode),
            Window(self.kernel_size[1], self.stride[1], self.dilation[1], left, right, mode),
        )

    def slot(self, context: ShardContext, x: Tensor) -> Slot | None:
        """Where to put the result of a norm of [b, c, h, w] that this convolution reads next; None: anywhere."""
        return _maps_slot(context, x, self.stencil())


class ShardCausalConv3d(nn.Conv3d):
    """A causal 3-D convolution of Wan's kind, ``forward(x, cache_x)``, on the rows of one rank.

    To be mixed into a class that keeps its padding as ``_padding`` = (left, right, top, bottom, front, 0).
    """

    _padding: tuple[int, int, int, int, int, int]

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        context = active_shard()
        if context is None:
            return super().forward(x, cache_x)  # type: ignore[call-arg]  # the causal class this is mixed into
        return causal_convolve(context, self, x, cache_x)

    def slot(self, context: ShardContext, x: Tensor, cache: Tensor | None) -> Slot | None:
        """Where to put the result of a norm of [b, c, t, h, w] that this convolution reads next; None: anywhere."""
        past = _past(self, x, cache)
        if past.flat:
            return _maps_slot(context, x, past.stencil)
        frames = past.zeros + (0 if past.cached is None else past.cached.shape[2])
        return slot_for(context, x, shard_plan(context, x, past.stencil), frames)


def pad_mode(name: str) -> PadMode:
    """The padding of that name, as torch names it. Raises for circular padding, which joins the picture's far edges."""
    for mode in get_args(PadMode):
        if name == mode:
            return cast(PadMode, mode)
    raise UnsupportedModeError(f"a spatial shard cannot pad with '{name}'; it has zeros, replicate and reflect")


def convolve_maps(
    context: ShardContext,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stencil: Stencil,
    groups: int = 1,
    keep: Keep | None = None,
) -> Tensor:
    """Convolve [b, c, h, w], or each frame of [b, c, t, h, w], with a 2-D kernel [c', c, kh, kw].

    The result holds the rows that this rank owns of the output.
    """
    if stencil.pointwise and groups == 1:
        context.open_slot(None)
        return mix_channels(channels_last(x), weight, bias, context.take_result())
    plan = shard_plan(context, x, stencil)
    result = context.take_result()
    # The kernel sees the frames of a film as pictures.
    flat = None if result is None else Result(_as_maps(result.memory), result.adds)

    def kernel(rows: Tensor, padding: tuple[int, int], result: Result | None = None) -> Tensor:
        return convolve(_as_maps(rows), weight, bias, stencil.strides, padding, stencil.dilations, groups, result)

    if plan is not None and not context.stands_in_slot(x) and _can_mend(context, plan, stencil):
        context.open_slot(None)
        x = channels_last(x)
        out = _convolve_mended(context, x, plan, stencil, kernel, flat, keep)
    else:
        read, padding = shard_input(context, x, stencil, plan, keep=keep)
        out = kernel(read, padding, flat)
    if result is not None and flat is not None and flat.taken:
        result.taken = True
        return result.memory
    return unfold_frames(out, x.shape[0]) if x.ndim == 5 else out


def _as_maps(x: Tensor) -> Tensor:
    return fold_frames(x) if x.ndim == 5 else x


def _convolve_mended(
    context: ShardContext,
    x: Tensor,
    plan: HaloPlan,
    stencil: Stencil,
    kernel: Callable[..., Tensor],
    result: Result | None,
    keep: Keep | None,
) -> Tensor:
    """Own rows are convolved while the halo travels; then those at the borders again, with the halo."""
    dim, window = context.dim, stencil.along(context.dim)
    padding = stencil.height.before, stencil.width.before
    exchange = HaloExchange(context.group, plan, x, dim, context.pool)
    sums: list[Tensor] = []
    if result is not None and result.adds:
        sums = [result.memory.narrow(dim, start, count).clone() for start, count in _borders(plan, window)]
    out = kernel(x, padding, result)
    halos = exchange.finish()
    keep_halos(context, keep, halos)
    for i, (start, strip) in enumerate(_border_strips(x, dim, plan, window, halos)):
        rows = kernel(strip, (0, padding[1]) if dim == -2 else (padding[0], 0))
        if sums and result is not None and result.taken:
            rows += sums[i]
        out.narrow(dim, start, rows.shape[dim]).copy_(rows)
    return out


def _maps_slot(context: ShardContext, x: Tensor, stencil: Stencil) -> Slot | None:
    """The slot for a norm of ``x`` ahead of :func:`convolve_maps`."""
    return slot_for(context, x, shard_plan(context, x, stencil), 0)


def _can_mend(context: ShardContext, plan: HaloPlan, stencil: Stencil) -> bool:
    """True when own rows can be convolved before the halo is there, and only the rows at the borders be done again."""
    window, other = stencil.along(context.dim), stencil.along(context.other_dim)
    low, high = plan.own
    same = window.stride == 1 and window.before == window.after and window.reach == 2 * window.before + 1
    zeros = window.mode == "zeros" and other.mode == "zeros" and other.before == other.after
    whole_above = plan.start in (low, low - window.before) and (plan.start < low or plan.before == window.before)
    whole_below = plan.stop in (high, high + window.after) and (plan.stop > high or plan.after == window.after)
    big = high - low >= max(_MEND_ROWS, window.reach - 1)
    return bool(plan.receives) and same and zeros and whole_above and whole_below and big


def _borders(plan: HaloPlan, window: Window) -> list[tuple[int, int]]:
    """The output rows that read other ranks' rows, as (first, number), counted from the rank's own."""
    low, high = plan.own
    starts = [receive.start for receive in plan.receives]
    above = [(0, window.before)] if any(start < low for start in starts) else []
    below = [(high - low - window.after, window.after)] if any(start >= high for start in starts) else []
    return above + below


def _border_strips(x: Tensor, dim: int, plan: HaloPlan, window: Window, halos: Pieces) -> Pieces:
    """What each of :func:`_borders` reads, with the first of its rows."""
    low, high = plan.own
    inside = window.reach - 1
    strips = []
    for first, _ in _borders(plan, window):
        if first == 0:
            above = [piece for start, piece in halos if start < low]
            strips.append((first, torch.cat([*above, x.narrow(dim, 0, inside)], dim)))
        else:
            below = [piece for start, piece in halos if start >= high]
            strips.append((first, torch.cat([x.narrow(dim, high - low - inside, inside), *below], dim)))
    return [(first, channels_last(strip)) for first, strip in strips]


def causal_convolve(context: ShardContext, conv: ShardCausalConv3d, x: Tensor, cache: Tensor | None) -> Tensor:
    """Convolve [b, c, t, h, w] after the cached frames [b, c, s, h, w] (own rows only), or after frames of zeros.

    Halo rows of the frames that the next call needs again stay in ``context.store``, so they travel once.
    """
    past = _past(conv, x, cache)
    keep = Keep(conv, conv._padding[4])
    if past.flat:
        return convolve_maps(context, x, conv.weight[:, :, -1], conv.bias, past.stencil, conv.groups, keep)
    plan = shard_plan(context, x, past.stencil)
    x, padding = shard_input(context, x, past.stencil, plan, keep=keep, cached=past.cached, zeros=past.zeros)
    if past.stencil.pointwise:
        return _convolve_times(conv, x)
    every = (0, *padding)
    return convolve(x, conv.weight, conv.bias, conv.stride, every, conv.dilation, conv.groups, context.take_result())


@dataclass(frozen=True)
class _Past:
    """What a causal convolution reads before its input.

    Args:
        cached: the frames of earlier calls, own rows only; ``zeros`` frames of zeros stand before them.
        flat: all taps but the last meet frames of zeros, or there are none: what is left is a 2-D convolution.
    """

    stencil: Stencil
    cached: Tensor | None
    zeros: int
    flat: bool


def _past(conv: ShardCausalConv3d, x: Tensor, cache: Tensor | None) -> _Past:
    left, right, top, bottom, front, _ = conv._padding
    height = Window(conv.kernel_size[1], conv.stride[1], conv.dilation[1], top, bottom)
    width = Window(conv.kernel_size[2], conv.stride[2], conv.dilation[2], left, right)
    cached = cache[:, :, -front:] if cache is not None and front else None
    lone = cached is None and x.shape[2] == 1 and front == conv.kernel_size[0] - 1
    return _Past(
        stencil=Stencil(height, width),
        cached=cached,
        zeros=front - (0 if cached is None else cached.shape[2]),
        flat=conv.stride[0] == 1 and (lone or conv.kernel_size[0] == 1),
    )


def _convolve_times(conv: ShardCausalConv3d, x: Tensor) -> Tensor:
    """A convolution over frames only. As a 2-D one over (frames, positions) it stays on the fast path of one thread."""
    flat = x.flatten(3)
    weight = conv.weight.flatten(3)
    out = F.conv2d(flat, weight, conv.bias, (conv.stride[0], 1), 0, (conv.dilation[0], 1), conv.groups)
    rows: Tensor = out.unflatten(3, x.shape[3:])
    return rows
