"""The exceptions of vaepar, one class for each party who must act, each with the exit code of the command line.

Messages are one line: what was asked, what was found, what is allowed. Everything may import this module; it
imports nothing of ours.
"""

from __future__ import annotations

from typing import ClassVar


class VaeparError(Exception):
    """Base of every error that vaepar raises on purpose. Exit code 1: unexpected."""

    exit_code: ClassVar[int] = 1


class UsageError(VaeparError):
    """The caller asked for something that cannot be: a flag, a mode, a combination. Exit code 2."""

    exit_code: ClassVar[int] = 2


class UnsupportedModeError(UsageError):
    """A parallel mode or operation was forced that the VAE family does not have. The message lists what it has."""


class OutputError(VaeparError):
    """A result could not be written: no space, no permission, an encoder that failed. Exit code 3."""

    exit_code: ClassVar[int] = 3


class DiskFullError(OutputError):
    """No space is left (or a quota or file-size limit is reached); later files would fail alike."""


class NonFiniteError(OutputError):
    """The decoded pixels hold NaN or infinity; writing them would hide a broken decode."""


class InputError(VaeparError):
    """An input file cannot be read or its meaning is not known. Exit code 4."""

    exit_code: ClassVar[int] = 4


class AmbiguousInputError(InputError):
    """A file is readable, but what it means must be said (state, layout, size); the message names the flag."""


class ModelError(VaeparError):
    """A model cannot be found, read, or used completely. Exit code 5."""

    exit_code: ClassVar[int] = 5


class DeviceMemoryError(VaeparError, MemoryError):
    """A device or the host ran out of memory. Exit code 6."""

    exit_code: ClassVar[int] = 6


class RankError(VaeparError):
    """The ranks cannot go on together."""


class PeerFailedError(RankError):
    """Another rank failed; the message is that rank's. Raised on the ranks that were well."""


class RankMismatchError(RankError):
    """The ranks hold different requests (shape, dtype, tiles): going on would mix pictures."""


class StageFailedError(RankError):
    """A rank failed with an exception that is not one of ours; every rank raises this class with that rank's words."""


class RankLostError(RankError):
    """A rank has vanished: it was killed, or its connection broke."""


class InterruptedRunError(VaeparError):
    """The run was asked to stop (SIGTERM, SIGINT) and stopped cleanly. Exit code 75: safe to run again."""

    exit_code: ClassVar[int] = 75
