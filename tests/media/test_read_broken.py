"""Bad input: one InputError, one line, the file's name in it; nothing left behind, nothing allocated in advance."""

from __future__ import annotations

import os
import struct
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vaepar.errors import InputError
from vaepar.media import PictureRules, find_media, open_source

from .reading import ffmpeg, greys, make_video, one_line, opened, random_pixels, read_path


def cut(path: Path, share: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: max(1, int(len(data) * share))])
    return path


def bomb_png(path: Path, side: int) -> Path:
    """A PNG whose header promises side x side and whose data holds one row."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(3 * side + 1))), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


def bomb_jpeg(path: Path, side: int) -> Path:
    Image.new("RGB", (16, 16)).save(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", side, side)
    path.write_bytes(data)
    return path


def bomb_tiff(path: Path, side: int) -> Path:
    Image.new("RGB", (16, 16)).save(path)
    data = bytearray(path.read_bytes())
    ifd = struct.unpack("<I", data[4:8])[0]
    for i in range(struct.unpack("<H", data[ifd : ifd + 2])[0]):
        at = ifd + 2 + 12 * i
        tag, kind = struct.unpack("<HH", data[at : at + 4])
        if tag in (256, 257):
            data[at + 8 : at + 12] = struct.pack("<I" if kind == 4 else "<Hxx", side)
    path.write_bytes(data)
    return path


def bomb_webp(path: Path, side: int) -> Path:
    """One flat colour; WebP holds 16383 x 16383 of it in few bytes, and this file says so in its header."""
    Image.new("RGB", (16, 16)).save(path, lossless=True)
    data = bytearray(path.read_bytes())
    at = data.index(b"VP8L") + 9
    bits = struct.unpack("<I", data[at : at + 4])[0] & ~0xFFFFFFF
    data[at : at + 4] = struct.pack("<I", bits | (side - 1) | (side - 1) << 14)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("make", "name"), [(bomb_png, "a.png"), (bomb_jpeg, "a.jpg"), (bomb_tiff, "a.tif"), (bomb_webp, "a.webp")]
)
@pytest.mark.parametrize("side", [10_000, 16_000])
def test_a_header_bomb_allocates_nothing(
    tmp_path: Path, make: Callable[[Path, int], Path], name: str, side: int
) -> None:
    path = make(tmp_path / name, side)
    opened_once = Image.new("RGB", (8, 8))  # Pillow's own modules are loaded before memory is watched
    opened_once.save(tmp_path / "warm.png")
    read_path(tmp_path / "warm.png")
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(InputError) as caught:
                opened(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    one_line(caught.value, name, "megapixels", "--max-pixels")
    assert peak < 2**21


def test_a_larger_limit_is_a_larger_limit(tmp_path: Path) -> None:
    # Above Pillow's own limit for an error (178 megapixels): the file itself is looked at then.
    with pytest.raises(InputError) as caught:
        opened(bomb_png(tmp_path / "a.png", 13_500), max_pixels=10**9)
    one_line(caught.value, "a.png", "13500x13500", "cannot hold that")


@pytest.mark.parametrize("side", [300, 3000])
def test_a_png_that_cannot_hold_what_it_says(tmp_path: Path, side: int) -> None:
    with pytest.raises(InputError) as caught:
        opened(bomb_png(tmp_path / "a.png", side))
    one_line(caught.value, "a.png", f"{side}x{side}", "cannot hold that")


def test_the_best_packed_png_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("L", (2000, 2000)).save(path, compress_level=9)
    assert path.stat().st_size * 500 < 2000 * 2000
    assert float(read_path(path).max()) == -1.0


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.tif"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.8, 0.95])
def test_a_picture_that_is_cut_short(tmp_path: Path, name: str, share: float) -> None:
    path = tmp_path / name
    Image.fromarray(random_pixels(64, 64)).save(path)
    cut(path, share)
    with pytest.raises(InputError) as caught:
        opened(path)
    one_line(caught.value, name)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_16_bit_png_that_is_cut_short(tmp_path: Path, share: float) -> None:
    Image.fromarray(random_pixels(64, 64, 1, np.uint16)[..., 0]).save(tmp_path / "a.png")
    with pytest.raises(InputError) as caught:
        opened(cut(tmp_path / "a.png", share))
    one_line(caught.value, "a.png")


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.tif", "a.mp4", "a.mov", "a.webm", "a.mkv", "a.gif"])
@pytest.mark.parametrize("content", [b"", b"hello, world\n" * 50, bytes(500), b"#EXTM3U\nfile:///etc/passwd\n"])
def test_a_file_of_something_else(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        opened(path)
    one_line(caught.value, name, *(() if content else ("empty",)))


def test_a_playlist_opens_no_other_file(tmp_path: Path) -> None:
    make_video(tmp_path / "secret.ts", greys(5), "-c:v", "mpeg2video")
    (tmp_path / "a.mp4").write_text("#EXTM3U\n#EXTINF:1,\nsecret.ts\n#EXT-X-ENDLIST\n")
    (tmp_path / "b.mkv").write_text("ffconcat version 1.0\nfile secret.ts\n")
    for name in ("a.mp4", "b.mkv"):
        with pytest.raises(InputError) as caught:
            opened(tmp_path / name)
        one_line(caught.value, name)


@pytest.mark.parametrize("name", ["a.png", "a.mp4"])
def test_folders_pipes_and_missing_rights(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError) as caught:  # would wait for ever if it were opened
        opened(tmp_path / name)
    one_line(caught.value, name)


@pytest.mark.parametrize("name", ["a.mp4", "a.png"])
def test_a_file_that_goes_between_finding_and_opening(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    (item,) = find_media([tmp_path / name])
    (tmp_path / name).unlink()
    with pytest.raises(InputError) as caught:
        open_source(item, PictureRules())
    one_line(caught.value, name)


@pytest.mark.parametrize(
    ("name", "kind"), [("a.webp", "animated WEBP"), ("a.png", "animated PNG"), ("a.tif", "several pages")]
)
def test_several_pictures_in_one_file(tmp_path: Path, name: str, kind: str) -> None:
    first, *rest = (Image.fromarray(random_pixels(8, 8, seed=i)) for i in range(3))
    first.save(tmp_path / name, save_all=True, append_images=rest)
    with pytest.raises(InputError) as caught:
        opened(tmp_path / name)
    one_line(caught.value, name, kind, "3", "GIF, MP4 or WebM")


def test_audio_only(tmp_path: Path) -> None:
    ffmpeg("-f", "lavfi", "-i", "sine=d=0.2", tmp_path / "a.mp4")
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "a.mp4")
    one_line(caught.value, "a.mp4", "no video, only audio")


def test_audio_with_a_cover(tmp_path: Path) -> None:
    Image.fromarray(random_pixels(16, 16)).save(tmp_path / "cover.png")
    ffmpeg(
        "-f", "lavfi", "-i", "sine=d=0.2", "-i", tmp_path / "cover.png", "-map", "0", "-map", "1",
        "-c:v", "copy", "-disposition:v:0", "attached_pic", tmp_path / "a.mp4",
    )  # fmt: skip
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "a.mp4")
    one_line(caught.value, "a.mp4", "a cover picture")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("front.mp4", ["-movflags", "+faststart"]),
        ("back.mp4", []),
        ("a.mkv", ["-c:v", "libx264"]),
        ("a.webm", ["-c:v", "libvpx-vp9", "-deadline", "realtime"]),
        ("a.gif", []),
    ],
)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_video_that_is_cut_short(tmp_path: Path, name: str, arguments: list[str], share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    path = cut(make_video(tmp_path / name, noise, *arguments), share)
    with pytest.raises(InputError) as caught:
        opened(path)
    one_line(caught.value, name)


def test_a_video_whose_size_changes(tmp_path: Path) -> None:
    for i, size in enumerate((16, 32)):
        make_video(tmp_path / f"{i}.ts", greys(4, size, 16), "-c:v", "mpeg2video")
    (tmp_path / "both.ts").write_bytes(b"".join((tmp_path / f"{i}.ts").read_bytes() for i in range(2)))
    ffmpeg("-i", tmp_path / "both.ts", "-c", "copy", tmp_path / "a.mkv")
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "a.mkv")
    one_line(caught.value, "a.mkv", "frame size")


def test_a_video_of_too_many_pixels(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", greys(2, 64, 64))
    with pytest.raises(InputError) as caught:
        opened(path, max_pixels=4000)
    one_line(caught.value, "a.mp4", "megapixels", "--max-pixels")


def test_a_size_that_changes_inside_a_sequence(tmp_path: Path) -> None:
    for i in range(1, 4):
        Image.new("RGB", (8, 8 if i < 3 else 16)).save(tmp_path / f"f{i}.png")
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    one_line(caught.value, "f3.png", "8x16", "8x8", "f1.png")


@pytest.mark.parametrize("name", ["line\nbreak", "\x1b[31mred", "a\u202eb"])
def test_messages_of_hostile_names_are_one_plain_line(tmp_path: Path, name: str) -> None:
    for suffix in (".png", ".mp4"):
        (tmp_path / (name + suffix)).write_bytes(b"nonsense")
        with pytest.raises(InputError) as caught:
            opened(tmp_path / (name + suffix))
        one_line(caught.value)


def test_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"x")
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    bad, good = find_media([tmp_path])
    with pytest.raises(InputError):
        open_source(bad, PictureRules())
    with open_source(good, PictureRules()) as source:
        assert source.read(1) is not None
