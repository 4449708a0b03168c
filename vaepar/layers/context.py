"""What is sharded now: the state of one request on one rank, reachable by the layers while a step of it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vaepar.errors import UsageError
from vaepar.layers.kernels import Result, adds_convolutions
from vaepar.parallel.group import RankGroup
from vaepar.parallel.halo import Arrived, BufferPool, HaloExchange
from vaepar.parallel.shards import Axis, HaloPlan, Layout, Window


@dataclass(frozen=True)
class Slot:
    """Where the next convolution will read, in the scratch buffer of the request, so that a norm can write there.

    Args:
        whole: all that the convolution reads, [b, c, h, w] or [b, c, t, h, w]: halo rows, padding and earlier frames
            among it.
        own: the part of ``whole`` for the norm's result, this rank's own rows.
        plan: what the convolution reads of other ranks; None when it reads nothing of them, or asks for it itself.
        exchange: of the norm's result, when it has begun already, or is over.
    """

    whole: Tensor
    own: Tensor
    plan: HaloPlan | None = None
    exchange: HaloExchange | Arrived | None = None


_ACTIVE: ContextVar[ShardContext | None] = ContextVar("vaepar_shard_context", default=None)


class ShardContext:
    """One request: who shares which axis, how each feature map is cut, and what is kept between its steps.

    A layer finds the layout of a tensor by the tensor's own extent: the maps of one model differ by factors of two, so
    on each rank the extents of its intervals differ as well.

    Args:
        group: the ranks; the first ``layouts[0].ranks`` of them own rows, this one among them.
        axis: the sharded axis.
        layouts: the layouts of all feature maps of the model, any order.
        overwrites: whether layers may write over maps that diffusers' own code does not read again, and exchange rows
            ahead of the layer that reads them. Not where hooks want to see maps; the same on all ranks.
    """

    def __init__(self, group: RankGroup, axis: Axis, layouts: Sequence[Layout], *, overwrites: bool = True) -> None:
        if axis not in ("height", "width"):
            raise UsageError(f"shard axis is '{axis}'; the axes are height and width")
        self.group = group
        self.axis = axis
        self.overwrites = overwrites
        #: True in the last step of a request: nothing has to be kept for a later one.
        self.last = False
        self.dim = -2 if axis == "height" else -1
        self.other_dim = -1 if axis == "height" else -2
        self.pool = BufferPool()
        self.store: dict[Hashable, Any] = {}
        self._ranks = layouts[0].ranks
        self._layouts: dict[int, Layout | None] = {}  # None: maps of several layouts have this many rows here
        self._targets: dict[tuple[Layout, Window], Layout] = {}
        self._deferred: tuple[int, int, int, int] | None = None
        self._slot: Slot | None = None
        self._result: Result | None = None
        self._own: weakref.ref[Tensor] | None = None
        for layout in layouts:
            self._register(layout)

    @property
    def alone(self) -> bool:
        """True when one rank owns every row, so that nothing is ever exchanged."""
        return self._ranks == 1

    def layout_of(self, rows: Tensor) -> Layout:
        """The layout of the map of which ``rows`` is this rank's part, [..., H, W]."""
        return self.layout_of_extent(rows.shape[self.dim])

    def layout_of_extent(self, local: int) -> Layout:
        layout = self._layouts.get(local)
        if layout is None:
            raise UsageError(
                f"rank {self.group.rank} met a map with {local} rows of its own, which is no part of this shard; "
                f"its maps have {sorted(n for n, known in self._layouts.items() if known is not None)}"
            )
        return layout

    def target_of(self, source: Layout, window: Window) -> Layout:
        """The layout of what ``window`` makes of a map cut as ``source``; a new one becomes known here."""
        key = (source, window)
        if key not in self._targets:
            extent = window.out_extent(source.extent)
            known = [layout for layout in self._layouts.values() if layout is not None and layout.extent == extent]
            target = source if window.stride == 1 and extent == source.extent else None
            target = target or (known[0] if known else window.target(source))
            self._register(target)
            self._targets[key] = target
        return self._targets[key]

    def defer_padding(self, left: int, right: int, top: int, bottom: int) -> None:
        """Leave this much zero padding to the next convolution, which applies it at the picture's edges only."""
        if self._deferred is not None:
            raise UsageError("two paddings meet without a convolution between them; a shard cannot apply both")
        self._deferred = (left, right, top, bottom)

    def take_padding(self) -> tuple[int, int, int, int]:
        """The deferred padding (left, right, top, bottom), which is then done."""
        deferred, self._deferred = self._deferred or (0, 0, 0, 0), None
        return deferred

    def open_slot(self, slot: Slot | None) -> None:
        """Let the next norm write into ``slot``; None closes the one that is open."""
        open_one, self._slot = self._slot, slot
        if open_one is not None and open_one.exchange is not None:
            open_one.exchange.finish()  # nobody reads its rows, but all ranks have begun it

    def set_slot_aside(self) -> Slot | None:
        """The open slot, if any; to be opened again after layers that have nothing to do with it."""
        slot, self._slot = self._slot, None
        return slot

    @contextmanager
    def result_open(self, result: Result | None) -> Iterator[None]:
        """Let the next convolution of the block write into ``result``."""
        self._result = result
        try:
            yield
        finally:
            self._result = None

    def take_result(self) -> Result | None:
        """The memory that is open for a result, which is closed then; without one the pool's buffer is given back."""
        result, self._result = self._result, None
        if result is None:
            self.pool.give_result()  # what makes a fresh map needs the memory more
        return result

    def passing_result(self, shape: Sequence[int], like: Tensor) -> Result | None:
        """The pool's memory for a map; None where a fresh one has to be made.

        The next convolution may take it again: the map is read before that, or the pool gives the memory away.
        """
        if not (self.overwrites and adds_convolutions(like)):
            return None
        return Result(self.pool.result((shape[0], *shape[2:], shape[1]), like).movedim(-1, 1))

    def _held_result(self, shape: Sequence[int], like: Tensor) -> Result | None:
        """As :meth:`passing_result`, of memory that is there, or a part of it: for a map that no block keeps."""
        if not (self.overwrites and adds_convolutions(like)):
            return None
        held = self.pool.held_result((shape[0], *shape[2:], shape[1]), like)
        return None if held is None else Result(held.movedim(-1, 1))

    def read_once(self, shape: Sequence[int], like: Tensor, convolve: Callable[[Result | None], Tensor]) -> Tensor:
        """What ``convolve`` makes, of that shape and read before the next convolution, in memory that is kept for such.

        Where there is none yet, what a convolution makes afresh is kept: filling memory with zeros for it takes longer.
        """
        if not (self.overwrites and adds_convolutions(like)):
            return convolve(None)
        result = self._held_result(shape, like)
        if result is None:
            self.pool.give_result()
        out = convolve(result)
        if result is None or not result.taken:
            self.pool.keep_result(out)
        return out

    def give_own(self, x: Tensor) -> None:
        """Let the next activation write over ``x``, which nobody else will read; hooks might."""
        if self.overwrites:
            self._own = weakref.ref(x)

    def take_own(self, x: Tensor) -> bool:
        """True once for what was given."""
        own, self._own = self._own, None
        return own is not None and own() is x

    def place_for(self, shape: Sequence[int], like: Tensor, *, read_once: bool = False) -> Tensor | None:
        """Where a norm is to put a result of that shape; None for anywhere.

        Args:
            read_once: the result is read before the next convolution, and not after it.
        """
        if self._slot is not None:
            return self._slot.own if _fits(self._slot.own, shape, like) else None
        passing = (self._held_result(shape, like) or self.passing_result(shape, like)) if read_once else None
        return None if passing is None else passing.memory

    def stands_in_slot(self, x: Tensor) -> bool:
        """True when ``x`` is what was written into the open slot."""
        return self._slot is not None and x is self._slot.own

    def take_slot(self, x: Tensor) -> Slot | None:
        """The open slot if ``x`` is what was written there; it is closed either way."""
        if self.stands_in_slot(x):
            return self.set_slot_aside()
        self.open_slot(None)
        return None

    def begin_exchange(
        self, plan: HaloPlan | None, x: Tensor, layer: Callable[[Tensor], Tensor] | None = None
    ) -> HaloExchange | None:
        """Begin the exchange of ``x``, or of what ``layer``, which treats each position alone, is about to make of it.

        The rows that other ranks need are made first, so that they travel while the rest is made.
        """
        if plan is None or not (plan.sends or plan.receives):
            return None
        return HaloExchange(self.group, plan, x, self.dim, self.pool, layer)

    def clear(self) -> None:
        """Give back buffers and kept rows."""
        self._slot = self._result = None
        self.pool.clear()
        self.store.clear()
        self._deferred = None

    def _register(self, layout: Layout) -> None:
        local = layout.length(self.group.rank)
        if self._layouts.setdefault(local, layout) != layout:
            self._layouts[local] = None


def _fits(memory: Tensor, shape: Sequence[int], like: Tensor) -> bool:
    return (memory.shape, memory.dtype, memory.device) == (tuple(shape), like.dtype, like.device)


def active_shard() -> ShardContext | None:
    """The request that runs now in this context, or None: layers then behave as the ones they stand for.

    What is compiled is the direct path: a compiler cannot read a context variable, and no collective belongs into its
    graph. Whoever activates a shard on a compiled model runs it uncompiled.
    """
    if torch.compiler.is_compiling():
        return None
    return _ACTIVE.get()


@contextmanager
def shard_active(context: ShardContext) -> Iterator[ShardContext]:
    """Let layers see ``context``. Not to be held across a yield: the consumer would see it as well.

    There are no gradients meanwhile: the layers write over what a backward pass would need.
    """
    token = _ACTIVE.set(context)
    try:
        with torch.no_grad():
            yield context
    finally:
        _ACTIVE.reset(token)


def is_plain(layer: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Module) -> bool:
    """True for a ``kind`` that does what its class does and nothing else, so that it need not be called itself."""
    changed = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return isinstance(layer, kind) and not changed
