"""Residual blocks that make few fresh maps: at full resolution those cost more than the sums and norms in them.

The norm before a convolution writes where the convolution will read. The sum goes into the block's input where that
has as many channels: diffusers' loops hold on to it and never read it again (Wan 2.2 clones what its shortcuts need).
That holds for a block that stands in such a loop itself, in a model without hooks; the request knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import CACHE_T
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from vaepar.layers.bands import convolve_in_bands, goes_in_bands
from vaepar.layers.context import ShardContext, active_shard, is_plain
from vaepar.layers.conv import ShardCausalConv3d, ShardConv2d
from vaepar.layers.inputs import channels_last
from vaepar.layers.kernels import Result, adds_convolutions, mix_channels
from vaepar.layers.norm import ShardGroupNorm, ShardRMSNorm, ShardSiLU

_CONVOLUTIONS = (ShardConv2d, ShardCausalConv3d)
_NORMS = (ShardGroupNorm, ShardRMSNorm)


class _Block(Protocol):
    norm2: nn.Module
    sums_in_place: bool

    @property
    def conv_shortcut(self) -> nn.Module | None: ...


class ShardResnetBlock2D(ResnetBlock2D):
    """diffusers' residual block without time embedding, as the image VAEs use it."""

    #: Set by the installation where the block stands in a loop of diffusers' that does not read its input again.
    sums_in_place = False

    def forward(self, input_tensor: Tensor, temb: Tensor | None = None, *args: object, **kwargs: object) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(input_tensor, temb, *args, **kwargs)
            return direct
        x = channels_last(input_tensor)
        first = _half(context, self.norm1, self.nonlinearity, self.conv1, x)
        out = _read_once(context, self.conv1, self.norm2, x, first)
        second = _half(context, self.norm2, self.nonlinearity, self.conv2, out, dropout=self.dropout)
        del first, out  # they hold a map whose memory is free for the result
        out = _with_shortcut(context, self, self.conv2, x, second)
        return out if self.output_scale_factor == 1 else out / self.output_scale_factor


class ShardCausalResidualBlock(nn.Module):
    """The residual block of Wan and Qwen-Image, to be mixed into it."""

    norm1: nn.Module
    norm2: nn.Module
    conv1: ShardCausalConv3d
    conv2: ShardCausalConv3d
    conv_shortcut: nn.Module
    nonlinearity: nn.Module
    dropout: nn.Module
    #: As in :class:`ShardResnetBlock2D`.
    sums_in_place = False

    def forward(self, x: Tensor, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None) -> Tensor:
        context = active_shard()
        if context is None or feat_cache is None or feat_idx is None:
            given = () if feat_idx is None else (feat_idx,)
            direct: Tensor = super().forward(x, feat_cache, *given)  # of the block that this is mixed into
            return direct
        cache, place = feat_cache, feat_idx
        ready = _ready(context, self.norm1, self.nonlinearity, self.conv1, x, cache=cache[place[0]])
        first = _Half(lambda: cached_convolve(context, self.conv1, ready, cache, place))
        out = _read_once(context, self.conv1, self.norm2, x, first)
        before: Tensor | None = cache[place[0]]
        ready = _ready(context, self.norm2, self.nonlinearity, self.conv2, out, dropout=self.dropout, cache=before)
        del out  # its memory is free for the result
        second = _Half(lambda: cached_convolve(context, self.conv2, ready, cache, place))
        return _with_shortcut(context, self, self.conv2, x, second)


@dataclass(frozen=True)
class _Half:
    """Half of a block: a convolution that can be made, with the norm ahead of it where both go in bands.

    Args:
        banded: the map that is read band by band while the result is written; None where the norm has been made.
    """

    convolve: Callable[[], Tensor]
    banded: Tensor | None = None


