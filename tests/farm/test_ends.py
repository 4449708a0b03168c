"""Runs that end before their time: killed, stopped, out of disk. What a second run then does."""

from __future__ import annotations

import itertools
import math
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.farm.conftest import decode_request, make_latents
from tests.farm.ranks import contents, decode_on, start_decode, temporary, wait_for
from vaepar.errors import RankLostError
from vaepar.jobs.report import RunReport, Silent
from vaepar.jobs.request import DecodeRequest

FILES = 6
_store = itertools.count()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_latents(tmp_path_factory.mktemp("ends") / "in", FILES, frames=4)


@pytest.fixture(scope="module")
def undisturbed(files: Path, wan: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], float]:
    """The outputs of a run that nothing happens to, and its seconds."""
    root = tmp_path_factory.mktemp("undisturbed")
    started = time.monotonic()
    decode_on(decode_request(files, wan, root / "out"), 2, root / "store")
    outputs = contents(root / "out")
    assert len(outputs) == FILES
    return outputs, time.monotonic() - started


def check_second_run(request: DecodeRequest, root: Path, want: dict[str, bytes]) -> None:
    """What is there is whole and right; a second run makes exactly what is missing, and leaves nothing else."""
    there = {name: data for name, data in contents(request.out).items() if not name.endswith(".tmp")}
    assert there.items() <= want.items()
    changed = {name: (request.out / name).stat().st_mtime_ns for name in there}
    report = decode_on(request, 2, root / f"store{next(_store)}")[0]
    assert report.exit_code == 0
    skipped = {Path(row.outputs[0]).name for row in report.rows if row.status == "skipped"}
    assert skipped == set(there)
    assert {name: (request.out / name).stat().st_mtime_ns for name in there} == changed
    assert contents(request.out) == want
    assert temporary(request.out) == []


@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_killed_at_any_moment(
    size: int, tmp_path: Path, files: Path, wan: Path, undisturbed: tuple[dict[str, bytes], float]
) -> None:
    """Ten random moments in all: the other ranks end by themselves, and their files do not suffer."""
    want, seconds = undisturbed
    random_ = random.Random(size)
    for trial in range(5):
        request = decode_request(files, wan, tmp_path / f"out{trial}", vae_parallel_size=size)
        victim = random_.randrange(2)
        ranks = start_decode(request, 2, tmp_path / f"store{next(_store)}")
        time.sleep(random_.uniform(0, seconds))
        ranks.kill(victim)
        results = ranks.wait()
        # The victim may have ended before; the other one has then nothing to complain of.
        assert results[victim] is None or isinstance(results[victim], RunReport)
        assert isinstance(results[1 - victim], RankLostError | RunReport)
        assert len(temporary(request.out)) <= 2  # of the killed rank: its file, and the one that it was finishing
        check_second_run(request, tmp_path, want)


@pytest.mark.processes
@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_sigterm_at_any_moment(
    grace: float, tmp_path: Path, files: Path, wan: Path, undisturbed: tuple[dict[str, bytes], float]
) -> None:
    """Ten random moments in all, to one rank or to both: both stop, nothing half-made is left, and both say 75."""
    want, seconds = undisturbed
    random_ = random.Random(round(grace))
    for trial in range(5):
        size = random_.choice([1, 2])
        request = decode_request(files, wan, tmp_path / f"out{trial}", vae_parallel_size=size, grace=grace)
        flag = tmp_path / f"begun{trial}"
        ranks = start_decode(request, 2, tmp_path / f"store{next(_store)}", prepare=partial(touch, flag))
        wait_for(flag.exists, "the ranks")
        time.sleep(random_.uniform(0, seconds / 2))
        ranks.terminate(*random_.choice([(0,), (1,), (0, 1)]))
        results = ranks.wait()
        for report in results:
            assert isinstance(report, RunReport)
            done = sum(row.status == "ok" for row in report.rows)
            assert report.exit_code == (75 if report.interrupted else 0)
            assert report.interrupted or done == FILES
            assert all(row.status in ("ok", "dropped", "not tried") for row in report.rows)
        assert [row.status for row in results[0].rows] == [row.status for row in results[1].rows]
        assert temporary(request.out) == []
        check_second_run(request, tmp_path, want)


