"""Ranks of a run: join those that torchrun started, or start them here and give back their real exit code.

The only reader of torchrun's environment.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vaepar.errors import UsageError, VaeparError

if TYPE_CHECKING:
    import torch

    from vaepar.parallel.group import RankGroup

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands among the ranks.

    Args:
        rank, size: global rank and number of ranks.
        local_rank, local_size: the same on this machine.
        launched: whether a launcher (torchrun, or this package) started the ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """The world that the launcher's variables describe; a world of one when there was none.

        Raises:
            UsageError: for variables that are not numbers or do not fit together.
        """
        env = os.environ if environment is None else environment
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
            return cls()
        try:
            rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
            local_rank = int(env.get("LOCAL_RANK", rank))
            local_size = int(env.get("LOCAL_WORLD_SIZE", size))
        except ValueError as error:
            raise UsageError(f"the launcher's variables RANK, WORLD_SIZE and so on must be numbers: {error}") from None
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            raise UsageError(
                f"the launcher's variables do not fit together: RANK={rank}, WORLD_SIZE={size}, "
                f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}"
            )
        return cls(rank=rank, size=size, local_rank=local_rank, local_size=local_size, launched=True)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def choose_ranks(asked: int | None, device: str, world: World) -> int:
    """How many ranks a run has: those that exist, those asked for, or one for each GPU.

    Raises:
        UsageError: for a number that contradicts the launcher's, or is beyond the GPUs.
    """
    if asked is not None and asked < 1:
        raise UsageError(f"--ranks is {asked}; it is a whole number of ranks, 1 or more")
    if world.launched:
        if asked is not None and asked != world.size:
            raise UsageError(f"--ranks {asked} was asked, but the launcher started {world.size} ranks; leave one out")
        return world.size
    gpus = _gpus(device)
    if gpus and asked is not None and asked > gpus:
        raise UsageError(f"--ranks {asked} is beyond the {gpus} GPU(s) here; one rank a GPU, or --device cpu")
    return asked if asked is not None else max(gpus, 1)


def _gpus(device: str) -> int:
    """GPUs that ``--device`` allows. Raises :class:`UsageError` when CUDA is asked for and there is none."""
    if device == "cpu":
        return 0
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not count:
        raise UsageError("--device cuda was asked, but torch finds no CUDA device here; --device cpu works")
    return count


def check_memory(ranks: int, weight_bytes: int) -> None:
    """Raise :class:`UsageError` when the host cannot even hold the weights and an interpreter for each rank."""
    import psutil

    need = ranks * (weight_bytes + 250 * 2**20)
    available = int(psutil.virtual_memory().available)
    if need > available:
        raise UsageError(
            f"--ranks {ranks} needs at least {need / 2**30:.1f} GiB for the model on every rank; "
            f"{available / 2**30:.1f} GiB are available"
        )


@contextmanager
def joined(world: World, device: str, timeout_seconds: float = 300) -> Iterator[RankGroup]:
    """The group of all ranks, while the block runs. CPU threads are divided among the ranks of this machine.

    Args:
        world: from :meth:`World.from_environment`.
        device: one of :data:`DEVICES`. GPUs get NCCL, one GPU a rank; CPUs get gloo.
        timeout_seconds: how long to wait for ranks that have not come.

    Raises:
        UsageError: more ranks on this machine than GPUs. RankLostError: a rank did not come in time.
    """
    import torch

    from vaepar.parallel.group import SoloGroup

    torch.set_num_threads(max(1, usable_cores() // world.local_size))
    where = _device(world, device)
    if not world.launched:
        yield SoloGroup(where)
        return
    from vaepar.parallel.torch_group import launched_group

    with launched_group(where, timeout_seconds) as group:
        yield group


def _device(world: World, device: str) -> torch.device:
    import torch

    gpus = _gpus(device)
    if not gpus:
        return torch.device("cpu")
    if world.local_size > gpus:
        raise UsageError(
            f"{world.local_size} ranks on this machine, but {gpus} GPU(s); one rank a GPU, or --device cpu"
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def start_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m vaepar ARGUMENTS`` on ``ranks`` new processes of this machine; their exit code.

    All ranks of a run end with the same code; where they do not (one was killed), it is that of the first that failed,
    128 + N for signal N.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent reports each failed rank with a traceback of its own; the ranks have said what is to be said.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    threads = str(max(1, usable_cores() // ranks))
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "vaepar", *arguments)
    except ChildFailedError as error:
        return _exit_code(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def exit_code_of(error: BaseException) -> int:
    """The exit code for an exception that ends a run."""
    if isinstance(error, VaeparError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


__all__ = [
    "DEVICES",
    "World",
    "check_memory",
    "choose_ranks",
    "exit_code_of",
    "joined",
    "start_ranks",
    "usable_cores",
]
