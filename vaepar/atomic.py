"""Names that appear only when their content is whole: temporary names, flushing, renaming, and what a killed run left.

Every output is written under ``.{name}.{host}-{pid}-{token}.tmp`` in its own folder (a rename across file systems
would not be atomic), flushed to the disk and then renamed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

import psutil

from vaepar.errors import DiskFullError, OutputError
from vaepar.text import quoted

NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Disk full, quota reached, file-size limit reached: the next file would fail alike."""

OUTPUT_SUFFIXES = ("", ".png", ".mp4", ".mkv")

_MAX_NAME_BYTES = 180  # leaves room for host, pid and token below the usual 255 bytes of one path component
_TEMP = re.compile(r"\.(?P<tag>.+)\.(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}\.tmp", re.DOTALL)
_FOREIGN_HOST_AGE_S = 7 * 24 * 3600.0  # whether another host's writer lives cannot be asked; a week of silence answers
_CLOCK_SLACK_S = 5.0
_UNSUPPORTED_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EROFS})


def output_error(exc: OSError, path: Path, action: str) -> OutputError:
    """``exc`` as an error of ours that names the file: :class:`DiskFullError` when space is the reason."""
    reason = exc.strerror or str(exc)
    if exc.errno in NO_SPACE_ERRNOS:
        return DiskFullError(f"no space left to {action} {quoted(path)}: {reason}")
    return OutputError(f"cannot {action} {quoted(path)}: {reason}")


def temp_path(path: Path) -> Path:
    """A fresh temporary name beside ``path`` that tells which process of which host writes it."""
    return path.with_name(f".{_tag(path.name)}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")


def create_temp_file(path: Path) -> Path:
    """An empty temporary file beside ``path``: proof that the folder takes new files.

    Raises:
        OutputError: the folder is missing, is no folder, or takes no files; or something of that name is there that
            is no file (a folder, a pipe, a link to nothing), which renaming would replace without a word.
    """
    if os.path.lexists(path) and not path.is_file():
        raise OutputError(f"cannot write {quoted(path)}: what is there is no regular file")
    temp = temp_path(path)
    try:
        # Not mkstemp: its mode 0600 would survive the rename, and colleagues could not read the result.
        os.close(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except OSError as exc:
        raise output_error(exc, path, "write") from exc
    return temp


def create_temp_folder(path: Path) -> Path:
    """Like :func:`create_temp_file`, for an output that is a folder."""
    temp = temp_path(path)
    try:
        temp.mkdir()
    except OSError as exc:
        raise output_error(exc, path, "write") from exc
    return temp


def sync_file(path: Path) -> None:
    """Flush a file's (or folder's) content to the disk. Some file systems cannot sync folders; that is not an error."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in _UNSUPPORTED_FSYNC:
            raise
    finally:
        os.close(fd)


def commit_file(temp: Path, path: Path) -> None:
    """Give a finished temporary file its name. Raises the operating system's OSError."""
    sync_file(temp)
    temp.replace(path)
    sync_file(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; its folder is made when missing. Raises :class:`OutputError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = create_temp_file(path)
        try:
            temp.write_bytes(data)
            commit_file(temp, path)
        finally:
            discard(temp)
    except OSError as exc:
        raise output_error(exc, path, "write") from exc


def commit_folder(temp: Path, path: Path) -> None:
    """Give a finished temporary folder its name; a folder of that name is moved away first, then deleted.

    A folder cannot be replaced in one step. Killed in between, the name is missing rather than half: the next run
    writes it again and removes what was moved away. Raises the operating system's OSError.
    """
    sync_file(temp)
    if not path.exists():
        temp.rename(path)
        sync_file(path.parent)
        return
    previous = temp_path(path)
    path.rename(previous)
    try:
        temp.rename(path)
    except BaseException:
        previous.rename(path)
        raise
    sync_file(path.parent)
    discard(previous)


def discard(temp: Path) -> None:
    """Remove a temporary file or folder if it is there; never raises an OSError, since it runs while others fail."""
    if temp.is_dir() and not temp.is_symlink():
        shutil.rmtree(temp, ignore_errors=True)
        return
    try:
        temp.unlink(missing_ok=True)
    except OSError:
        return


def remove_stale_temps(folder: Path, stem: str) -> tuple[Path, ...]:
    """Remove what killed runs left of the outputs ``stem``, ``stem.png``, ``stem.mp4`` and ``stem.mkv`` in ``folder``.

    Only names of our own pattern are touched, never those of a process that lives on this host, and those of other
    hosts only after a week without a change.

    Args:
        folder: where the output goes; may be missing.
        stem: the output's name without (or with) its suffix.

    Returns:
        The removed paths.
    """
    tags = {_tag(stem + suffix) for suffix in OUTPUT_SUFFIXES}
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return ()
    removed = []
    for entry in entries:
        match = _TEMP.fullmatch(entry.name)
        if match is None or match["tag"] not in tags or not _is_stale(entry, match["host"], int(match["pid"])):
            continue
        discard(entry)
        if not os.path.lexists(entry):
            removed.append(entry)
    return tuple(removed)


def _is_stale(temp: Path, host: str, pid: int) -> bool:
    try:
        changed = temp.lstat().st_mtime
    except OSError:
        return False
    if host != _host():
        return time.time() - changed > _FOREIGN_HOST_AGE_S
    try:
        # A process that started after the last change cannot be the writer: its number was given out again.
        return bool(psutil.Process(pid).create_time() > changed + _CLOCK_SLACK_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _tag(name: str) -> str:
    raw = os.fsencode(name)
    if len(raw) <= _MAX_NAME_BYTES:
        return name
    head = raw[: _MAX_NAME_BYTES - 41].decode("utf-8", "ignore")
    return f"{head}~{hashlib.sha1(raw, usedforsecurity=False).hexdigest()}"


def _host() -> str:
    return hashlib.sha1(socket.gethostname().encode(), usedforsecurity=False).hexdigest()[:8]
