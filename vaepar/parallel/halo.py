"""The exchange of rows between the ranks that share a feature map.

Rows travel in the order in which channels_last keeps them (channels innermost), so that a slice of a channels_last map
goes out without a copy where it can, and backends that know only dense buffers accept it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vaepar.parallel.group import Message, Pending, RankGroup
from vaepar.parallel.shards import HaloPlan, Layout, Transfer

Pieces = list[tuple[int, Tensor]]
"""Rows of other ranks: the number of the first, and [B, C, (T,) H, W]."""

# How much more memory a result may be given than it needs: phases of an upsampling have a row and a column to spare.
_RESULT_SLACK = 1.05


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Memory of that shape, in the dtype and on the device of ``like``, also for steps outside of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


@dataclass
class BufferPool:
    """Memory that one request uses again and again; :meth:`clear` gives it back."""

    buffers: dict[Hashable, Tensor] = field(default_factory=dict)
    _scratch: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)
    _result: Tensor | None = None

    def take(self, name: Hashable, shape: Sequence[int], like: Tensor) -> Tensor:
        """A contiguous buffer of that shape, in the dtype and on the device of ``like``; its content is left over."""
        key = (name, tuple(shape), like.dtype, like.device)
        if key not in self.buffers:
            self.buffers[key] = empty(shape, like)
        return self.buffers[key]

    def scratch(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """The one scratch buffer, contiguous and of that shape. What an earlier call gave is void then.

        It is as large as the largest shape so far, and stays until :meth:`clear`. What is short-lived and comes again
        is made here: on a CPU the fresh pages of a large tensor take longer than the arithmetic that fills it once,
        and everywhere the input of a convolution need not exist twice.
        """
        key, count = (like.dtype, like.device), math.prod(shape)
        if key not in self._scratch or self._scratch[key].numel() < count:
            self._scratch.pop(key, None)  # before the larger one is made
            self._scratch[key] = empty((count,), like)
        return self._scratch[key][:count].view(tuple(shape))

    def result(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """The one buffer for short-lived results of a convolution, contiguous; what an earlier call gave is void then.

        It is next to nothing larger than that: a block may keep it (:meth:`give_result`), and no more memory with it.
        """
        held, count = self.held_result(shape, like), math.prod(shape)
        if held is None or self._result is None or self._result.numel() > _RESULT_SLACK * count:
            self.give_result()  # before the new one is made
            held = empty(shape, like)
            self._result = held.view(-1)
        return held

    def held_result(self, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """That much of the buffer of :meth:`result`, if it is there and large enough."""
        held, count = self._result, math.prod(shape)
        if held is None or (held.dtype, held.device) != (like.dtype, like.device) or held.numel() < count:
            return None
        return held[:count].view(tuple(shape))

    def keep_result(self, x: Tensor) -> None:
        """Make the memory of ``x``, [B, C, ...] and channels_last, the buffer of :meth:`result`."""
        inner = x.movedim(1, -1)
        if inner.is_contiguous() and not x.is_inference():  # a later step may be taken outside of that mode
            self._result = inner.view(-1)

    def give_result(self) -> None:
        """Forget the buffer for results: to whoever holds it still, it belongs now."""
        self._result = None

    def in_scratch(self, x: Tensor) -> bool:
        """True when ``x`` lies in the scratch buffer."""
        own = x.untyped_storage()._cdata
        return any(buffer.untyped_storage()._cdata == own for buffer in self._scratch.values())

    def clear(self) -> None:
        self.buffers.clear()
        self._scratch.clear()
        self._result = None


class HaloExchange:
    """The rows that one operation needs from others: started at construction, there after :meth:`finish`.

    Args:
        group: the ranks; those beyond the layout take no part.
        plan: what this rank sends and receives.
        rows: the rank's own rows, [B, C, H, W] or [B, C, T, H, W].
        dim: the sharded dimension, -2 (height) or -1 (width).
        pool: where the receive buffers come from; the received rows are valid until the next exchange.
        prepare: what is to be sent of some rows, of their shape and dtype; the rows themselves when None.
    """

    def __init__(
        self,
        group: RankGroup,
        plan: HaloPlan,
        rows: Tensor,
        dim: int,
        pool: BufferPool,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._plan = plan
        axis = dim - 1  # channels stand last in what travels
        sends = []
        for send in plan.sends:
            piece = rows.narrow(dim, send.start - plan.own[0], send.rows)
            piece = piece if prepare is None else prepare(piece)
            sends.append(Message(piece.movedim(1, -1), send.peer))
        self._buffers = []
        receives = []
        for receive in plan.receives:
            buffer = pool.take(("halo", receive.peer), _shape_of(receive, rows, axis), rows)
            receives.append(Message(buffer, receive.peer))
            self._buffers.append(buffer.movedim(-1, 1))
        self._pending: Pending = group.exchange(sends, receives)

    def finish(self) -> Pieces:
        """Wait; the received pieces as (first row, [B, C, (T,) H, W]), in the order of rows."""
        self._pending.wait()
        return [(receive.start, piece) for receive, piece in zip(self._plan.receives, self._buffers, strict=True)]


@dataclass(frozen=True)
class Arrived:
    """The rows of an exchange that is over."""

    pieces: Pieces

    def finish(self) -> Pieces:
        return self.pieces


def gather_beside_halo(
    group: RankGroup, layout: Layout, part: Tensor, plan: HaloPlan, rows: Tensor, dim: int, pool: BufferPool
) -> tuple[list[Tensor], Pieces]:
    """:func:`gather_parts` of parts of one shape and the exchange of :class:`HaloExchange` in one round.

    A peer gets one message of both: with small maps, an exchange takes as long as the arithmetic between two of them.

    Args:
        part: contiguous; its bytes are a multiple of the size of a value of ``rows``, which follow them.
    """
    axis, inner = dim - 1, rows.movedim(1, -1)
    ahead = part.numel() * part.element_size()
    parts, pieces, sends, receives = {group.rank: part}, {}, [], []
    for peer in (rank for rank in range(layout.ranks) if rank != group.rank):
        sent = [inner.narrow(axis, send.start - plan.own[0], send.rows) for send in plan.sends if send.peer == peer]
        sends.append(Message(torch.cat([_bytes(tensor) for tensor in (part, *sent)]), peer))
        shapes = [(take.start, _shape_of(take, rows, axis)) for take in plan.receives if take.peer == peer]
        sizes = [ahead, *(math.prod(shape) * rows.element_size() for _, shape in shapes)]
        buffer = pool.take(("beside", peer), (sum(sizes),), rows.new_empty(0, dtype=torch.uint8))
        receives.append(Message(buffer, peer))
        first, *others = torch.split(buffer, sizes)
        parts[peer] = first.view(part.dtype).view(part.shape)
        for (start, shape), values in zip(shapes, others, strict=True):
            pieces[start] = values.view(rows.dtype).view(shape).movedim(-1, 1)
    group.exchange(sends, receives).wait()
    return [parts[rank] for rank in range(layout.ranks)], sorted(pieces.items())


def _shape_of(piece: Transfer, rows: Tensor, axis: int) -> list[int]:
    """The shape of a piece of other ranks' ``rows``, channels last."""
    shape = list(rows.movedim(1, -1).shape)
    shape[axis] = piece.rows
    return shape


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def gather_parts(group: RankGroup, layout: Layout, part: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The contiguous parts of all ranks of the layout, in rank order, in one round; ``shapes[r]`` is that of rank r."""
    ranks = range(layout.ranks)
    parts = [part if r == group.rank else part.new_empty(tuple(shapes[r])) for r in ranks]
    peers = [r for r in ranks if r != group.rank]
    group.exchange([Message(part, r) for r in peers], [Message(parts[r], r) for r in peers]).wait()
    return parts
