"""Ranks of a run: join those that torchrun started, or start them here and give back their real exit code.

The only reader of torchrun's environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from vaepar.errors import InterruptedRunError, UsageError

if TYPE_CHECKING:
    import torch

    from vaepar.parallel.group import RankGroup

logger = logging.getLogger(__name__)

# mallopt's number for the size from which memory is mapped, and that size: PyTorch's huge pages begin at 2 MiB.
_M_MMAP_THRESHOLD = -3
_OWN_PAGES_FROM = 2 * 2**20

# How often start_ranks has started its ranks again; each time they have a new agent, which counts from 0.
_RESTARTS = "_VAEPAR_RESTARTS"

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands among the ranks.

    Args:
        rank, size: global rank and number of ranks.
        local_rank, local_size: the same on this machine.
        launched: whether a launcher (torchrun, or this package) started the ranks.
        begun: when torch's agent, which starts ranks again, was started itself (seconds since the epoch); None
            without one.
        restarts: how often the ranks were started again, by torch's agent or by this package's launcher.
        ours: whether it was this package's launcher.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False
    begun: float | None = None
    restarts: int = 0
    ours: bool = False

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
            restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", 0)) + int(env.get(_RESTARTS, 0))
        except ValueError as error:
            raise UsageError(f"the launcher's variables RANK, WORLD_SIZE and so on must be numbers: {error}") from None
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            raise UsageError(
                f"the launcher's variables do not fit together: RANK={rank}, WORLD_SIZE={size}, "
                f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}"
            )
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            launched=True,
            begun=_launcher_begun() if "TORCHELASTIC_RUN_ID" in env else None,
            restarts=restarts,
            ours=_RESTARTS in env,
        )


def _launcher_begun() -> float | None:
    """When the parent process, which is torch's agent, was started."""
    import psutil

    try:
        return float(psutil.Process(os.getppid()).create_time())
    except psutil.Error:
        return None


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
    keep_memory_flat()
    import torch

    from vaepar.parallel.group import SoloGroup

    # torchrun sets OMP_NUM_THREADS to 1 where nobody has, so under a launcher it says nothing about the user's wish.
    if world.launched or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // world.local_size))
    where = _device(world, device)
    if not world.launched:
        yield SoloGroup(where)
        return
    from vaepar.parallel.torch_group import launched_group

    scheduling = _batch_scheduling() if where.type == "cpu" else contextlib.nullcontext()
    with scheduling, launched_group(where, timeout_seconds) as group:
        yield group


@contextmanager
def _batch_scheduling() -> Iterator[None]:
    """Let this thread, and threads and processes that it starts meanwhile, wait for a core instead of taking it.

    gloo's thread wakes up for each message. Where it interrupts the rank's own thread while that holds gloo's lock, it
    spins for the lock through its whole time slice: a twentieth of a decode on two cores. A policy that somebody else
    has chosen stays.
    """
    changed = False
    with contextlib.suppress(OSError, AttributeError):  # a sandbox may forbid it, another system not have it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    try:
        yield
    finally:
        if changed:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def prepare_process() -> None:
    """Settings that PyTorch reads when it is loaded. The command line makes them before anything else."""
    # A store whose host has died is told as our one line; PyTorch's own warning is a stack of its C++ functions.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    keep_memory_flat()


def keep_memory_flat() -> None:
    """Give large tensors pages of their own, which go back to the system when they are freed.

    On glibc's heap, tensors of mixed sizes leave gaps that are never given back: a rank's resident memory grew from
    0.8 to 1.1 GB over 81 frames of one decode, and stays at 0.55 GB this way. Huge pages make up for the cost of the
    fresh pages: without them a decode takes a quarter longer. PyTorch reads its switch once, when it is loaded, so a
    process calls this before it imports torch; later it does half of its work.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # a C library without mallopt has no such heap
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES_FROM)


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


def start_ranks(arguments: Sequence[str], ranks: int, *, max_restarts: int = 0) -> int:
    """Run ``python -m vaepar ARGUMENTS`` on ``ranks`` new processes of this machine; their exit code.

    All ranks of a run end with the same code; where they do not (one was killed), it is that of the first that failed,
    128 + N for signal N. SIGINT and SIGTERM go on to the ranks, which end in their own time; a second one ends them at
    once.

    Args:
        arguments: of the command line.
        ranks: how many.
        max_restarts: how often all ranks start again after one was killed. What they had finished is not redone. A
            rank that ends with an error has said why, and would say it again.
    """
    # The agent reports each failed rank with a traceback of its own; the ranks have said what is to be said.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    with _Forwarding() as signals:
        for restart in range(max_restarts + 1):
            os.environ[_RESTARTS] = str(restart)
            rank, code = _run_ranks(arguments, ranks)
            if code >= 0 or signals.asked:
                break
            died = f"rank {rank} of {ranks} was ended by {_signal_name(-code)}"
            if restart < max_restarts:
                logger.warning("%s; starting the ranks again (%d of %d)", died, restart + 1, max_restarts)
            else:
                logger.error("%s; what was whole before is kept, and the same command again does the rest", died)
        if signals.asked == 1 and code in (-signal.SIGTERM, -signal.SIGINT):
            # The first signal came before the ranks listened, so nothing was under way: as safe as a clean stop.
            return InterruptedRunError.exit_code
    return _exit_code(code)


def _own_package() -> tuple[str, ...]:
    """The interpreter's arguments that run this very package.

    ``-m`` looks into the working folder first, where a folder that is called like the package would be taken for it.
    """
    try:
        here = Path(__file__).resolve().parents[1] == Path.cwd()
    except OSError:  # the working folder is gone
        here = False
    return ("-m", "vaepar") if here else ("-P", "-m", "vaepar")


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    return f"{name} (by the system when memory ran out, or by hand)" if name == "SIGKILL" else name


def _run_ranks(arguments: Sequence[str], ranks: int) -> tuple[int, int]:
    """The first rank that failed and its exit code, negative for a signal; (0, 0) when none did."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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
    # Its own handler would end the agent at the first signal, and the ranks' exit code with it.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    if hasattr(config, "signals_to_handle"):
        config.signals_to_handle = ""
    try:
        elastic_launch(config, sys.executable)(*_own_package(), *arguments)
    except ChildFailedError as error:
        return _cause({rank: (int(each.exitcode), each.timestamp) for rank, each in error.failures.items()})
    return 0, 0


def _cause(failures: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """Which of the failed ranks, each with its exit code and time, made the others fail, and its exit code.

    A rank that was killed and those that lost it often end within one look of torch's agent, whose own choice among
    them is by number. The killed one has a negative code.
    """
    rank, (code, _) = min(failures.items(), key=lambda item: (item[1][0] >= 0, item[1][1], item[0]))
    return rank, code


class _Forwarding:
    """While the block runs, SIGINT and SIGTERM of this process go to its children (the ranks), and are counted."""

    def __init__(self) -> None:
        self.asked = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Forwarding:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        import psutil

        self.asked += 1
        children = psutil.Process().children()
        if not children:
            raise InterruptedRunError(f"stopped by {signal.Signals(number).name} before the ranks had started")
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


__all__ = [
    "DEVICES",
    "World",
    "check_memory",
    "choose_ranks",
    "joined",
    "keep_memory_flat",
    "prepare_process",
    "start_ranks",
    "usable_cores",
]
