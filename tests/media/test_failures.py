"""What goes wrong outside: binaries, disks, kills, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.media.helpers import (
    ROOT,
    fake_ffmpeg,
    ffv1,
    from_bytes,
    mp4,
    names_in,
    random_bytes,
    read_video,
    run_python,
    write,
)
from vaepar.errors import DiskFullError, OutputError
from vaepar.media import BackgroundSink, FrameSink, OutputFormat, open_sink, remove_stale_temps
from vaepar.media.ffmpeg import EncoderProcess, count_packets

# The check before the run encodes to nowhere ("-f null"); these scripts let it pass and fail in the real run.
CHECK_PASSES = 'case "$*" in *"-f null"*) exec "$REAL" "$@";; esac\n'


def open_mp4(path: Path, *, frames: int | None = None, fmt: OutputFormat | None = None) -> FrameSink:
    return open_sink(path, fmt or mp4(), height=64, width=64, frames=frames, metadata={}, overwrite=False)


def use_ffmpeg(monkeypatch: pytest.MonkeyPatch, exe: Path | str) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(exe))


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("exit 1", "code 1"),
        ("echo 'Unknown encoder libx264' >&2; exit 8", "Unknown encoder"),
        ("printf 'a\\033[31mb\\nc' >&2; exit 3", "a?[31mb | c"),
        ("kill -9 $$", "signal 9"),
    ],
)
def test_an_ffmpeg_that_fails_is_found_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, word: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    use_ffmpeg(monkeypatch, fake_ffmpeg(tmp_path / "ffmpeg", script))
    with pytest.raises(OutputError) as caught:
        open_mp4(out / "x.mp4")
    assert word in str(caught.value)
    assert str(tmp_path / "ffmpeg") in str(caught.value)
    assert str(caught.value).isprintable()
    assert names_in(out) == []


@pytest.mark.parametrize("exe", ["missing", "text", "."])
def test_an_ffmpeg_that_does_not_run_is_found_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exe: str
) -> None:
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    use_ffmpeg(monkeypatch, tmp_path / exe)
    with pytest.raises(OutputError, match="IMAGEIO_FFMPEG_EXE"):
        open_mp4(tmp_path / "x.mp4")


def test_a_repaired_ffmpeg_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ffmpeg(monkeypatch, fake_ffmpeg(tmp_path / "ffmpeg", "exit 1"))
    with pytest.raises(OutputError):
        open_mp4(tmp_path / "x.mp4")
    fake_ffmpeg(tmp_path / "ffmpeg", 'exec "$REAL" "$@"')
    write(tmp_path / "x.mp4", mp4(), random_bytes(2, 64, 64))
    assert len(read_video(tmp_path / "x.mp4")) == 2


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("exit 1", "code 1"),  # before it reads anything
        ("head -c 20000 >/dev/null; echo 'encoder broke' >&2; exit 7", "encoder broke"),  # in the middle
        ("cat >/dev/null; exit 9", "code 9"),  # after it has read everything
        ("cat >/dev/null; exit 0", "holds"),  # it says that all is well, and wrote nothing
        ('"$REAL" "$@"; exit 4', "code 4"),  # a whole file, and still an error
        ('"$REAL" "$@"; kill -9 $$', "signal 9"),
    ],
)
@pytest.mark.parametrize("frames", [1, 5, 40])
@pytest.mark.parametrize("background", [False, True])
def test_an_ffmpeg_that_fails_in_the_run_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, word: str, frames: int, background: bool
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    use_ffmpeg(monkeypatch, fake_ffmpeg(tmp_path / "ffmpeg", CHECK_PASSES + script))
    sink = open_mp4(out / "x.mp4", frames=frames)
    if background:
        sink = BackgroundSink(sink)

    def produce() -> None:
        with sink:
            for _ in range(frames):
                sink.write(from_bytes(random_bytes(1, 64, 64)))
            sink.close()

    with pytest.raises(OutputError) as caught:
        produce()
    assert word in str(caught.value) or "not written whole" in str(caught.value)
    assert "x.mp4" in str(caught.value)
    assert names_in(out) == []


def test_a_file_with_fewer_frames_than_were_given_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All looks well, but the file lost its last frame on the way.
    script = """
for last; do :; done
file="${last#file:}"
"$REAL" "$@" || exit 1
"$REAL" -v error -i "$last" -frames:v 4 -c copy -f mp4 -y "$last.cut" </dev/null && mv "$file.cut" "$file"
"""
    out = tmp_path / "out"
    out.mkdir()
    use_ffmpeg(monkeypatch, fake_ffmpeg(tmp_path / "ffmpeg", CHECK_PASSES + script))
    with pytest.raises(OutputError, match="given 5 frames and holds 4"):
        write(out / "x.mp4", mp4(), random_bytes(5, 64, 64))
    assert names_in(out) == []


@pytest.mark.parametrize("when", ["write", "close"])
def test_abort_ends_an_ffmpeg_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    hang = "exec sleep 1000" if when == "write" else "cat >/dev/null; exec sleep 1000"
    use_ffmpeg(monkeypatch, fake_ffmpeg(tmp_path / "ffmpeg", CHECK_PASSES + hang))
    sink = BackgroundSink(open_mp4(out / "x.mp4"), depth=1)
    sink.write(from_bytes(random_bytes(40, 64, 64)))  # more than a pipe holds: the worker is stuck
    if when == "close":
        sink.end()
    time.sleep(0.3)  # the worker gets into its wait; earlier or later, the result is the same
    sink.abort()
    assert names_in(out) == []


def encoders() -> list[psutil.Process]:
    """The running encoders of this process; other tests' servers are children too."""
    return [child for child in psutil.Process().children() if "ffmpeg" in child.name()]


