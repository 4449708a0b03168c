"""VAE groups: which ranks share a latent, while other groups work on other files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vaepar.errors import UsageError
from vaepar.jobs.farming import AUTO, Farming
from vaepar.launch import World
from vaepar.parallel.group import RankGroup, SoloGroup
from vaepar.parallel.torch_group import TorchGroup


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """A mesh of replicas x VAE ranks.

    Args:
        size: ranks of one VAE group.
        count: number of groups; ``size * count`` is the size of the world.
        reason: why this size, for the plan.
    """

    size: int
    count: int
    reason: str

    def of(self, rank: int) -> int:
        """The group of a rank of the world: contiguous ranks share a group."""
        return rank // self.size

    def ranks(self, group: int) -> tuple[int, ...]:
        return tuple(range(group * self.size, (group + 1) * self.size))


def local_size(world: RankGroup) -> int:
    """Ranks of this machine; all of them where no launcher says otherwise."""
    launched = World.from_environment()
    return launched.local_size if launched.launched and launched.size == world.size else world.size


def allowed_sizes(world: int, local: int, across_nodes: bool) -> tuple[int, ...]:
    """The sizes that VAE groups can have, ascending: divisors of the ranks of a machine, or of all ranks."""
    # Machines with unequal numbers of ranks leave only groups that fit each of them.
    extent = world if across_nodes else math.gcd(world, local)
    return tuple(size for size in range(1, extent + 1) if extent % size == 0)


def check_size(farming: Farming, world: int, local: int) -> None:
    """Raise :class:`UsageError` when the asked size does not divide the ranks, or would cross machines unasked."""
    size = farming.vae_parallel_size
    if size == AUTO:
        return
    sizes = allowed_sizes(world, local, farming.across_nodes)
    if size in sizes:
        return
    if int(size) > world:
        raise UsageError(f"--vae-parallel-size {size} is more than the {world} rank(s) there are; --ranks starts more")
    hint = "" if farming.across_nodes or local == world else " (--across-nodes lets groups cross machines)"
    raise UsageError(
        f"--vae-parallel-size {size} does not divide the {world} rank(s), {local} of them on a machine; "
        f"it is one of {', '.join(map(str, sizes))}{hint}"
    )


def choose_grouping(
    farming: Farming, world: int, local: int, files: int, fits: Callable[[int], bool], shares: bool = False
) -> Grouping:
    """The mesh for a run.

    Replicas come first: they divide the work of a folder exactly, while ranks that share a latent also exchange. So
    ``auto`` takes the smallest group that fits the memory and leaves no group without a file.

    Args:
        farming: what was asked.
        world, local: ranks in all, and of one machine.
        files: files that are to be worked on.
        fits: whether the largest file fits the memory of each rank when so many ranks share it.
        shares: whether a mode was asked for that only makes sense when ranks share a latent.
    """
    if farming.vae_parallel_size != AUTO:
        check_size(farming, world, local)
        size = int(farming.vae_parallel_size)
        return Grouping(size=size, count=world // size, reason="asked for")
    sizes = allowed_sizes(world, local, farming.across_nodes)
    if shares:
        whose = "all ranks" if sizes[-1] == world else "the ranks of a machine"
        return Grouping(size=sizes[-1], count=world // sizes[-1], reason=f"the mode shares each latent among {whose}")
    enough = [size for size in sizes if world // size <= max(files, 1)] or [sizes[-1]]
    fitting = [size for size in enough if fits(size)]
    size = fitting[0] if fitting else enough[-1]
    return Grouping(size=size, count=world // size, reason=_reason(size, enough, bool(fitting), files, world))


def _reason(size: int, enough: Sequence[int], fitting: bool, files: int, world: int) -> str:
    if world == 1:
        return "one rank"
    if not fitting:
        return "the estimate says that no group has enough memory; the largest one is tried"
    if size > enough[0]:
        return f"smaller groups would not fit the memory, {size} ranks do"
    if size > 1:
        return f"{files} file(s) for {world} ranks"
    return f"{files} files keep every rank busy"


def join_group(world: RankGroup, grouping: Grouping) -> RankGroup:
    """This rank's VAE group. All ranks of the world call it with the same grouping.

    Raises:
        UsageError: for several groups in a world that has no store to share files by.
    """
    if grouping.count == 1:
        return world
    if not isinstance(world, TorchGroup):
        raise UsageError(f"{grouping.count} VAE groups need ranks that are processes of their own")
    if grouping.size == 1:
        return SoloGroup(world.device)
    return TorchGroup(grouping.ranks(grouping.of(world.rank)), world.device)
