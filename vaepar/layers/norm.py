"""Norms and activations on the rows of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vaepar.layers.context import ShardContext, Slot, active_shard
from vaepar.layers.inputs import channels_last
from vaepar.parallel.halo import Arrived, Pieces, gather_beside_halo, gather_parts
from vaepar.parallel.shards import HaloPlan, Layout

# On CPU torch sums a channel of a channels_last map one position after the other: over 400000 positions a variance is
# off by 1e-4, and its own GroupNorm, which subtracts squares, by 1e-3 of the result. Blocks of this size keep 1e-6.
_BLOCK_POSITIONS = 4096

# The four passes of a norm and its activation over pieces of this size meet them in the cache: a fifth faster.
_PIECE_BYTES = 4 * 2**20

_RMS_FLOOR = 1e-12  # that of torch.nn.functional.normalize, which Wan and Qwen-Image call


class ShardGroupNorm(nn.GroupNorm):
    """A GroupNorm whose statistics are those of the whole picture while a shard is active."""

    #: As in :class:`ShardRMSNorm`.
    read_once = False

    def forward(self, input: Tensor) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(input)
            return direct
        out = group_norm(context, self, input, read_once=self.read_once)
        if self.read_once:
            context.give_own(out)
        return out

    def activated(self, context: ShardContext, x: Tensor, plan: HaloPlan | None) -> tuple[KnownNorm, Pieces]:
        """SiLU of this norm of [b, c, h, w], and of the rows that ``plan`` wants of other ranks.

        The statistics are taken here; the rows come with those of other ranks, as they are before the norm. So all
        ranks have to do this, or none: others exchange rows after the statistics, and the norm's result.
        """
        moments = _moments(x, self.num_groups)
        pieces: Pieces = []
        if plan is not None and not context.alone:
            layout = context.layout_of(x)
            parts, pieces = gather_beside_halo(context.group, layout, moments, plan, x, context.dim, context.pool)
            moments = _of_all_ranks(parts, layout)
        normed = KnownNorm(*_scale_and_shift(self, moments, x.dtype))
        return normed, [(start, normed.activated(piece)) for start, piece in pieces]

    def write_activated(self, context: ShardContext, x: Tensor, slot: Slot) -> None:
        """As :meth:`ShardRMSNorm.write_activated`, by :meth:`activated`."""
        x = channels_last(x)
        normed, pieces = self.activated(context, x, slot.plan)
        context.open_slot(replace(slot, exchange=Arrived(pieces)))
        normed.write(x, slot.own)


@dataclass(frozen=True)
class KnownNorm:
    """A GroupNorm whose statistics are known: of any rows, whoever owns them.

    Args:
        scale: and ``shift``, of each image and channel, [b, c, 1, 1], at least float32.
    """

    scale: Tensor
    shift: Tensor

    def of_images(self, images: slice) -> KnownNorm:
        return KnownNorm(self.scale[images], self.shift[images])

    def norm(self, rows: Tensor, out: Tensor) -> Tensor:
        """That of ``rows`` [b, c, h, w] into ``out``, of their shape and dtype. Half precision is widened meanwhile."""
        return torch.addcmul(self.shift, rows, self.scale, out=out)

    def write(self, rows: Tensor, out: Tensor) -> None:
        """SiLU of that, in pieces that stay in the cache."""
        for part, piece in zip(_pieces(rows), _pieces(out), strict=True):
            F.silu(self.norm(part, piece), inplace=True)

    def activated(self, rows: Tensor) -> Tensor:
        """SiLU of that in a map of its own."""
        out = torch.empty_like(rows)
        self.write(rows, out)
        return out


class ShardRMSNorm(nn.Module):
    """The per-position RMS norm of Wan and Qwen-Image in three passes over memory, where theirs takes six.

    To be mixed into a class that has ``channel_first``, ``scale``, ``gamma`` and ``bias``.
    """

    channel_first: bool
    scale: float
    gamma: Tensor
    bias: Tensor | float
    #: Set by the installation where diffusers' own code gives the result to an activation and a convolution only.
    read_once = False

    def forward(self, x: Tensor) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(x)  # of the norm that this is mixed into
            return direct
        place = context.place_for(x.shape, x, read_once=self.read_once)
        out = self.normalised(x, place)
        if self.read_once:
            context.give_own(out)
        return out

    def normalised(self, x: Tensor, place: Tensor | None = None) -> Tensor:
        """The norm of any positions; in ``place``, which has the shape and dtype of ``x``, where there is one."""
        dim = 1 if self.channel_first else -1
        half = x.dtype in (torch.float16, torch.bfloat16)
        wide = x.float() if half else x
        norm = torch.linalg.vector_norm(wide, dim=dim, keepdim=True).clamp_min_(_RMS_FLOOR)
        out = torch.mul(wide, norm.reciprocal_().mul_(self.scale), out=None if half else place).mul_(self.gamma)
        if isinstance(self.bias, Tensor):
            out.add_(self.bias)
        if half:  # rounded once, at the end
            return out.to(x.dtype) if place is None else place.copy_(out)
        return out

    def write_activated(self, context: ShardContext, x: Tensor, slot: Slot) -> None:
        """SiLU of the norm of [b, c, h, w] or [b, c, t, h, w] into ``slot``, in pieces that stay in the cache.

        The slot is open then, and the exchange of the rows that the next convolution reads of other ranks has begun.
        """
        exchange = context.begin_exchange(slot.plan, x, lambda rows: F.silu(self.normalised(rows), inplace=True))
        context.open_slot(replace(slot, exchange=exchange))
        for part, out in zip(_pieces(x), _pieces(slot.own), strict=True):
            F.silu(self.normalised(part, out), inplace=True)


def _pieces(x: Tensor) -> list[Tensor]:
    """``x`` in pieces along frames and height that a processor's cache holds; devices with none to speak of: whole."""
    if x.device.type != "cpu":
        return [x]
    frames = x.split(1, 2) if x.ndim == 5 else (x,)
    parts = -(-frames[0].numel() * x.element_size() // _PIECE_BYTES)
    return [piece for frame in frames for piece in frame.tensor_split(min(parts, x.shape[-2]), -2)]


class ShardSiLU(nn.SiLU):
    """SiLU in place on what a block or a norm says is its own; elsewhere a map of its own, as without a shard."""

    def forward(self, input: Tensor) -> Tensor:
        context = active_shard()
        return F.silu(input, inplace=self.inplace or (context is not None and context.take_own(input)))


def group_norm(context: ShardContext, norm: nn.GroupNorm, x: Tensor, *, read_once: bool = False) -> Tensor:
    """GroupNorm of [b, c, h, w] over the whole picture, from this rank's rows."""
    x = channels_last(x)
    known = KnownNorm(*_scale_and_shift(norm, _joint_moments(context, norm, x), x.dtype))
    place = context.place_for(x.shape, x, read_once=read_once)
    out = torch.empty_like(x) if place is None else place
    for part, piece in zip(_pieces(x), _pieces(out), strict=True):
        known.norm(part, piece)
    return out


def _joint_moments(context: ShardContext, norm: nn.GroupNorm, x: Tensor) -> Tensor:
    """Mean and variance of each group over the whole picture, [2, b, groups], from this rank's rows [b, c, h, w]."""
    moments = _moments(x, norm.num_groups)
    if context.alone:
        return moments
    layout = context.layout_of(x)
    return _of_all_ranks(gather_parts(context.group, layout, moments, [moments.shape] * layout.ranks), layout)


def _of_all_ranks(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """The moments of the whole picture from those of each rank's rows.

    They are joined by the formula of Chan, Golub and LeVeque (1979), which stays exact where the mean is large against
    the deviation; sums of squares do not.
    """
    return _merged(torch.stack(list(parts)), [layout.length(rank) for rank in range(layout.ranks)])


def _moments(x: Tensor, groups: int) -> Tensor:
    """Mean and variance of each group of [b, c, h, w], [2, b, groups], at least float32."""
    rows = max(1, _BLOCK_POSITIONS // x.shape[3]) if x.device.type == "cpu" else x.shape[2]
    blocks = x.split(rows, 2)
    parts = torch.stack([_channel_moments(block) for block in blocks])
    channels = _merged(parts, [block.shape[2] for block in blocks])
    return _merged(channels.unflatten(2, (groups, -1)).movedim(3, 0), [1] * (x.shape[1] // groups))


def _channel_moments(x: Tensor) -> Tensor:
    """Mean and variance of each channel, [2, b, c]."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()  # the statistics come in the dtype of the input
    images = [torch.stack(torch.batch_norm_update_stats(image[None], None, None, 0.0)) for image in x]
    moments = torch.stack(images, 1)
    if x.device.type == "cpu":  # the same sum, ten times more exact: it matters where the mean is large
        moments[0] = x.mean((2, 3))
    return moments


def _merged(parts: Tensor, sizes: Sequence[int]) -> Tensor:
    """The moments [2, ...] of the union of parts [p, 2, ...] that hold so many positions each."""
    shares = parts.new_tensor([size / sum(sizes) for size in sizes]).view(-1, *[1] * (parts.ndim - 2))
    mean = (shares * parts[:, 0]).sum(0)
    var = (shares * (parts[:, 1] + (parts[:, 0] - mean).square())).sum(0)
    return torch.stack((mean, var))


def _scale_and_shift(norm: nn.GroupNorm, moments: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a map is multiplied with and what is added then, [b, c, 1, 1], at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    mean, var = moments.repeat_interleave(norm.num_channels // norm.num_groups, 2).to(wide)
    scale = (var + norm.eps).rsqrt_()
    if norm.weight is not None:
        scale = scale * norm.weight.to(wide)
    shift = -mean * scale
    if norm.bias is not None:
        shift = shift + norm.bias.to(wide)
    return scale[..., None, None], shift[..., None, None]
