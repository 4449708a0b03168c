"""Where decoded frames go: one interface, and what every sink that writes a file or folder has in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from vaepar.atomic import discard, output_error
from vaepar.errors import OutputError, UsageError
from vaepar.media.formats import OutputFormat
from vaepar.media.quantise import check_frames, quantise
from vaepar.text import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt
    import torch


class FrameSink(ABC):
    """Takes frames in time order and leaves one whole output, or none.

    A context manager: an exception inside aborts; leaving it normally closes a sink that is still open.
    """

    @abstractmethod
    def quantise(self, frames: torch.Tensor) -> npt.NDArray[np.uint8]:
        """``frames`` [C, t, H, W] as the bytes [t, H, W, C] of this output, shape and finiteness checked."""

    @abstractmethod
    def write_pixels(self, pixels: npt.NDArray[np.uint8]) -> None:
        """Append frames that :meth:`quantise` made: uint8 [t, H, W, C]."""

    def write(self, frames: torch.Tensor) -> None:
        """Append frames.

        Args:
            frames: [C, t, H, W], C 3 (or 4 where the format has alpha), floating dtype, range [-1, 1], any device.

        Raises:
            UsageError: another shape or dtype than this output has.
            NonFiniteError: NaN or infinity in a pixel.
            OutputError: the output cannot be written. After any error the sink is aborted and nothing is left.
        """
        self.write_pixels(self.quantise(frames))

    @abstractmethod
    def close(self) -> tuple[Path, ...]:
        """Finish the output and give it its name.

        Returns:
            The paths that now exist: the file, or the folder of a sequence.

        Raises:
            OutputError: it could not be finished, or has another number of frames than was promised; nothing is left.
        """

    @abstractmethod
    def abort(self) -> None:
        """Stop and remove everything that was written; allowed at any time, also twice, without effect after close."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether neither :meth:`close` nor :meth:`abort` has ended it."""

    def cancel(self) -> None:  # noqa: B027  # a sink that never waits has nothing to do
        """Make a write or close that runs in another thread fail soon. Safe from any thread; :meth:`abort` follows."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self.is_open:
            self.close()


@dataclass(frozen=True, kw_only=True)
class Target:
    """What one output is: where, how, how large, how long (frames; None: as many as come), with which metadata."""

    path: Path
    format: OutputFormat
    height: int
    width: int
    frames: int | None
    metadata: Mapping[str, str] = field(default_factory=dict)
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, value in (("height", self.height), ("width", self.width), ("frames", self.frames)):
            if name == "frames" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} of {quoted(self.path)} is {value!r}; it is a whole number, 1 or more")
        for key, text in self.metadata.items():
            if not isinstance(key, str) or not isinstance(text, str):
                raise UsageError(f"metadata {key!r} of {quoted(self.path)} is {type(text).__name__}; both are str")

    @property
    def channels(self) -> tuple[int, ...]:
        """The channel counts this format can hold."""
        if self.format.kind == "mp4":
            return (3,)
        if self.format.kind == "ffv1":
            return (4,) if self.format.pix_fmt == "bgra" else (3,)
        return (3, 4)


class TargetSink(FrameSink):
    """A sink of one :class:`Target`: counts frames, checks shapes, and leaves nothing after an error.

    Subclasses write one chunk (:meth:`_append`), make the temporary output whole and give it its name
    (:meth:`_commit`), and let go of processes and handles (:meth:`_release`).
    """

    def __init__(self, target: Target, temp: Path) -> None:
        self.target = target
        self._temp = temp
        self._written = 0
        self._channels: int | None = None
        self._paths: tuple[Path, ...] | None = None
        self._error: BaseException | None = None
        self._aborted = False
        self._cancelled = threading.Event()

    def quantise(self, frames: torch.Tensor) -> npt.NDArray[np.uint8]:
        # Aborts nothing: it may run beside a write of another thread, which must end before its files can go.
        check_frames(frames, f"the frames of {quoted(self.target.path)}")
        c, t, h, w = frames.shape
        self._check_shape((t, h, w, c))
        return quantise(frames, allow_nonfinite=self.target.format.allow_nonfinite, name=quoted(self.target.path))

    def write(self, frames: torch.Tensor) -> None:
        self._check_open()
        try:
            pixels = self.quantise(frames)
        except BaseException as exc:
            self._fail(exc)
            raise
        self.write_pixels(pixels)

    def write_pixels(self, pixels: npt.NDArray[np.uint8]) -> None:
        self._check_open()
        try:
            if pixels.dtype.name != "uint8":
                raise UsageError(f"pixels of {quoted(self.target.path)} are {pixels.dtype}; they are uint8")
            self._check_shape(pixels.shape)
            self._check_count(self._written + pixels.shape[0])
            try:
                self._append(pixels)
            except OSError as exc:
                raise output_error(exc, self.target.path, "write") from exc
            self._written += pixels.shape[0]
        except BaseException as exc:
            self._fail(exc)
            raise

    def close(self) -> tuple[Path, ...]:
        if self._paths is not None:
            return self._paths
        self._check_open()
        try:
            promised = self.target.frames
            if self._written != (promised or self._written) or not self._written:
                wanted = "at least 1" if promised is None else str(promised)
                raise OutputError(f"{quoted(self.target.path)} got {self._written} frames; promised were {wanted}")
            try:
                self._commit()
            except OSError as exc:
                raise output_error(exc, self.target.path, "finish") from exc
        except BaseException as exc:
            self._fail(exc)
            raise
        self._paths = (self.target.path,)
        return self._paths

    def abort(self) -> None:
        if self._paths is not None or self._aborted:
            return
        self._aborted = True
        self.cancel()
        try:
            self._release()
        finally:
            discard(self._temp)

    @property
    def is_open(self) -> bool:
        return self._paths is None and not self._aborted

    def cancel(self) -> None:
        self._cancelled.set()

    @abstractmethod
    def _append(self, pixels: npt.NDArray[np.uint8]) -> None: ...

    @abstractmethod
    def _commit(self) -> None: ...

    def _release(self) -> None:
        """Let go of processes and handles; most sinks hold none."""

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self.abort()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._aborted or self._cancelled.is_set():
            raise OutputError(f"{quoted(self.target.path)} was aborted; it takes no more frames")
        if self._paths is not None:
            raise OutputError(f"{quoted(self.target.path)} is finished; it takes no more frames")

    def _check_count(self, count: int) -> None:
        promised = self.target.frames
        if promised is not None and count > promised:
            raise OutputError(f"{quoted(self.target.path)} got frame {promised + 1}; promised were {promised} frames")

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        """Of pixels [t, H, W, C]."""
        target = self.target
        if len(shape) != 4 or shape[1:3] != (target.height, target.width):
            raise UsageError(
                f"frames [t, H, W, C] of {quoted(target.path)} are {list(shape)}; "
                f"the output is {target.height} high and {target.width} wide and is never resized"
            )
        allowed = target.channels if self._channels is None else (self._channels,)
        if shape[3] not in allowed:
            raise UsageError(
                f"frames of {quoted(target.path)} have {shape[3]} channels; "
                f"this {target.format.kind} takes {' or '.join(map(str, allowed))}"
            )
        self._channels = shape[3]
