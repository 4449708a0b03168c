"""Ranks as processes over ``torch.distributed``: gloo between CPUs, NCCL between GPUs. Its only importer.

The control plane is always gloo. The data plane is a process group of its own that is thrown away and made anew
after a failure: a gloo transfer cannot be cancelled, so half-done transfers of a failed request must never meet
those of the next one.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore as _PrefixStore
from torch.distributed.rendezvous import rendezvous

from vaepar.errors import PeerFailedError, RankLostError, UsageError
from vaepar.parallel.group import Message, Pending, RankGroup, SoloGroup, WaitAll

# A rank may compute for hours between two meetings; a dead peer is noticed by its closed socket, not by this limit.
_PATIENCE = timedelta(days=2)
_MEETING_SECONDS = 600.0
_EXCHANGE_TAG = 1 << 20
_POISON_TAG = 1 << 21
_WATCH_SECONDS = 0.5
_POLL_SECONDS = 0.02

# The members of a group make their groups of the same ranks in the same order, so equal numbers name equal groups.
_made: Counter[tuple[int, ...]] = Counter()


class _Plane(Protocol):
    def send(self, tensor: Tensor, dst: int, tag: int) -> Any: ...
    def recv(self, buffer: Tensor, src: int, tag: int) -> Any: ...
    def batch(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]: ...
    def broadcast(self, tensor: Tensor, src: int) -> None: ...
    def break_off(self) -> None: ...


class _GlooPlane:
    """A bare gloo process group, with ranks of its own and a store prefix that no earlier group used."""

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._pg: Any = dist.ProcessGroupGloo(_PrefixStore(prefix, store), rank, size, _PATIENCE)

    def send(self, tensor: Tensor, dst: int, tag: int) -> Any:
        return self._pg.send([tensor], dst, tag)

    def recv(self, buffer: Tensor, src: int, tag: int) -> Any:
        return self._pg.recv([buffer], src, tag)

    def batch(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        works = [self.recv(message.tensor, message.peer, _EXCHANGE_TAG) for message in receives]
        works.extend(self.send(message.tensor, message.peer, _EXCHANGE_TAG) for message in sends)
        return works

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._pg.broadcast([tensor], options).wait()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        self._pg.allgather([parts], [tensor]).wait()
        return parts

    def break_off(self) -> None:
        """Close the connections, so that peers waiting for this rank wake up.

        gloo closes all pairs of a context when a wait runs into its limit; a wait of one millisecond for a message
        that nobody sends does that on purpose. A pair that is closed already raises another error: try the next.
        """
        for peer in range(self._size):
            if peer != self._rank:
                with contextlib.suppress(RuntimeError):
                    self.recv(torch.zeros(1), peer, _POISON_TAG).wait(timedelta(milliseconds=1))


class _NcclPlane:
    """An NCCL process group among global ranks; transfers of one exchange are batched, or two ranks could deadlock."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._pg = dist.new_group(self._ranks, backend="nccl", timeout=_PATIENCE, use_local_synchronization=True)

    def send(self, tensor: Tensor, dst: int, tag: int) -> Any:
        return self.batch([Message(tensor, dst)], [])[0]

    def recv(self, buffer: Tensor, src: int, tag: int) -> Any:
        return self.batch([], [Message(buffer, src)])[0]

    def batch(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        ops = [dist.P2POp(dist.isend, m.tensor, self._ranks[m.peer], self._pg) for m in sends]
        ops.extend(dist.P2POp(dist.irecv, m.tensor, self._ranks[m.peer], self._pg) for m in receives)
        return list(dist.batch_isend_irecv(ops))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        dist.broadcast(tensor, self._ranks[src], group=self._pg)

    def break_off(self) -> None:
        # Not destroyed: its name stays taken, so the group made next cannot read this one's rendezvous keys.
        if isinstance(self._pg, dist.ProcessGroup):
            self._pg.abort()


class _Receipt:
    """A started transfer. It keeps the tensor alive: gloo reads and writes its memory until the wait returns."""

    def __init__(self, group: TorchGroup, works: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        self._group, self._works, self._tensors = group, list(works), list(tensors)

    def wait(self) -> None:
        with self._group.translated():
            for work in self._works:
                work.wait()
        self._works, self._tensors = [], []


class TorchGroup(RankGroup):
    """Some ranks of an initialised ``torch.distributed`` world.

    Args:
        ranks: the global ranks of the group in group order, own rank among them; all ranks of the world when None.
        device: where tensors live; a CUDA device makes the data plane NCCL. CPU when None.
        timeout_seconds: how long to wait for members that have not come.

    Every member constructs its groups in the same order. Raises :class:`UsageError` when torch.distributed is not
    initialised or the own rank is not in ``ranks``.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        device: torch.device | None = None,
        timeout_seconds: float = _MEETING_SECONDS,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError("a group of ranks needs torch.distributed to be initialised; start with torchrun")
        self._ranks = list(ranks) if ranks is not None else list(range(dist.get_world_size()))
        own = dist.get_rank()
        if own not in self._ranks:
            raise UsageError(f"rank {own} is not in the group of ranks {self._ranks}")
        super().__init__(self._ranks.index(own), len(self._ranks), device or torch.device("cpu"))
        self._store = dist.distributed_c10d._get_default_store()
        members = tuple(self._ranks)
        self._name = f"vaepar/{_made[members]}/{'-'.join(map(str, members))}"
        _made[members] += 1
        self._epoch = 0
        self._meet(timeout_seconds)
        self._control = _GlooPlane(self._store, f"{self._name}/control", self.rank, self.size)
        self._data: _Plane = self._open_data()
        self._alarmed = False
        if self.device.type == "cuda":
            threading.Thread(target=self._watch, name="vaepar-alarm", daemon=True).start()

    @property
    def store(self) -> Any:
        """The key-value store through which all ranks of the world met (``torch.distributed.Store``)."""
        return self._store

    def gather_values(self, value: int) -> list[int]:
        with self._control_errors():
            return [int(part) for part in self._control.gather(torch.tensor([value], dtype=torch.int64))]

    def raise_alarm(self) -> None:
        if self._alarmed:
            return
        self._alarmed = True
        with contextlib.suppress(RuntimeError):  # the store is gone when its host died; the sockets still tell
            self._store.set(self._alarm_key(), str(self.rank))
        self._data.break_off()

    def check_alarm(self) -> None:
        try:
            raised = self._store.check([self._alarm_key()])
            source = int(self._store.get(self._alarm_key())) if raised else self.rank
        except RuntimeError as error:
            raise RankLostError(f"the store that the ranks share is gone: {_line(error)}") from error
        if source != self.rank:
            raise PeerFailedError(f"rank {source} failed")

    def renew(self) -> None:
        self.gather_values(0)  # all ranks have stopped using the old data plane
        self._epoch += 1
        self._alarmed = False
        self._data = self._open_data()

    def _meet(self, timeout_seconds: float) -> None:
        """Wait until every member is here: the rendezvous of a backend would wait for a lost one for days."""
        self._store.set(f"{self._name}/here/{self.rank}", "1")
        try:
            self._store.wait(
                [f"{self._name}/here/{rank}" for rank in range(self.size)], timedelta(seconds=timeout_seconds)
            )
        except RuntimeError as error:
            raise RankLostError(
                f"not all of ranks {self._ranks} made their group within {timeout_seconds:g} seconds: {_line(error)}"
            ) from error

    def _open_data(self) -> _Plane:
        if self.device.type == "cuda":
            return _NcclPlane(self._ranks)
        return _GlooPlane(self._store, f"{self._name}/data/{self._epoch}", self.rank, self.size)

    def _alarm_key(self) -> str:
        return f"{self._name}/alarm/{self._epoch}"

    def _watch(self) -> None:
        """Break off NCCL transfers when a peer has raised the alarm: NCCL itself would wait for it without end."""
        pause = threading.Event()
        while not pause.wait(_WATCH_SECONDS):
            watched = self._data  # renew() may put a new plane in its place at any time; that one must live
            try:
                self.check_alarm()
            except PeerFailedError:
                watched.break_off()
            except RankLostError:
                return

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn the backend's error into ours: a peer that failed has raised the alarm, one that vanished has not."""
        try:
            yield
        except RuntimeError as error:
            self.check_alarm()
            raise RankLostError(f"a rank has vanished: {_line(error)}") from error

    @contextmanager
    def _control_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._control.break_off()  # others may be waiting for this rank, not for the one that vanished
            raise RankLostError(f"a rank has vanished: {_line(error)}") from error

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        with self.translated():
            return _Receipt(self, [self._data.send(tensor, dst, tag)], [tensor])

    def _irecv(self, buffer: Tensor, src: int, tag: int) -> Pending:
        with self.translated():
            return _Receipt(self, [self._data.recv(buffer, src, tag)], [buffer])

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        with self.translated():
            works = self._data.batch(sends, receives)
        return WaitAll([_Receipt(self, works, [m.tensor for m in (*sends, *receives)])])

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        with self.translated():
            self._data.broadcast(tensor, src)


def default_group(device: torch.device) -> RankGroup:
    """All ranks of an initialised world; this process alone where there is none."""
    if dist.is_available() and dist.is_initialized():
        return TorchGroup(device=device)
    return SoloGroup(device)


@contextmanager
def launched_group(device: torch.device, timeout_seconds: float) -> Iterator[TorchGroup]:
    """Meet the ranks that a launcher started, by its environment variables, while the block runs.

    Raises:
        RankLostError: when not all ranks came within ``timeout_seconds``.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        limit = timedelta(seconds=timeout_seconds)
        base, rank, size = next(rendezvous("env://", timeout=limit))
        # Only with a store of their own do the ranks of a restart not meet the addresses of those that have died.
        store = _PrefixStore(_agree_on_name(base, rank, size, timeout_seconds), base)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        group = TorchGroup(device=device, timeout_seconds=timeout_seconds)
    except RuntimeError as error:
        raise RankLostError(f"the ranks did not meet within {timeout_seconds:g} seconds: {_line(error)}") from error
    try:
        yield group
    finally:
        dist.destroy_process_group()


def _agree_on_name(store: Any, rank: int, size: int, timeout_seconds: float) -> str:
    """A name that all ranks of this start share, and no earlier start that used the same store.

    torch's agent keeps one store over all restarts. So every rank says hello under a name that it has just made up;
    rank 0 answers to each such name until all ranks have shown that they heard it, and not one that died before.

    Raises:
        RankLostError: when a rank has not come in time; it is named.
    """
    end = time.monotonic() + timeout_seconds
    if rank:
        own = uuid.uuid4().hex
        store.set(f"vaepar/hello/{rank}", own)
        while not store.check([f"vaepar/welcome/{own}"]):
            _keep_waiting(end, "rank 0", timeout_seconds)
        name: str = store.get(f"vaepar/welcome/{own}").decode()
        store.set(f"vaepar/here/{name}/{rank}", "1")
        return name
    name = uuid.uuid4().hex
    missing = list(range(1, size))
    while missing:
        for other in missing:
            if store.check([f"vaepar/hello/{other}"]):
                store.set(f"vaepar/welcome/{store.get(f'vaepar/hello/{other}').decode()}", name)
        missing = [other for other in missing if not store.check([f"vaepar/here/{name}/{other}"])]
        if missing:
            _keep_waiting(end, f"rank(s) {', '.join(map(str, missing))}", timeout_seconds)
    return name


def _keep_waiting(end: float, whom: str, timeout_seconds: float) -> None:
    if time.monotonic() > end:
        raise RankLostError(f"{whom} did not come within {timeout_seconds:g} seconds")
    time.sleep(_POLL_SECONDS)


def _line(error: BaseException) -> str:
    """The backend's words; for the one that means a dead process, ours instead of a line of its source code."""
    words = " ".join(str(error).split())
    if re.search("connection (was )?(closed|reset)|broken pipe", words, re.IGNORECASE):
        return "its connection was closed"
    return words[:200]
