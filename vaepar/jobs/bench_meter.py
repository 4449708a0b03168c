"""Clocks and memory of one pass on one rank, and what the machine is."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from vaepar.jobs.memory import peak_bytes, reset_peak
from vaepar.launch import usable_cores

_CPU_INFO = Path("/proc/cpuinfo")
_CLEAR = Path("/proc/self/clear_refs")
_LOOK_SECONDS = 0.5


@dataclass
class Reading:
    """What one rank spent on one pass.

    Args:
        nanoseconds: wall time; 0 on ranks that slept.
        cpu_nanoseconds: processor time of this process, its sleep at the meeting points included.
        peak_bytes: highest memory during the pass less the level before it; -1 where it cannot be measured.
    """

    nanoseconds: int = 0
    cpu_nanoseconds: int = 0
    peak_bytes: int = -1


class Meter:
    """Measures passes on one device. A pass begins with :meth:`settle`, outside of what is timed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measures_memory = device.type == "cuda" or os.access(_CLEAR, os.W_OK)
        self._level = 0

    def settle(self) -> None:
        """Bring memory to rest: drop garbage, hand freed pages back, and start a new peak at the present level."""
        gc.collect()
        if self._device.type == "cpu":
            _trim()
        reset_peak(self._device)
        self._level = peak_bytes(self._device)

    @contextmanager
    def timed(self, reading: Reading) -> Iterator[None]:
        """Fill in wall time and peak for the block; work that the device still has to do is waited for."""
        self._synchronise()
        started = time.perf_counter_ns()
        yield
        self._synchronise()
        reading.nanoseconds = time.perf_counter_ns() - started
        if self._measures_memory:
            reading.peak_bytes = max(0, peak_bytes(self._device) - self._level)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Compute with so many CPU threads while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _trim() -> None:
    """Give freed heap back to the system, or a later pass would find its memory resident and seem to need none."""
    with contextlib.suppress(OSError, AttributeError):  # only the GNU C library has it
        ctypes.CDLL(None).malloc_trim(0)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The machine of this rank. Takes half a second, to see what other programs do."""
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpus": gpus if device.type == "cuda" else [],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": version("diffusers"),
        "busy_before": round(psutil.cpu_percent(interval=_LOOK_SECONDS) / 100, 3),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


__all__ = ["Meter", "Reading", "describe_machine", "threads_set"]
