"""Videos: colours by the file's own tags, depth, rotation, transparency, shape of pixels."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vaepar.errors import InputError

from .reading import Bytes, as_bytes, ffmpeg, greys, make_video, one_line, opened, read_all, read_path

TAGGED = ["-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"]

# --- colours ------------------------------------------------------------------------------------------------------

PATCHES = np.array(
    [[0, 0, 0], [255, 255, 255], [128, 128, 128], [200, 40, 40], [40, 180, 60], [30, 60, 200], [220, 200, 40],
     [90, 20, 120]]
)  # fmt: skip
# Luma weights of red and blue: ITU-R BT.601, BT.709, BT.2020.
WEIGHTS = {"601": (0.299, 0.114), "709": (0.2126, 0.0722), "2020": (0.2627, 0.0593)}


def yuv(rgb: Bytes, kind: str, full: bool, bits: int = 8) -> Bytes:
    """[..., 3] RGB bytes as Y'CbCr, by the formulae of the standards."""
    kr, kb = WEIGHTS[kind]
    r, g, b = np.moveaxis(rgb / 255, -1, 0)
    y = kr * r + (1 - kr - kb) * g + kb * b
    scale = 1 << (bits - 8)
    span, foot, chroma = ((1 << bits) - 1, 0, (1 << bits) - 1) if full else (219 * scale, 16 * scale, 224 * scale)
    planes = (
        y * span + foot,
        (b - y) / (2 - 2 * kb) * chroma + 128 * scale,
        (r - y) / (2 - 2 * kr) * chroma + 128 * scale,
    )
    return np.stack(planes, -1).round().clip(0, (1 << bits) - 1).astype("<u2" if bits > 8 else "u1")


def patches_file(
    path: Path, kind: str, full: bool, tags: list[str], size: tuple[int, int] = (32, 128), bits: int = 8
) -> Bytes:
    """Two frames of the patches as 4:4:4 FFV1 that says ``tags``; gives the RGB that they are."""
    h, w = size
    picture = np.repeat(np.repeat(PATCHES[None], h, axis=0), w // len(PATCHES), axis=1)
    planes = np.moveaxis(yuv(picture, kind, full, bits), -1, 0).tobytes()
    ffmpeg(
        "-f", "rawvideo", "-pixel_format", "yuv444p" + (f"{bits}le" if bits > 8 else ""), "-video_size", f"{w}x{h}",
        "-framerate", "24", *tags, "-i", "pipe:0", "-vf", "null", "-c:v", "ffv1", *tags, path, stdin=planes * 2,
    )  # fmt: skip
    return picture.astype(np.uint8)


MATRIX_TAGS = {"601": "smpte170m", "709": "bt709", "2020": "bt2020nc"}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("full", [False, True])
def test_colours_by_the_files_own_tags(tmp_path: Path, kind: str, full: bool) -> None:
    tags = ["-colorspace", MATRIX_TAGS[kind], "-color_range", "pc" if full else "tv"]
    picture = patches_file(tmp_path / "a.mkv", kind, full, tags)
    source = opened(tmp_path / "a.mkv")
    out = as_bytes(read_all(source))
    # 8-bit limited range has 219 steps for 255, chroma two of them: 2 levels are the rounding of the file itself.
    assert np.abs(out.astype(int) - picture).max() <= 2
    assert not any("tagged" in note for note in source.notes)


@pytest.mark.parametrize(
    ("size", "kind"), [((32, 128), "601"), ((576, 720), "601"), ((608, 640), "709"), ((32, 1280), "709")]
)
def test_untagged_colours_by_size(tmp_path: Path, size: tuple[int, int], kind: str) -> None:
    picture = patches_file(tmp_path / "a.mkv", kind, False, [], size)
    source = opened(tmp_path / "a.mkv")
    out = as_bytes(read_all(source))
    assert np.abs(out.astype(int) - picture).max() <= 2
    assert any(f"BT.{kind}" in note for note in source.notes)


def test_ten_bits_stay_ten_bits(tmp_path: Path) -> None:
    ramp = np.arange(64, 64 + 512, dtype="<u2")  # luma of 10-bit limited range: 64 is black, 940 white
    planes = np.stack([np.broadcast_to(p, (16, 512)) for p in (ramp, np.full(512, 512), np.full(512, 512))]).astype(
        "<u2"
    )
    ffmpeg(
        "-f", "rawvideo", "-pixel_format", "yuv444p10le", "-video_size", "512x16", *TAGGED, "-i", "pipe:0",
        "-c:v", "ffv1", *TAGGED, tmp_path / "a.mkv", stdin=planes.tobytes(),
    )  # fmt: skip
    x = read_path(tmp_path / "a.mkv")
    assert len(torch.unique(x[:, 0, 0])) >= 512
    wanted = torch.arange(512) / 876 * 2 - 1
    assert float((x[:, 0, 4] - wanted).abs().max()) < 2 / 65535  # rounded once, to 16 bits


def test_wide_colours_are_brought_to_bt709(tmp_path: Path) -> None:
    tags = ["-colorspace", "bt2020nc", "-color_primaries", "bt2020", "-color_trc", "bt2020-10", "-color_range", "tv"]
    picture = patches_file(tmp_path / "a.mkv", "2020", False, tags, bits=10)
    source = opened(tmp_path / "a.mkv")
    out = as_bytes(read_all(source))[0, 8]
    # ITU-R BT.2087: light of BT.2020 to BT.709, as a display of BT.1886 (gamma 2.4) shows it.
    matrix = np.array([[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]])
    wanted = ((picture[8] / 255) ** 2.4 @ matrix.T).clip(0, 1) ** (1 / 2.4) * 255
    # Two roundings, and colours out of BT.709 that are cut off at 0, where the curve is steepest.
    assert np.abs(out - wanted)[wanted > 20].max() <= 2
    assert out[wanted < 20].max() <= 24
    assert any("BT.2020" in note for note in source.notes)


@pytest.mark.parametrize("transfer", ["smpte2084", "arib-std-b67"])
def test_high_dynamic_range_is_refused(tmp_path: Path, transfer: str) -> None:
    tags = ["-colorspace", "bt2020nc", "-color_primaries", "bt2020", "-color_trc", transfer, "-color_range", "tv"]
    patches_file(tmp_path / "a.mkv", "2020", False, tags, bits=10)
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "a.mkv")
    one_line(caught.value, "a.mkv", transfer, "tone-map")