def test_killed_processes_are_told_apart_from_full_disks(tmp_path: Path) -> None:
    sink = open_mp4(tmp_path / "x.mp4")
    for child in encoders():
        child.kill()
    with pytest.raises(OutputError, match="signal 9") as caught:
        write_much(sink)
    assert not isinstance(caught.value, DiskFullError)
    assert names_in(tmp_path) == []


def write_much(sink: FrameSink) -> None:
    for _ in range(20):
        sink.write(from_bytes(random_bytes(4, 64, 64)))


LIMITED = """
import json, os, resource, sys
from pathlib import Path
from tests.media.helpers import ffv1, mp4, random_bytes, write
path, frames = Path(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (200 * 1024, 200 * 1024))
try:
    write(path, ffv1() if path.suffix == ".mkv" else mp4(crf=0), random_bytes(frames, 200, 328))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error), error.exit_code, os.listdir(path.parent)]))
"""


@pytest.mark.parametrize("name", ["x.mp4", "x.mkv"])
@pytest.mark.parametrize("frames", [3, 30])
def test_a_file_size_limit_leaves_nothing(tmp_path: Path, name: str, frames: int) -> None:
    error, message, code, left = run_python(LIMITED, tmp_path / name, frames)
    assert error == DiskFullError.__name__
    assert "no space" in message
    assert name in message
    assert code == 3
    assert left == []


@pytest.mark.parametrize("frames", [1, 200])
def test_a_full_device_is_told_as_no_space(frames: int) -> None:
    encoder = EncoderProcess(
        ("-f", "rawvideo", "-pixel_format", "rgb24", "-video_size", "64x64", "-i", "pipe:0",
         "-c:v", "ffv1", "-f", "matroska", "-y", "file:/dev/full"), "'x.mkv'",
    )  # fmt: skip

    def feed() -> None:
        for frame in random_bytes(frames, 64, 64):
            encoder.feed(frame.data.cast("B"))
        encoder.finish()

    with pytest.raises(DiskFullError, match=r"no space left to write 'x.mkv'"):
        feed()
    encoder.dispose()


def packets_or_minus_one(file: Path) -> int:
    try:
        return count_packets(file, "it")
    except OutputError:
        return -1


@pytest.mark.parametrize("name", ["x.mp4", "x.mkv"])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9])
def test_a_cut_file_is_seen(tmp_path: Path, name: str, kept: float) -> None:
    write(tmp_path / name, ffv1() if name == "x.mkv" else mp4(), random_bytes(9, 64, 64))
    assert count_packets(tmp_path / name, "it") == 9
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(len(content) * kept)])
    assert packets_or_minus_one(tmp_path / name) < 9


WRITER = """
import sys, time
from pathlib import Path
import torch
from tests.media.helpers import ffv1, mp4, PNG, SEQUENCE
from vaepar.media import BackgroundSink, open_sink
path = Path(sys.argv[1])
fmt = {".mp4": mp4(), ".mkv": ffv1(), "": SEQUENCE}[path.suffix]
sink = BackgroundSink(open_sink(path, fmt, height=64, width=64, frames=None, metadata={}, overwrite=False))
while True:
    sink.write(torch.rand(3, 4, 64, 64))
    print("wrote", flush=True)
    time.sleep(0.01)
"""


def start_writer(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline() == b"wrote\n"
    return process


@pytest.mark.parametrize("name", ["x.mp4", "x.mkv", "x"])
def test_a_killed_writer_leaves_only_what_the_next_run_removes(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with start_writer(path) as process:
        assert remove_stale_temps(tmp_path, name) == ()  # it lives
        encoders = psutil.Process(process.pid).children()
        process.kill()
    psutil.wait_procs(encoders, timeout=30)  # ffmpeg sees the end of its input, finishes the nameless file and ends
    assert not any(encoder.is_running() for encoder in encoders)
    left = names_in(tmp_path)
    assert len(left) == 1
    assert left[0].startswith(f".{name}.")
    assert left[0].endswith(".tmp")
    assert [temp.name for temp in remove_stale_temps(tmp_path, name)] == left
    assert names_in(tmp_path) == []


def test_ctrl_c_reaches_ffmpeg_only_through_us(tmp_path: Path) -> None:
    # A terminal signals its whole foreground group; ffmpeg on its own would close a short file as if it were whole.
    sink = open_mp4(tmp_path / "x.mp4", frames=4)
    children = encoders()
    assert len(children) == 1
    assert os.getpgid(children[0].pid) != os.getpgid(0)
    assert os.getsid(children[0].pid) != os.getsid(0)
    write_and_close(sink)
    assert len(read_video(tmp_path / "x.mp4")) == 4


def write_and_close(sink: FrameSink) -> None:
    with sink:
        sink.write(from_bytes(random_bytes(4, 64, 64)))


def test_an_interrupt_while_closing_aborts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    use_ffmpeg(monkeypatch, fake_ffmpeg(tmp_path / "ffmpeg", CHECK_PASSES + "cat >/dev/null; exec sleep 1000"))
    for background in (False, True):
        sink: FrameSink = open_mp4(out / "x.mp4")
        if background:
            sink = BackgroundSink(sink)
        sink.write(from_bytes(random_bytes(4, 64, 64)))
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            sink.close()
        timer.join()
        assert names_in(out) == []
