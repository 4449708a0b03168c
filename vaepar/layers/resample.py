"""Up- and down-sampling on the rows of one rank."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageUpsample
from diffusers.models.autoencoders.autoencoder_kl_wan import WanUpsample
from diffusers.models.downsampling import Downsample2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from vaepar.layers.bands import bands_of
from vaepar.layers.context import ShardContext, active_shard, is_plain
from vaepar.layers.inputs import Stencil, channels_last, shard_plan
from vaepar.layers.kernels import convolve, out_shape
from vaepar.parallel.shards import Window

_EXACT_DTYPES = (torch.float32, torch.float64)


class ShardZeroPad2d(nn.ZeroPad2d):
    """Zero padding that stands at the picture's edges only: the convolution that follows applies it."""

    def forward(self, input: Tensor) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(input)
            return direct
        context.defer_padding(*self.padding)
        return input


class ShardUpsampleConv(nn.Sequential):
    """Nearest upsampling by two and a 3x3 convolution, children 0 and 1, as one step."""

    def forward(self, input: Tensor) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(input)
            return direct
        conv = cast(nn.Conv2d, self[1])
        if not (context.overwrites and is_plain(self[0])):  # that some rank has a hook, all know
            called: Tensor = conv(self[0](input))
            return called
        if input.dtype == torch.float64 and isinstance(self[0], WanUpsample | QwenImageUpsample):
            input = input.float().double()  # these two pass through float32, which rounds
        out = upsample_conv(context, input, conv)
        context.pool.give_result()  # what follows is larger, above all the shortcut in parallel of Wan 2.2
        return out


class ShardUpsample2D(Upsample2D):
    """diffusers' upsampling by two with a 3x3 convolution (AutoencoderKL, FLUX.2)."""

    def forward(self, hidden_states: Tensor, output_size: int | None = None, *args: object, **kwargs: object) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(hidden_states, output_size, *args, **kwargs)
            return direct
        return upsample_conv(context, hidden_states, cast(nn.Conv2d, self.conv))


class ShardDownsample2D(Downsample2D):
    """diffusers' strided 3x3 convolution, padded right and bottom or all around."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        context = active_shard()
        if context is None:
            direct: Tensor = super().forward(hidden_states, *args, **kwargs)
            return direct
        if self.padding == 0:
            context.defer_padding(0, 1, 0, 1)
        down: Tensor = self.conv(hidden_states)
        return down


def upsample_conv(context: ShardContext, x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Nearest upsampling of [b, c, h, w] by two, then a 3x3 convolution with padding 1: [b, c', 2h, 2w].

    In an upsampled map neighbours repeat, so each of the four output phases reads only 2x2 different positions: with
    the taps on equal positions added up beforehand, four ninths of the products remain and the large input is never
    made. Sums of taps would lose bits in half precision, where the two steps are taken one after the other; so they
    are in a model with hooks or forwards of its own, which want to be called, and on all ranks alike.
    """
    if x.dtype not in _EXACT_DTYPES or not (context.overwrites and is_plain(conv)):
        large: Tensor = conv(F.interpolate(x, scale_factor=2.0, mode="nearest-exact"))
        return large
    x = channels_last(x)
    window = Window(3, before=1, after=1)
    stencil = Stencil(window, window)
    plan = shard_plan(context, x, stencil)
    exchange = context.begin_exchange(plan, x)
    halos = [] if exchange is None else exchange.finish()
    kernels, bias = _phase_kernels(conv.weight), None if conv.bias is None else conv.bias.repeat(2)
    channels, width = conv.out_channels, x.shape[3]
    out = torch.empty(
        (x.shape[0], channels, 2 * x.shape[2], 2 * width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    for images, start, band, padding in bands_of(context, x, stencil, plan, halos, kernels[0], 2 * channels):
        count = band.shape[2] - 2 + 2 * padding[0]
        large = out[images, :, 2 * start : 2 * (start + count)]
        for a, kernel in enumerate(kernels):  # even rows, then odd ones: half of the memory
            make = partial(convolve, band, kernel, bias, (1, 1), padding, (1, 1), 1)
            phases = context.read_once(out_shape(band, kernel, (1, 1), padding, (1, 1)), x, make)
            for b, phase in enumerate(phases.split(channels, 1)):
                large[:, :, a::2, b::2].copy_(phase[:, :, a : a + count, b : b + width])
            del phases, phase
    return out


def _phase_kernels(weight: Tensor) -> list[Tensor]:
    """The 2x2 kernels of even and of odd rows, [2c', c, 2, 2] each, even columns first, from [c', c, 3, 3].

    Even rows of the output read the row above and twice their own, odd ones twice their own and the row below.
    """
    taps = weight.new_tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]])
    kernels = torch.einsum("apk,bql,oikl->aboipq", taps, taps, weight)
    return [rows.flatten(0, 1).contiguous(memory_format=torch.channels_last) for rows in kernels]