def test_motion_jpeg_has_full_range(tmp_path: Path) -> None:
    pixels = np.zeros((2, 32, 32, 3), np.uint8)
    pixels[:, :, 16:] = 255
    source = opened(make_video(tmp_path / "a.mov", pixels, "-c:v", "mjpeg", "-q:v", "1", "-pix_fmt", "yuvj444p"))
    out = as_bytes(read_all(source))
    assert out[:, :, :8].max() <= 2
    assert out[:, :, -8:].min() >= 253


# --- geometry and transparency ------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotated_phone_video(tmp_path: Path, degrees: int) -> None:
    pixels = np.zeros((3, 32, 64, 3), np.uint8)
    pixels[:, :16, :32] = 255  # white at the top left
    make_video(tmp_path / "flat.mp4", pixels, "-pix_fmt", "yuv444p")
    ffmpeg("-display_rotation", degrees, "-i", tmp_path / "flat.mp4", "-c", "copy", tmp_path / "a.mp4")
    source = opened(tmp_path / "a.mp4")
    assert source.original_size == ((32, 64) if degrees == 180 else (64, 32))
    assert any("rotation" in note for note in source.notes)
    out = as_bytes(read_all(source))
    wanted = np.rot90(pixels, degrees // 90, axes=(1, 2))  # both turn counterclockwise
    assert np.abs(out.astype(int) - wanted).mean() < 3


def transparent_frames(opaque: int, clear: int) -> Bytes:
    frames = np.full((opaque + clear, 16, 16, 4), (200, 0, 0, 255), np.uint8)
    frames[opaque:, 4:12, 4:12, 3] = 0
    return frames


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vp9.webm", ["-c:v", "libvpx-vp9", "-pix_fmt", "yuva420p", "-lossless", "1"]),
        ("vp8.webm", ["-c:v", "libvpx", "-pix_fmt", "yuva420p", "-auto-alt-ref", "0", "-crf", "4", "-b:v", "2M"]),
        ("ffv1.mkv", ["-c:v", "ffv1", "-pix_fmt", "bgra"]),
        ("prores.mov", ["-c:v", "prores_ks", "-pix_fmt", "yuva444p10le"]),
        ("png.mov", ["-c:v", "png"]),
    ],
)
def test_transparent_video(tmp_path: Path, name: str, arguments: list[str]) -> None:
    path = make_video(tmp_path / name, transparent_frames(2, 2), *arguments)
    with pytest.raises(InputError) as caught:
        opened(path)
    one_line(caught.value, name, "frame 3", "--alpha drop, white or black")
    out = as_bytes(read_path(path, alpha="white"))
    assert out[:, 1, 1, 1].max() < 40  # red outside
    assert out[2:, 8, 8].min() > 215  # white inside
    assert out[:2, 8, 8, 1].max() < 40
    kept = as_bytes(read_path(path, channels=4))[..., 3]
    assert kept[2:, 8, 8].max() < 20
    assert kept[:, 1, 1].min() > 235


