"""Stored layouts to the VAE's axes and back: pure moves of numbers, bit for bit.

Axes as in :mod:`vaepar.latents.contract`: B C F H W, a patch of 2x2 latents as Q = (C, 2, 2), a grid of patches P R.
The orders are those of diffusers' ``FluxPipeline._unpack_latents`` (and Qwen-Image's, the same) and
``Flux2Pipeline._unpatchify_latents``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vaepar.errors import UsageError
from vaepar.latents.contract import LatentLayout
from vaepar.text import shape_text

if TYPE_CHECKING:
    from torch import Tensor

_UNBATCHED = {LatentLayout.CHW: LatentLayout.BCHW, LatentLayout.CFHW: LatentLayout.BCFHW}


def unfold(grid: Tensor) -> Tensor:
    """[B, 4C, P, R] -> [B, C, 2P, 2R]."""
    b, q, p, r = grid.shape
    return grid.reshape(b, q // 4, 2, 2, p, r).permute(0, 1, 4, 2, 5, 3).reshape(b, q // 4, 2 * p, 2 * r)


def fold(latent: Tensor) -> Tensor:
    """[B, C, 2P, 2R] -> [B, 4C, P, R]."""
    b, c, h, w = latent.shape
    return latent.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, h // 2, w // 2)


def tokens_to_grid(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """[B, N, Q] in row-major order -> [B, Q, P, R]."""
    b, _, q = tokens.shape
    return tokens.reshape(b, rows, columns, q).permute(0, 3, 1, 2)


def grid_to_tokens(grid: Tensor) -> Tensor:
    """[B, Q, P, R] -> [B, N, Q] in row-major order."""
    b, q, p, r = grid.shape
    return grid.permute(0, 2, 3, 1).reshape(b, p * r, q)


def unpack(tensor: Tensor, layout: LatentLayout, latent_size: tuple[int, int], *, takes_frames: bool) -> Tensor:
    """A stored tensor as [B, C, H, W], or [B, C, F, H, W] if ``takes_frames``.

    Args:
        tensor: in ``layout``.
        latent_size: (H, W) in latents; needed for tokens, whose shape does not say it.
        takes_frames: whether the VAE has a frame axis; stills get one of length 1.
    """
    rows, columns = latent_size
    if layout in (LatentLayout.CHW, LatentLayout.CFHW, LatentLayout.CGRID128):
        tensor = tensor.unsqueeze(0)
    if layout in (LatentLayout.PACKED_2X2, LatentLayout.TOKENS128):
        tensor = unfold(tokens_to_grid(tensor, rows // 2, columns // 2))
    elif layout in (LatentLayout.GRID128, LatentLayout.CGRID128):
        tensor = unfold(tensor)
    if takes_frames and tensor.ndim == 4:
        tensor = tensor.unsqueeze(2)
    return tensor


def pack(latent: Tensor, layout: LatentLayout) -> Tensor:
    """The inverse of :func:`unpack`.

    Raises:
        UsageError: when the layout has no place for the batch, the frames or the odd rows of ``latent``.
    """
    unbatched = layout in (*_UNBATCHED, LatentLayout.CGRID128)
    has_frames = layout in (LatentLayout.BCFHW, LatentLayout.CFHW)
    patched = layout in (LatentLayout.PACKED_2X2, *(kind for kind in LatentLayout if kind.endswith("128")))
    fits = (not unbatched or latent.shape[0] == 1) and (has_frames == (latent.ndim == 5) or latent.shape[2] == 1)
    if has_frames and latent.ndim == 4:
        fits = False
    if not fits or (patched and (latent.shape[-2] % 2 or latent.shape[-1] % 2)):
        raise UsageError(f"latents of shape {shape_text(latent.shape)} cannot be stored in the layout {layout.value}")
    if latent.ndim == 5 and not has_frames:
        latent = latent.squeeze(2)
    if patched:
        latent = fold(latent)
    if layout in (LatentLayout.PACKED_2X2, LatentLayout.TOKENS128):
        latent = grid_to_tokens(latent)
    return (latent.squeeze(0) if unbatched else latent).contiguous()
