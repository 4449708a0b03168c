from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.media.helpers import (
    Pixels,
    ffv1,
    from_bytes,
    mp4,
    names_in,
    random_bytes,
    read_tag,
    read_video,
    stream_facts,
    write,
)
from vaepar.errors import OutputError, UsageError
from vaepar.media import OutputFormat, is_complete, open_sink

PATCH = 32
COLOURS = [
    (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255), (255, 0, 255),  # primaries and their sums
    (0, 0, 0), (16, 16, 16), (64, 64, 64), (128, 128, 128), (192, 192, 192), (235, 235, 235), (255, 255, 255),  # greys
    (255, 219, 172), (224, 172, 105), (198, 134, 66), (141, 85, 36), (92, 56, 30),  # skin
]  # fmt: skip
BT709 = "scale=in_color_matrix=bt709:in_range=tv:out_range=pc"


def colour_chart(frames: int) -> Pixels:
    """Flat patches in a grid of six columns."""
    rows = -(-len(COLOURS) // 6)
    chart = np.zeros((rows * PATCH, 6 * PATCH, 3), np.uint8)
    for i, colour in enumerate(COLOURS):
        y, x = i // 6 * PATCH, i % 6 * PATCH
        chart[y : y + PATCH, x : x + PATCH] = colour
    return np.repeat(chart[None], frames, axis=0)


def largest_difference(read: Pixels, chart: Pixels) -> int:
    """Within the patches: at their edges 4:2:0 mixes two colours by design."""
    _, height, width, _ = chart.shape
    inner = np.zeros((height, width), bool)
    for y in range(0, height, PATCH):
        for x in range(0, width, PATCH):
            inner[y + 6 : y + PATCH - 6, x + 6 : x + PATCH - 6] = True
    return int(np.abs(read.astype(int) - chart.astype(int))[:, inner].max())


@pytest.mark.parametrize("filters", [BT709, None], ids=["as BT.709", "by its tags"])
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv422p", "yuv444p", "yuv420p10le", "yuv444p10le"])
def test_colours_are_those_that_a_bt709_player_shows(tmp_path: Path, pix_fmt: str, filters: str | None) -> None:
    chart = colour_chart(5)
    write(tmp_path / "x.mp4", mp4(pix_fmt=pix_fmt), chart)
    # 3 of 255: one step of limited-range luma is 255/219 = 1.16, rounding of luma and both chroma adds up to 2,
    # and the encoder's quantiser moves flat patches by at most one step.
    assert largest_difference(read_video(tmp_path / "x.mp4", filters=filters), chart) <= 3


def test_h265_has_right_colours_and_apples_tag(tmp_path: Path) -> None:
    chart = colour_chart(3)
    write(tmp_path / "x.mp4", mp4(codec="libx265", crf=8), chart)
    assert largest_difference(read_video(tmp_path / "x.mp4"), chart) <= 3
    assert "hvc1" in stream_facts(tmp_path / "x.mp4")[0]


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_matrix_primaries_transfer_and_range_are_tagged(tmp_path: Path, codec: str) -> None:
    write(tmp_path / "x.mp4", mp4(codec=codec), random_bytes(2, 64, 64))
    # ffmpeg prints one word when matrix, primaries and transfer agree, three when they do not.
    assert "yuv420p(tv, bt709, progressive)" in stream_facts(tmp_path / "x.mp4")[0]
    assert b"colr" in (tmp_path / "x.mp4").read_bytes()


@pytest.mark.parametrize("frames", [1, 2, 5, 17])
@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_every_frame_comes_back_in_order(tmp_path: Path, frames: int, codec: str) -> None:
    levels = np.linspace(20, 235, frames).round().astype(np.uint8)
    pixels = np.broadcast_to(levels[:, None, None, None], (frames, 64, 64, 3)).copy()
    write(tmp_path / "x.mp4", mp4(codec=codec, crf=8), pixels, chunk=3)
    read = read_video(tmp_path / "x.mp4")
    assert len(read) == frames
    assert np.abs(read.mean(axis=(1, 2, 3)) - levels).max() <= 3


@pytest.mark.parametrize("size", [(200, 328), (1080, 64), (360, 48), (18, 34), (2, 2)])
def test_the_size_is_kept(tmp_path: Path, size: tuple[int, int]) -> None:
    write(tmp_path / "x.mp4", mp4(preset="ultrafast"), random_bytes(2, *size))
    assert stream_facts(tmp_path / "x.mp4")[1:] == (size[1], size[0])
    assert read_video(tmp_path / "x.mp4").shape == (2, *size, 3)


@pytest.mark.parametrize("size", [(77, 101), (77, 100), (76, 101)])
@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_odd_sizes_are_refused_for_subsampled_colour_and_kept_for_full(
    tmp_path: Path, size: tuple[int, int], codec: str
) -> None:
    pixels = random_bytes(2, *size)
    with pytest.raises(OutputError, match="yuv444p") as caught:
        write(tmp_path / "x.mp4", mp4(codec=codec), pixels)
    assert f"{size[1]}x{size[0]}" in str(caught.value)
    assert names_in(tmp_path) == []
    write(tmp_path / "x.mp4", mp4(codec=codec, pix_fmt="yuv444p"), pixels)
    assert read_video(tmp_path / "x.mp4").shape == (2, *size, 3)


def test_422_takes_an_odd_height_only(tmp_path: Path) -> None:
    write(tmp_path / "x.mp4", mp4(pix_fmt="yuv422p"), random_bytes(2, 77, 100))
    assert read_video(tmp_path / "x.mp4").shape == (2, 77, 100, 3)
    with pytest.raises(OutputError, match="yuv444p"):
        write(tmp_path / "y.mp4", mp4(pix_fmt="yuv422p"), random_bytes(2, 76, 101))


@pytest.mark.parametrize("size", [(1, 1), (77, 101), (200, 328)])
@pytest.mark.parametrize("frames", [1, 5])
def test_ffv1_is_lossless(tmp_path: Path, size: tuple[int, int], frames: int) -> None:
    pixels = random_bytes(frames, *size)
    write(tmp_path / "x.mkv", ffv1(), pixels)
    np.testing.assert_array_equal(read_video(tmp_path / "x.mkv"), pixels)
    assert re.search(r"bgr0\(pc, gbr/bt709/iec61966-2-1", stream_facts(tmp_path / "x.mkv")[0])


def test_ffv1_with_alpha_takes_rgba_only(tmp_path: Path) -> None:
    pixels = random_bytes(2, 8, 8, 4)
    pixels[..., 3] = 255
    write(tmp_path / "x.mkv", ffv1(pix_fmt="bgra"), pixels)
    np.testing.assert_array_equal(read_video(tmp_path / "x.mkv"), pixels[..., :3])
    for name, fmt, channels in (("y.mkv", ffv1(pix_fmt="bgra"), 3), ("y.mkv", ffv1(), 4), ("y.mp4", mp4(), 4)):
        with pytest.raises(UsageError, match=f"{channels} channels"):
            write(tmp_path / name, fmt, random_bytes(1, 8, 8, channels))


@pytest.mark.parametrize("fps", [Fraction(16), Fraction(24000, 1001), Fraction(30000, 1001), Fraction(25, 2),
                                 Fraction(1), Fraction(240), Fraction(1, 3)])  # fmt: skip
def test_the_frame_rate_is_exact(tmp_path: Path, fps: Fraction) -> None:
    write(tmp_path / "x.mp4", mp4(fps=fps), random_bytes(7, 32, 32))
    content = (tmp_path / "x.mp4").read_bytes()
    # The media header holds the time base and the duration in it, the time-to-sample box one frame's duration.
    media = content.index(b"mdhd") + 4
    time_base = int.from_bytes(content[media + 12 : media + 16])
    table = content.index(b"stts") + 4
    assert int.from_bytes(content[table + 4 : table + 8]) == 1  # all frames last equally long
    assert Fraction(time_base, int.from_bytes(content[table + 12 : table + 16])) == fps


def test_the_index_is_in_front_of_the_pictures(tmp_path: Path) -> None:
    write(tmp_path / "x.mp4", mp4(), random_bytes(5, 64, 64))
    content = (tmp_path / "x.mp4").read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")


@pytest.mark.parametrize(("name", "fmt"), [("x.mp4", mp4()), ("x.mkv", ffv1())])
def test_metadata_is_json_in_one_tag(tmp_path: Path, name: str, fmt: OutputFormat) -> None:
    metadata = {"a=b;c#d": "ä\\n\n\x1b[31m", "": "", "workflow": "w" * 300_000}  # longer than an argument may be
    write(tmp_path / name, fmt, random_bytes(2, 16, 16), metadata=metadata)
    tag = read_tag(tmp_path / name)
    assert tag is not None
    assert json.loads(tag) == metadata


def test_without_metadata_there_is_no_tag(tmp_path: Path) -> None:
    write(tmp_path / "x.mp4", mp4(), random_bytes(2, 16, 16))
    assert read_tag(tmp_path / "x.mp4") is None
    assert b"vaepar" not in (tmp_path / "x.mp4").read_bytes()


@pytest.mark.parametrize("stem", ["-x", "a b", "日本é", "100%d", "a:b", "file:x", "o'q\"$(x)`", "n\new", "é" * 120])
@pytest.mark.parametrize("relative", [False, True])
def test_any_name_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stem: str, relative: bool) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(f"{stem}.mp4") if relative else tmp_path / f"{stem}.mp4"
    assert write(path, mp4(), random_bytes(2, 16, 16)) == (path,)
    assert names_in(tmp_path) == [f"{stem}.mp4"]
    assert len(read_video(path)) == 2
    assert is_complete(path, mp4())


