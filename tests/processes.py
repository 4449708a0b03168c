"""Run a function on real rank processes over gloo: no ports (the ranks meet at a file), no process left behind."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

_LIMIT_SECONDS = 240

# Processes are forked from a server that has imported everything and computed nothing, so that one starts in a moment.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tests.processes", "tests.farm.ranks", "diffusers.models.autoencoders", "imageio_ffmpeg", "PIL.Image"]
)


def _body(rank: int, size: int, store: str, work: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    import torch.distributed as dist

    from vaepar.parallel.torch_group import TorchGroup

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        # Plain pickle copies tensors; the pipe's own would share their memory, which ends with this process.
        pipe.send_bytes(pickle.dumps(("ok", work(TorchGroup(), *args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
    finally:
        dist.destroy_process_group()


def run_processes(size: int, work: Callable[..., Any], tmp_path: Path, *args: Any) -> list[Any]:
    """What ``work(group, *args)`` gave on each of ``size`` ranks; it must be importable. Raises when a rank raised.

    A rank that dies gives None.
    """
    store = tmp_path / "rendezvous"
    ends: list[Connection] = []
    processes = []
    for rank in range(size):
        here, there = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_body, args=(rank, size, str(store), work, args, there))
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    try:
        results = [_take(end) for end in ends]
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    failed = [text for kind, text in results if kind == "error"]
    if failed:
        raise AssertionError("\n".join(failed))
    return [value for _, value in results]


def _take(end: Connection) -> tuple[str, Any]:
    try:
        if not end.poll(_LIMIT_SECONDS):
            return "error", f"a rank gave no result within {_LIMIT_SECONDS} seconds"
        kind, value = pickle.loads(end.recv_bytes())
    except EOFError:
        return "dead", None
    return kind, value
