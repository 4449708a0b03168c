"""Decode and encode with one feature map shared by the ranks of a group: the picture that one device would make.

Every rank of the group calls the same function with the same tensor. The first ``min(size, extent)`` ranks own rows;
the others only hand the result on where they are its owner. The model is prepared in place at the first call and
behaves as before outside of these functions; all state of a request lives in the request and is dropped with it.

What differs between families is the adapter's answer, see :class:`ShardFamily`; no family is named here.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vaepar.autoencoders.family import ShardFamily, ShardStep
from vaepar.autoencoders.feed import FrameFeed
from vaepar.errors import UsageError
from vaepar.layers.context import ShardContext, shard_active
from vaepar.layers.install import install_shards
from vaepar.parallel.executor import joined
from vaepar.parallel.group import Pending, RankGroup
from vaepar.parallel.shards import Axis, Layout, decode_layouts, encode_layouts

DEFAULT_FRAMES_PER_STEP = 4
_DIMS: dict[str, int] = {"height": -2, "width": -1}


def prepare_shards(vae: ShardFamily) -> None:
    """Prepare the model in place; the functions of this module do it when it has not been done."""
    install_shards(*vae.shard_parts)


def shard_decode_chunks(
    vae: ShardFamily,
    z: Tensor,
    group: RankGroup,
    axis: Axis,
    *,
    frames_per_step: int = DEFAULT_FRAMES_PER_STEP,
    owner: int = 0,
) -> Generator[Tensor | None]:
    """Decode ``z`` with the ranks of ``group`` and give the picture to one of them, in chunks.

    Args:
        vae: a family's adapter.
        z: the latent in VAE space, the same on every rank: [B, C, H, W], or [B, C, T, H, W] for video families.
        axis: ``"height"`` or ``"width"``.
        frames_per_step: latent frames of one step after the first, which bounds memory; video families only.
        owner: the rank that gets the picture.

    Yields:
        In time order, one chunk a step: on the owner [B, 3, t, H', W'] (or [B, 3, H', W']) as diffusers' untiled
        decode gives it, None on the other ranks. Image families have one step.

    Raises:
        UsageError: the latent, the axis or a number is not one that can be.
        PeerFailedError: another rank has raised the alarm.
    """
    _check_request(vae, z.shape, group, axis, owner, frames_per_step)
    prepare_shards(vae)
    return _decode(vae, z, group, axis, frames_per_step, owner)


def shard_encode(
    vae: ShardFamily,
    x: Tensor | FrameFeed,
    group: RankGroup,
    axis: Axis,
    *,
    frames_per_step: int = DEFAULT_FRAMES_PER_STEP,
    owner: int | None = None,
) -> Tensor | None:
    """Encode ``x`` with the ranks of ``group``: the moments (mean and log variance) of the posterior.

    Args:
        vae: a family's adapter.
        x: pixels in [-1, 1], the same on every rank, [B, 3, H, W] or [B, 3, T, H, W]; sizes that do not fill a latent
            row or column lose the rest, and frames beyond 4n + 1 are left out, as in diffusers. A feed of a film is
            read step by step, so that it never has to be in memory whole.
        frames_per_step: latent frames of one step after the first; video families only.
        owner: the rank that gets the moments; None gives them to all.

    Returns:
        [B, 2C, H', W'] or [B, 2C, T', H', W'], None on ranks that are not the owner.

    Raises:
        UsageError: the pixels, the axis or a number is not one that can be.
        PeerFailedError: another rank has raised the alarm.
    """
    shape = tuple(x.shape)
    _check_request(vae, shape, group, axis, 0 if owner is None else owner, frames_per_step)
    prepare_shards(vae)
    _check_pixels(vae, shape)
    layouts = encode_layouts(shape[_DIMS[axis]] // vae.patch_size, group.size, vae.doublings)
    steps = vae.shard_encode_steps(shape, frames_per_step)
    request = _Request(vae, group, axis, layouts, owner)
    try:
        group.check_alarm()
        request.agree_to_overwrite()
        rows = None
        if request.context is not None:
            rows = _encode_rows(vae, x, steps, request, request.context, layouts[0])
        moments = request.deliver(rows, layouts[-1], _joined_shape(steps), x)
        request.settle()
        return moments
    finally:
        request.close()


class _Request:
    """One decode or encode on one rank: its context, and the way of finished rows to their owner."""

    def __init__(
        self, vae: ShardFamily, group: RankGroup, axis: Axis, layouts: tuple[Layout, ...], owner: int | None
    ) -> None:
        self.group = group
        self.dim = _DIMS[axis]
        active = group.rank < layouts[0].ranks
        self.context = ShardContext(group, axis, layouts, overwrites=False) if active else None
        self._vae, self._ranks = vae, layouts[0].ranks
        self._receivers = range(group.size) if owner is None else (owner,)
        self._pending: list[tuple[Pending, Tensor]] = []

    def agree_to_overwrite(self) -> None:
        """Let layers write over maps and exchange rows early, if the model allows it, and is the same on all ranks.

        A hook may be on one rank only, as for a look at its maps; if that rank alone exchanged something later or
        apart, each would take the other's message for another one.
        """
        if self.context is not None:
            same = self.group.all_equal(_fingerprint(self._vae), self._ranks)
            self.context.overwrites = same and not _is_changed(self._vae)

    def own_rows(self, x: Tensor, layout: Layout, factor: int = 1) -> Tensor:
        """This rank's part of ``x``, a view; ``factor`` rows of ``x`` make one of the layout."""
        start = layout.bounds[self.group.rank] * factor
        return x.narrow(self.dim, start, layout.length(self.group.rank) * factor)

    def deliver(
        self, rows: Tensor | None, layout: Layout, shape: Sequence[int], like: Tensor | FrameFeed
    ) -> Tensor | None:
        """Send own finished rows to the receivers, exact size; on a receiver the whole map of ``shape``, else None."""
        self.settle()
        group = self.group
        if rows is not None:
            rows = rows.to(like.dtype).contiguous()  # under autocast they are of another, and peers expect this one
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
        whole = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
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


def _decode(
    vae: ShardFamily, z: Tensor, group: RankGroup, axis: Axis, frames_per_step: int, owner: int
) -> Generator[Tensor | None]:
    layouts = decode_layouts(z.shape[_DIMS[axis]], group.size, vae.doublings)
    steps = vae.shard_decode_steps(z.shape, frames_per_step)
    request = _Request(vae, group, axis, layouts, owner)
    walk = vae.decode_pieces(_frames(request.own_rows(z, layouts[0]), step) for step in steps)
    try:
        group.check_alarm()
        request.agree_to_overwrite()
        for step in steps:
            group.check_alarm()
            rows = None
            if request.context is not None:
                request.context.last = step is steps[-1]
                with _running(vae, request.context):
                    rows = vae.finish_untiled(next(walk))
            if request.context is not None and request.context.last:
                request.context.clear()  # the whole chunk is made now, and may stay with its consumer for long
            chunk = request.deliver(rows, layouts[0].scaled(vae.shard_ratio), step.shape, z)
            del rows
            yield chunk
            del chunk
        request.settle()
    finally:
        walk.close()
        request.close()


@torch.no_grad()
def _encode_rows(
    vae: ShardFamily,
    x: Tensor | FrameFeed,
    steps: list[ShardStep],
    request: _Request,
    context: ShardContext,
    layout: Layout,
) -> Tensor:
    """Moments of this rank's rows of the pixels."""
    patch = vae.patch_size
    pieces = (vae.patchify(request.own_rows(_frames(x, step), layout, patch)) for step in steps)
    moments = []
    with closing(vae.encode_pieces(pieces)) as walk:
        for step in steps:
            context.group.check_alarm()
            context.last = step is steps[-1]
            with _running(vae, context):
                moments.append(next(walk))
    return joined(moments)


def _frames(x: Tensor | FrameFeed, step: ShardStep) -> Tensor:
    """What ``step`` takes of ``x``: a view, or the next piece of a feed. A picture has no frames and is taken whole."""
    if not isinstance(x, Tensor):
        return x.frames(step.start, step.stop)
    return x[:, :, step.start : step.stop] if x.ndim == 5 else x


@contextmanager
def _running(vae: ShardFamily, context: ShardContext) -> Iterator[None]:
    """Let the layers see the shard. Compiled parts hold the direct path only, so they run uncompiled meanwhile."""
    with _uncompiled() if any(_is_compiled(part) for part in vae.modules()) else nullcontext(), shard_active(context):
        yield


def _is_compiled(part: nn.Module) -> bool:
    """True for a wrapped, a compiled in place and a module whose own ``forward`` was replaced, by a compiler or so."""
    return hasattr(part, "_orig_mod") or part._compiled_call_impl is not None or "forward" in vars(part)


class _Stance:
    """torch keeps one stance for the whole process: the first request sets it, the last one sets it back."""

    lock = threading.Lock()
    users = 0
    before: Any = None


@contextmanager
def _uncompiled() -> Iterator[None]:
    with _Stance.lock:
        if _Stance.users == 0:
            _Stance.before = torch.compiler.set_stance("force_eager")
            _Stance.before.__enter__()
        _Stance.users += 1
    try:
        yield
    finally:
        with _Stance.lock:
            _Stance.users -= 1
            if _Stance.users == 0:
                _Stance.before.__exit__(None, None, None)


def _is_changed(vae: ShardFamily) -> bool:
    """True when a hook or a layer's own ``forward`` may keep, or read again, what a layer was given or has made."""
    shared = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
    own = (hooks for part in vae.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks))
    return any(shared) or any(own) or any("forward" in vars(part) for part in vae.modules())