def test_the_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    pixels = random_bytes(9, 48, 64)
    write(tmp_path / "a.mp4", mp4(), pixels, chunk=2)
    write(tmp_path / "b.mp4", mp4(), pixels, chunk=9)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_settings_reach_the_encoder(tmp_path: Path) -> None:
    pixels = random_bytes(5, 64, 64)
    write(tmp_path / "fine.mp4", mp4(crf=5), pixels)
    write(tmp_path / "coarse.mp4", mp4(crf=45), pixels)
    write(tmp_path / "fast.mp4", mp4(preset="ultrafast", threads=1), pixels)
    assert (tmp_path / "coarse.mp4").stat().st_size * 3 < (tmp_path / "fine.mp4").stat().st_size
    # x264 writes its settings into the stream.
    fast = (tmp_path / "fast.mp4").read_bytes()
    assert b"cabac=0" in fast
    assert b" threads=1 " in fast
    assert b"cabac=1" in (tmp_path / "fine.mp4").read_bytes()


@pytest.mark.parametrize("written", [0, 2, 4])
def test_another_number_of_frames_than_promised_is_an_error(tmp_path: Path, written: int) -> None:
    def produce() -> None:
        with open_sink(tmp_path / "x.mp4", mp4(), height=16, width=16, frames=3, metadata={}, overwrite=False) as sink:
            for _ in range(written):
                sink.write(from_bytes(random_bytes(1, 16, 16)))

    with pytest.raises(OutputError, match="promised were 3"):
        produce()
    assert names_in(tmp_path) == []


def test_an_unknown_number_of_frames_may_come_but_not_none(tmp_path: Path) -> None:
    with open_sink(tmp_path / "x.mp4", mp4(), height=16, width=16, frames=None, metadata={}, overwrite=False) as sink:
        sink.write(from_bytes(random_bytes(3, 16, 16)))
    assert len(read_video(tmp_path / "x.mp4")) == 3
    with pytest.raises(OutputError, match="0 frames"):
        open_sink(tmp_path / "y.mp4", mp4(), height=16, width=16, frames=None, metadata={}, overwrite=False).close()
    assert names_in(tmp_path) == ["x.mp4"]
