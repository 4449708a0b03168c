"""The ffmpeg binary: found, proven to encode before anything is decoded, fed through a pipe, and never believed.

An own pipe rather than ``imageio_ffmpeg.write_frames``: that one drops ffmpeg's exit code and messages, resizes to
multiples of 16 unless told otherwise, and rounds the frame rate.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO

from vaepar.errors import DiskFullError, OutputError
from vaepar.text import quoted

BASE_ARGUMENTS = ("-hide_banner", "-nostdin", "-loglevel", "error", "-nostats")

_PROBE_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0
_NO_SPACE = re.compile(rb"No space left on device|File too large|Disk quota exceeded", re.IGNORECASE)
_ADDRESS = re.compile(r" @ 0x[0-9a-fA-F]+")
_TAIL_BYTES = 4000
_TAIL_LINES = 4
_TAIL_CHARACTERS = 600


def ffmpeg_exe() -> str:
    """The binary of imageio-ffmpeg, or the one that IMAGEIO_FFMPEG_EXE names. Raises OutputError if there is none."""
    import imageio_ffmpeg

    try:
        exe: str = imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as exc:
        raise OutputError(f"no ffmpeg was found; install imageio-ffmpeg or set IMAGEIO_FFMPEG_EXE: {exc}") from exc
    return exe


def check_encodes(arguments: tuple[str, ...], frame_bytes: int, what: str) -> None:
    """Encode one black frame to nowhere with the very arguments of the real run.

    Passes silently; a passed check is remembered for that binary and those arguments.

    Args:
        arguments: input, filter and encoder arguments, input from ``pipe:0``, without an output.
        frame_bytes: bytes of one raw frame.
        what: what the message calls this encoding, as in ``libx264 at 64x64``.

    Raises:
        OutputError: the binary does not run, lacks the encoder, or refuses these arguments.
    """
    exe = ffmpeg_exe()
    try:
        status = Path(exe).stat()
        stamp = (status.st_mtime_ns, status.st_size)
    except OSError:
        stamp = (0, 0)  # a bare name that the PATH resolves
    _check_encodes(exe, stamp, arguments, frame_bytes, what)


@lru_cache(maxsize=64)
def _check_encodes(exe: str, stamp: tuple[int, int], arguments: tuple[str, ...], frame_bytes: int, what: str) -> None:
    result = _run(exe, (*BASE_ARGUMENTS, *arguments, "-f", "null", "-"), what, stdin=bytes(frame_bytes))
    if result.returncode != 0:
        raise OutputError(f"ffmpeg {quoted(exe)} cannot encode {what}: {_describe(result.returncode, result.stderr)}")


def count_packets(file: Path, what: str) -> int:
    """How many video packets a finished file holds, found by walking through it without decoding.

    Raises OutputError when the file cannot be walked through to its end. A cut inside the very last packet can go
    unseen with some codecs; ffmpeg's exit code, which is checked before, covers that.
    """
    arguments = (
        *BASE_ARGUMENTS, "-i", f"file:{file}", "-map", "0:v:0", "-c", "copy", "-progress", "pipe:1", "-f", "null", "-",
    )  # fmt: skip
    result = _run(ffmpeg_exe(), arguments, what)
    counts = re.findall(rb"^frame=\s*(\d+)\s*$", result.stdout, re.MULTILINE)
    # A file that was cut short makes the demuxer complain and still end with code 0: its messages count too.
    if result.returncode != 0 or result.stderr.strip() or not counts:
        raise OutputError(f"{what} was not written whole: {_describe(result.returncode, result.stderr)}")
    return int(counts[-1])


class EncoderProcess:
    """One running ffmpeg that reads raw frames from its standard input.

    It has a session of its own: a Ctrl-C in the terminal does not reach it, else it would close the file as if it
    were whole. Its messages go to an unnamed file, so they can neither block it nor grow in memory.

    Args:
        arguments: everything after the binary and the base arguments.
        what: what messages call the output.
        metadata: content of an ffmetadata file, read from the descriptor that ``{metadata}`` in an argument stands for.
    """

    def __init__(self, arguments: tuple[str, ...], what: str, metadata: bytes | None = None) -> None:
        self._what = what
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process is reaped
        metadata_file: IO[bytes] | None = None
        try:
            keep: tuple[int, ...] = ()
            if metadata is not None:
                metadata_file = tempfile.TemporaryFile()  # noqa: SIM115
                metadata_file.write(metadata)
                metadata_file.seek(0)
                keep = (metadata_file.fileno(),)
                arguments = tuple(a.replace("{metadata}", f"pipe:{keep[0]}") for a in arguments)
            self._process = subprocess.Popen(
                (ffmpeg_exe(), *BASE_ARGUMENTS, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
                pass_fds=keep,
            )
        except OSError as exc:
            self._stderr.close()
            raise OutputError(f"ffmpeg for {what} cannot be started: {exc.strerror or exc}") from exc
        finally:
            if metadata_file is not None:
                metadata_file.close()

    def feed(self, data: memoryview) -> None:
        """Hand over raw frames; blocks while ffmpeg is busy. Raises OutputError when ffmpeg has ended."""
        stdin = self._process.stdin
        try:
            if stdin is None or stdin.closed:
                raise BrokenPipeError
            stdin.write(data)
            stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._failure() from None

    def finish(self) -> None:
        """End the input, wait for ffmpeg, and raise unless it ended well."""
        stdin = self._process.stdin
        if stdin is not None:
            with suppress(BrokenPipeError, ValueError):
                stdin.close()
        if self._process.wait() != 0:
            raise self._failure()
        self._stderr.close()

    def kill(self) -> None:
        """End ffmpeg at once, from any thread."""
        with suppress(OSError):
            self._process.kill()

    def dispose(self) -> None:
        """Kill and reap ffmpeg and close its pipe; allowed at any time, also twice."""
        self.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.close()
        self._stderr.close()

    def _failure(self) -> OutputError:
        """ffmpeg's end as an error. It has closed its input, so it is about to end; one that does not is killed."""
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        text = b""
        with suppress(OSError, ValueError):
            size = os.fstat(self._stderr.fileno()).st_size
            text = os.pread(self._stderr.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        reason = _describe(code, text)
        if code == -signal.SIGXFSZ or _NO_SPACE.search(text):
            return DiskFullError(f"no space left to write {self._what}: {reason}")
        return OutputError(f"{self._what} could not be encoded: {reason}")


def _run(exe: str, arguments: tuple[str, ...], what: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            (exe, *arguments), input=stdin, capture_output=True, start_new_session=True, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise OutputError(f"ffmpeg {quoted(exe)} did not answer within {_PROBE_TIMEOUT_S:g} s for {what}") from None
    except OSError as exc:
        raise OutputError(
            f"ffmpeg {quoted(exe)} cannot be run: {exc.strerror or exc}; IMAGEIO_FFMPEG_EXE names another"
        ) from exc


def _describe(code: int, stderr: bytes) -> str:
    """Exit code and the end of the messages, in one line without control characters."""
    lines = [_ADDRESS.sub("", line).strip() for line in stderr.decode("utf-8", "replace").splitlines()]
    tail = " | ".join([line for line in lines if line][-_TAIL_LINES:])[-_TAIL_CHARACTERS:]
    clean = "".join(character if character.isprintable() else "?" for character in tail)
    ended = (
        f"ffmpeg was ended by signal {-code} ({signal.strsignal(-code)})"
        if code < 0
        else f"ffmpeg ended with code {code}"
    )
    return f"{ended}: {clean}" if clean else f"{ended} without a message"
