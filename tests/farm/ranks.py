"""Whole runs on real rank processes that start in a moment: forked from a server that has imported everything."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import vaepar.jobs.decode
from tests.processes import CONTEXT
from vaepar.errors import VaeparError
from vaepar.jobs.report import RunReport, Silent
from vaepar.jobs.request import DecodeRequest

LIMIT_SECONDS = 120

# Of a rank that waits for one that was killed before they had met: launchers end it, here the test does.
NEVER_BEGAN = "never began"
_MEETING_SECONDS = 30
_BEGAN = "began"


@dataclass
class Ranks:
    """Running ranks; ``results`` are those of each rank: a report, an error, or None for a rank that died."""

    processes: list[BaseProcess]
    pipes: list[Connection]
    results: list[Any] = field(default_factory=list)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def terminate(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            pid = self.processes[rank].pid
            if pid is not None and self.processes[rank].is_alive():
                os.kill(pid, signal.SIGTERM)

    def wait(self) -> list[Any]:
        """The results of all ranks. Raises when one does not end."""
        try:
            for process, pipe in zip(self.processes, self.pipes, strict=True):
                begun = _received(pipe, _MEETING_SECONDS, NEVER_BEGAN)
                if begun == NEVER_BEGAN:
                    process.kill()
                self.results.append(_received(pipe) if begun == _BEGAN else begun)
            for process in self.processes:
                process.join(LIMIT_SECONDS)
        finally:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return self.results


def start_decode(request: DecodeRequest, size: int, store: Path, prepare: Callable[[], None] | None = None) -> Ranks:
    """Begin a decode on ``size`` ranks that meet at the file ``store``; ``prepare`` runs first in each of them."""
    processes, pipes = [], []
    for rank in range(size):
        here, there = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_body, args=(rank, size, str(store), request, prepare, there))
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    return Ranks(processes, pipes)


def decode_on(request: DecodeRequest, size: int, store: Path) -> list[RunReport]:
    """The reports of all ranks of a whole decode. Raises what a rank raised."""
    results = start_decode(request, size, store).wait()
    for result in results:
        if not isinstance(result, RunReport):
            raise AssertionError(f"a rank gave {result!r}")
    return results


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come")
        time.sleep(0.005)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def temporary(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*.tmp")]


def _received(pipe: Connection, limit: float = LIMIT_SECONDS, otherwise: str | None = None) -> Any:
    """The next message of a rank; None when it has died, ``otherwise`` when it says nothing."""
    try:
        if not pipe.poll(limit):
            if otherwise is not None:
                return otherwise
            raise AssertionError(f"a rank gave no result within {limit} seconds")
        return pipe.recv()
    except EOFError:
        return None


def _body(
    rank: int, size: int, store: str, request: DecodeRequest, prepare: Callable[[], None] | None, pipe: Connection
) -> None:
    import torch.distributed as dist

    from vaepar.parallel.torch_group import TorchGroup

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        if prepare is not None:
            prepare()
        group = TorchGroup()
        pipe.send(_BEGAN)
        pipe.send(vaepar.jobs.decode.run_decode(request, group, Silent()))
    except VaeparError as error:
        pipe.send(error)
    finally:
        dist.destroy_process_group()


def apart(work: Callable[..., Any], *args: Any) -> Any:
    """``work(*args)`` in a fresh process."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_apart, args=(work, args, there))
    process.start()
    there.close()
    try:
        return _received(here)
    finally:
        process.join(LIMIT_SECONDS)


def _apart(work: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    pipe.send(work(*args))
