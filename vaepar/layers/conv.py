"""Convolutions on the rows of one rank: the halo is fetched, padding stands at the picture's edges only.

Shapes: b batch, c channels, t frames, h and w the local height and width; the sharded axis is one of h and w.
The functions take maps of any memory format and give channels_last ones (see :func:`channels_last`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vaepar.errors import UnsupportedModeError
from vaepar.layers.context import ShardContext, active_shard
from vaepar.parallel.halo import HaloExchange
from vaepar.parallel.shards import HaloPlan, Layout, PadMode, Window, halo_plan

Pieces = list[tuple[int, Tensor]]


def channels_last(x: Tensor) -> Tensor:
    """``x`` with channels innermost in memory.

    oneDNN convolves 1.2 to 3 times faster from this format on AVX-512 processors (24 to 128 channels, float32), and a
    norm over channels reads it 10 times faster.
    """
    return x.contiguous(memory_format=torch.channels_last_3d if x.ndim == 5 else torch.channels_last)


def fold_frames(x: Tensor) -> Tensor:
    """[b, c, t, h, w] as [b * t, c, h, w]; a view where ``x`` is channels_last."""
    return x.transpose(1, 2).flatten(0, 1)


def unfold_frames(x: Tensor, batch: int) -> Tensor:
    """[b * t, c, h, w] as [b, c, t, h, w]."""
    frames: Tensor = x.unflatten(0, (batch, -1))
    return frames.transpose(1, 2)


class ShardConv2d(nn.Conv2d):
    """A 2-D convolution that fetches its halo from other ranks while a shard is active."""

    def forward(self, input: Tensor) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(input)
            return direct
        padding = zip(self._reversed_padding_repeated_twice, context.take_padding(), strict=True)
        left, right, top, bottom = ((own, deferred) for own, deferred in padding)
        mode = pad_mode(self.padding_mode)
        height = Window(self.kernel_size[0], self.stride[0], self.dilation[0], top[0], bottom[0], mode)
        width = Window(self.kernel_size[1], self.stride[1], self.dilation[1], left[0], right[0], mode)
        stencil = Stencil(height.padded(top[1], bottom[1]), width.padded(left[1], right[1]))
        return convolve_maps(context, input, self.weight, self.bias, stencil, self.groups)


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


@dataclass(frozen=True)
class Stencil:
    """The windows of a convolution along both axes of the picture."""

    height: Window
    width: Window

    def along(self, dim: int) -> Window:
        return self.height if dim == -2 else self.width

    @property
    def strides(self) -> tuple[int, int]:
        return self.height.stride, self.width.stride

    @property
    def dilations(self) -> tuple[int, int]:
        return self.height.dilation, self.width.dilation


def pad_mode(name: str) -> PadMode:
    """The padding of that name, as torch names it. Raises for circular padding, which joins the picture's far edges."""
    for mode in get_args(PadMode):
        if name == mode:
            return cast(PadMode, mode)
    raise UnsupportedModeError(f"a spatial shard cannot pad with '{name}'; it has zeros, replicate and reflect")


def convolve_maps(
    context: ShardContext, x: Tensor, weight: Tensor, bias: Tensor | None, stencil: Stencil, groups: int = 1
) -> Tensor:
    """Convolve [b, c, h, w] with a 2-D kernel; the result holds the rows that this rank owns of the output."""
    x, padding = shard_input(context, x, stencil)
    return F.conv2d(x, weight, bias, stencil.strides, padding, stencil.dilations, groups)


def causal_convolve(context: ShardContext, conv: ShardCausalConv3d, x: Tensor, cache: Tensor | None) -> Tensor:
    """Convolve [b, c, t, h, w] after the cached frames [b, c, s, h, w] (own rows only), or after frames of zeros.

    Halo rows of the frames that the next call needs again stay in ``context.store``, so they travel once.
    """
    left, right, top, bottom, front, _ = conv._padding
    height = Window(conv.kernel_size[1], conv.stride[1], conv.dilation[1], top, bottom)
    width = Window(conv.kernel_size[2], conv.stride[2], conv.dilation[2], left, right)
    stencil = Stencil(height, width)
    cached = cache[:, :, -front:] if cache is not None and front else None
    zeros = front - (0 if cached is None else cached.shape[2])
    lone = cached is None and x.shape[2] == 1 and front == conv.kernel_size[0] - 1
    if conv.stride[0] == 1 and (lone or conv.kernel_size[0] == 1):
        # All taps but the last meet frames of zeros, or there are none: what is left is a 2-D convolution.
        x, padding = shard_input(context, x, stencil, keep=(conv, front))
        weight = conv.weight[:, :, -1]
        maps = F.conv2d(fold_frames(x), weight, conv.bias, stencil.strides, padding, stencil.dilations, conv.groups)
        return unfold_frames(maps, x.shape[0])
    x, padding = shard_input(context, x, stencil, keep=(conv, front), cached=cached, zeros=zeros)
    return F.conv3d(x, conv.weight, conv.bias, conv.stride, (0, *padding), conv.dilation, conv.groups)