def _half(
    context: ShardContext,
    norm: nn.Module,
    activation: nn.Module,
    conv: nn.Module,
    x: Tensor,
    dropout: nn.Module | None = None,
) -> _Half:
    """``conv(dropout(activation(norm(x))))`` of a picture [b, c, h, w]."""
    x = channels_last(x)
    if isinstance(norm, ShardGroupNorm) and isinstance(conv, ShardConv2d) and is_plain(norm) and is_plain(conv):
        plain = is_plain(activation, ShardSiLU) and _does_nothing(dropout)
        if plain and goes_in_bands(context, conv, x):
            return _Half(partial(convolve_in_bands, context, norm, conv, x), banded=x)
    return _Half(partial(conv, _ready(context, norm, activation, conv, x, dropout=dropout)))


def _ready(
    context: ShardContext,
    norm: nn.Module,
    activation: nn.Module,
    conv: nn.Module,
    x: Tensor,
    *,
    dropout: nn.Module | None = None,
    cache: Tensor | None = None,
) -> Tensor:
    """``dropout(activation(norm(x)))``, written where ``conv`` will read if these are the layers that this is made for.

    Others stand in their place when a model was changed: they may read their input twice, or call further layers. Then
    nothing is sent before the convolution asks for it: each rank decides by itself whether it can wait with the halo,
    and an exchange that only some of them began in vain would put the others out of step.
    """
    known = context.overwrites and is_plain(norm, _NORMS) and is_plain(conv)
    slot, early = None, is_plain(activation, ShardSiLU) and _does_nothing(dropout)
    if known and isinstance(conv, ShardCausalConv3d):
        slot = conv.slot(context, x, cache)
    elif known and isinstance(conv, ShardConv2d):
        slot = conv.slot(context, x)
        # Rows travel with a GroupNorm's statistics on all ranks or on none; one that skips rows has slots on some only.
        early = early and (conv.stencil().keeps_size or not isinstance(norm, ShardGroupNorm))
    if slot is not None and isinstance(norm, _NORMS) and early:
        norm.write_activated(context, x, slot)
        return slot.own
    context.open_slot(slot)
    out: Tensor = norm(x)
    if known and isinstance(activation, ShardSiLU):
        context.give_own(out)
    ready: Tensor = activation(out)
    return ready if dropout is None else dropout(ready)


def _does_nothing(dropout: nn.Module | None) -> bool:
    """True for a dropout that gives back its input, and for none."""
    if dropout is None:
        return True
    return type(dropout) is nn.Dropout and is_plain(dropout) and not (dropout.training and dropout.p)


def _read_once(context: ShardContext, conv: nn.Module, norm: nn.Module, x: Tensor, half: _Half) -> Tensor:
    """What ``half`` makes by ``conv`` of a map like ``x``, good until ``norm`` has read it."""
    if not (isinstance(conv, _CONVOLUTIONS) and is_plain(conv) and is_plain(norm, _NORMS)):
        return half.convolve()

    def into(result: Result | None) -> Tensor:
        with context.result_open(result):
            return half.convolve()

    return context.read_once((x.shape[0], conv.out_channels, *x.shape[2:]), x, into)


def _with_shortcut(context: ShardContext, block: _Block, conv: nn.Module, x: Tensor, half: _Half) -> Tensor:
    """The sum of what ``half`` makes by ``conv``, and of the block's shortcut of its input ``x``."""
    shortcut = block.conv_shortcut
    if type(shortcut) is nn.Identity and is_plain(shortcut):
        shortcut = None
    base = None
    if isinstance(conv, _CONVOLUTIONS) and is_plain(conv) and is_plain(block.norm2, _NORMS):
        base = _base(context, shortcut, x, half, own=block.sums_in_place)
    if base is not None:
        with context.result_open(base):
            out = half.convolve()
        if shortcut is not None and block.sums_in_place:
            context.pool.keep_result(x)  # nobody reads it again
        return base.memory if base.taken else base.memory.add_(out)
    out = half.convolve()
    if shortcut is None:
        return _sum(context, out, x, own=block.sums_in_place)
    return _sum(context, out, _shortcut(context, shortcut, x))


