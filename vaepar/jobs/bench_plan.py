"""What a bench measures for one latent, in which order: pure planning, without ranks and without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vaepar.autoencoders.selection import DIRECT, Selection
from vaepar.config import VaeParallelMode
from vaepar.errors import UsageError

STOCK_UNTILED, STOCK_TILED = "stock untiled", "stock tiled"

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to decode the latent of a bench.

    Args:
        name: ``stock untiled`` or ``stock tiled`` (plain diffusers), else the mode that was asked for.
        strategy: what runs: the name again for stock, else ``direct``, ``tile`` or a spatial mode.
        reason: why that strategy.
        ranks: ranks that decode together; the others sleep.
        threads: CPU threads of each of them.
    """

    name: str
    strategy: str
    reason: str = "baseline"
    ranks: int = 1
    threads: int = 1

    @property
    def is_stock(self) -> bool:
        return self.name in (STOCK_UNTILED, STOCK_TILED)

    @property
    def mode(self) -> VaeParallelMode:
        """The mode to set on the adapter. Raises :class:`UsageError` for stock."""
        return VaeParallelMode.parse(self.name)

    @property
    def label(self) -> str:
        """A name that tells cases of one latent apart."""
        return f"{self.name}, {self.ranks} x {self.threads}"


def plan_cases(
    modes: Sequence[VaeParallelMode],
    counts: Sequence[int],
    threads: int,
    choose: Callable[[VaeParallelMode, int], Selection],
    *,
    stock_threads: Sequence[int],
) -> list[Case]:
    """The cases of one latent: stock baselines, every mode at every number of ranks, and what these are compared to.

    Every strategy is also measured on one rank, so that a speed-up over one rank is one of the same work.

    Args:
        modes, counts: modes and numbers of ranks to compare.
        threads: CPU threads of each rank.
        choose: the adapter's strategy for a mode on a number of ranks.
        stock_threads: thread counts of the stock baselines.

    Raises:
        UsageError: a mode was forced that this latent cannot have on so many ranks.
    """
    cases = [
        Case(name=name, strategy=name, threads=count)
        for count in _unique(stock_threads)
        for name in (STOCK_UNTILED, STOCK_TILED)
    ]
    shared: list[Case] = []
    for count in counts:
        for mode in modes:
            picked = choose(mode, count)
            if picked.refused is not None:
                raise UsageError(f"--modes {mode.value} on {count} rank(s) does not fit the latent: {picked.refused}")
            shared.append(
                Case(name=mode.value, strategy=picked.mode, reason=picked.reason, ranks=count, threads=threads)
            )
    alone = {case.strategy for case in shared if case.ranks == 1}
    missing = [strategy for strategy in _unique(case.strategy for case in shared) if strategy not in alone]
    single = [
        Case(
            name=VaeParallelMode.TILE.value if strategy == DIRECT else strategy,
            strategy=strategy,
            reason="to compare with",
            threads=threads,
        )
        for strategy in missing
    ]
    return [*cases, *single, *shared]


def in_order(cases: Sequence[_T], repeat: int) -> list[_T]:
    """The order of one repeat: every other one runs backwards, so that a drift of the machine hits all alike."""
    return list(cases) if repeat % 2 == 0 else list(reversed(cases))


def alone_of(case: Case, cases: Iterable[Case]) -> Case | None:
    """The one-rank case that does the same work: same strategy, same threads of a rank."""
    return next(
        (
            other
            for other in cases
            if not other.is_stock
            and other.ranks == 1
            and other.strategy == case.strategy
            and other.threads == case.threads
        ),
        None,
    )


def stock_of(case: Case, cases: Iterable[Case], threads: int) -> Case | None:
    """The stock case that makes the same picture with so many threads: tiled for tiles, untiled for the rest.

    Where it was measured with one number of threads only (on GPUs, where they do not matter), that one.
    """
    name = case.strategy if case.is_stock else STOCK_TILED if case.strategy == VaeParallelMode.TILE else STOCK_UNTILED
    found = [other for other in cases if other.name == name]
    return found[0] if len(found) == 1 else next((other for other in found if other.threads == threads), None)


def _unique(values: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(values))


__all__ = ["STOCK_TILED", "STOCK_UNTILED", "Case", "alone_of", "in_order", "plan_cases", "stock_of"]
