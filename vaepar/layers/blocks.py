"""Residual blocks that make few fresh maps: at full resolution those cost more than the sums and norms in them.

The norm before a convolution writes where the convolution will read. The sum goes into the block's input where that
has as many channels: diffusers' loops hold on to it and never read it again (Wan 2.2 clones what its shortcuts need).
That holds for a block that stands in such a loop itself, in a model without hooks; the request knows.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import CACHE_T
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from vaepar.layers.context import ShardContext, active_shard
from vaepar.layers.conv import ShardCausalConv3d, ShardConv2d
from vaepar.layers.inputs import channels_last
from vaepar.layers.norm import ShardGroupNorm, ShardRMSNorm, ShardSiLU


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
        out: Tensor = self.conv1(_ready(context, self.norm1, self.nonlinearity, self.conv1, x))
        ready = self.dropout(_ready(context, self.norm2, self.nonlinearity, self.conv2, out))
        del out  # its memory is free for the result
        out = self.conv2(ready)
        if self.conv_shortcut is None:
            out = _sum(context, out, x, own=self.sums_in_place)
        else:
            out = _sum(context, out, _shortcut(context, self.conv_shortcut, x))
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
            place = () if feat_idx is None else (feat_idx,)
            direct: Tensor = super().forward(x, feat_cache, *place)  # of the block that this is mixed into
            return direct
        ready = _ready(context, self.norm1, self.nonlinearity, self.conv1, x, feat_cache[feat_idx[0]])
        out = cached_convolve(self.conv1, ready, feat_cache, feat_idx)
        ready = _ready(context, self.norm2, self.nonlinearity, self.conv2, out, feat_cache[feat_idx[0]])
        ready = self.dropout(ready)
        del out  # its memory is free for the result
        out = cached_convolve(self.conv2, ready, feat_cache, feat_idx)
        if isinstance(self.conv_shortcut, nn.Identity):
            return _sum(context, out, x, own=self.sums_in_place)
        return _sum(context, out, _shortcut(context, self.conv_shortcut, x))


def _ready(
    context: ShardContext,
    norm: nn.Module,
    activation: nn.Module,
    conv: nn.Module,
    x: Tensor,
    cache: Tensor | None = None,
) -> Tensor:
    """``activation(norm(x))``, written where ``conv`` will read, if all three are the layers that this is made for.

    Others stand in their place when a model was changed: they may read their input twice, or call further layers.
    """
    known = context.overwrites and isinstance(norm, ShardGroupNorm | ShardRMSNorm)
    slot = None
    if known and isinstance(conv, ShardCausalConv3d):
        slot = conv.slot(context, x, cache)
    elif known and isinstance(conv, ShardConv2d):
        slot = conv.slot(context, x)
    context.open_slot(slot)
    out: Tensor = norm(x)
    if known and isinstance(activation, ShardSiLU):
        context.give_own(out)
    ready: Tensor = activation(out)
    return ready


def _shortcut(context: ShardContext, layer: nn.Module, x: Tensor) -> Tensor:
    """What is added to a block's result: ``layer`` of ``x``, good until the next convolution."""
    if context.overwrites and isinstance(layer, ShardConv2d | ShardCausalConv3d):
        shape = (x.shape[0], *x.shape[2:], layer.out_channels)
        context.open_result(context.pool.scratch(shape, x).movedim(-1, 1))
    added: Tensor = layer(x)
    context.open_result(None)  # one that is not pointwise has left it, and the next that is would take it
    return added


def _sum(context: ShardContext, out: Tensor, added: Tensor, *, own: bool = False) -> Tensor:
    """The sum of a block's result and what is added to it; in the memory of the latter if that is its ``own``."""
    if not context.overwrites:
        return out + added
    return added.add_(out) if own else out.add_(added)


def cached_convolve(conv: nn.Module, x: Tensor, cache: list[Any], place: list[int]) -> Tensor:
    """Convolve ``x`` after the frames in its place of the temporal cache, and leave the last frames there."""
    before: Tensor | None = cache[place[0]]
    out: Tensor = conv(x, before)
    tail = x[:, :, -CACHE_T:]
    if tail.shape[2] < CACHE_T and before is not None:
        tail = torch.cat([before[:, :, tail.shape[2] - CACHE_T :], tail], 2)
    cache[place[0]] = tail.clone()
    place[0] += 1
    return out
