"""ffmpeg as a reader: short questions with an answer, and one long stream of raw frames.

Files are named ``file:`` and an absolute path, and no other protocol and only the expected containers may be opened:
a playlist with a video's name must not make ffmpeg fetch addresses or read other files.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from vaepar.errors import InputError, OutputError
from vaepar.media.ffmpeg import ffmpeg_exe
from vaepar.text import quoted

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,gif"

_QUIET = ("-hide_banner", "-nostdin", "-nostats")
_SHORT_TIMEOUT_S = 60.0
_LEVEL = re.compile(r"\[(?:panic|fatal|error)\] ")
_ADDRESS = re.compile(r"^(?:\[[^\]]* @ 0x[0-9a-fA-F]+\] ?)+")
_TAIL_BYTES = 8000
_TAIL_LINES = 3
_TAIL_CHARACTERS = 400
# Said behind the reason, with the path that the message has already.
_ECHO = re.compile(r"\] Error opening (?:input|output) files?")
# What players pass over too: it spoils no pixel.
_HARMLESS = re.compile(
    r"mmco: unref short failure|co located POCs unavailable|number of reference frames .* exceeds max|"
    r"non monotonically increasing dts|Last message repeated"
)


def check_plain_file(path: Path, wanted: str) -> None:
    """Raise InputError unless ``path`` is a file with content that may be read; ``wanted`` is what should be there."""
    name = quoted(path)
    try:
        if not path.is_file():  # a named pipe would never end, nor even open
            raise InputError(f"{name} is {'no plain file' if path.exists() else 'not there'}; {wanted} is needed")
        if path.stat().st_size == 0:
            raise InputError(f"{name} is empty; {wanted} is needed")
        path.open("rb").close()
    except OSError as exc:
        raise InputError(f"{name} cannot be read: {exc.strerror or exc}") from exc


def reader_exe() -> str:
    """The binary. Raises InputError if there is none."""
    try:
        return ffmpeg_exe()
    except OutputError as exc:
        raise InputError(f"videos and 16-bit pictures cannot be read: {exc}") from exc


def input_arguments(path: Path, max_pixels: int, containers: str = CONTAINERS) -> tuple[str, ...]:
    """Everything up to and including ``-i``; other input options come before it."""
    return (
        "-protocol_whitelist", "file,pipe", "-format_whitelist", containers, "-max_pixels", str(max_pixels),
        "-i", f"file:{path.absolute()}",
    )  # fmt: skip


def ask(
    arguments: Sequence[str], name: str, *, level: str = "error", timeout: float | None = _SHORT_TIMEOUT_S
) -> Answer:
    """Run ffmpeg to its end. An interrupt (or any exception) kills and reaps it.

    Args:
        arguments: everything after the binary and the log level.
        name: what messages call the input.
        level: ffmpeg's log level.
        timeout: seconds; None for work that grows with the file.

    Raises:
        InputError: ffmpeg cannot be started or does not end in time. Its failure is in the answer.
    """
    exe = reader_exe()
    command = (exe, *_QUIET, "-loglevel", f"level+{level}", *arguments)
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{name}: ffmpeg did not answer within {timeout:g} s") from None
    except OSError as exc:
        raise InputError(
            f"ffmpeg {quoted(exe)} cannot be run to read {name}: {exc.strerror or exc}; "
            "IMAGEIO_FFMPEG_EXE names another"
        ) from exc
    return Answer(result.returncode, result.stdout, result.stderr)


class Answer:
    """How ffmpeg ended: ``code``, ``stdout``, ``log`` (its messages as text) and the ``errors`` among them."""

    def __init__(self, code: int, stdout: bytes, stderr: bytes) -> None:
        self.code = code
        self.stdout = stdout
        self.log = stderr.decode("utf-8", "replace")
        errors = [_plain(line) for line in self.log.splitlines() if _LEVEL.search(line) and not _ECHO.search(line)]
        self.harmless = tuple(dict.fromkeys(line for line in errors if _HARMLESS.search(line)))
        self.errors = tuple(line for line in errors if not _HARMLESS.search(line))

    @property
    def failed(self) -> bool:
        """Whether it ended badly or complained of the data: a file that was cut short ends with code 0."""
        return self.code != 0 or bool(self.errors)

    @property
    def reason(self) -> str:
        """Its first complaints (the later ones follow from them) in one printable line."""
        text = " | ".join(dict.fromkeys(self.errors[:_TAIL_LINES]))[:_TAIL_CHARACTERS]
        return text or f"ffmpeg ended with code {self.code} without a message"


class DecoderProcess:
    """One running ffmpeg that writes raw frames to a pipe. Memory: one frame, and the pipe.

    It has a session of its own, so a Ctrl-C in the terminal ends it by :meth:`dispose` only. Its messages go to an
    unnamed file, so they can neither block it nor grow in memory.
    """

    def __init__(self, arguments: Sequence[str], name: str, frame_bytes: int) -> None:
        self._name = name
        self._frame_bytes = frame_bytes
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process is reaped
        try:
            self._process = subprocess.Popen(
                (reader_exe(), *_QUIET, "-loglevel", "level+error", *arguments, "pipe:1"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
            )
        except BaseException as exc:
            self._stderr.close()
            if isinstance(exc, OSError):
                raise InputError(f"ffmpeg cannot be started to read {name}: {exc.strerror or exc}") from exc
            raise

    @property
    def pid(self) -> int:
        """The process, for those who must see that it ends."""
        return self._process.pid

    def frame(self, number: int, total: int) -> bytearray:
        """The next raw frame. Raises InputError, naming ``number`` of ``total``, when it does not come whole."""
        data = bytearray(self._frame_bytes)
        view, got = memoryview(data), 0
        stdout = self._process.stdout
        while got < len(data) and stdout is not None and not stdout.closed:
            n = stdout.readinto(view[got:])  # type: ignore[attr-defined]  # BufferedReader, typed as IO[bytes]
            if not n:
                break
            got += n
        if got < len(data):
            code = self._process.wait()
            raise InputError(
                f"{self._name} ends at frame {number} of {total}: {self._reason(code)}; a whole file is needed"
            )
        return data

    def dispose(self) -> None:
        """Kill and reap ffmpeg and close its pipe; allowed at any time, also twice."""
        with suppress(OSError):
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def _reason(self, code: int) -> str:
        if code < 0:
            return f"ffmpeg was ended by signal {-code} ({signal.strsignal(-code)})"
        text = b""
        with suppress(OSError, ValueError):
            text = os.pread(self._stderr.fileno(), _TAIL_BYTES, 0)
        return Answer(code, b"", text).reason


def _plain(line: str) -> str:
    """A message without its level, its addresses and whatever does not print."""
    text = _ADDRESS.sub("", _LEVEL.sub("", line)).strip()
    return "".join(c if c.isprintable() else "?" for c in text)
