from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.media.helpers import (
    EVERY_FORMAT,
    SEQUENCE,
    Pixels,
    format_id,
    from_bytes,
    mp4,
    names_in,
    random_bytes,
    read_video,
    run_python,
)
from vaepar.errors import NonFiniteError, OutputError, UsageError
from vaepar.media import BackgroundSink, FrameSink, OutputFormat, is_complete, open_sink, quantise

WAIT_S = 60.0


class GatedSink(FrameSink):
    """Writes one chunk whenever the test lets it, and counts the chunks that are alive as bytes."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.gate = threading.Semaphore(0)
        self.changed = threading.Condition()
        self.made = 0
        self.written: list[Pixels] = []
        self.writer_threads: set[str] = set()
        self.ends: list[str] = []
        self.fail_at = fail_at

    def quantise(self, frames: torch.Tensor) -> Pixels:
        with self.changed:
            self.made += 1
            self.changed.notify_all()
        return quantise(frames)

    def write_pixels(self, pixels: Pixels) -> None:
        if not self.gate.acquire(timeout=WAIT_S):
            raise TimeoutError
        self.writer_threads.add(threading.current_thread().name)
        if len(self.written) == self.fail_at:
            raise OutputError("the writer broke")
        self.written.append(pixels)

    def close(self) -> tuple[Path, ...]:
        self.ends.append("close")
        return (Path("done"),)

    def abort(self) -> None:
        self.ends.append("abort")

    @property
    def is_open(self) -> bool:
        return not self.ends

    def cancel(self) -> None:
        self.ends.append("cancel")
        self.gate.release(1000)

    def wait_made(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.made >= count, WAIT_S)


def produce(sink: FrameSink, count: int) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for i in range(count):
                sink.write(torch.full((3, 1, 2, 2), i / 127.5 - 1))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_queue_is_bounded_and_keeps_the_order(depth: int) -> None:
    inner = GatedSink()
    sink = BackgroundSink(inner, depth=depth)
    thread, errors = produce(sink, 12)
    for written in range(12):
        # The chunk in the writer's hands and those in the queue; the producer may not make another.
        alive = min(12, written + depth + 1)
        inner.wait_made(alive)
        thread.join(0.05)  # time in which an unbounded queue would be filled
        assert inner.made == alive
        inner.gate.release()
    thread.join(WAIT_S)
    assert sink.close() == (Path("done"),)
    assert not errors
    assert [int(pixels[0, 0, 0, 0]) for pixels in inner.written] == list(range(12))
    assert inner.writer_threads == {"vaepar-writer"}
    assert inner.ends == ["close"]


def test_an_error_of_the_worker_wakes_a_producer_that_waits(tmp_path: Path) -> None:
    inner = GatedSink(fail_at=1)
    sink = BackgroundSink(inner, depth=1)
    thread, errors = produce(sink, 100)
    inner.gate.release(2)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert [str(error) for error in errors] == ["the writer broke"]
    for call in (sink.close, sink.end, lambda: sink.write(torch.zeros(3, 1, 2, 2))):
        with pytest.raises(OutputError, match="the writer broke") as caught:
            call()
        assert caught.value is errors[0]
    assert inner.ends == ["abort"]
    sink.abort()


def test_an_error_in_the_last_chunk_surfaces_at_close() -> None:
    inner = GatedSink(fail_at=0)
    sink = BackgroundSink(inner)
    sink.write(torch.zeros(3, 1, 2, 2))
    inner.gate.release()
    with pytest.raises(OutputError, match="the writer broke"):
        sink.close()
    assert inner.ends == ["abort"]


def test_leaving_a_with_block_raises_what_the_worker_met() -> None:
    inner = GatedSink(fail_at=0)

    def produce_one() -> None:
        with BackgroundSink(inner) as sink:
            sink.write(torch.zeros(3, 1, 2, 2))
            inner.gate.release()

    with pytest.raises(OutputError, match="the writer broke"):
        produce_one()


def test_abort_stops_a_worker_that_waits_and_drops_the_queue() -> None:
    inner = GatedSink()
    sink = BackgroundSink(inner, depth=3)
    for _ in range(3):
        sink.write(torch.zeros(3, 1, 2, 2))
    sink.abort()
    assert len(inner.written) <= 1
    assert "close" not in inner.ends
    assert inner.ends[-1] == "abort"
    for call in (sink.close, sink.end, lambda: sink.write(torch.zeros(3, 1, 2, 2))):
        with pytest.raises(OutputError, match="aborted"):
            call()


def test_abort_wakes_a_producer_that_waits() -> None:
    inner = GatedSink()
    sink = BackgroundSink(inner, depth=1)
    thread, errors = produce(sink, 100)
    inner.wait_made(2)
    sink.abort()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert "aborted" in str(errors[0])


def test_after_end_the_worker_finishes_by_itself() -> None:
    inner = GatedSink()
    sink = BackgroundSink(inner)
    sink.write(torch.zeros(3, 1, 2, 2))
    sink.end()
    with pytest.raises(OutputError, match="ended"):
        sink.write(torch.zeros(3, 1, 2, 2))
    inner.gate.release()
    assert sink.close() == (Path("done"),)
    assert sink.close() == (Path("done"),)
    sink.abort()
    assert inner.ends[0] == "close"


@pytest.mark.parametrize("depth", [0, -1, 1.5, True])
def test_depths_that_cannot_be_are_refused(depth: Any) -> None:
    inner = GatedSink()
    with pytest.raises(UsageError, match="depth"):
        BackgroundSink(inner, depth=depth)


@pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=format_id)
@pytest.mark.parametrize("chunk", [1, 3])
def test_the_same_output_as_without(tmp_path: Path, fmt: OutputFormat, chunk: int) -> None:
    frames = 1 if fmt.kind == "png" else 7
    pixels = random_bytes(frames, 32, 48)

    def write_through(path: Path, *, background: bool) -> None:
        sink = open_sink(path, fmt, height=32, width=48, frames=frames, metadata={"a": "b"}, overwrite=False)
        with BackgroundSink(sink) if background else sink as target:
            for start in range(0, frames, chunk):
                target.write(from_bytes(pixels[start : start + chunk]))

    plain, queued = tmp_path / f"plain{fmt.suffix}", tmp_path / f"queued{fmt.suffix}"
    write_through(plain, background=False)
    write_through(queued, background=True)
    if fmt.kind == "png-sequence":
        assert names_in(plain) == names_in(queued)
        assert all((plain / name).read_bytes() == (queued / name).read_bytes() for name in names_in(plain))
    else:
        assert plain.read_bytes() == queued.read_bytes()


def test_the_callers_buffer_may_be_used_again_at_once(tmp_path: Path) -> None:
    buffer = torch.empty(3, 1, 32, 32)
    sink = open_sink(tmp_path / "x.mp4", mp4(), height=32, width=32, frames=8, metadata={}, overwrite=False)
    with BackgroundSink(sink) as queued:
        for i in range(8):
            buffer.fill_(i / 4 - 1)
            queued.write(buffer)
    levels = read_video(tmp_path / "x.mp4").mean(axis=(1, 2, 3))
    assert np.abs(levels - np.arange(8) / 8 * 255).max() < 4


@pytest.mark.parametrize("bad_chunk", [0, 3])
@pytest.mark.parametrize("fmt", [SEQUENCE, mp4()], ids=format_id)
def test_nan_is_raised_where_it_is_written_and_leaves_nothing(
    tmp_path: Path, fmt: OutputFormat, bad_chunk: int
) -> None:
    frames = torch.zeros(3, 4, 64, 64)
    sink = BackgroundSink(
        open_sink(tmp_path / f"x{fmt.suffix}", fmt, height=64, width=64, frames=None, metadata={}, overwrite=False)
    )
    for _ in range(bad_chunk):
        sink.write(frames)
    frames[2, 3, 63, 63] = float("inf")
    with pytest.raises(NonFiniteError, match="1 of 16384 pixels"):
        sink.write(frames)
    assert names_in(tmp_path) == []
    with pytest.raises(NonFiniteError):
        sink.close()


def test_one_output_is_finished_while_the_next_is_written(tmp_path: Path) -> None:
    frames = from_bytes(random_bytes(4, 32, 32))
    sinks = []
    for i in range(3):
        sink = BackgroundSink(
            open_sink(tmp_path / f"{i}.mp4", mp4(), height=32, width=32, frames=4, metadata={}, overwrite=False)
        )
        sink.write(frames)
        sink.end()
        sinks.append(sink)
    assert [sink.close() for sink in sinks] == [(tmp_path / f"{i}.mp4",) for i in range(3)]
    assert all(is_complete(tmp_path / f"{i}.mp4", mp4()) for i in range(3))


MEMORY = """
import json, re, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.media.helpers import SEQUENCE, ffv1, mp4
from vaepar.media import BackgroundSink, open_sink
path, frames = Path(sys.argv[1]), int(sys.argv[2])
fmt = {".mp4": mp4(preset="ultrafast"), ".mkv": ffv1(), "": SEQUENCE}[path.suffix]
chunk = torch.rand(3, 4, 320, 512) * 2 - 1
sink = open_sink(path, fmt, height=320, width=512, frames=frames, metadata={}, overwrite=True)
with BackgroundSink(sink) as queued:
    for start in range(0, frames, 4):
        queued.write(chunk[:, : min(4, frames - start)].clone())
print(json.dumps(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])))
"""


@pytest.mark.parametrize("name", ["x.mp4", "x.mkv", "x"])
def test_memory_does_not_grow_with_frames(tmp_path: Path, name: str) -> None:
    few = run_python(MEMORY, tmp_path / name, 17, OMP_NUM_THREADS="1")
    many = run_python(MEMORY, tmp_path / name, 81, OMP_NUM_THREADS="1")
    # Kept, the 64 frames more would be 31 MB as bytes and 126 MB as floats upon some 250 MB; the layout of the heap
    # alone moves the peak by up to 7 MB from run to run.
    assert many - few < 16 * 1024
