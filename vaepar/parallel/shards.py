"""Who owns which rows of a feature map, and which rows an operation needs from whom: arithmetic, no tensors.

"Rows" are the positions along the sharded axis, whichever that is. A :class:`Layout` cuts an extent into contiguous
intervals, one for each of the first ranks of a group; a :class:`Window` is what a convolution reads; the plan of an
exchange follows from both. All values are frozen, so plans are computed once and shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from vaepar.errors import UsageError

PadMode = Literal["zeros", "replicate", "reflect"]
Axis = Literal["height", "width"]


@dataclass(frozen=True)
class Layout:
    """Contiguous intervals of an extent: rank r owns rows ``[bounds[r], bounds[r + 1])``, at least one row each."""

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0 or any(a >= b for a, b in pairwise(self.bounds)):
            raise UsageError(f"shard bounds are {self.bounds}; they start at 0 and grow, one row or more for each rank")

    @property
    def extent(self) -> int:
        return self.bounds[-1]

    @property
    def ranks(self) -> int:
        """How many ranks own rows; ranks of the group beyond them have no part in the shard."""
        return len(self.bounds) - 1

    def interval(self, rank: int) -> tuple[int, int]:
        return self.bounds[rank], self.bounds[rank + 1]

    def length(self, rank: int) -> int:
        return self.bounds[rank + 1] - self.bounds[rank]

    def scaled(self, factor: int) -> Layout:
        """The layout of the map that is ``factor`` times as large."""
        return Layout(tuple(bound * factor for bound in self.bounds))

    def owners(self, start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
        """The ranks that own rows of ``[start, stop)``, as (rank, first row, row after the last)."""
        pieces = []
        for rank in range(self.ranks):
            low, high = max(start, self.bounds[rank]), min(stop, self.bounds[rank + 1])
            if low < high:
                pieces.append((rank, low, high))
        return tuple(pieces)


def split_rows(extent: int, size: int) -> Layout:
    """Cut ``extent`` rows as evenly as can be among ``size`` ranks, larger shares first: 60 over 8 is 8,8,8,8,7,7,7,7.

    Fewer rows than ranks: the first ``extent`` ranks own one row each.
    """
    if extent < 1 or size < 1:
        raise UsageError(f"cannot share {extent} rows among {size} ranks; both are 1 or more")
    ranks = min(extent, size)
    share, rest = divmod(extent, ranks)
    bounds = [0]
    for rank in range(ranks):
        bounds.append(bounds[-1] + share + (rank < rest))
    return Layout(tuple(bounds))


def decode_layouts(extent: int, size: int, doublings: int) -> tuple[Layout, ...]:
    """The layouts of a decoder's feature maps: the latent of ``extent`` rows, then doubled ``doublings`` times."""
    latent = split_rows(extent, size)
    return tuple(latent.scaled(2**k) for k in range(doublings + 1))


def encode_layouts(extent: int, size: int, halvings: int) -> tuple[Layout, ...]:
    """The layouts of an encoder's feature maps: ``extent`` rows, then halved (rounding down) ``halvings`` times.

    Bounds are those of the latent times the local ratio, so that no halving crosses them; the last rank also owns the
    rows that do not fill a latent row. Raises :class:`UsageError` for a picture smaller than one latent row.
    """
    extents = [extent >> k for k in range(halvings + 1)]
    if extents[-1] < 1:
        raise UsageError(f"a picture of {extent} rows has no latent row; it needs {2**halvings} rows or more")
    latent = split_rows(extents[-1], size)
    return tuple(
        Layout((*(bound << (halvings - k) for bound in latent.bounds[:-1]), extents[k])) for k in range(halvings + 1)
    )


