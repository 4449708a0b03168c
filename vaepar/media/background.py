"""Writing in the background: one thread, a bounded queue, and errors that come back to the producer."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from vaepar.errors import OutputError, UsageError
from vaepar.media.sink import FrameSink

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class BackgroundSink(FrameSink):
    """Wraps a sink with one worker thread, so that encoding overlaps decoding.

    At most ``depth`` chunks wait and one is being written, as bytes: frames are quantised in :meth:`write`, on their
    own device. :meth:`write` blocks while the queue is full. An error of the worker is raised, the same exception, by
    the next :meth:`write`, :meth:`end` or :meth:`close`.

    Args:
        inner: the sink that writes. It belongs to the worker from now on.
        depth: chunks that may wait, 1 or more.
    """

    def __init__(self, inner: FrameSink, depth: int = 2) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise UsageError(f"depth of the writer's queue is {depth!r}; it is a whole number, 1 or more")
        self._inner = inner
        self._depth = depth
        self._chunks: deque[npt.NDArray[np.uint8]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._aborted = False
        self._error: BaseException | None = None
        self._paths: tuple[Path, ...] | None = None
        self._worker = threading.Thread(target=self._work, name="vaepar-writer", daemon=True)
        self._worker.start()

    def quantise(self, frames: torch.Tensor) -> npt.NDArray[np.uint8]:
        return self._inner.quantise(frames)

    def write(self, frames: torch.Tensor) -> None:
        # Room first, bytes second: a chunk that waits for room is held once, by the caller.
        self._wait_for_room()
        try:
            pixels = self.quantise(frames)
        except BaseException as exc:
            self._fail(exc)
            raise
        self._put(pixels)

    def write_pixels(self, pixels: npt.NDArray[np.uint8]) -> None:
        self._wait_for_room()
        self._put(pixels)

    def end(self) -> None:
        """Say that no more frames come. The worker goes on and finishes the output; :meth:`close` waits for it.

        Between the two, the next file may decode already.
        """
        with self._changed:
            self._check()
            self._ended = True
            self._changed.notify_all()

    def close(self) -> tuple[Path, ...]:
        if not self._ended:
            self.end()
        try:
            self._worker.join()
        except BaseException as exc:  # an interrupt while waiting
            self._fail(exc)
            raise
        if self._error is not None:
            raise self._error
        if self._paths is None:
            raise OutputError("the output was aborted; it cannot be finished")
        return self._paths

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._chunks.clear()
            self._changed.notify_all()
        if self._worker.is_alive():
            self._inner.cancel()
            self._worker.join()
        self._inner.abort()

    @property
    def is_open(self) -> bool:
        return self._paths is None and not self._aborted

    def cancel(self) -> None:
        self._inner.cancel()

    def _wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(self._has_room)
            self._check()

    def _has_room(self) -> bool:
        return len(self._chunks) < self._depth or self._error is not None or self._aborted

    def _put(self, pixels: npt.NDArray[np.uint8]) -> None:
        with self._changed:
            self._check()
            self._chunks.append(pixels)
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._aborted or self._ended:
            raise OutputError("the output is aborted or ended; it takes no more frames")

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
        self.abort()

    def _work(self) -> None:
        try:
            while (chunk := self._next()) is not None:
                self._inner.write_pixels(chunk)
                del chunk  # else it would live on through the wait for the next one
            if not self._aborted:
                self._paths = self._inner.close()
        except BaseException as exc:
            with self._changed:
                if self._error is None and not self._aborted:
                    self._error = exc
                self._chunks.clear()
                self._changed.notify_all()
            self._inner.abort()

    def _next(self) -> npt.NDArray[np.uint8] | None:
        """The next chunk; None at the end and after an abort."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._chunks) or self._ended or self._aborted)
            if self._aborted or not self._chunks:
                return None
            chunk = self._chunks.popleft()
            self._changed.notify_all()
            return chunk