def _base(context: ShardContext, shortcut: nn.Module | None, x: Tensor, half: _Half, *, own: bool) -> Result | None:
    """A map that holds the shortcut of ``x`` and becomes the block's result; None: the sum is taken afterwards.

    The convolution that will be added to it has its input in the scratch buffer, so a shortcut must not need that.
    """
    if shortcut is None and own:
        return Result(channels_last(x), adds=True) if context.overwrites and adds_convolutions(x) else None
    channels = x.shape[1]
    if shortcut is not None:
        if not (isinstance(shortcut, _CONVOLUTIONS) and _is_pointwise(shortcut) and is_plain(shortcut)):
            return None
        channels = shortcut.out_channels
    shape = (x.shape[0], channels, *x.shape[2:])
    if half.banded is not None and tuple(half.banded.shape) != shape:
        context.pool.give_result()  # rows of another length: a band would be written over some that are not yet read
    result = context.passing_result(shape, x)
    if result is None:
        return None
    context.pool.give_result()
    if half.banded is not None:
        return Result(result.memory, adds=True, fill=partial(_write_shortcut, shortcut, x))
    if shortcut is None:
        return Result(result.memory.copy_(x), adds=True)
    slot = context.set_slot_aside()  # that of the convolution
    with context.result_open(result):
        added: Tensor = shortcut(x)
    context.open_slot(slot)
    return Result(result.memory if result.taken else added, adds=True)


def _write_shortcut(shortcut: nn.Module | None, x: Tensor, images: slice, rows: slice, out: Tensor) -> None:
    """A block's shortcut of some rows of some images into ``out``, [b', c, n, w]; a 1x1 convolution or none."""
    part = x[images, :, rows]
    if isinstance(shortcut, _CONVOLUTIONS):
        result = Result(out)
        result.put(mix_channels(part, shortcut.weight, shortcut.bias, result))
    else:
        out.copy_(part)


def _is_pointwise(conv: ShardConv2d | ShardCausalConv3d) -> bool:
    return {*conv.kernel_size, *conv.stride, conv.groups} == {1}


def _shortcut(context: ShardContext, layer: nn.Module, x: Tensor) -> Tensor:
    """What is added to a block's result: ``layer`` of ``x``, good until the next convolution."""
    result = None
    if context.overwrites and isinstance(layer, _CONVOLUTIONS) and _is_pointwise(layer):
        shape = (x.shape[0], *x.shape[2:], layer.out_channels)
        result = Result(context.pool.scratch(shape, x).movedim(-1, 1))
    with context.result_open(result):
        added: Tensor = layer(x)
    return added


def _sum(context: ShardContext, out: Tensor, added: Tensor, *, own: bool = False) -> Tensor:
    """The sum of a block's result and what is added to it; in the memory of the latter if that is its ``own``."""
    if not context.overwrites:
        return out + added
    return added.add_(out) if own else out.add_(added)


def cached_convolve(context: ShardContext, conv: nn.Module, x: Tensor, cache: list[Any], place: list[int]) -> Tensor:
    """Convolve ``x`` after the frames in its place of the temporal cache, and leave the last frames there."""
    before: Tensor | None = cache[place[0]]
    out: Tensor = conv(x, before)
    if not context.last:
        cache[place[0]] = _tail(x, before, reuses=context.overwrites)
    place[0] += 1
    return out


def _tail(x: Tensor, before: Tensor | None, *, reuses: bool) -> Tensor:
    """The last frames of ``x``, behind the last of those ``before`` where it is short; in their memory if that fits."""
    tail = x[:, :, -CACHE_T:]
    if before is not None and tail.shape[2] < CACHE_T:
        return torch.cat([before[:, :, tail.shape[2] - CACHE_T :], tail], 2)
    fits = before is not None and before.shape == tail.shape and before.dtype == tail.dtype
    if reuses and before is not None and fits and not before.is_inference():  # the mode may have ended since
        return before.copy_(tail)
    return tail.clone()
