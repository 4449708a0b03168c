"""N ranks as threads of one process: the group for tests and for counting messages.

Tensors are copied when they are sent, as on a wire, so a rank that writes to a tensor after sending it changes
nothing at the receiver. Waits end as soon as another rank raises the alarm or leaves without agreement.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from vaepar.errors import PeerFailedError, RankLostError
from vaepar.parallel.group import Message, Pending, RankGroup, WaitAll

T = TypeVar("T")

_EXCHANGE_TAG = -1


class _Hub:
    """What the ranks of one loopback group share: mailboxes, meeting points and the alarm."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.meetings: dict[tuple[str, int], dict[int, object]] = {}
        self.left: dict[tuple[str, int], int] = {}
        self.alarm: int | None = None
        self.gone: set[int] = set()

    def wait_for(self, ready: Callable[[], bool], *, heed_alarm: bool) -> None:
        """Sleep until ``ready()``; the caller holds the condition."""
        while not ready():
            if heed_alarm and self.alarm is not None:
                raise PeerFailedError(f"rank {self.alarm} failed")
            if self.gone:
                raise RankLostError(f"rank {min(self.gone)} has left the group")
            self.changed.wait()


class _Receipt:
    def __init__(self, hub: _Hub, key: tuple[int, int, int], buffer: Tensor) -> None:
        self._hub, self._key, self._buffer = hub, key, buffer

    def wait(self) -> None:
        hub = self._hub
        with hub.changed:
            hub.wait_for(lambda: bool(hub.mail[self._key]), heed_alarm=True)
            sent = hub.mail[self._key].popleft()
        if sent.shape != self._buffer.shape or sent.dtype != self._buffer.dtype:
            raise ValueError(
                f"rank {self._key[1]} expected {tuple(self._buffer.shape)} {self._buffer.dtype} from rank "
                f"{self._key[0]}, which sent {tuple(sent.shape)} {sent.dtype}"
            )
        self._buffer.copy_(sent)


class LoopbackGroup(RankGroup):
    """One rank of a group of threads. Make them with :func:`run_loopback` or :meth:`create`."""

    def __init__(self, rank: int, hub: _Hub) -> None:
        super().__init__(rank, hub.size, torch.device("cpu"))
        self._hub = hub
        self._data_turn = 0
        self._control_turn = 0

    @classmethod
    def create(cls, size: int) -> list[LoopbackGroup]:
        """The ``size`` ranks of a new group, one for each thread that will use it."""
        hub = _Hub(size)
        return [cls(rank, hub) for rank in range(size)]

    def leave(self) -> None:
        """Say that this rank has gone for good, as a process does by dying."""
        with self._hub.changed:
            self._hub.gone.add(self.rank)
            self._hub.changed.notify_all()

    def gather_values(self, value: int) -> list[int]:
        return self._meet_control(value)

    def raise_alarm(self) -> None:
        with self._hub.changed:
            if self._hub.alarm is None:
                self._hub.alarm = self.rank
            self._hub.changed.notify_all()

    def check_alarm(self) -> None:
        alarm = self._hub.alarm
        if alarm is not None and alarm != self.rank:
            raise PeerFailedError(f"rank {alarm} failed")

    def renew(self) -> None:
        self._meet_control(None)  # nobody clears while another may still be about to send
        with self._hub.changed:
            self._hub.alarm = None
            self._hub.mail.clear()
            for key in [key for key in self._hub.meetings if key[0] == "data"]:
                del self._hub.meetings[key]
                self._hub.left.pop(key, None)
        self._data_turn = 0
        self._meet_control(None)

    def _meet_control(self, value: T) -> list[T]:
        turn, self._control_turn = self._control_turn, self._control_turn + 1
        return self._meet(("control", turn), value, heed_alarm=False)

    def _meet_data(self, value: T) -> list[T]:
        turn, self._data_turn = self._data_turn, self._data_turn + 1
        return self._meet(("data", turn), value, heed_alarm=True)

    def _meet(self, key: tuple[str, int], value: T, *, heed_alarm: bool) -> list[T]:
        hub = self._hub
        with hub.changed:
            place = hub.meetings.setdefault(key, {})
            place[self.rank] = value
            hub.changed.notify_all()
            hub.wait_for(lambda: len(place) == hub.size, heed_alarm=heed_alarm)
            values = [place[r] for r in range(hub.size)]
            hub.left[key] = hub.left.get(key, 0) + 1
            if hub.left[key] == hub.size:
                hub.meetings.pop(key, None)
                del hub.left[key]
        return values  # type: ignore[return-value]  # a meeting holds only what its ranks brought

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        hub = self._hub
        with hub.changed:
            if hub.alarm is not None:
                raise PeerFailedError(f"rank {hub.alarm} failed")
            hub.mail[self.rank, dst, tag].append(tensor.detach().clone())
            hub.changed.notify_all()
        return WaitAll([])

    def _irecv(self, buffer: Tensor, src: int, tag: int) -> Pending:
        return _Receipt(self._hub, (src, self.rank, tag), buffer)

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for send in sends:
            self._isend(send.tensor, send.peer, _EXCHANGE_TAG)
        return WaitAll([self._irecv(recv.tensor, recv.peer, _EXCHANGE_TAG) for recv in receives])

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        given = self._meet_data(tensor.detach().clone() if self.rank == src else None)[src]
        if given is not None:
            tensor.copy_(given)


def run_loopback(size: int, work: Callable[[LoopbackGroup], T]) -> list[T]:
    """Run ``work(group)`` on ``size`` threads and return what each gave, in rank order.

    When ranks raise, the others are told at once, and the exception of the lowest rank that failed by itself (not
    because a peer did) is raised here.
    """
    groups = LoopbackGroup.create(size)
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}

    def body(group: LoopbackGroup) -> None:
        try:
            results[group.rank] = work(group)
        except BaseException as error:
            failures[group.rank] = error
            group.leave()

    threads = [threading.Thread(target=body, args=(group,), name=f"rank{group.rank}") for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        ordered = [failures[rank] for rank in sorted(failures)]
        own = [error for error in ordered if not isinstance(error, PeerFailedError | RankLostError)]
        raise (own or ordered)[0]
    return [results[r] for r in range(size)]
