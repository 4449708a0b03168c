"""One rank's failure is every rank's failure, at once, at every stage, and the next request works.

The same scenarios run on threads (three ranks) and on real gloo processes (two ranks).
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import run_processes
from vaepar.errors import (
    DeviceMemoryError,
    InputError,
    PeerFailedError,
    RankLostError,
    RankMismatchError,
    StageFailedError,
)
from vaepar.parallel.agreement import agreed
from vaepar.parallel.executor import DistributedOperator, DistributedVaeExecutor, GridSpec, TileTask, assign
from vaepar.parallel.group import Message, RankGroup, SoloGroup
from vaepar.parallel.halo import gather_parts
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import split_rows

STAGES = ("split", "exec", "merge", "write")
# What takes longer hangs: below any timeout of the backends (60 seconds for the store, two days for a transfer), far
# above the milliseconds that it takes, so that a loaded machine fails no test.
HANG_SECONDS = 45.0


def failing_operator(group: RankGroup, stage: str, rank: int, error: Exception) -> DistributedOperator:
    """An operator over 6 tiles and 2 steps that raises ``error`` in one stage on one rank, once."""
    armed = [True]

    def maybe(at: str) -> None:
        if armed[0] and at == stage and group.rank == rank:
            armed[0] = False
            raise error

    def split(z: Tensor) -> tuple[list[TileTask], GridSpec]:
        maybe("split")
        tasks = [TileTask(i, (i,), [z[:, i], z[:, i] + 1], 1, [(4, 5), (4, 5)]) for i in range(6)]
        return tasks, GridSpec((1,), (6,), steps=2)

    def steps(task: TileTask) -> Iterator[Tensor]:
        for step, piece in enumerate(task.tensor):
            if step == 1 and task.tile_id >= 3:
                maybe("exec")
            yield piece * 2

    def merge(tiles: dict[tuple[int, ...], Tensor], grid: GridSpec) -> Tensor:
        maybe("merge")
        return torch.stack([tiles[i,] for i in range(6)], dim=1)

    return DistributedOperator(split, lambda task: torch.cat(list(steps(task))), merge, steps=steps, step_dim=2)


def scenario(group: RankGroup, stage: str, rank: int, kind: str) -> tuple[str, str, float, bool]:
    """Fail once, then succeed on the same executor. Returns class and words of the error, seconds, success."""
    error: Exception = torch.OutOfMemoryError("CUDA out of memory, they said") if kind == "oom" else ValueError("boom")
    if kind == "ours":
        error = InputError("that file is broken")
    executor = DistributedVaeExecutor(group)
    z = torch.arange(120, dtype=torch.float32).reshape(4, 6, 5)
    operator = failing_operator(group, stage, rank, error)
    caught: tuple[str, str] = ("", "")
    started = time.monotonic()
    try:
        with agreed(group, "decode"):
            for chunk in executor.stream(z, operator):
                if chunk is not None and stage == "write" and group.rank == 0:
                    raise error
    except Exception as raised:
        caught = type(raised).__name__, str(raised)
    seconds = time.monotonic() - started
    again = executor.execute(z, operator, broadcast_result=True)
    return *caught, seconds, torch.equal(again, torch.cat([z * 2, z * 2 + 2], dim=2))


def test_memory_that_a_cpu_lacks_is_told_in_our_words() -> None:
    with pytest.raises(DeviceMemoryError) as caught, agreed(SoloGroup(), "latents"):
        torch.empty(2**52, dtype=torch.uint8)
    assert str(caught.value) == "out of memory in latents: 4.194e+06 GiB were asked for at once"


def assert_all_failed(results: list[Any], rank: int, kind: str) -> None:
    expected = {"oom": DeviceMemoryError, "error": StageFailedError, "ours": InputError}[kind].__name__
    words = {"oom": "out of memory", "error": "ValueError: boom", "ours": "that file is broken"}[kind]
    for r, (name, text, seconds, fine_after) in enumerate(results):
        assert name == expected, (r, name, text)
        assert words in text
        assert r == rank or f"rank {rank}" in text
        assert "\n" not in text
        assert seconds < HANG_SECONDS
        assert fine_after


CASES = [(stage, rank) for stage in STAGES for rank in (0, 1, 2) if rank == 0 or stage in ("split", "exec")]


@pytest.mark.parametrize("kind", ["oom", "error", "ours"])
@pytest.mark.parametrize(("stage", "rank"), CASES)
def test_threads_fail_together(stage: str, rank: int, kind: str) -> None:
    assert_all_failed(run_loopback(3, lambda group: scenario(group, stage, rank, kind)), rank, kind)


def all_cases(group: RankGroup) -> list[Any]:
    cases = [(stage, rank, kind) for stage, rank in CASES if rank < 2 for kind in ("oom", "error", "ours")]
    files = len(list(Path("/proc/self/fd").iterdir()))
    results = [(case, scenario(group, *case)) for case in cases]
    end = time.monotonic() + HANG_SECONDS  # threads of the backend close the sockets of a plane that is thrown away
    while (grown := len(list(Path("/proc/self/fd").iterdir())) - files) >= len(cases) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.1)
    return [results, grown]


@pytest.mark.processes
def test_processes_fail_together_and_close_what_they_opened(tmp_path: Path) -> None:
    (first, first_grown), (second, second_grown) = run_processes(2, all_cases, tmp_path)
    for (case, one), (_, two) in zip(first, second, strict=True):
        assert_all_failed([one, two], case[1], case[2])
    # A renewed data plane has as many sockets as the one before; a leak would be several per failure.
    assert max(first_grown, second_grown) < len(first)


def test_memory_and_another_error_at_once_is_the_other_error() -> None:
    def work(group: RankGroup) -> str:
        try:
            with agreed(group, "decode"):
                raise MemoryError if group.rank == 0 else ValueError("boom")
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    for text in run_loopback(2, work):
        assert text == "StageFailedError: rank 1: decode failed: ValueError: boom"


WAITS = ("recv", "exchange", "broadcast", "gather")


def test_waiting_in_every_operation_ends_when_a_peer_fails() -> None:
    def wait(group: RankGroup, how: str) -> None:
        buffer = torch.zeros(3)
        if how == "recv":
            group.irecv(buffer, 2).wait()
        elif how == "exchange":
            group.exchange([Message(buffer, 2)], [Message(buffer, 2)]).wait()
        elif how == "broadcast":
            group.broadcast(buffer, 2)
        elif how == "gather":
            gather_parts(group, split_rows(3, 3), buffer, [(3,)] * 3)

    def work(group: RankGroup) -> list[str]:
        seen = []
        for how in WAITS:
            try:
                with agreed(group, how):
                    if group.rank == 2:
                        raise ValueError("boom")
                    wait(group, how)
            except StageFailedError as error:
                seen.append(str(error))
        return seen

    for seen in run_loopback(3, work):
        assert seen == [f"rank 2: {how} failed: ValueError: boom" for how in WAITS]


def dying(group: RankGroup) -> str:
    group.gather_values(0)  # all are here: what is waited for afterwards is not the start of an interpreter
    started = time.monotonic()
    try:
        with agreed(group, "decode"):
            if group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            group.irecv(torch.zeros(4), 1).wait()
    except RankLostError:
        return "lost" if time.monotonic() - started < HANG_SECONDS else "lost after a timeout"
    return "nothing noticed"


@pytest.mark.processes
def test_a_killed_rank_is_noticed_at_once(tmp_path: Path) -> None:
    assert run_processes(3, dying, tmp_path) == ["lost", None, "lost"]


def test_ranks_with_different_latents_are_stopped() -> None:
    def work(group: RankGroup) -> str:
        executor = DistributedVaeExecutor(group)
        z = torch.zeros(4, 6, 5 + group.rank)
        operator = failing_operator(group, "none", 0, ValueError())
        with pytest.raises(RankMismatchError, match=r"different latents: rank 0 has \(4, 6, 5\)"):
            executor.execute(z, operator)
        return "stopped"

    assert run_loopback(2, work) == ["stopped"] * 2


def test_alarm_reaches_a_rank_that_computes() -> None:
    def work(group: RankGroup) -> str:
        try:
            with agreed(group, "decode"):
                if group.rank == 0:
                    raise ValueError("boom")
                while True:
                    group.check_alarm()
                    time.sleep(0.01)
        except StageFailedError as error:
            return str(error)

    assert run_loopback(2, work) == ["rank 0: decode failed: ValueError: boom"] * 2


def test_a_stream_that_is_dropped_late_does_not_disturb_the_next_request() -> None:
    def work(group: RankGroup) -> bool:
        executor = DistributedVaeExecutor(group)
        z = torch.arange(120, dtype=torch.float32).reshape(4, 6, 5)
        operator = failing_operator(group, "none", 0, ValueError())
        stream = executor.stream(z, operator)
        failed = False
        try:
            with agreed(group, "decode"):
                next(stream)
                if group.rank == 0:
                    raise ValueError("the consumer failed and forgot the stream")
                for _ in stream:
                    pass
        except StageFailedError:
            failed = True
        first = executor.execute(z, operator)
        stream.close()
        return failed and torch.equal(first, executor.execute(z, operator))

    assert run_loopback(2, work) == [True, True]


def test_errors_that_wake_peers_are_not_the_peers_own() -> None:
    def work(group: RankGroup) -> str:
        try:
            with agreed(group, "decode"):
                if group.rank == 1:
                    raise PeerFailedError("as if woken")
        except PeerFailedError as error:
            return str(error)
        return ""

    assert run_loopback(2, work) == ["rank 1: as if woken", "as if woken"]


def test_tiles_of_unknown_shape_travel_behind_their_shape() -> None:
    def split(z: Tensor) -> tuple[list[TileTask], GridSpec]:
        return [TileTask(i, (i,), z[: i + 1, :2], workload=i + 1) for i in range(5)], GridSpec((0,), (5,))

    def merge(tiles: dict[tuple[int, ...], Tensor], grid: GridSpec) -> Tensor:
        return torch.cat([tiles[i,] for i in range(grid.grid_shape[0])])

    def work(group: RankGroup) -> Tensor:
        z = torch.arange(30, dtype=torch.float64).reshape(6, 5)
        operator = DistributedOperator(split, lambda task: torch.as_tensor(task.tensor) * 2, merge)
        return DistributedVaeExecutor(group).execute(z, operator)

    z = torch.arange(30, dtype=torch.float64).reshape(6, 5)
    want = torch.cat([z[: i + 1, :2] * 2 for i in range(5)])
    assert all(torch.equal(got, want) for got in run_loopback(3, work))


@pytest.mark.parametrize(
    ("loads", "workers", "shares"),
    [
        ([2, 5, 13, 8, 2, 4], 2, [[2, 5], [3, 1, 0, 4]]),
        ([1, 1, 1], 5, [[0], [1], [2], [], []]),
        ([7], 1, [[0]]),
        ([], 2, [[], []]),
    ],
)
def test_largest_first_to_the_least_loaded(loads: list[int], workers: int, shares: list[list[int]]) -> None:
    assert assign(loads, workers) == shares
