"""Decode and encode with one feature map shared by the ranks of a group: the picture that one device would make.

Every rank of the group calls the same function with the same tensor. The first ``min(size, extent)`` ranks own rows;
the others only hand the result on where they are its owner. The model is prepared in place at the first call and
behaves as before outside of these functions; all state of a request lives in the request and is dropped with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage, QwenImageCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, WanCausalConv3d, patchify, unpatchify
from torch import Tensor, nn

from vaepar.autoencoders.feed import FrameFeed, TensorFeed, shape_of
from vaepar.errors import UsageError
from vaepar.layers.context import ShardContext, shard_active
from vaepar.layers.install import install_shards
from vaepar.parallel.group import Pending, RankGroup
from vaepar.parallel.shards import Axis, Layout, auto_axis, decode_layouts, eligible_axes, encode_layouts

__all__ = ["auto_axis", "eligible_axes", "prepare_shards", "shard_decode_chunks", "shard_encode"]

DEFAULT_FRAMES_PER_STEP = 4
_DIMS: dict[str, int] = {"height": -2, "width": -1}
_CAUSAL_FAMILIES = (AutoencoderKLWan, AutoencoderKLQwenImage)
_CAUSAL_CONVS = (WanCausalConv3d, QwenImageCausalConv3d)


def prepare_shards(vae: nn.Module) -> None:
    """Prepare the model in place; the functions of this module do it when it has not been done."""
    model = cast(Any, vae)
    install_shards(model.encoder, model.decoder, model.quant_conv, model.post_quant_conv)


def shard_decode_chunks(
    vae: nn.Module,
    z: Tensor,
    group: RankGroup,
    axis: Axis,
    *,
    frames_per_step: int = DEFAULT_FRAMES_PER_STEP,
    owner: int = 0,
) -> Iterator[Tensor | None]:
    """Decode ``z`` with the ranks of ``group`` and give the picture to one of them, in chunks.

    Args:
        vae: AutoencoderKL, FLUX.2, Qwen-Image or Wan.
        z: the latent in VAE space, the same on every rank: [B, C, H, W], or [B, C, T, H, W] for Qwen-Image and Wan.
        axis: ``"height"`` or ``"width"``.
        frames_per_step: latent frames of one step after the first, which bounds memory; Qwen-Image and Wan only.
        owner: the rank that gets the picture.

    Yields:
        In time order, one chunk a step: on the owner [B, 3, t, H', W'] (or [B, 3, H', W']) as diffusers' untiled
        decode gives it, None on the other ranks. Image families have one step.

    Raises:
        UsageError: the latent, the axis or a number is not one that can be.
        PeerFailedError: another rank has raised the alarm.
    """
    _check_request(vae, z, group, axis, owner, frames_per_step)
    prepare_shards(vae)
    if isinstance(vae, _CAUSAL_FAMILIES):
        return _decode_causal(vae, z, group, axis, frames_per_step, owner)
    return _decode_image(vae, z, group, axis, owner)


def shard_encode(
    vae: nn.Module,
    x: Tensor | FrameFeed,
    group: RankGroup,
    axis: Axis,
    *,
    frames_per_step: int = DEFAULT_FRAMES_PER_STEP,
    owner: int | None = None,
) -> Tensor | None:
    """Encode ``x`` with the ranks of ``group``: the moments (mean and log variance) of the posterior.

    Args:
        x: pixels in [-1, 1], the same on every rank, [B, 3, H, W] or [B, 3, T, H, W]; sizes that do not fill a latent
            row or column lose the rest, and frames beyond 4n + 1 are left out, as in diffusers. A feed of a film is
            read step by step, so that it never has to be in memory whole.
        frames_per_step: latent frames of one step after the first; Qwen-Image and Wan only.
        owner: the rank that gets the moments; None gives them to all.

    Returns:
        [B, 2C, H', W'] or [B, 2C, T', H', W'], None on ranks that are not the owner.

    Raises:
        UsageError: the pixels, the axis or a number is not one that can be.
        PeerFailedError: another rank has raised the alarm.
    """
    like = x if isinstance(x, Tensor) else shape_of(x)
    _check_request(vae, like, group, axis, 0 if owner is None else owner, frames_per_step)
    prepare_shards(vae)
    model = cast(Any, vae)
    patch = _patch_size(vae)
    _check_pixels(vae, like, patch)
    layouts = encode_layouts(like.shape[_DIMS[axis]] // patch, group.size, _doublings(vae))
    request = _Request(group, axis, layouts, owner)
    try:
        group.check_alarm()
        rows = None
        if request.context is not None:
            if isinstance(vae, _CAUSAL_FAMILIES):
                feed = TensorFeed(x) if isinstance(x, Tensor) else x
                rows = _encode_frames(
                    model,
                    lambda low, high: request.own_rows(feed.frames(low, high), layouts[0], patch),
                    like.shape[2],
                    request.context,
                    frames_per_step,
                )
            else:
                picture = x if isinstance(x, Tensor) else x.frames(0, 1)[:, :, 0]
                rows = _encode_image(model, request.own_rows(picture, layouts[0], patch), request.context)
        moments = request.deliver(rows, layouts[-1], _moments_shape(vae, like, patch), x)
        request.settle()
        return moments
    finally:
        request.close()


class _Request:
    """One decode or encode on one rank: its context, and the way of finished rows to their owner."""

    def __init__(self, group: RankGroup, axis: Axis, layouts: tuple[Layout, ...], owner: int | None) -> None:
        self.group = group
        self.dim = _DIMS[axis]
        active = group.rank < layouts[0].ranks
        self.context = ShardContext(group, axis, layouts) if active else None
        self._receivers = range(group.size) if owner is None else (owner,)
        self._pending: list[tuple[Pending, Tensor]] = []

    def own_rows(self, x: Tensor, layout: Layout, factor: int = 1) -> Tensor:
        """This rank's part of ``x``, a view; ``factor`` rows of ``x`` make one of the layout."""
        start = layout.bounds[self.group.rank] * factor
        return x.narrow(self.dim, start, layout.length(self.group.rank) * factor)

    def deliver(self, rows: Tensor | None, layout: Layout, shape: list[int], like: Tensor | FrameFeed) -> Tensor | None:
        """Send own finished rows to the receivers, exact size; on a receiver the whole map of ``shape``, else None."""
        self.settle()
        group = self.group
        if rows is not None:
            rows = rows.contiguous()
            for rank in self._receivers:
                if rank != group.rank:
                    self._pending.append((group.isend(rows, rank), rows))
        if group.rank not in self._receivers:
            return None
        if rows is not None and layout.ranks == 1:
            return rows
        arriving = []
        for rank in range(layout.ranks):
            if rank != group.rank:
                part_shape = list(shape)
                part_shape[self.dim] = layout.length(rank)
                buffer = torch.empty(part_shape, dtype=like.dtype, device=like.device)
                arriving.append((rank, buffer, group.irecv(buffer, rank)))
        whole = torch.empty(shape, dtype=like.dtype, device=like.device)
        if rows is not None:
            self._place(whole, layout, group.rank, rows)
        for rank, buffer, pending in arriving:
            pending.wait()
            self._place(whole, layout, rank, buffer)
        return whole

    def settle(self) -> None:
        """Wait until what was sent has gone; at most one step's rows are ever on their way."""
        while self._pending:
            self._pending.pop(0)[0].wait()

    def close(self) -> None:
        """Drop everything that the request holds, after success and after failure."""
        self._pending.clear()
        if self.context is not None:
            self.context.clear()

    def _place(self, whole: Tensor, layout: Layout, rank: int, rows: Tensor) -> None:
        whole.narrow(self.dim, layout.bounds[rank], layout.length(rank)).copy_(rows)


def _decode_image(vae: nn.Module, z: Tensor, group: RankGroup, axis: Axis, owner: int) -> Iterator[Tensor | None]:
    model = cast(Any, vae)
    doublings = _doublings(vae)
    layouts = decode_layouts(z.shape[_DIMS[axis]], group.size, doublings)
    request = _Request(group, axis, layouts, owner)
    try:
        group.check_alarm()
        rows = None
        if request.context is not None:
            with torch.no_grad(), _running(model, request.context):
                rows = request.own_rows(z, layouts[0])
                if model.post_quant_conv is not None:
                    rows = model.post_quant_conv(rows)
                rows = model.decoder(rows)
        shape = [z.shape[0], model.decoder.conv_out.out_channels, *(size << doublings for size in z.shape[-2:])]
        chunk = request.deliver(rows, layouts[-1], shape, z)
        del rows
        yield chunk
        request.settle()
    finally:
        request.close()


def _decode_causal(
    vae: nn.Module, z: Tensor, group: RankGroup, axis: Axis, frames_per_step: int, owner: int
) -> Iterator[Tensor | None]:
    model = cast(Any, vae)
    patch = _patch_size(vae)
    ratio = patch << _doublings(vae)
    layouts = decode_layouts(z.shape[_DIMS[axis]], group.size, _doublings(vae))
    request = _Request(group, axis, layouts, owner)
    cache = _new_cache(model.decoder)
    growth = 2 ** sum(model.temperal_upsample)
    try:
        for start, stop in _steps(z.shape[2], frames_per_step):
            group.check_alarm()
            rows = None
            if request.context is not None:
                own = request.own_rows(z, layouts[0])[:, :, start:stop]
                rows = _decode_step(model, own, request.context, cache, first=start == 0)
            frames = 1 if start == 0 else growth * (stop - start)
            channels = model.decoder.conv_out.out_channels // patch**2
            shape = [z.shape[0], channels, frames, *(size * ratio for size in z.shape[-2:])]
            chunk = request.deliver(rows, layouts[0].scaled(ratio), shape, z)
            del rows
            yield chunk
            del chunk
        request.settle()
    finally:
        cache.clear()
        request.close()


@torch.no_grad()
def _decode_step(model: Any, z: Tensor, context: ShardContext, cache: list[Any], *, first: bool) -> Tensor:
    extra = {"first_chunk": first} if isinstance(model, AutoencoderKLWan) else {}
    with _running(model, context):
        rows = model.decoder(model.post_quant_conv(z), feat_cache=cache, feat_idx=[0], **extra)
    rows = unpatchify(rows, patch_size=_patch_size(model))
    return torch.clamp(rows, min=-1.0, max=1.0)


@torch.no_grad()
def _encode_image(model: Any, x: Tensor, context: ShardContext) -> Tensor:
    with _running(model, context):
        moments = model.encoder(x)
        return cast(Tensor, moments if model.quant_conv is None else model.quant_conv(moments))


@torch.no_grad()
def _encode_frames(
    model: Any, rows: Callable[[int, int], Tensor], frames: int, context: ShardContext, frames_per_step: int
) -> Tensor:
    """Moments of this rank's rows; ``rows`` gives its pixels of the frames from the first to before the last number."""
    cache = _new_cache(model.encoder)
    latents = []
    try:
        for start, stop in _steps(1 + (frames - 1) // 4, frames_per_step):
            context.group.check_alarm()
            low, high = (0, 1) if start == 0 else (4 * start - 3, 4 * stop - 3)
            with _running(model, context):
                pixels = patchify(rows(low, high), patch_size=_patch_size(model))
                latents.append(model.quant_conv(model.encoder(pixels, feat_cache=cache, feat_idx=[0])))
        return torch.cat(latents, 2)
    finally:
        cache.clear()


@contextmanager
def _running(model: nn.Module, context: ShardContext) -> Iterator[None]:
    """Let the layers see the shard. Compiled parts hold the direct path only, so they run uncompiled meanwhile."""
    compiled = any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in model.modules())
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext(), shard_active(context):
        yield


def _steps(frames: int, frames_per_step: int) -> Iterator[tuple[int, int]]:
    """The latent frames of each step: the first alone, because the models treat it apart, then as many as asked."""
    yield 0, 1
    for start in range(1, frames, frames_per_step):
        yield start, min(start + frames_per_step, frames)


def _new_cache(coder: nn.Module) -> list[Any]:
    """An empty temporal cache, a place for each causal convolution; the model's own stays untouched."""
    return [None] * sum(isinstance(module, _CAUSAL_CONVS) for module in coder.modules())


def _doublings(vae: nn.Module) -> int:
    """How often the decoder doubles height and width, patches apart."""
    config = cast(Any, vae).config
    widths = config.dim_mult if isinstance(vae, _CAUSAL_FAMILIES) else config.block_out_channels
    return len(widths) - 1


def _patch_size(vae: nn.Module) -> int:
    return getattr(cast(Any, vae).config, "patch_size", None) or 1 if isinstance(vae, AutoencoderKLWan) else 1


def _check_request(vae: nn.Module, x: Tensor, group: RankGroup, axis: Axis, owner: int, frames_per_step: int) -> None:
    """Raise :class:`UsageError` before anything is sent, on every rank alike."""
    dims = 5 if isinstance(vae, _CAUSAL_FAMILIES) else 4
    if x.ndim != dims or 0 in x.shape:
        raise UsageError(
            f"{type(vae).__name__} got a tensor of shape {tuple(x.shape)}; a shard takes {dims} axes, none empty"
        )
    if axis not in _DIMS:
        raise UsageError(f"shard axis is {axis!r}; the axes are height and width")
    if not 0 <= owner < group.size:
        raise UsageError(f"owner is rank {owner}; the ranks of the group are 0 to {group.size - 1}")
    if frames_per_step < 1:
        raise UsageError(f"frames_per_step is {frames_per_step}; it is 1 or more")


def _check_pixels(vae: nn.Module, x: Tensor, patch: int) -> None:
    ratio = patch << _doublings(vae)
    residual = bool(getattr(cast(Any, vae).config, "is_residual", False))
    multiple = ratio if residual else patch
    if any(size % multiple or size < ratio for size in x.shape[-2:]):
        raise UsageError(
            f"{type(vae).__name__} got pixels of {x.shape[-2]}x{x.shape[-1]}; it needs {ratio} or more"
            f"{f', multiples of {multiple},' if multiple > 1 else ''} in height and in width"
        )


def _moments_shape(vae: nn.Module, x: Tensor, patch: int) -> list[int]:
    model = cast(Any, vae)
    last = model.quant_conv if model.quant_conv is not None else model.encoder.conv_out
    frames = [1 + (x.shape[2] - 1) // 4] if x.ndim == 5 else []
    return [x.shape[0], last.out_channels, *frames, *(size // patch >> _doublings(vae) for size in x.shape[-2:])]
