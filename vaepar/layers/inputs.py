"""What a convolution reads on one rank: its own rows, the halo, earlier frames, and zeros at the picture's edges.

Shapes: b batch, c channels, t frames, h and w the local height and width; the sharded axis is one of h and w.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vaepar.errors import UsageError
from vaepar.layers.context import ShardContext, Slot
from vaepar.parallel.halo import Arrived, HaloExchange, Pieces
from vaepar.parallel.shards import HaloPlan, Layout, Window, halo_plan


def channels_last(x: Tensor) -> Tensor:
    """``x`` with channels innermost in memory.

    oneDNN convolves 1.2 to 3 times faster from this format on AVX-512 processors (24 to 128 channels, float32), and a
    norm over channels reads it 10 times faster.
    """
    inner = x.movedim(1, -1).contiguous()
    # The view settles the strides of axes of length 1. Where those are odd, a convolution takes the map for a
    # channels_first one and converts it back and forth.
    return inner.view(-1).view(inner.shape).movedim(-1, 1)


def fold_frames(x: Tensor) -> Tensor:
    """[b, c, t, h, w] as [b * t, c, h, w]; a view where ``x`` is channels_last."""
    return channels_last(x).movedim(1, -1).flatten(0, 1).movedim(-1, 1)


def unfold_frames(x: Tensor, batch: int) -> Tensor:
    """[b * t, c, h, w] as [b, c, t, h, w]."""
    frames: Tensor = channels_last(x).movedim(1, -1).unflatten(0, (batch, -1))
    return frames.movedim(-1, 1)


@dataclass(frozen=True)
class Stencil:
    """The windows of a convolution along both axes of the picture."""

    height: Window
    width: Window

    def along(self, dim: int) -> Window:
        return self.height if dim == -2 else self.width

    @property
    def pointwise(self) -> bool:
        """True when each output position reads its own input position and nothing else."""
        return self.height == self.width == Window(1)

    @property
    def keeps_size(self) -> bool:
        """True when the output is as large as the input, with zeros around: then each rank reads all of its rows."""
        both = (self.height, self.width)
        same = all(window.stride == 1 and window.before + window.after == window.reach - 1 for window in both)
        return same and all(window.mode == "zeros" for window in both)

    @property
    def strides(self) -> tuple[int, int]:
        return self.height.stride, self.width.stride

    @property
    def dilations(self) -> tuple[int, int]:
        return self.height.dilation, self.width.dilation


@dataclass(frozen=True)
class Keep:
    """The layer whose halo rows are kept for its next call, and of how many of the last frames."""

    layer: nn.Module
    frames: int


def shard_input(
    context: ShardContext,
    x: Tensor,
    stencil: Stencil,
    plan: HaloPlan | None,
    *,
    keep: Keep | None = None,
    cached: Tensor | None = None,
    zeros: int = 0,
) -> tuple[Tensor, tuple[int, int]]:
    """What a convolution has to read for this rank's rows of its output, and the padding left to its kernel (h, w).

    The input is written once, around ``x`` where that stands in a slot; where nothing has to be added it is ``x``
    itself. It is good for the convolution that follows and void after it.

    Args:
        x: own rows, [b, c, h, w] or [b, c, t, h, w].
        plan: that of :func:`shard_plan`.
        keep: the layer that may need the halo rows again.
        cached: frames before ``x``, own rows only.
        zeros: frames of zeros before those.
    """
    slot = context.take_slot(x)
    x = x if slot is not None else channels_last(x)
    window, other = stencil.along(context.dim), stencil.along(context.other_dim)
    # Without a plan the whole picture is here: the kernel pads by itself.
    pad = window.before if plan is None else 0
    exchange = None if slot is None else slot.exchange
    if exchange is not None and slot is not None and slot.plan != plan:
        exchange.finish()  # of rows that another layer would have read
        exchange = None
    if exchange is None and plan is not None and (plan.receives or plan.sends):
        exchange = HaloExchange(context.group, plan, x, context.dim, context.pool)
    frames = zeros + (0 if cached is None else cached.shape[2])
    if frames or _changes_rows(plan):
        x = _build(context, x, plan, exchange, keep, cached, zeros, slot)
    elif exchange is not None:
        _fetch(context, exchange, keep, cached)
    x, other_pad = _pad_other(x, other, context.other_dim)
    return x, ((pad, other_pad) if context.dim == -2 else (other_pad, pad))


def shard_plan(context: ShardContext, x: Tensor, stencil: Stencil) -> HaloPlan | None:
    """What a convolution of ``x`` reads on this rank; None when that is the whole picture and the kernel can pad it."""
    window = stencil.along(context.dim)
    if not context.alone:
        source = context.layout_of(x)
        return halo_plan(source, context.target_of(source, window), window, context.group.rank)
    if window.mode == "zeros" and window.before == window.after:
        return None
    layout = Layout((0, x.shape[context.dim]))
    return halo_plan(layout, window.target(layout), window, 0)


def slot_for(context: ShardContext, x: Tensor, plan: HaloPlan | None, frames: int) -> Slot | None:
    """A slot for the result of a norm of ``x`` that is convolved by ``plan``, behind so many earlier frames.

    None where the convolution does not read all of the rank's rows, which peers may need all the same.
    """
    if plan is not None and (plan.gather is not None or plan.start > plan.own[0] or plan.stop < plan.own[1]):
        return None
    shape, first = shape_around(x, context.dim, plan, frames)
    whole = context.pool.scratch((shape[0], *shape[2:], shape[1]), x).movedim(-1, 1)
    own = whole.narrow(context.dim, first, x.shape[context.dim])
    return Slot(whole, own[:, :, frames:] if x.ndim == 5 else own, plan)


def keep_halos(context: ShardContext, keep: Keep | None, halos: Pieces) -> None:
    """Store the halo rows of the last frames, so that they do not travel again when those frames are cached."""
    if keep is not None and keep.frames and not context.last:
        pieces = [(start, piece[:, :, -keep.frames :].clone()) for start, piece in halos]
        context.store["halo", id(keep.layer)] = pieces


def _fetch(context: ShardContext, exchange: HaloExchange | Arrived, keep: Keep | None, cached: Tensor | None) -> Pieces:
    """The halo rows, behind those of the cached frames where there are any."""
    kept: Pieces | None = None if keep is None else context.store.pop(("halo", id(keep.layer)), None)
    if cached is not None and kept is None:
        raise UsageError("a layer got cached frames of another request; a shard fills its cache itself")
    halos = exchange.finish()
    if cached is not None and kept is not None:
        halos = [(start, torch.cat([old, new], 2)) for (start, old), (_, new) in zip(kept, halos, strict=True)]
    keep_halos(context, keep, halos)
    return halos


def _changes_rows(plan: HaloPlan | None) -> bool:
    """True when a convolution reads more or less along the sharded axis than the rank's own rows."""
    return plan is not None and not (plan.own == (plan.start, plan.stop) and not plan.before and not plan.after)


