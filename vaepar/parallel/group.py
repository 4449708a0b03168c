"""Ranks as objects: what a group of ranks can do for each other, without saying how.

A :class:`RankGroup` has two planes. The data plane moves tensors (halo rows, tiles) and texts; its waits end
when a peer raises the alarm. The control plane only gathers small integers, and stays usable when the data plane has
failed, so that ranks can agree on a failure. Rank numbers are always those inside the group, 0 to ``size - 1``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A transfer that was started. The tensors given to it stay untouched until :meth:`wait` returns."""

    def wait(self) -> None:
        """Return when the transfer is done. Raises :class:`PeerFailedError` or :class:`RankLostError`."""


@dataclass(frozen=True)
class Message:
    """One tensor to a peer, or one contiguous buffer to be filled by a peer."""

    tensor: Tensor
    peer: int


@dataclass
class Traffic:
    """What one rank has sent; ``rounds`` counts the times it had to wait for others in an exchange."""

    messages: int = 0
    bytes: int = 0
    rounds: int = 0

    def reset(self) -> None:
        self.messages = self.bytes = self.rounds = 0

    def add(self, tensor: Tensor, copies: int = 1) -> None:
        self.messages += copies
        self.bytes += copies * tensor.numel() * tensor.element_size()


class Done:
    """A transfer that needs no waiting."""

    def wait(self) -> None:
        return None


class RankGroup(ABC):
    """A group of ranks that work on the same requests.

    Args:
        rank: own rank, 0 to ``size - 1``.
        size: number of ranks.
        device: where the tensors of the data plane live.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.traffic = Traffic()
        # The bookkeeping of agreement.agreed: how many blocks are open, and how many outermost ones have ended.
        self.stage_depth = 0
        self.requests = 0

    # The data plane.

    def isend(self, tensor: Tensor, dst: int, *, tag: int = 0) -> Pending:
        """Start sending ``tensor`` to rank ``dst``; its shape and dtype must be known there."""
        tensor = tensor.contiguous()
        self.traffic.add(tensor)
        return self._isend(tensor, dst, tag)

    def irecv(self, buffer: Tensor, src: int, *, tag: int = 0) -> Pending:
        """Start filling the contiguous ``buffer`` with what rank ``src`` sends under the same tag."""
        return self._irecv(buffer, src, tag)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start one round of point-to-point transfers; several messages between two ranks keep their order."""
        contiguous = [Message(send.tensor.contiguous(), send.peer) for send in sends]
        for send in contiguous:
            self.traffic.add(send.tensor)
        if not contiguous and not receives:
            return Done()
        self.traffic.rounds += 1
        return self._exchange(contiguous, receives)

    def all_equal(self, value: int, ranks: int) -> bool:
        """True when the first ``ranks`` ranks, which all call this, give the same value (64 bit). One round.

        On the data plane: a rank that fails meanwhile meets the others on the control plane.
        """
        mine = torch.tensor([value], dtype=torch.int64, device=self.device)
        theirs = [Message(torch.empty_like(mine), peer) for peer in range(ranks) if peer != self.rank]
        self.exchange([Message(mine, message.peer) for message in theirs], theirs).wait()
        return all(int(message.tensor) == value for message in theirs)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Replace ``tensor`` on every rank by that of rank ``src``; shape and dtype are the same everywhere."""
        if self.size > 1:
            if self.rank == src:
                self.traffic.add(tensor, self.size - 1)
            self._broadcast(tensor, src)

    def broadcast_text(self, text: str | None, src: int = 0) -> str:
        """The text of rank ``src`` on every rank; what other ranks give is ignored."""
        data = (text or "").encode("utf-8", "surrogateescape") if self.rank == src else b""
        length = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        self.broadcast(length, src)
        if not int(length):
            return ""
        letters = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(int(length), dtype=torch.uint8)
        )
        letters = letters.to(self.device)
        self.broadcast(letters, src)
        return letters.cpu().numpy().tobytes().decode("utf-8", "surrogateescape")

    # The control plane. Only for agreement: a rank that has failed is there already, whatever the others are doing.

    @abstractmethod
    def gather_values(self, value: int) -> list[int]:
        """The integers (64 bit) of all ranks, in rank order."""

    # Failure.

    @abstractmethod
    def raise_alarm(self) -> None:
        """Tell the others that this rank has failed: whoever waits for it on the data plane wakes with an error."""

    @abstractmethod
    def check_alarm(self) -> None:
        """Raise :class:`PeerFailedError` when another rank has raised the alarm; call it between pieces of work."""

    @abstractmethod
    def renew(self) -> None:
        """Make the data plane usable again after an alarm. All ranks of the group call it together."""

    @abstractmethod
    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Pending: ...

    @abstractmethod
    def _irecv(self, buffer: Tensor, src: int, tag: int) -> Pending: ...

    @abstractmethod
    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, src: int) -> None: ...


class SoloGroup(RankGroup):
    """The group of one rank: nothing is ever sent."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(0, 1, device or torch.device("cpu"))

    def gather_values(self, value: int) -> list[int]:
        return [value]

    def raise_alarm(self) -> None:
        return None

    def check_alarm(self) -> None:
        return None

    def renew(self) -> None:
        return None

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        raise ValueError(f"a group of one rank cannot send to rank {dst}")

    def _irecv(self, buffer: Tensor, src: int, tag: int) -> Pending:
        raise ValueError(f"a group of one rank cannot receive from rank {src}")

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        raise ValueError("a group of one rank has nobody to exchange with")

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        return None


class WaitAll:
    """Several pending transfers as one."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = list(pending)

    def wait(self) -> None:
        while self._pending:
            self._pending.pop(0).wait()
