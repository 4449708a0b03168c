"""One outcome for all ranks: a stage that fails on one rank fails on every rank, with the same class of error.

A failing rank raises the alarm at once, which wakes peers that wait for its tensors; then all ranks meet on the
control plane and compare outcomes. Nobody waits for a timeout, and the group is usable for the next request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vaepar import errors
from vaepar.errors import DeviceMemoryError, PeerFailedError, RankMismatchError, VaeparError
from vaepar.parallel.group import RankGroup

_OK, _WOKEN, _OUT_OF_MEMORY, _FAILED = range(4)

_OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "defaultcpuallocator",
    "not enough memory",
    "cannot allocate memory",
    "could not create a primitive",  # oneDNN, when it has no memory for a convolution's work space
    "could not create a memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OUT_OF_MEMORY_WORDS)


@contextmanager
def agreed(group: RankGroup, stage: str) -> Iterator[None]:
    """Run a block that all ranks of ``group`` enter; all of them leave it normally, or all of them raise.

    When any rank failed for another reason than memory, all ranks raise that error's class
    (:class:`~vaepar.errors.StageFailedError` for foreign exceptions); when ranks only ran out of memory, all raise
    :class:`DeviceMemoryError`. Blocks nest: an inner block only raises the alarm, and the outermost one compares
    outcomes, so that the ranks always meet at the same place, wherever in the block one of them failed.

    Args:
        group: the ranks that run the block.
        stage: what is being done, for the message ("decode", "read").
    """
    depth, request = group.stage_depth, group.requests
    error: BaseException | None = None
    group.stage_depth = depth + 1
    try:
        yield
    except BaseException as caught:
        error = caught
    if group.requests != request:
        # A stream that was dropped inside a block that has ended since: its failure is settled already.
        if error is not None:
            raise error
        return
    group.stage_depth = depth
    if error is not None:
        group.raise_alarm()
        if depth:
            raise error
    if depth == 0:
        group.requests += 1
        _settle(group, stage, error)


def agree_on(group: RankGroup, what: str, fingerprint: str) -> None:
    """Raise :class:`RankMismatchError` unless this rank brings the same ``fingerprint`` as rank 0."""
    first = group.broadcast_text(fingerprint) if group.size > 1 else fingerprint
    if fingerprint != first:
        raise RankMismatchError(
            f"the ranks hold different {what}: rank 0 has {first}, rank {group.rank} has {fingerprint}"
        )


def _settle(group: RankGroup, stage: str, error: BaseException | None) -> None:
    # After a lost rank this raises RankLostError on every rank that is left, which is the agreement there can be.
    outcomes = group.gather_values(_outcome(error)) if group.size > 1 else [_outcome(error)]
    worst = max(outcomes)
    if worst == _OK:
        return
    if group.size > 1:
        group.renew()
    source = outcomes.index(worst)
    told = json.loads(group.broadcast_text(_describe(stage, error), source))
    if group.rank == source and error is not None and not isinstance(error, Exception):
        raise error  # KeyboardInterrupt and its like keep their meaning on the rank that got them
    raise _rebuild(told, source, group, error)


def _outcome(error: BaseException | None) -> int:
    if error is None:
        return _OK
    if isinstance(error, PeerFailedError):
        return _WOKEN
    return _OUT_OF_MEMORY if is_out_of_memory(error) else _FAILED


def _describe(stage: str, error: BaseException | None) -> str:
    words = " ".join(str(error).split()) if error is not None else ""
    return json.dumps({"stage": stage, "type": type(error).__name__, "words": words[:2000]})


def _memory_words(words: str) -> str:
    """What PyTorch says of a failed allocation on a CPU, without its line of source code; other words as they are."""
    asked = re.search(r"tried to allocate (\d+) bytes", words)
    if asked is None:
        return words or "no details"
    return f"{int(asked[1]) / 2**30:.4g} GiB were asked for at once"


def _rebuild(told: dict[str, str], source: int, group: RankGroup, error: BaseException | None) -> VaeparError:
    """The exception to raise here for what rank ``source`` told. Our own classes are raised again as themselves."""
    where = f"rank {source}: " if group.size > 1 else ""
    kind = getattr(errors, told["type"], None)
    if isinstance(error, VaeparError) and group.rank == source:
        return error
    if isinstance(kind, type) and issubclass(kind, VaeparError):
        return kind(where + told["words"])
    fake = RuntimeError(told["words"])
    if told["type"] in ("MemoryError", "OutOfMemoryError") or is_out_of_memory(fake):
        # No cause is attached: its traceback would keep alive the tensors that filled the memory.
        return DeviceMemoryError(f"{where}out of memory in {told['stage']}: {_memory_words(told['words'])}")
    failure = errors.StageFailedError(f"{where}{told['stage']} failed: {told['type']}: {told['words']}")
    if group.rank == source:
        failure.__cause__ = error
    return failure
