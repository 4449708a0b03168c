"""Small random VAEs of the real classes: the bench on which everything is compared.

Each factory takes ``real_topology``: False gives a model of a few KB that runs in milliseconds; True gives the depth
of the released checkpoints (four levels, two blocks a level, attention) at small widths. Gains and biases of norms are
random, because ones and zeros hide a norm that forgets them; the weights keep activations of order 1, so that an
absolute tolerance means something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan
from torch import nn

WAN22_LATENT_CHANNELS = 48


def make_kl(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, real_topology: bool = False, cls: type[Any] | None = None
) -> Any:
    """AutoencoderKL, 8x in space; latent [B, 4, H, W], or [B, 16, H, W] with the real topology."""
    if real_topology:
        widths, layers, channels, groups = (8, 16, 32, 32), 2, 16, 8
    else:
        widths, layers, channels, groups = (16, 16, 16, 16), 1, 4, 4
    return _make(
        lambda: (cls or AutoencoderKL)(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=widths,
            layers_per_block=layers,
            latent_channels=channels,
            norm_num_groups=groups,
            sample_size=64,
        ),
        seed,
        dtype,
    )


def make_flux2(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, real_topology: bool = False, cls: type[Any] | None = None
) -> Any:
    """AutoencoderKLFlux2, 8x in space; latent [B, 32, H, W] (128 channels at half the size when packed)."""
    widths, layers, groups = ((8, 16, 32, 32), 2, 8) if real_topology else ((16, 16, 16, 16), 1, 4)
    vae = _make(
        lambda: (cls or AutoencoderKLFlux2)(
            block_out_channels=widths, layers_per_block=layers, norm_num_groups=groups, sample_size=64
        ),
        seed,
        dtype,
    )
    generator = torch.Generator().manual_seed(seed + 2)
    vae.bn.running_mean.copy_(0.3 * torch.randn(vae.bn.running_mean.shape, generator=generator))
    vae.bn.running_var.copy_(0.5 + 1.5 * torch.rand(vae.bn.running_var.shape, generator=generator))
    return vae


def make_qwenimage(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, real_topology: bool = False, cls: type[Any] | None = None
) -> Any:
    """AutoencoderKLQwenImage, 8x in space, 4x in time; latent [B, 16, T, H, W]."""
    size = {"base_dim": 8, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    tiny = {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return _make(
        lambda: (cls or AutoencoderKLQwenImage)(z_dim=16, attn_scales=[], **(size if real_topology else tiny)),
        seed,
        dtype,
    )


def make_wan21(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, real_topology: bool = False, cls: type[Any] | None = None
) -> Any:
    """AutoencoderKLWan as Wan 2.1 has it, 8x in space, T frames to 4T - 3; latent [B, 16, T, H, W]."""
    size = {"base_dim": 8, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    tiny = {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return _make(
        lambda: (cls or AutoencoderKLWan)(
            z_dim=16, temperal_downsample=[False, True, True], **(size if real_topology else tiny)
        ),
        seed,
        dtype,
    )


def make_wan22(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, real_topology: bool = False, cls: type[Any] | None = None
) -> Any:
    """AutoencoderKLWan as Wan 2.2 5B has it (residual, patches of 2), 16x in space; latent [B, 48, T, H, W]."""
    return _make(
        lambda: (cls or AutoencoderKLWan)(
            base_dim=8 if real_topology else 4,
            decoder_base_dim=8 if real_topology else 4,
            z_dim=WAN22_LATENT_CHANNELS,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=2 if real_topology else 1,
            temperal_downsample=[False, True, True],
            is_residual=True,
            patch_size=2,
            in_channels=12,
            out_channels=12,
            scale_factor_spatial=16,
            latents_mean=[0.0] * WAN22_LATENT_CHANNELS,
            latents_std=[1.0] * WAN22_LATENT_CHANNELS,
        ),
        seed,
        dtype,
    )


def _make(build: Callable[[], Any], seed: int, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = build()
    generator = torch.Generator().manual_seed(seed + 1)
    for module in vae.modules():
        gain = getattr(module, "gamma", None)  # the RMS norms of Wan and Qwen-Image
        if isinstance(module, nn.GroupNorm):
            gain = module.weight
            _fill(module.bias, 0.0, 0.2, generator)
        if isinstance(gain, nn.Parameter):
            _fill(gain, 1.0, 0.2, generator)
    if isinstance(vae, AutoencoderKL | AutoencoderKLFlux2):
        with torch.no_grad():  # nothing clamps these: random weights would give pixels up to 4 instead of 1
            vae.decoder.conv_out.weight.mul_(0.25)
    return (vae if dtype == torch.float32 else vae.to(dtype)).eval()


def _fill(parameter: nn.Parameter, centre: float, spread: float, generator: torch.Generator) -> None:
    with torch.no_grad():
        parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