def test_opaque_video_with_an_alpha_channel(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mkv", transparent_frames(3, 0), "-c:v", "ffv1", "-pix_fmt", "bgra")
    source = opened(path)
    assert (as_bytes(read_all(source)) == (200, 0, 0)).all()
    assert any("opaque" in note for note in source.notes)


def test_fit_of_a_video(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 21, 35, 3), dtype=np.uint8)
    path = make_video(tmp_path / "a.mkv", pixels, "-c:v", "ffv1", "-pix_fmt", "bgr0")
    with pytest.raises(InputError) as caught:
        opened(path, multiple=(8, 8))
    one_line(caught.value, "35x21", "32x16", "40x24")
    assert np.array_equal(as_bytes(read_path(path, multiple=(8, 8), fit="crop")), pixels[:, 2:18, 1:33])
    assert np.array_equal(as_bytes(read_path(path, multiple=(8, 8), fit="pad"))[:, :21, :35], pixels)


def test_a_transparent_gif(tmp_path: Path) -> None:
    # Later frames of a GIF can only add, so the hole is there from the first one on.
    images = [Image.new("P", (16, 16), color) for color in (1, 3)]
    for image in images:
        image.paste(2, (4, 4, 12, 12))
        image.putpalette([0, 0, 0, 0, 0, 200, 255, 0, 0, 0, 99, 0])
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=100, transparency=2)
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "a.gif")
    one_line(caught.value, "a.gif", "frame 1", "--alpha")
    out = as_bytes(read_path(tmp_path / "a.gif", alpha="white"))
    assert [frame.tolist() for frame in out[:, 8, 8]] == [[255, 255, 255]] * 2
    assert [frame.tolist() for frame in out[:, 1, 1]] == [[0, 0, 200], [0, 99, 0]]


@pytest.mark.parametrize(("pix_fmt", "bits"), [("gray", 8), ("gray10le", 10), ("gray16le", 16), ("gbrp10le", 10)])
def test_grey_and_deep_rgb_video(tmp_path: Path, pix_fmt: str, bits: int) -> None:
    ramp = np.linspace(0, (1 << bits) - 1, 256).round().astype("<u2" if bits > 8 else "u1")
    raw = np.broadcast_to(ramp, (3 if pix_fmt.startswith("gbr") else 1, 16, 256)).tobytes()
    ffmpeg(
        "-f", "rawvideo", "-pixel_format", pix_fmt, "-color_range", "pc", "-video_size", "256x16", "-i", "pipe:0",
        "-c:v", "ffv1", "-color_range", "pc", tmp_path / "a.mkv", stdin=raw,
    )  # fmt: skip
    x = read_path(tmp_path / "a.mkv")
    wanted = torch.linspace(-1, 1, 256)
    # One step of the source (the ramp is rounded to it), at least of the 16 bits that are read.
    assert float((x[:, 0, 4] - wanted).abs().max()) <= 2 / ((1 << bits) - 1) + 2 / 65535


def test_interlaced_video_is_said(tmp_path: Path) -> None:
    path = make_video(
        tmp_path / "a.mkv", greys(4, 32, 32), "-vf", "setfield=tff", "-c:v", "ffv1", "-flags", "+ildct+ilme"
    )
    with opened(path) as source:
        assert any("interlaced" in note for note in source.notes)


def test_memory_is_that_of_a_few_frames(tmp_path: Path) -> None:
    frame = 256 * 256 * 3
    path = make_video(tmp_path / "a.mkv", greys(28, 256, 256), "-c:v", "ffv1", "-pix_fmt", "bgr0")
    with opened(path) as source:
        source.read(1)
        tracemalloc.start()
        try:
            while source.read(1) is not None:
                pass
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    # The raw frame, its last sibling, and one float32 copy (four times as large); 27 frames were read.
    assert peak < 10 * frame


def test_pixels_that_are_not_square_are_said(tmp_path: Path) -> None:
    with opened(make_video(tmp_path / "a.mp4", greys(2), "-vf", "setsar=4/3")) as source:
        assert any("4:3" in note for note in source.notes)
