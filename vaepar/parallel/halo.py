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
from vaepar.parallel.shards import HaloPlan, Layout


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
            with torch.inference_mode(False):  # a later step may be taken outside of the mode that this one is in
                self.buffers[key] = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
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
            with torch.inference_mode(False):
                self._scratch[key] = torch.empty(count, dtype=like.dtype, device=like.device)
        return self._scratch[key][:count].view(tuple(shape))

    def result(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """The one buffer for short-lived results of a convolution, contiguous; what an earlier call gave is void then.

        It has exactly this shape: a block may keep it (:meth:`give_result`), and no more memory with it.
        """
        held = self.held_result(shape, like)
        if held is None:
            self.give_result()  # before the new one is made
            with torch.inference_mode(False):
                held = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
            self._result = held.view(-1)
        return held

    def held_result(self, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """The buffer of :meth:`result` if it is there and of that shape."""
        held = self._result
        if held is None or (held.numel(), held.dtype, held.device) != (math.prod(shape), like.dtype, like.device):
            return None
        return held.view(tuple(shape))

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
            shape = list(rows.movedim(1, -1).shape)
            shape[axis] = receive.rows
            buffer = pool.take(("halo", receive.peer), shape, rows)
            receives.append(Message(buffer, receive.peer))
            self._buffers.append(buffer.movedim(-1, 1))
        self._pending: Pending = group.exchange(sends, receives)

    def finish(self) -> list[tuple[int, Tensor]]:
        """Wait; the received pieces as (first row, [B, C, (T,) H, W]), in the order of rows."""
        self._pending.wait()
        return [(receive.start, piece) for receive, piece in zip(self._plan.receives, self._buffers, strict=True)]


def gather_parts(group: RankGroup, layout: Layout, part: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The contiguous parts of all ranks of the layout, in rank order, in one round; ``shapes[r]`` is that of rank r."""
    ranks = range(layout.ranks)
    parts = [part if r == group.rank else part.new_empty(tuple(shapes[r])) for r in ranks]
    peers = [r for r in ranks if r != group.rank]
    group.exchange([Message(part, r) for r in peers], [Message(parts[r], r) for r in peers]).wait()
    return parts