def touch(path: Path) -> None:
    """Before and behind the run's own handlers a signal is passed over: it never kills the rank."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    path.touch()


class _StopsItself(Silent):
    """Sends this process a signal when the ``after``-th piece of the first file has come."""

    def __init__(self, after: int) -> None:
        self._left = after
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advanced(self, frames: int) -> None:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("grace", "done"), [(0.0, 0), (600.0, 1)])
def test_the_grace_decides_between_finishing_and_dropping(
    grace: float, done: int, tmp_path: Path, files: Path, wan: Path
) -> None:
    from vaepar.jobs.decode import run_decode
    from vaepar.parallel.group import SoloGroup

    request = decode_request(files, wan, tmp_path / "out", grace=grace)
    before = signal.getsignal(signal.SIGTERM)
    watching = _StopsItself(after=1)
    report = run_decode(request, SoloGroup(), watching)
    assert report.interrupted
    assert report.exit_code == 75
    assert [row.status for row in report.rows] == ["ok" if done else "dropped"] + ["not tried"] * (FILES - 1)
    assert any(note.startswith(f"SIGTERM: the file under way has {grace:g} s") for note in watching.notes)
    assert any("the same command again" in note for note in watching.notes)
    assert len(contents(tmp_path / "out")) == done
    assert signal.getsignal(signal.SIGTERM) is before


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[int], None]]:
    """A file system of so many bytes on ``folder``; gives a function that makes it larger."""

    def mount(*options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], check=True, capture_output=True)

    folder.mkdir(parents=True)
    try:
        mount("-o", f"size={size}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small file system needs more rights than there are here: {error}")
    try:
        yield lambda larger: mount("-o", f"remount,size={larger}")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 2])
def test_a_disk_that_is_really_full(
    size: int, tmp_path: Path, files: Path, wan: Path, undisturbed: tuple[dict[str, bytes], float]
) -> None:
    """ENOSPC from a file system: what was whole stays, nothing half-written does, and a second run makes the rest."""
    want, _ = undisturbed
    pages = [math.ceil(len(data) / 4096) * 4096 for data in want.values()]
    half = sum(pages) // 2
    with small_disk(tmp_path / "out", half) as enlarge:
        request = decode_request(files, wan, tmp_path / "out", vae_parallel_size=size)
        for report in start_decode(request, 2, tmp_path / "store").wait():
            assert isinstance(report, RunReport)
            assert report.exit_code == 3
            failed = [row for row in report.rows if row.status == "failed"]
            assert failed
            assert all("no space" in (row.error or "") and (row.error or "").isprintable() for row in failed)
            assert {row.status for row in report.rows} <= {"ok", "failed", "not tried"}
        assert temporary(request.out) == []
        assert contents(request.out).items() < want.items()
        enlarge(4 * half)
        check_second_run(request, tmp_path, want)


def limit_file_size(size: int) -> None:
    """Writes beyond ``size`` bytes fail as on a full disk; the disk's own error is EFBIG then."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.processes
@pytest.mark.parametrize("format_", ["mp4", "png-sequence"])
def test_a_full_disk(format_: str, tmp_path: Path, wan: Path) -> None:
    """The first file that does not fit fails; the next ones are not tried; nothing half-written keeps a name."""
    folder = make_latents(tmp_path / "in", 4, frames=1, height=4, width=4)
    make_latents(tmp_path / "large", 1, frames=6, height=24, width=24)
    (tmp_path / "large" / "shot000.safetensors").rename(folder / "shot001b.safetensors")
    whole = decode_request(folder, wan, tmp_path / "whole", format_=format_)
    decode_on(whole, 2, tmp_path / "store")
    want = contents(tmp_path / "whole")
    largest = max(len(data) for name, data in want.items() if "shot001b" in name)
    small = max(len(data) for name, data in want.items() if "shot001b" not in name)
    assert small < largest - 1
    request = decode_request(folder, wan, tmp_path / "out", format_=format_, vae_parallel_size=2)
    ranks = start_decode(request, 2, tmp_path / "store2", prepare=partial(limit_file_size, largest - 1))
    results = ranks.wait()
    for report in results:
        assert isinstance(report, RunReport)
        statuses = [row.status for row in report.rows]
        assert statuses[:3] == ["ok", "ok", "failed"]
        # Writers lag behind: one more file may have been begun before the disk was known to be full, but no second.
        assert statuses[4] == "not tried"
        assert "no space" in (report.rows[2].error or "")
        assert report.exit_code == 3
    assert temporary(request.out) == []
    assert contents(request.out).items() <= want.items()
    assert not any("shot001b" in name for name in contents(request.out))
    assert decode_on(request, 2, tmp_path / "store3")[0].exit_code == 0
    assert contents(request.out) == want