@dataclass(frozen=True)
class Window:
    """What a convolution reads along one axis: row o of its output reads ``o * stride - before + dilation * j``."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    mode: PadMode = "zeros"

    @property
    def reach(self) -> int:
        """Rows from the first to the last that one output row reads."""
        return self.dilation * (self.kernel - 1) + 1

    def out_extent(self, extent: int) -> int:
        """Rows of the whole output for ``extent`` rows of the whole input; below 1 there is no output."""
        return (extent + self.before + self.after - self.reach) // self.stride + 1

    def target(self, source: Layout) -> Layout:
        """A layout of the output for which rows stay where they are read: input bounds divided by the stride.

        Raises :class:`UsageError` when the output has fewer rows than ``source`` has ranks.
        """
        extent = self.out_extent(source.extent)
        if extent < source.ranks:
            raise UsageError(
                f"{source.extent} rows on {source.ranks} ranks become {max(extent, 0)}; each rank needs one"
            )
        inner = [-(-bound // self.stride) for bound in source.bounds[1:-1]]
        if inner and inner[-1] >= extent:
            return split_rows(extent, source.ranks)
        return Layout((0, *inner, extent))

    def padded(self, before: int, after: int) -> Window:
        """The same window with that much more zero padding."""
        if (before or after) and (self.before or self.after) and self.mode != "zeros":
            raise UsageError(f"zero padding cannot be added outside of '{self.mode}' padding")
        mode: PadMode = "zeros" if before or after else self.mode
        return Window(self.kernel, self.stride, self.dilation, self.before + before, self.after + after, mode)


@dataclass(frozen=True)
class Transfer:
    """Rows ``[start, stop)``, numbered in the whole map, to or from a peer."""

    peer: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class HaloPlan:
    """What one rank holds, needs, sends and receives for one operation.

    The operation's input is rows ``[start, stop)`` of the whole map, between ``before`` and ``after`` rows of zeros.
    ``gather`` is set where the padding repeats or mirrors rows: the input is then those rows, counted from ``start``.
    """

    own: tuple[int, int]
    start: int
    stop: int
    before: int
    after: int
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    gather: tuple[int, ...] | None = None

    @property
    def sent_rows(self) -> int:
        """Rows that leave this rank, one that goes to two peers twice; what a group's traffic is compared with."""
        return sum(send.rows for send in self.sends)


@lru_cache(maxsize=4096)
def halo_plan(source: Layout, target: Layout, window: Window, rank: int) -> HaloPlan:
    """The plan of ``rank`` for an operation that turns a map cut as ``source`` into one cut as ``target``."""
    start, stop = _needed(source, target, window, rank)
    own = source.interval(rank)
    receives = tuple(Transfer(*piece) for piece in source.owners(start, stop) if piece[0] != rank)
    sends = []
    for peer in range(target.ranks):
        if peer == rank:
            continue
        low, high = _needed(source, target, window, peer)
        low, high = max(low, own[0]), min(high, own[1])
        if low < high:
            sends.append(Transfer(peer, low, high))
    first, last = _read(target, window, rank)
    gather = None
    if window.mode != "zeros" and (first < 0 or last > source.extent):
        gather = tuple(_mirror(row, source.extent, window.mode) - start for row in range(first, last))
    return HaloPlan(
        own=own,
        start=start,
        stop=stop,
        before=max(0, -first),
        after=max(0, last - source.extent),
        receives=receives,
        sends=tuple(sends),
        gather=gather,
    )


def _read(target: Layout, window: Window, rank: int) -> tuple[int, int]:
    """The rows that the rank's output reads, those of the padding (below 0, beyond the extent) among them."""
    low, high = target.interval(rank)
    return low * window.stride - window.before, (high - 1) * window.stride - window.before + window.reach


def _needed(source: Layout, target: Layout, window: Window, rank: int) -> tuple[int, int]:
    """The real rows that the rank's output reads, including those that its padding repeats or mirrors."""
    first, last = _read(target, window, rank)
    rows = [max(0, first), min(source.extent, last)]
    if window.mode != "zeros":
        edges = [*range(first, min(0, last)), *range(max(source.extent, first), last)]
        mirrored = [_mirror(row, source.extent, window.mode) for row in edges]
        rows = [min([rows[0], *mirrored]), max([rows[1], *(row + 1 for row in mirrored)])]
    elif rows[0] >= rows[1]:  # every row read is padding: keep an empty interval inside the map
        rows = [min(max(0, first), source.extent)] * 2
    return rows[0], rows[1]


def _mirror(row: int, extent: int, mode: PadMode) -> int:
    """The row of the map that stands at ``row`` of the padded map."""
    if 0 <= row < extent:
        return row
    if mode == "replicate":
        return min(max(row, 0), extent - 1)
    mirrored = -row if row < 0 else 2 * (extent - 1) - row
    if not 0 <= mirrored < extent:
        raise UsageError(f"reflect padding reads row {row} of a map of {extent} rows; the padding is less than the map")
    return mirrored


def eligible_axes(extents: Sequence[tuple[Axis, int]], size: int) -> tuple[Axis, ...]:
    """The axes on which every one of ``size`` ranks owns a row, as given: ``(("height", 60), ("width", 104))``."""
    return tuple(axis for axis, extent in extents if extent >= size)
