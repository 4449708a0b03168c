"""Attention over the picture: each rank asks with its own positions and looks at those of all ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn

from vaepar.errors import UnsupportedModeError
from vaepar.layers.context import ShardContext, active_shard
from vaepar.layers.inputs import channels_last, fold_frames, unfold_frames
from vaepar.parallel.halo import gather_parts


class ShardSpatialAttention(Attention):
    """The attention block of AutoencoderKL's middle, [b, c, h, w] in and out."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(hidden_states, *args, **kwargs)
            return direct
        residual = channels_last(hidden_states)
        normed = residual if self.group_norm is None else self.group_norm(residual)
        tokens = normed.permute(0, 2, 3, 1).flatten(1, 2)
        keys_values = torch.cat((self.to_k(tokens), self.to_v(tokens)), -1)
        mixed = attend(context, self.to_q(tokens), keys_values, hidden_states, self.heads)
        mixed = self.to_out[1](self.to_out[0](mixed))
        maps = mixed.unflatten(1, residual.shape[-2:]).permute(0, 3, 1, 2)
        if self.residual_connection:
            maps = maps + residual
        rescaled: Tensor = maps if self.rescale_output_factor == 1 else maps / self.rescale_output_factor
        return rescaled


class ShardFrameAttention(nn.Module):
    """The single-headed attention block of Wan and Qwen-Image, within each frame of [b, c, t, h, w].

    To be mixed into a class that has ``norm``, ``to_qkv`` and ``proj`` (1x1 convolutions).
    """

    norm: nn.Module
    to_qkv: nn.Conv2d
    proj: nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(x)  # of the block that this is mixed into
            return direct
        x = channels_last(x)
        maps = fold_frames(x)
        qkv = self.to_qkv(self.norm(maps)).permute(0, 2, 3, 1).flatten(1, 2)
        channels = qkv.shape[-1] // 3
        mixed = attend(context, qkv[..., :channels], qkv[..., channels:], maps, heads=1)
        out: Tensor = self.proj(mixed.unflatten(1, maps.shape[-2:]).permute(0, 3, 1, 2))
        return unfold_frames(out, x.shape[0]) + x


def check_attention(attention: Attention) -> None:
    """Raise :class:`UnsupportedModeError` for a variant of diffusers' attention that the shard does not compute."""
    processor = attention.processor
    standard = type(processor) in (AttnProcessor, AttnProcessor2_0)
    extras = [name for name in ("spatial_norm", "norm_q", "norm_k", "norm_cross") if getattr(attention, name, None)]
    if not standard or extras or getattr(attention, "fused_projections", False):
        raise UnsupportedModeError(
            f"a spatial shard cannot compute attention with {type(processor).__name__}"
            f"{' and ' + ', '.join(extras) if extras else ''}; it has diffusers' plain self-attention"
        )


def attend(context: ShardContext, queries: Tensor, keys_values: Tensor, maps: Tensor, heads: int) -> Tensor:
    """Scaled dot-product attention of own queries [b, n, c] over the keys and values of the whole picture.

    Args:
        keys_values: those of this rank's positions, [b, n, 2c], keys first.
        maps: the feature map [b, c, h, w] that the positions come from, which says how many each rank has.

    Returns:
        [b, n, c].
    """
    if not context.alone:
        layout = context.layout_of(maps)
        across = maps.shape[context.other_dim]
        shapes = [(keys_values.shape[0], layout.length(r) * across, keys_values.shape[2]) for r in range(layout.ranks)]
        keys_values = torch.cat(gather_parts(context.group, layout, keys_values.contiguous(), shapes), 1)
    keys, values = keys_values.chunk(2, -1)
    split = [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (queries, keys, values)]
    return F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
