"""Norms and activations on the rows of one rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vaepar.layers.context import ShardContext, active_shard
from vaepar.layers.conv import channels_last
from vaepar.parallel.halo import gather_parts

_RMS_FLOOR = 1e-12  # that of torch.nn.functional.normalize, which Wan and Qwen-Image call


class ShardGroupNorm(nn.GroupNorm):
    """A GroupNorm whose statistics are those of the whole picture while a shard is active."""

    def forward(self, input: Tensor) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(input)
            return direct
        return group_norm(context, self, input)


class ShardRMSNorm(nn.Module):
    """The per-position RMS norm of Wan and Qwen-Image in three passes over memory, where theirs takes six.

    To be mixed into a class that has ``channel_first``, ``scale``, ``gamma`` and ``bias``.
    """

    channel_first: bool
    scale: float
    gamma: Tensor
    bias: Tensor | float

    def forward(self, x: Tensor) -> Tensor:
        if active_shard() is None:
            direct: Tensor = super().forward(x)  # of the norm that this is mixed into
            return direct
        dim = 1 if self.channel_first else -1
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        norm = torch.linalg.vector_norm(wide, dim=dim, keepdim=True).clamp_min_(_RMS_FLOOR)
        out = (wide * norm.reciprocal_().mul_(self.scale)).mul_(self.gamma)
        if isinstance(self.bias, Tensor):
            out.add_(self.bias)
        rounded: Tensor = out.to(x.dtype)
        return rounded


class ShardSiLU(nn.SiLU):
    """SiLU in place while a shard is active: in these models its input is always a norm's fresh output."""

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(input, inplace=self.inplace or active_shard() is not None)


def group_norm(context: ShardContext, norm: nn.GroupNorm, x: Tensor) -> Tensor:
    """GroupNorm of [b, c, h, w] over the whole picture, from this rank's rows.

    Each rank sends the mean and the squared deviations of its own rows; parts are joined by the formula of Chan, Golub
    and LeVeque (1979), which stays exact where the mean is large against the deviation and sums of squares do not.
    """
    if context.alone:
        return F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    x = channels_last(x)
    layout = context.layout_of(x)
    mean, deviations = _moments(x, norm.num_groups)
    part = torch.stack((mean, deviations))
    parts = torch.stack(gather_parts(context.group, layout, part, [part.shape] * layout.ranks))
    weights = parts.new_tensor([layout.length(r) / layout.extent for r in range(layout.ranks)]).view(-1, 1, 1)
    whole_mean = (weights * parts[:, 0]).sum(0)
    whole_var = (weights * (parts[:, 1] + (parts[:, 0] - whole_mean).square())).sum(0)
    return _normalise(x, norm, whole_mean, whole_var)


def _moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and mean squared deviation of each group of [b, c, h, w], two of [b, groups], at least float32."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()  # the statistics come in the dtype of the input
    per_channel = [torch.batch_norm_update_stats(image[None], None, None, 0.0) for image in x]
    mean = torch.stack([m for m, _ in per_channel]).unflatten(1, (groups, -1))
    var = torch.stack([v for _, v in per_channel]).unflatten(1, (groups, -1))
    group_mean = mean.mean(2)
    return group_mean, (var + (mean - group_mean[..., None]).square()).mean(2)


def _normalise(x: Tensor, norm: nn.GroupNorm, mean: Tensor, var: Tensor) -> Tensor:
    repeats = x.shape[1] // norm.num_groups
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = None if norm.weight is None else norm.weight.to(wide)
    bias = None if norm.bias is None else norm.bias.to(wide)
    mean, var = mean.repeat_interleave(repeats, 1).to(wide), var.repeat_interleave(repeats, 1).to(wide)
    images = [
        F.batch_norm(image[None], mean[i], var[i], weight, bias, training=False, eps=norm.eps)
        for i, image in enumerate(x)
    ]
    return images[0] if len(images) == 1 else torch.cat(images)
