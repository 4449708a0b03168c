"""Residual blocks that make few fresh maps: at full resolution those cost more than the sums and norms in them.

The norm before a convolution writes where the convolution will read. The sum goes into the block's input where that
has as many channels: diffusers' loop over blocks holds on to it, so it is memory that nobody else can have.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from vaepar.layers.context import ShardContext, active_shard
from vaepar.layers.conv import ShardCausalConv3d, ShardConv2d, result_slot
from vaepar.layers.inputs import channels_last


class ShardResnetBlock2D(ResnetBlock2D):
    """diffusers' residual block without time embedding, as the image VAEs use it."""

    def forward(self, input_tensor: Tensor, temb: Tensor | None = None, *args: object, **kwargs: object) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(input_tensor, temb, *args, **kwargs)
            return direct
        x = channels_last(input_tensor)
        _open_slot(context, self.conv1, x)
        out: Tensor = self.conv1(self.nonlinearity(self.norm1(x)))
        _open_slot(context, self.conv2, out)
        ready = self.dropout(self.nonlinearity(self.norm2(out)))
        del out  # its memory is free for the result
        out = self.conv2(ready)
        out = x.add_(out) if self.conv_shortcut is None else out.add_(_shortcut(context, self.conv_shortcut, x))
        return out if self.output_scale_factor == 1 else out.div_(self.output_scale_factor)


class ShardCausalResidualBlock(nn.Module):
    """The residual block of Wan and Qwen-Image, to be mixed into it."""

    norm1: nn.Module
    norm2: nn.Module
    conv1: ShardCausalConv3d
    conv2: ShardCausalConv3d
    conv_shortcut: nn.Module
    nonlinearity: nn.Module
    dropout: nn.Module

    def forward(self, x: Tensor, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None) -> Tensor:
        context = active_shard()
        if context is None or feat_cache is None or feat_idx is None:
            place = () if feat_idx is None else (feat_idx,)
            direct: Tensor = super().forward(x, feat_cache, *place)  # of the block that this is mixed into
            return direct
        _open_slot(context, self.conv1, x, feat_cache[feat_idx[0]])
        out = cached_convolve(self.conv1, self.nonlinearity(self.norm1(x)), feat_cache, feat_idx)
        _open_slot(context, self.conv2, out, feat_cache[feat_idx[0]])
        ready = self.dropout(self.nonlinearity(self.norm2(out)))
        del out  # its memory is free for the result
        out = cached_convolve(self.conv2, ready, feat_cache, feat_idx)
        if isinstance(self.conv_shortcut, nn.Identity):
            return x.add_(out)
        return out.add_(_shortcut(context, self.conv_shortcut, x))


def _open_slot(context: ShardContext, conv: nn.Module, x: Tensor, cache: Tensor | None = None) -> None:
    """Let the next norm, that of ``x``, write where ``conv`` will read; not where another layer stands in its place."""
    slot = None
    if isinstance(conv, ShardCausalConv3d):
        slot = conv.slot(context, x, cache)
    elif isinstance(conv, ShardConv2d):
        slot = conv.slot(context, x)
    context.open_slot(slot)


def _shortcut(context: ShardContext, layer: nn.Module, x: Tensor) -> Tensor:
    """What is added to a block's result: ``layer`` of ``x``, good until the next slot is opened."""
    if isinstance(layer, ShardConv2d | ShardCausalConv3d):
        context.open_slot(result_slot(context, layer, x))
    added: Tensor = layer(x)
    return added


def cached_convolve(conv: ShardCausalConv3d, x: Tensor, cache: list[Any], place: list[int]) -> Tensor:
    """Convolve ``x`` after the frames in its place of the temporal cache, and leave the last frames there."""
    frames = conv._padding[4]
    before: Tensor | None = cache[place[0]]
    out: Tensor = conv(x, before)
    tail = x[:, :, -frames:]
    if tail.shape[2] < frames and before is not None:
        tail = torch.cat([before[:, :, tail.shape[2] - frames :], tail], 2)
    cache[place[0]] = tail.clone()
    place[0] += 1
    return out
