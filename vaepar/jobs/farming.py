"""How a run shares its ranks among files, and how it ends when it is asked to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vaepar.errors import UsageError
from vaepar.latents.text import shown

AUTO = "auto"

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
        shard: (i, n): only every n-th of the sorted inputs, beginning with the i-th (from 0).
        dry_run: plan for so many ranks and do nothing; None for a real run.
    """

    vae_parallel_size: int | str = AUTO
    across_nodes: bool = False
    grace: float = DEFAULT_GRACE_SECONDS
    retreat: bool = True
    shard: tuple[int, int] | None = None
    dry_run: int | None = None

    def __post_init__(self) -> None:
        size = self.vae_parallel_size
        if size != AUTO and (isinstance(size, bool | str) or size < 1):
            raise UsageError(f"--vae-parallel-size is {size}; it is a whole number of ranks, 1 or more, or 'auto'")
        if not math.isfinite(self.grace) or self.grace < 0:
            raise UsageError(f"--grace is {self.grace}; it is a number of seconds, 0 or more")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            index, count = self.shard
            raise UsageError(f"--shard is {index}/{count}; it is i/n with i from 0 to n - 1")


def parse_parallel_size(text: str) -> int | str:
    """``auto`` or a number. Raises :class:`UsageError`."""
    if text == AUTO:
        return AUTO
    if not text.isdecimal():
        raise UsageError(f"--vae-parallel-size is '{shown(text)}'; it is a whole number of ranks, 1 or more, or 'auto'")
    return int(text)


def parse_shard(text: str) -> tuple[int, int]:
    """``i/n`` as two numbers. Raises :class:`UsageError`."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal()):
        raise UsageError(f"--shard is '{shown(text)}'; it is i/n with i from 0 to n - 1")
    return int(index), int(count)
