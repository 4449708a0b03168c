"""Residual blocks that add in place: a fresh map of full resolution costs more than the sum itself."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from vaepar.layers.context import active_shard
from vaepar.layers.conv import ShardCausalConv3d
from vaepar.layers.inputs import channels_last


class ShardResnetBlock2D(ResnetBlock2D):
    """diffusers' residual block without time embedding, as the image VAEs use it."""

    def forward(self, input_tensor: Tensor, temb: Tensor | None = None, *args: object, **kwargs: object) -> Tensor:
        if active_shard() is None:
            direct: Tensor = super().forward(input_tensor, temb, *args, **kwargs)
            return direct
        x = channels_last(input_tensor)
        out: Tensor = self.conv1(self.nonlinearity(self.norm1(x)))
        out = self.conv2(self.dropout(self.nonlinearity(self.norm2(out))))
        out.add_(x if self.conv_shortcut is None else self.conv_shortcut(x))
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
        if active_shard() is None or feat_cache is None or feat_idx is None:
            place = () if feat_idx is None else (feat_idx,)
            direct: Tensor = super().forward(x, feat_cache, *place)  # of the block that this is mixed into
            return direct
        out = cached_convolve(self.conv1, self.nonlinearity(self.norm1(x)), feat_cache, feat_idx)
        out = cached_convolve(self.conv2, self.dropout(self.nonlinearity(self.norm2(out))), feat_cache, feat_idx)
        shortcut: Tensor = self.conv_shortcut(x)
        return out.add_(shortcut)


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