def shard_input(
    context: ShardContext,
    x: Tensor,
    stencil: Stencil,
    *,
    keep: tuple[nn.Module, int] | None = None,
    cached: Tensor | None = None,
    zeros: int = 0,
) -> tuple[Tensor, tuple[int, int]]:
    """What a convolution has to read for this rank's rows of its output, and the padding left to its kernel (h, w).

    The input is allocated once and written once; where nothing has to be added it is ``x`` itself.

    Args:
        x: own rows, [b, c, h, w] or [b, c, t, h, w].
        keep: the layer and how many of the last frames' halo rows to keep for its next call.
        cached: frames before ``x``, own rows only.
        zeros: frames of zeros before those.
    """
    x = channels_last(x)
    window, other = stencil.along(context.dim), stencil.along(context.other_dim)
    plan = None
    halos: Pieces = []
    pad = 0
    if not context.alone:
        source = context.layout_of(x)
        plan = halo_plan(source, context.target_of(source, window), window, context.group.rank)
        if plan.receives or plan.sends:
            halos = _fetch(context, plan, x, keep, cached)
        if plan.local and not plan.before and not plan.after:
            plan = None
    elif window.mode == "zeros" and window.before == window.after:
        pad = window.before  # the whole picture is here: the kernel pads by itself and nothing is copied
    else:
        layout = Layout((0, x.shape[context.dim]))
        plan = halo_plan(layout, window.target(layout), window, 0)
    if plan is not None:
        x = _build(x, context.dim, plan, halos, cached, zeros)
    elif cached is not None or zeros:
        x = _prepend(x, cached, zeros)
    x, other_pad = _pad_other(x, other, context.other_dim)
    return x, ((pad, other_pad) if context.dim == -2 else (other_pad, pad))


def _fetch(
    context: ShardContext, plan: HaloPlan, x: Tensor, keep: tuple[nn.Module, int] | None, cached: Tensor | None
) -> Pieces:
    """The halo rows of ``x``, behind those of the cached frames where there are any."""

    def exchange(rows: Tensor) -> Pieces:
        return HaloExchange(context.group, plan, rows, context.dim, context.pool).finish()

    if keep is None or not keep[1]:
        return exchange(x)
    key = ("halo", id(keep[0]))
    frames, kept = context.store.pop(key, (0, []))
    if cached is not None and frames != cached.shape[2]:  # the layer's cache is not from its last call in this request
        kept = [(start, piece.clone()) for start, piece in exchange(cached)]
    halos = exchange(x)
    if cached is not None:
        halos = [(start, torch.cat([old, new], 2)) for (start, old), (_, new) in zip(kept, halos, strict=True)]
    held = min(keep[1], x.shape[2] + (0 if cached is None else cached.shape[2]))
    context.store[key] = held, [(start, piece[:, :, -held:].clone()) for start, piece in halos]
    return halos


def _build(x: Tensor, dim: int, plan: HaloPlan, halos: Pieces, cached: Tensor | None, zeros: int) -> Tensor:
    """Own rows, halo rows, zeros at the picture's edges and earlier frames in one new map."""
    mirrored = plan.gather is not None
    before, after = (0, 0) if mirrored else (plan.before, plan.after)
    shape = list(x.shape)
    shape[dim] = before + plan.stop - plan.start + after
    frames = 0 if cached is None else cached.shape[2]
    if x.ndim == 5:
        shape[2] += zeros + frames
    memory_format = torch.channels_last_3d if x.ndim == 5 else torch.channels_last
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
    out.narrow(dim, 0, before).zero_()
    out.narrow(dim, shape[dim] - after, after).zero_()
    if zeros:
        out[:, :, :zeros].zero_()
    filled = out[:, :, zeros:] if x.ndim == 5 else out
    low, high = max(plan.own[0], plan.start), min(plan.own[1], plan.stop)
    if low < high:
        own = filled.narrow(dim, before + low - plan.start, high - low)
        if cached is not None:
            own[:, :, :frames].copy_(cached.narrow(dim, low - plan.own[0], high - low))
        (own[:, :, frames:] if x.ndim == 5 else own).copy_(x.narrow(dim, low - plan.own[0], high - low))
    for start, piece in halos:
        filled.narrow(dim, before + start - plan.start, piece.shape[dim]).copy_(piece)
    if plan.gather is not None:
        return out.index_select(dim, torch.tensor(plan.gather, device=x.device))
    return out


def _prepend(x: Tensor, cached: Tensor | None, zeros: int) -> Tensor:
    frames = [x.new_zeros((*x.shape[:2], zeros, *x.shape[3:]))] if zeros else []
    frames += [] if cached is None else [cached]
    return torch.cat([channels_last(part) for part in (*frames, x)], 2)


def _pad_other(x: Tensor, window: Window, dim: int) -> tuple[Tensor, int]:
    """Padding along the axis that is whole on every rank: left to the kernel where the kernel can do it."""
    if window.mode == "zeros" and window.before == window.after:
        return x, window.before
    pad = (0, 0, window.before, window.after) if dim == -2 else (window.before, window.after, 0, 0)
    mode = "constant" if window.mode == "zeros" else window.mode
    if x.ndim == 4:
        return channels_last(F.pad(x, pad, mode)), 0
    return channels_last(unfold_frames(F.pad(fold_frames(x), pad, mode), x.shape[0])), 0
