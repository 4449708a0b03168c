"""How a run shares its ranks among files, and how it ends when it is asked to."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from vaepar.errors import UsageError
from vaepar.text import shown

AUTO = "auto"

Shard = tuple[int, int, int]
_SHARD_FORM = "it is i/n, or i-j/n for several parts, with numbers from 0 to n - 1"

# Launchers and farms give 30 seconds from SIGTERM to SIGKILL (torchrun, Slurm's KillWait, Kubernetes); ten leave time
# to finish the writers and to report.
DEFAULT_GRACE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Farming:
    """Settings of a run over many files.

    Args:
        vae_parallel_size: ranks that share one latent (a VAE group); the other ranks take other files. ``"auto"``
            lets the plan decide from the files and the memory.
        across_nodes: let a VAE group have ranks of several machines.
        grace: seconds after a stop signal in which the current file may still be finished; then it is dropped.
        retreat: try a file that does not fit the memory again with less, instead of failing it at once.
        shard: (i, j, n): of the sorted inputs, cut into n parts, only the parts i to j, counted from 0.
        dry_run: plan for so many ranks and do nothing; None for a real run.
        dry_device: ``cpu`` or ``cuda``: for which the plan estimates memory; it need not be here.
    """

    vae_parallel_size: int | str = AUTO
    across_nodes: bool = False
    grace: float = DEFAULT_GRACE_SECONDS
    retreat: bool = True
    shard: Shard | None = None
    dry_run: int | None = None
    dry_device: str = "cpu"

    def __post_init__(self) -> None:
        size = self.vae_parallel_size
        if size != AUTO and (isinstance(size, bool | str) or size < 1):
            raise UsageError(f"--vae-parallel-size is {size}; it is a whole number of ranks, 1 or more, or 'auto'")
        if not math.isfinite(self.grace) or self.grace < 0:
            raise UsageError(f"--grace is {self.grace}; it is a number of seconds, 0 or more")
        if self.shard is not None and not 0 <= self.shard[0] <= self.shard[1] < self.shard[2]:
            first, last, count = self.shard
            asked = f"{first}/{count}" if first == last else f"{first}-{last}/{count}"
            raise UsageError(f"--shard is {asked}; {_SHARD_FORM}")


def parse_parallel_size(text: str) -> int | str:
    """``auto`` or a number. Raises :class:`UsageError`."""
    if text == AUTO:
        return AUTO
    if not text.isdecimal():
        raise UsageError(f"--vae-parallel-size is '{shown(text)}'; it is a whole number of ranks, 1 or more, or 'auto'")
    return int(text)


def parse_shard(text: str) -> Shard:
    """``i/n`` or ``i-j/n`` as three numbers. Raises :class:`UsageError`."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?/(\d{1,9})", text, re.ASCII)
    if found is None:
        raise UsageError(f"--shard is '{shown(text)}'; {_SHARD_FORM}")
    first, last, count = found.groups()
    return int(first), int(last or first), int(count)
