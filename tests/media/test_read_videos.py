"""Videos: exact counts and rates, colours by the file's own tags, rotation, transparency, bounded processes."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from vaepar.errors import InputError
from vaepar.media import FrameSource, OutputFormat, open_sink
from vaepar.media.video_source import VideoSource

from .reading import as_bytes, greys, levels, make_video, one_line, opened, read_all, read_path

FORMATS = {
    "a.mp4": [], "front.mp4": ["-movflags", "+faststart"], "a.mov": ["-c:v", "prores_ks"],
    "a.mkv": ["-c:v", "libx264"], "lossless.mkv": ["-c:v", "ffv1"], "a.webm": ["-c:v", "libvpx-vp9"],
    "vp8.webm": ["-c:v", "libvpx"], "av1.mp4": ["-c:v", "libsvtav1", "-loglevel", "error"],
    "hevc.mp4": ["-c:v", "libx265", "-x265-params", "log-level=none"], "a.gif": [],
}  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 5, 17])
@pytest.mark.parametrize("name", FORMATS)
def test_frames_read_are_frames_written(tmp_path: Path, name: str, count: int) -> None:
    path = make_video(tmp_path / name, greys(count, 64, 64), *FORMATS[name], rate=25)
    source = opened(path)
    assert source.frames == source.original_frames == count
    found = levels(read_all(source))
    assert len(found) == count
    # The codecs lose a little; neighbours are 8 apart, so 3 cannot hide a wrong, missing or repeated frame.
    assert all(abs(f - w) <= 3 for f, w in zip(found, (8 + 8 * i for i in range(count)), strict=True)), found


@pytest.mark.parametrize("rate", ["16", "24000/1001", "30000/1001", "25/2", "60", "120", "1", "7"])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.webm"])
@pytest.mark.parametrize("count", [2, 30])
def test_the_rate_is_exact(tmp_path: Path, rate: str, name: str, count: int) -> None:
    path = make_video(tmp_path / name, greys(count, 16, 16), *FORMATS[name], rate=rate)
    with opened(path) as source:
        assert source.fps == Fraction(rate)
        assert source.frames == count
        assert not any("vary" in note for note in source.notes)


@pytest.mark.parametrize("rate", ["24000/1001", "16"])
def test_what_this_library_wrote_comes_back(tmp_path: Path, rate: str) -> None:
    fmt = OutputFormat(kind="ffv1", fps=Fraction(rate))
    pixels = np.random.default_rng(0).integers(0, 256, (6, 24, 40, 3), dtype=np.uint8)
    frames = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1).permute(3, 0, 1, 2)
    with open_sink(tmp_path / "a.mkv", fmt, height=24, width=40, frames=6, metadata={}, overwrite=False) as sink:
        sink.write(frames)
    source = opened(tmp_path / "a.mkv")
    assert source.fps == Fraction(rate)
    assert source.notes == ()
    assert np.array_equal(as_bytes(read_all(source)), pixels)


def test_a_sequence_of_ours_keeps_its_rate(tmp_path: Path) -> None:
    fmt = OutputFormat(kind="png-sequence", fps=Fraction(24000, 1001))
    with open_sink(tmp_path / "seq", fmt, height=8, width=8, frames=3, metadata={}, overwrite=False) as sink:
        sink.write(torch.zeros(3, 3, 8, 8))
    with opened(tmp_path / "seq") as source:
        assert source.fps == Fraction(24000, 1001)
        assert source.frames == 3


# --- times --------------------------------------------------------------------------------------------------------


def test_gif_with_its_own_delays(tmp_path: Path) -> None:
    images = [Image.new("RGB", (16, 16), (level, level, level)) for level in (20, 100, 200)]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=[100, 200, 100], loop=0)
    source = opened(tmp_path / "a.gif")
    assert (source.frames, source.fps) == (4, Fraction(10))
    assert any("vary" in note and "10 frames" in note for note in source.notes)
    assert levels(read_all(source)) == [20, 100, 100, 200]


@pytest.mark.parametrize(
    ("delay", "fps"), [(80, Fraction(25, 2)), (40, Fraction(25)), (30, Fraction(100, 3)), (70, Fraction(100, 7))]
)
def test_gif_with_equal_delays(tmp_path: Path, delay: int, fps: Fraction) -> None:
    images = [Image.new("RGB", (16, 16), (40 * i, 0, 0)) for i in range(5)]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=delay)
    with opened(tmp_path / "a.gif") as source:
        assert (source.frames, source.fps) == (5, fps)


def varying(path: Path, times: list[float], *arguments: str) -> Path:
    """Frame i, of grey 8 * i + 8, shown from ``times[i]`` seconds on."""
    tree = "0"
    for i in reversed(range(len(times))):
        tree = f"if(eq(N,{i}),{times[i]},{tree})"
    return make_video(
        path, greys(len(times), 32, 32), "-vf", f"settb=1/90000,setpts='({tree})/TB'", "-fps_mode", "vfr",
        "-enc_time_base", "1:90000", *arguments, rate=30,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_phone_that_dropped_frames(tmp_path: Path, name: str) -> None:
    times = [i / 30 for i in (0, 1, 2, 5, 6, 7, 8, 11, 12)]
    source = opened(varying(tmp_path / name, times))
    assert source.fps == 30
    assert source.frames == 13
    assert any("vary" in note for note in source.notes)
    found = [round((level - 8) / 8) for level in levels(read_all(source))]
    assert found == [0, 1, 2, 2, 2, 3, 4, 5, 6, 6, 6, 7, 8]


def test_jittering_times_become_the_usual_rate(tmp_path: Path) -> None:
    jitter = [0, 0.004, -0.003, 0.005, 0, -0.004, 0.003, 0.002, 0, 0.001, -0.002, 0]
    source = opened(varying(tmp_path / "a.mp4", [i / 30 + j for i, j in enumerate(jitter)]))
    assert source.fps is not None
    assert abs(source.fps - 30) < 2
    found = levels(read_all(source))
    assert len(found) == source.frames
    assert abs(source.frames / source.fps - 12 / 30) < 1.5 / 30  # the clip lasts as long as before


def test_a_clip_that_begins_late_gets_no_extra_frames(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mkv", greys(5), "-c:v", "libx264", "-output_ts_offset", "3")
    source = opened(path)
    assert (source.frames, source.fps) == (5, Fraction(24))
    assert len(levels(read_all(source))) == 5


# --- frame ranges -------------------------------------------------------------------------------------------------


def test_frames_of_a_video_count_from_1(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mkv", greys(12), "-c:v", "ffv1", "-pix_fmt", "bgr0")
    assert levels(read_path(path, "1")) == [8]
    assert levels(read_path(path, "3-5,12")) == [24, 32, 40, 96]
    source = opened(path, "1-12x3")
    assert (source.frames, source.fps) == (4, Fraction(8))
    assert any("of every 3" in note for note in source.notes)
    assert levels(read_all(source)) == [8, 32, 56, 80]


@pytest.mark.parametrize("frames", ["1-13", "0-3", "20"])
def test_frames_that_a_video_does_not_have(tmp_path: Path, frames: str) -> None:
    path = make_video(tmp_path / "a.mp4", greys(12))
    with pytest.raises(InputError) as caught:
        opened(path, frames)
    one_line(caught.value, "a.mp4", frames, "count from 1" if frames == "0-3" else "frames 1 to 12")


def test_ranges_and_frame_steps_together(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mkv", greys(12), "-c:v", "ffv1", "-pix_fmt", "bgr0")
    with pytest.raises(InputError) as caught:
        opened(path, "1-8", frames_step=4)
    one_line(caught.value, "8 frames", "5 (", "9 (")
    assert levels(read_path(path, "2-9", frames_step=4, frames_fit="trim")) == [16, 24, 32, 40, 48]
    assert levels(read_path(path, "2-7", frames_step=4, frames_fit="pad")) == [16, 24, 32, 40, 48, 56, 56, 56, 56]
    assert levels(read_path(path, frames_step=4, frames_fit="trim")) == [8 + 8 * i for i in range(9)]


@pytest.mark.parametrize(
    "name", ["café 日本.mp4", "-x.mp4", "100% %04d.mp4", "a:b.mp4", "http:x.mp4", "[1] *.mp4", "a'b.mp4"]
)
def test_odd_names_are_plain_names(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_video(tmp_path / "plain.mp4", greys(3)).rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert len(levels(read_path(name))) == 3


# --- processes ----------------------------------------------------------------------------------------------------


def long_video(path: Path) -> Path:
    # More than a pipe holds, so ffmpeg waits in the middle while nobody reads.
    return make_video(path, greys(30, 128, 128), "-c:v", "ffv1", "-pix_fmt", "bgr0")


def fail_inside(source: FrameSource) -> None:
    with source:
        source.read(2)
        raise InputError("mine")


@pytest.mark.parametrize("how", ["close", "error", "never read"])
def test_ffmpeg_is_gone_after_closing_in_the_middle(tmp_path: Path, how: str) -> None:
    source = opened(long_video(tmp_path / "a.mkv"))
    assert isinstance(source, VideoSource)
    pid = source.pid
    assert psutil.pid_exists(pid)
    if how == "error":
        with pytest.raises(InputError, match="mine"):
            fail_inside(source)
    else:
        if how == "close":
            source.read(2)
        source.close()
    assert not psutil.pid_exists(pid)


def test_an_ffmpeg_that_is_killed_is_an_error_not_an_end(tmp_path: Path) -> None:
    source = opened(long_video(tmp_path / "a.mkv"))
    assert isinstance(source, VideoSource)
    source.read(1)
    psutil.Process(source.pid).kill()
    with pytest.raises(InputError) as caught:
        read_all(source, 5)
    one_line(caught.value, "a.mkv", "of 30", "signal 9")
    assert not psutil.pid_exists(source.pid)


def test_a_file_that_is_cut_behind_the_check_is_found(tmp_path: Path) -> None:
    path = make_video(
        tmp_path / "a.mkv", np.random.default_rng(0).integers(0, 256, (30, 128, 128, 3), dtype=np.uint8), "-c:v", "ffv1"
    )
    source = opened(path)
    source.read(1)
    os.truncate(path, 4000)
    with pytest.raises(InputError) as caught:
        read_all(source, 5)
    one_line(caught.value, "a.mkv", "of 30")


def fake_ffmpeg(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\nREAL='{imageio_ffmpeg.get_ffmpeg_exe()}'\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", ["exit 3", "echo boom >&2; exit 1", "kill -9 $$"])
def test_an_ffmpeg_that_fails(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_video(tmp_path / "a.mp4", greys(3))
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(fake_ffmpeg(tmp_path / "fake", script)))
    with pytest.raises(InputError) as caught:
        opened(path)
    one_line(caught.value, "a.mp4")


def test_an_ffmpeg_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_video(tmp_path / "a.mp4", greys(3))
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "gone"))
    with pytest.raises(InputError) as caught:
        opened(path)
    one_line(caught.value, "gone", "IMAGEIO_FFMPEG_EXE")