def _fingerprint(vae: ShardFamily) -> int:
    """A number for hooks or none, the layers' classes, and dropout that is on; ``hash`` differs between processes."""
    layers = [f"{type(part).__qualname__} {part.training and getattr(part, 'p', 0)}" for part in vae.modules()]
    return zlib.crc32(f"{_is_changed(vae)} {' '.join(layers)}".encode())


def _joined_shape(steps: list[ShardStep]) -> tuple[int, ...]:
    """The shape of what all steps make, one after another in time."""
    first = steps[0].shape
    return first if len(steps) == 1 else (*first[:2], sum(step.shape[2] for step in steps), *first[3:])


def _check_request(
    vae: ShardFamily, shape: Sequence[int], group: RankGroup, axis: Axis, owner: int, frames_per_step: int
) -> None:
    """Raise :class:`UsageError` before anything is sent, on every rank alike."""
    family, dims = vae.capability.base_class, vae.capability.latent_rank
    if len(shape) != dims or 0 in shape:
        raise UsageError(f"{family} got a tensor of shape {tuple(shape)}; a shard takes {dims} axes, none empty")
    if axis not in _DIMS:
        raise UsageError(f"shard axis is {axis!r}; the axes are height and width")
    if not 0 <= owner < group.size:
        raise UsageError(f"owner is rank {owner}; the ranks of the group are 0 to {group.size - 1}")
    if frames_per_step < 1:
        raise UsageError(f"frames_per_step is {frames_per_step}; it is 1 or more")


def _check_pixels(vae: ShardFamily, shape: Sequence[int]) -> None:
    ratio, multiple = vae.shard_ratio, vae.pixel_multiple
    if any(size % multiple or size < ratio for size in shape[-2:]):
        raise UsageError(
            f"{vae.capability.base_class} got pixels of {shape[-2]}x{shape[-1]}; it needs {ratio} or more"
            f"{f', multiples of {multiple},' if multiple > 1 else ''} in height and in width"
        )
