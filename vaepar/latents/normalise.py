"""Between the transformer's space and the VAE's, in the order of casts of the pipelines.

The order matters in half precision: x / s + m in float32 then cast is not the cast of x, then / s + m. So the table
below says, for each kind of file, which formula and which order; the code only follows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from vaepar.errors import UsageError
from vaepar.latents.contract import LatentLayout
from vaepar.latents.packing import fold, unfold
from vaepar.latents.vae_facts import VaeFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BatchNorm = tuple["Tensor", "Tensor", float]
"""(running_mean [4C], running_var [4C], eps) of ``AutoencoderKLFlux2.bn``."""


class CastOrder(Enum):
    """When the latent goes to the VAE's dtype."""

    FIRST = "cast, then denormalise in the VAE's dtype"
    LAST = "denormalise in the stored dtype, then cast"
    UPCAST = "as LAST, but a half latent for a float32 VAE is cast first"


class Formula(Enum):
    """raw from norm."""

    SCALE_SHIFT = "x / scaling_factor + shift_factor"
    STATISTICS = "x * std / scaling_factor + mean"
    MEAN_STD = "x / (1 / std) + mean"
    BATCH_NORM = "x * sqrt(var + eps) + mean over 4C patch channels"


@dataclass(frozen=True)
class Arithmetic:
    """One row: the kinds of file that it is for, then the formula and the order. None stands for any."""

    family: str
    formula: Formula
    cast: CastOrder
    producer: str | None = None
    layouts: frozenset[LatentLayout] | None = None
    scaling_factor: float | None = None
    statistics: bool | None = None
    source: str = ""

    def is_for(self, vae: VaeFacts, producer: str, layout: LatentLayout) -> bool:
        factor = vae.scaling_factor
        return (
            self.family == vae.family
            and self.producer in (None, producer)
            and (self.layouts is None or layout in self.layouts)
            and (self.scaling_factor is None or (factor is not None and math.isclose(factor, self.scaling_factor)))
            and self.statistics in (None, vae.latents_std is not None)
        )


_PLAIN = frozenset({LatentLayout.BCHW, LatentLayout.CHW})

# The first row that fits counts. The last row of each family fits always.
ARITHMETIC: tuple[Arithmetic, ...] = (
    Arithmetic("wan", Formula.MEAN_STD, CastOrder.FIRST, source="WanPipeline"),
    Arithmetic("qwenimage", Formula.MEAN_STD, CastOrder.FIRST, source="QwenImagePipeline"),
    Arithmetic("flux2", Formula.BATCH_NORM, CastOrder.FIRST, producer="musubi", source="musubi-tuner: inside its VAE"),
    Arithmetic("flux2", Formula.BATCH_NORM, CastOrder.LAST, source="Flux2Pipeline"),
    Arithmetic(
        "kl",
        Formula.STATISTICS,
        CastOrder.UPCAST,
        statistics=True,
        source="StableDiffusionXLPipeline with latents_mean and latents_std",
    ),
    Arithmetic("kl", Formula.SCALE_SHIFT, CastOrder.FIRST, producer="musubi", source="musubi-tuner: inside its VAE"),
    # FLUX.1 and Z-Image share their VAE's numbers; FLUX.1 returns tokens, Z-Image does not.
    Arithmetic(
        "kl",
        Formula.SCALE_SHIFT,
        CastOrder.FIRST,
        layouts=_PLAIN,
        scaling_factor=0.3611,
        source="ZImagePipeline",
    ),
    Arithmetic(
        "kl",
        Formula.SCALE_SHIFT,
        CastOrder.UPCAST,
        layouts=_PLAIN,
        scaling_factor=0.13025,
        source="StableDiffusionXLPipeline",
    ),
    Arithmetic(
        "kl",
        Formula.SCALE_SHIFT,
        CastOrder.LAST,
        source="FluxPipeline, StableDiffusion3Pipeline, StableDiffusionPipeline",
    ),
)