def shape_around(x: Tensor, dim: int, plan: HaloPlan | None, frames: int) -> tuple[list[int], int]:
    """The shape of what is read for ``x`` behind so many earlier frames, and where its own rows begin in it."""
    shape, first = list(x.shape), 0
    if plan is not None:
        before, after = (0, 0) if plan.gather is not None else (plan.before, plan.after)
        shape[dim] = before + plan.stop - plan.start + after
        first = before + plan.own[0] - plan.start
    if x.ndim == 5:
        shape[2] += frames
    return shape, first


def _build(
    context: ShardContext,
    x: Tensor,
    plan: HaloPlan | None,
    exchange: HaloExchange | Arrived | None,
    keep: Keep | None,
    cached: Tensor | None,
    zeros: int,
    slot: Slot | None,
) -> Tensor:
    """Own rows, halo rows, zeros at the picture's edges and earlier frames in one map; the halo is waited for last."""
    dim, frames = context.dim, 0 if cached is None else cached.shape[2]
    shape, first = shape_around(x, dim, plan, zeros + frames)
    stands = slot is not None and list(slot.whole.shape) == shape
    out = slot.whole if slot is not None and stands else empty_maps(context, shape, x)
    filled = out[:, :, zeros:] if x.ndim == 5 else out
    if zeros:
        out[:, :, :zeros].zero_()
    # Own rows that the output reads; a stride may skip some at the ends.
    skip = max(0, -first)
    count = min(shape[dim] - max(first, 0), x.shape[dim] - skip)
    if count > 0:
        own = filled.narrow(dim, max(first, 0), count)
        if cached is not None:
            own[:, :, :frames].copy_(cached.narrow(dim, skip, count))
        if not stands:
            (own[:, :, frames:] if x.ndim == 5 else own).copy_(x.narrow(dim, skip, count))
    if plan is None:
        return out
    if plan.gather is None:
        filled.narrow(dim, 0, plan.before).zero_()
        filled.narrow(dim, shape[dim] - plan.after, plan.after).zero_()
    for start, piece in () if exchange is None else _fetch(context, exchange, keep, cached):
        filled.narrow(dim, first + start - plan.own[0], piece.shape[dim]).copy_(piece)
    if plan.gather is not None:
        return out.index_select(dim, torch.tensor(plan.gather, device=x.device))
    return out


def empty_maps(context: ShardContext, shape: list[int], x: Tensor) -> Tensor:
    """A channels_last map for what is read around ``x``: in the scratch buffer, unless ``x`` itself lies there."""
    inner = (shape[0], *shape[2:], shape[1])
    used = context.pool.in_scratch(x)
    return (x.new_empty(inner) if used else context.pool.scratch(inner, x)).movedim(-1, 1)


def _pad_other(x: Tensor, window: Window, dim: int) -> tuple[Tensor, int]:
    """Padding along the axis that is whole on every rank: left to the kernel where the kernel can do it."""
    if window.mode == "zeros" and window.before == window.after:
        return x, window.before
    pad = (0, 0, window.before, window.after) if dim == -2 else (window.before, window.after, 0, 0)
    mode = "constant" if window.mode == "zeros" else window.mode
    if x.ndim == 4:
        return channels_last(F.pad(x, pad, mode)), 0
    return channels_last(unfold_frames(F.pad(fold_frames(x), pad, mode), x.shape[0])), 0
