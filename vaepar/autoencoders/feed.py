"""Pixels that are encoded piece by piece, so that a film never has to be in memory whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, overload

import torch
from torch import Tensor

from vaepar.errors import InputError


class FrameFeed(Protocol):
    """Pixels [B, C, T, H, W] of known shape, given out in time order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, C, T, H, W]."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def frames(self, start: int, stop: int) -> Tensor:
        """Frames ``start`` to ``stop - 1``, [B, C, stop - start, H, W], range [-1, 1].

        Asked for in time order; the last piece may be asked for again.
        """


class TensorFeed:
    """A tensor as a feed."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._x.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._x.dtype

    @property
    def device(self) -> torch.device:
        return self._x.device

    @property
    def whole(self) -> Tensor:
        """All frames at once."""
        return self._x

    def frames(self, start: int, stop: int) -> Tensor:
        return self._x[:, :, start:stop]


class ReaderFeed:
    """A reader as a feed; it holds the last piece, which every tile of a rank looks at.

    Args:
        read: the next so many frames, [C, t, H, W]; None at the end.
        shape: [1, C, T, H, W] that the reader promises.
        dtype, device: what the pieces are brought to.
    """

    def __init__(
        self,
        read: Callable[[int], Tensor | None],
        shape: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._read = read
        self.shape: tuple[int, ...] = shape
        self.dtype, self.device = dtype, device
        self._piece: Tensor | None = None
        self._bounds = (0, 0)

    def frames(self, start: int, stop: int) -> Tensor:
        if self._piece is None or self._bounds != (start, stop):
            if start != self._bounds[1]:
                raise InputError(f"frames {start} to {stop} were asked for after frame {self._bounds[1]}")
            self._piece = None  # let go of the last piece before the next one is read
            read = self._read(stop - start)
            found = 0 if read is None else read.shape[1]
            if read is None or found != stop - start:
                raise InputError(f"the frames end at {start + found}; {self.shape[2]} were promised")
            self._piece = read[None].to(device=self.device, dtype=self.dtype)
            self._bounds = (start, stop)
        return self._piece


class MappedFeed:
    """A feed whose pieces pass through a function that changes channels and size, such as patchify."""

    def __init__(
        self, feed: FrameFeed, change: Callable[[Tensor], Tensor], channels: int, height: int, width: int
    ) -> None:
        self._feed, self._change = feed, change
        batch, _, frames = feed.shape[:3]
        self.shape: tuple[int, ...] = (batch, channels, frames, height, width)
        self.dtype, self.device = feed.dtype, feed.device
        self._bounds: tuple[int, int] | None = None
        self._piece: Tensor | None = None

    def frames(self, start: int, stop: int) -> Tensor:
        if self._piece is None or self._bounds != (start, stop):
            self._piece = None
            self._piece = self._change(self._feed.frames(start, stop))
            self._bounds = (start, stop)
        return self._piece


class TilePieces(Sequence[Tensor]):
    """One tile's pieces in time order, cut from a feed when they are asked for."""

    def __init__(self, feed: FrameFeed, bounds: Sequence[tuple[int, int]], rows: slice, columns: slice) -> None:
        self._feed, self._bounds, self._rows, self._columns = feed, bounds, rows, columns

    def __len__(self) -> int:
        return len(self._bounds)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return TilePieces(self._feed, self._bounds[index], self._rows, self._columns)
        return self._feed.frames(*self._bounds[index])[..., self._rows, self._columns]


def shape_of(feed: FrameFeed) -> Tensor:
    """A tensor of a feed's shape and dtype that holds no data, for the executor's comparison of ranks."""
    return torch.empty(feed.shape, dtype=feed.dtype, device="meta")