def arithmetic_for(vae: VaeFacts, producer: str, layout: LatentLayout) -> Arithmetic:
    """The row of :data:`ARITHMETIC` for a file of that producer and layout."""
    return next(row for row in ARITHMETIC if row.is_for(vae, producer, layout))


def denormalise(x: Tensor, formula: Formula, vae: VaeFacts, bn: BatchNorm | None = None) -> Tensor:
    """norm -> raw, in the dtype of ``x`` ([B, C, H, W] or [B, C, F, H, W]).

    Raises:
        UsageError: when the formula needs ``bn`` and there is none.
    """
    if formula is Formula.BATCH_NORM:
        mean, deviation = _batch_norm(x, bn)
        return unfold(fold(x) * deviation + mean)
    if formula is Formula.MEAN_STD:
        if vae.latents_mean is None or vae.latents_std is None:
            return x
        # Written with the reciprocal, rounded in the latent's dtype, because the pipelines do: x * std differs in
        # the last bit.
        return x / (1.0 / _column(x, vae.latents_std)) + _column(x, vae.latents_mean)
    factor = 1.0 if vae.scaling_factor is None else vae.scaling_factor
    if formula is Formula.STATISTICS:
        return x * _column(x, vae.latents_std or ()) / factor + _column(x, vae.latents_mean or ())
    x = x / factor
    return x if vae.shift_factor is None else x + vae.shift_factor


def normalise(x: Tensor, vae: VaeFacts, bn: BatchNorm | None = None) -> Tensor:
    """raw -> norm, in the dtype of ``x``, as the img2img, edit and image-to-video pipelines write it.

    Raises:
        UsageError: when the family needs ``bn`` and there is none.
    """
    if vae.family == "flux2":
        mean, deviation = _batch_norm(x, bn)
        return unfold((fold(x) - mean) / deviation)
    factor = 1.0 if vae.scaling_factor is None else vae.scaling_factor
    if vae.latents_mean is None or vae.latents_std is None:
        if vae.takes_frames:
            return x
        return (x if vae.shift_factor is None else x - vae.shift_factor) * factor
    mean, deviation = _column(x, vae.latents_mean), _column(x, vae.latents_std)
    if vae.family == "wan":
        return (x - mean) * (1.0 / deviation)
    if vae.family == "qwenimage":
        return (x - mean) / deviation
    return (x - mean) * factor / deviation


def raw_deviation(vae: VaeFacts, bn: BatchNorm | None) -> list[float]:
    """The deviation that raw latents of a real picture have by the model's own constants, one a channel."""
    if bn is not None and vae.family == "flux2":
        var = bn[1].detach().float().cpu().reshape(vae.latent_channels, 4).mean(dim=1)
        return [math.sqrt(max(value, 0.0) + bn[2]) for value in var.tolist()]
    factor = abs(vae.scaling_factor or 1.0)
    deviations: Sequence[float] = vae.latents_std or [1.0] * vae.latent_channels
    return [abs(value) / factor for value in deviations]


def cast_first(order: CastOrder, stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether the cast precedes the denormalisation for these dtypes."""
    return order is CastOrder.FIRST or (order is CastOrder.UPCAST and stored.itemsize < wanted.itemsize)


def _column(x: Tensor, values: Sequence[float]) -> Tensor:
    """One number a channel, shaped to meet ``x``, through float32 into its dtype as the pipelines do."""
    import torch

    shape = (1, -1) + (1,) * (x.ndim - 2)
    return torch.tensor(values, dtype=torch.float32).view(shape).to(x.device, x.dtype)


def _batch_norm(x: Tensor, bn: BatchNorm | None) -> tuple[Tensor, Tensor]:
    import torch

    if bn is None:
        raise UsageError(
            "normalised FLUX.2 latents need the model's bn.running_mean, bn.running_var and batch_norm_eps"
        )
    mean, var, eps = bn
    deviation = torch.sqrt(var.view(1, -1, 1, 1) + eps).to(x.device, x.dtype)
    return mean.view(1, -1, 1, 1).to(x.device, x.dtype), deviation
