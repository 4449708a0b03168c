from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.media.helpers import names_in
from vaepar import atomic
from vaepar.errors import DiskFullError, OutputError
from vaepar.media import remove_stale_temps

NAMES = ["x.mp4", "-x.mp4", "100%d.png", "ä b.mkv", "a.b.c.png", "x", "n\new.png", "é" * 120 + ".png", "é" * 120]


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not psutil.pid_exists(process.pid)
    return process.pid


def leave_behind(path: Path, pid: int, *, folder: bool = False) -> Path:
    """The temporary output of a process ``pid`` that was killed."""
    temp = atomic.temp_path(path)
    temp = temp.with_name(temp.name.replace(f"-{os.getpid()}-", f"-{pid}-"))
    if folder:
        temp.mkdir()
        (temp / "frame_00001.png").write_bytes(b"x")
    else:
        temp.write_bytes(b"x")
    return temp


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", [False, True])
def test_what_a_dead_process_left_is_removed(tmp_path: Path, name: str, folder: bool) -> None:
    temp = leave_behind(tmp_path / name, dead_pid(), folder=folder)
    assert len(os.fsencode(temp.name)) <= 255
    assert remove_stale_temps(tmp_path, name) == (temp,)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("suffix", ["", ".png", ".mp4", ".mkv"])
def test_the_stem_stands_for_every_kind_of_output(tmp_path: Path, suffix: str) -> None:
    leave_behind(tmp_path / f"clip.1{suffix}", dead_pid())
    assert len(remove_stale_temps(tmp_path, "clip.1")) == 1


def test_what_is_not_ours_or_not_of_this_output_stays(tmp_path: Path) -> None:
    pid = dead_pid()
    others = [
        leave_behind(tmp_path / "other.mp4", pid).name,
        leave_behind(tmp_path / "clip.mp4.mp4", pid).name,
        leave_behind(tmp_path / "xclip.mp4", pid).name,
    ]
    for name in (
        "clip.mp4",
        ".clip.mp4.tmp",
        ".clip.mp4.123.tmp",
        f".clip.mp4.zzzzzzzz-{pid}-00000000.tmp",
        "clip.tmp",
    ):
        (tmp_path / name).write_bytes(b"mine")
        others.append(name)
    assert remove_stale_temps(tmp_path, "clip") == ()
    assert names_in(tmp_path) == sorted(others)


def test_a_living_process_keeps_its_file(tmp_path: Path) -> None:
    mine = atomic.create_temp_file(tmp_path / "clip.mp4")
    parents = leave_behind(tmp_path / "clip.mp4", os.getppid())
    assert remove_stale_temps(tmp_path, "clip.mp4") == ()
    assert {mine.name, parents.name} == set(names_in(tmp_path))


def test_a_number_given_out_again_does_not_keep_a_file(tmp_path: Path) -> None:
    # Last changed before this process started: some earlier process of the same number wrote it.
    temp = atomic.create_temp_file(tmp_path / "clip.mp4")
    before = psutil.Process().create_time() - 3600
    os.utime(temp, (before, before))
    assert remove_stale_temps(tmp_path, "clip.mp4") == (temp,)


def test_another_hosts_file_stays_until_it_was_silent_for_a_week(tmp_path: Path) -> None:
    temp = leave_behind(tmp_path / "clip.mp4", dead_pid())
    temp = temp.rename(temp.with_name(re.sub(r"\.[0-9a-f]{8}-", ".00000000-", temp.name)))
    assert remove_stale_temps(tmp_path, "clip.mp4") == ()
    long_ago = time.time() - 8 * 24 * 3600
    os.utime(temp, (long_ago, long_ago))
    assert remove_stale_temps(tmp_path, "clip.mp4") == (temp,)


def test_a_missing_folder_holds_nothing_stale(tmp_path: Path) -> None:
    assert remove_stale_temps(tmp_path / "none", "x") == ()
    (tmp_path / "file").touch()
    assert remove_stale_temps(tmp_path / "file", "x") == ()


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    old, new = tmp_path / "seq", atomic.create_temp_folder(tmp_path / "seq")
    old.mkdir()
    (old / "old").touch()
    (new / "new").touch()
    atomic.commit_folder(new, old)
    assert names_in(tmp_path) == ["seq"]
    assert names_in(old) == ["new"]


def test_the_old_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    old, new = tmp_path / "seq", atomic.create_temp_folder(tmp_path / "seq")
    old.mkdir()
    (old / "old").touch()

    class Vanishing(type(new)):  # type: ignore[misc]  # the concrete class of this platform's paths
        def rename(self, target: Path) -> Path:
            raise OSError(errno.EIO, "input/output error")

    with pytest.raises(OSError, match="input/output error"):
        atomic.commit_folder(Vanishing(new), old)
    assert names_in(old) == ["old"]


def test_outputs_get_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        temp = atomic.create_temp_file(tmp_path / "x.png")
    finally:
        os.umask(before)
    assert temp.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_lack_of_space_is_told_from_other_failures(number: int, tmp_path: Path) -> None:
    error = atomic.output_error(OSError(number, os.strerror(number)), tmp_path / "a\x1b.png", "write")
    assert isinstance(error, DiskFullError)
    assert "no space" in str(error)
    assert str(error).isprintable()
    other = atomic.output_error(PermissionError(errno.EACCES, "Permission denied"), tmp_path, "write")
    assert type(other) is OutputError


@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    """Renaming would replace a pipe or a link to nothing without a word, and fail on a folder after all the work."""
    path = tmp_path / "x.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nothing")
    with pytest.raises(OutputError, match="no regular file"):
        atomic.create_temp_file(path)
    assert names_in(tmp_path) == ["x.png"]


def test_a_link_to_a_file_is_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_bytes(b"old")
    (tmp_path / "x.json").symlink_to(tmp_path / "real.json")
    atomic.write_whole(tmp_path / "x.json", b"new")
    assert (tmp_path / "x.json").read_bytes() == b"new"
    assert not (tmp_path / "x.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"old"


def test_a_whole_file_or_none(tmp_path: Path) -> None:
    atomic.write_whole(tmp_path / "new" / "x.json", b"{}")
    assert names_in(tmp_path / "new") == ["x.json"]
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        atomic.write_whole(tmp_path / "file" / "x.json", b"{}")
