"""Every kind of picture file to the pixels that one sees."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, ImageCms, ImageOps

from vaepar.errors import InputError

from .reading import Bytes, as_bytes, one_line, opened, random_pixels, read_all, read_path


def png(path: Path, pixels: Bytes, depth: int, colour: int, *extra: tuple[bytes, bytes]) -> Path:
    """A PNG by the specification: ``colour`` 0 grey, 2 RGB, 4 grey + alpha, 6 RGBA; chunks before the data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    h, w = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2" if depth == 16 else "u1").tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", w, h, depth, colour, 0, 0, 0)
    body = b"".join(chunk(kind, data) for kind, data in extra)
    data = chunk(b"IHDR", head) + body + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    return path


def deep(frames: torch.Tensor) -> Bytes:
    """[C, 1, H, W] in [-1, 1] as uint16 [H, W, C]. float32 holds 24 bits, so this is exact."""
    out: Bytes = ((frames[:, 0].double() + 1) * 32767.5).round().permute(1, 2, 0).numpy().astype(np.uint16)
    return out


@pytest.mark.parametrize("suffix", ["png", "webp", "tif", "tiff"])
def test_lossless_rgb(tmp_path: Path, suffix: str) -> None:
    pixels = random_pixels(20, 30)
    path = tmp_path / f"a.{suffix}"
    settings: dict[str, Any] = {"lossless": True, "exact": True} if suffix == "webp" else {}
    Image.fromarray(pixels).save(path, **settings)
    source = opened(path)
    assert (source.height, source.width, source.frames, source.fps) == (20, 30, 1, None)
    assert np.array_equal(as_bytes(read_all(source))[0], pixels)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_deflate", "packbits"])
def test_compressed_tiff(tmp_path: Path, compression: str) -> None:
    pixels = random_pixels(20, 30)
    Image.fromarray(pixels).save(tmp_path / "a.tif", compression=compression)
    assert np.array_equal(as_bytes(read_path(tmp_path / "a.tif"))[0], pixels)


@pytest.mark.parametrize("settings", [{}, {"progressive": True}, {"subsampling": 2}])
def test_jpeg_is_what_pillow_sees(tmp_path: Path, settings: dict[str, Any]) -> None:
    Image.fromarray(random_pixels(24, 40)).save(tmp_path / "a.jpg", quality=95, **settings)
    assert np.array_equal(as_bytes(read_path(tmp_path / "a.jpg"))[0], np.asarray(Image.open(tmp_path / "a.jpg")))


def test_the_first_picture_of_a_stereo_jpeg(tmp_path: Path) -> None:
    first, second = (Image.fromarray(random_pixels(16, 16, seed=i)) for i in range(2))
    first.save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[second])
    source = opened(tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as stored:
        assert np.array_equal(as_bytes(read_all(source))[0], np.asarray(stored.convert("RGB")))
    assert any("first of 2" in note for note in source.notes)


def test_content_counts_not_the_name(tmp_path: Path) -> None:
    pixels = random_pixels(8, 8)
    Image.fromarray(pixels).save(tmp_path / "a.jpg", format="PNG")
    assert np.array_equal(as_bytes(read_path(tmp_path / "a.jpg"))[0], pixels)


@pytest.mark.parametrize("mode", ["L", "1", "P"])
def test_grey_and_palette(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(random_pixels(12, 16)).convert(mode)
    image.save(tmp_path / "a.png")
    assert np.array_equal(as_bytes(read_path(tmp_path / "a.png"))[0], np.asarray(image.convert("RGB")))


# --- transparency -------------------------------------------------------------------------------------------------


def transparent_files(folder: Path) -> dict[str, Path]:
    """Five kinds of transparency, each with hidden red (or grey) under alpha 0, half and full."""
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[..., 0], rgba[..., 3] = 200, np.tile(np.array([0, 255, 128, 255, 0, 255, 64, 255], np.uint8), (8, 1))
    image = Image.fromarray(rgba)
    paths = {name: folder / f"{name}.png" for name in ("RGBA", "LA", "P", "RGBkey", "Lkey")}
    image.save(paths["RGBA"])
    image.convert("LA").save(paths["LA"])
    palette = Image.fromarray(np.tile(np.arange(8, dtype=np.uint8), (8, 1)), mode="L").convert("P")
    palette.putpalette([c for i in range(256) for c in (max(0, 200 - i), i, 0)])
    palette.save(paths["P"], transparency=bytes(rgba[0, :, 3]) + b"\xff" * 248)
    keyed = np.asarray(image.convert("RGB")).copy()
    keyed[2:4] = (1, 2, 3)
    Image.fromarray(keyed).save(paths["RGBkey"], transparency=(1, 2, 3))
    Image.fromarray(keyed[..., 0]).save(paths["Lkey"], transparency=1)
    return paths


KINDS = ["RGBA", "LA", "P", "RGBkey", "Lkey"]


@pytest.mark.parametrize("kind", KINDS)
def test_transparency_is_refused_unless_decided(tmp_path: Path, kind: str) -> None:
    path = transparent_files(tmp_path)[kind]
    with pytest.raises(InputError) as caught:
        opened(path)
    one_line(caught.value, path.name, "--alpha drop, white or black")


@pytest.mark.parametrize("kind", KINDS)
def test_transparency_by_every_rule(tmp_path: Path, kind: str) -> None:
    path = transparent_files(tmp_path)[kind]
    rgba = np.asarray(Image.open(path).convert("RGBA")).astype(float)
    colour, alpha = rgba[..., :3], rgba[..., 3:] / 255
    for ground, level in (("white", 255), ("black", 0)):
        out = as_bytes(read_path(path, alpha=ground))[0]
        assert np.abs(out - (colour * alpha + level * (1 - alpha))).max() <= 0.5 + 1e-9  # rounding to whole numbers
    dropped = opened(path, alpha="drop")
    assert np.array_equal(as_bytes(read_all(dropped))[0], colour)
    assert any("hidden colours" in note for note in dropped.notes)
    for rule in ("keep", "refuse"):
        assert np.array_equal(as_bytes(read_path(path, alpha=rule, channels=4))[0], rgba)
    over = as_bytes(read_path(path, alpha="white", channels=4))[0]
    assert (over[..., 3] == 255).all()
    assert np.array_equal(over[..., :3], as_bytes(read_path(path, alpha="white"))[0])


def test_an_opaque_alpha_channel_is_no_transparency(tmp_path: Path) -> None:
    pixels = random_pixels(8, 8, 4)
    pixels[..., 3] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    source = opened(tmp_path / "a.png")
    assert np.array_equal(as_bytes(read_all(source))[0], pixels[..., :3])
    assert any("opaque" in note for note in source.notes)


def test_a_picture_without_alpha_is_opaque_for_four_channels(tmp_path: Path) -> None:
    Image.fromarray(random_pixels(8, 8)).save(tmp_path / "a.png")
    source = opened(tmp_path / "a.png", channels=4)
    assert (as_bytes(read_all(source))[..., 3] == 255).all()
    assert any("opaque" in note for note in source.notes)


def test_webp_and_tiff_with_alpha(tmp_path: Path) -> None:
    pixels = random_pixels(8, 8, 4)
    Image.fromarray(pixels).save(tmp_path / "a.webp", lossless=True, exact=True)
    Image.fromarray(pixels).save(tmp_path / "a.tif")
    for name in ("a.webp", "a.tif"):
        assert np.array_equal(as_bytes(read_path(tmp_path / name, channels=4))[0], pixels)


# --- 16 bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "colour"), [(1, 0), (3, 2), (2, 4), (4, 6)])
def test_16_bit_png_exactly(tmp_path: Path, channels: int, colour: int) -> None:
    pixels = random_pixels(13, 17, channels, np.uint16)
    path = png(tmp_path / "a %04d.png", pixels, 16, colour)
    out = deep(read_path(path, channels=4 if channels in (2, 4) else 3))
    assert np.array_equal(out[..., :3], pixels[..., :3] if channels > 2 else pixels[..., :1].repeat(3, axis=2))
    if channels in (2, 4):
        assert np.array_equal(out[..., 3], pixels[..., -1])


def test_16_bit_png_is_not_8_bits_in_disguise(tmp_path: Path) -> None:
    ramp = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)[..., None].repeat(3, axis=2)
    x = read_path(png(tmp_path / "a.png", ramp, 16, 2))
    assert len(torch.unique(x)) == 1024
    assert float(x.min()) == -1.0


def test_16_bit_png_with_a_colour_key(tmp_path: Path) -> None:
    pixels = random_pixels(8, 8, 3, np.uint16)
    pixels[0] = (7, 300, 65535)
    path = png(tmp_path / "a.png", pixels, 16, 2, (b"tRNS", struct.pack(">HHH", 7, 300, 65535)))
    out = deep(read_path(path, channels=4))
    assert np.array_equal(out[..., :3], pixels)
    assert (out[0, :, 3] == 0).all()
    assert (out[1:, :, 3] == 65535).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_16_bit_tiff_exactly(tmp_path: Path, channels: int, byteorder: Any) -> None:
    pixels = random_pixels(13, 17, channels, np.uint16)
    stored = pixels[..., 0] if channels == 1 else pixels
    kind = "minisblack" if channels == 1 else "rgb"
    tifffile.imwrite(tmp_path / "a.tif", stored, photometric=kind, byteorder=byteorder)
    assert np.array_equal(deep(read_path(tmp_path / "a.tif")), pixels.repeat(3, axis=2) if channels == 1 else pixels)


def test_16_bit_tiff_inverted(tmp_path: Path) -> None:
    pixels = random_pixels(8, 8, 1, np.uint16)[..., 0]
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="miniswhite")
    assert np.array_equal(deep(read_path(tmp_path / "a.tif"))[..., 0], 65535 - pixels)


def test_16_bit_over_white(tmp_path: Path) -> None:
    pixels = random_pixels(8, 8, 4, np.uint16)
    out = deep(read_path(png(tmp_path / "a.png", pixels, 16, 6), alpha="white"))
    alpha = pixels[..., 3:] / 65535
    assert np.abs(out - (pixels[..., :3] * alpha + 65535 * (1 - alpha))).max() <= 0.5 + 1e-6


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
def test_other_depths_are_refused_by_name(tmp_path: Path, dtype: type) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.ones((8, 8), dtype))
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "a.tif")
    one_line(caught.value, "a.tif", "are read")


# --- orientation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, suffix: str, orientation: int) -> None:
    image = Image.fromarray(random_pixels(10, 20))
    exif = Image.Exif()
    exif[0x0112] = orientation
    settings: dict[str, Any] = {"lossless": True} if suffix == "webp" else {}
    image.save(tmp_path / f"a.{suffix}", exif=exif, **settings)
    source = opened(tmp_path / f"a.{suffix}")
    out = as_bytes(read_all(source))[0]
    assert source.original_size == ((20, 10) if orientation > 4 else (10, 20))
    with Image.open(tmp_path / f"a.{suffix}") as stored:
        assert np.array_equal(out, np.asarray(ImageOps.exif_transpose(stored)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_of_16_bits(tmp_path: Path, orientation: int) -> None:
    pixels = random_pixels(10, 20, 3, np.uint16)
    exif = Image.Exif()
    exif[0x0112] = orientation
    small = Image.fromarray((pixels >> 8).astype(np.uint8))
    small.info["exif"] = exif.tobytes()
    small.getexif()[0x0112] = orientation
    wanted = np.asarray(ImageOps.exif_transpose(small))
    path = png(tmp_path / "a.png", pixels, 16, 2, (b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")))
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb", extratags=[(274, 3, 1, orientation, True)])
    for file in (path, tmp_path / "a.tif"):
        assert np.array_equal((deep(read_path(file)) >> 8).astype(np.uint8), wanted)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("turned", [1, 2])
def test_a_sequence_of_turned_pictures(tmp_path: Path, suffix: str, turned: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(random_pixels(10, 20)).save(tmp_path / f"{turned}.{suffix}", exif=exif)
    Image.fromarray(random_pixels(20, 10)).save(tmp_path / f"{3 - turned}.{suffix}")
    assert read_path(tmp_path).shape == (3, 2, 20, 10)


# --- colours ------------------------------------------------------------------------------------------------------


def test_cmyk_jpeg_is_not_inverted(tmp_path: Path) -> None:
    ink = np.zeros((16, 16, 4), np.uint8)
    ink[..., 0] = 255  # cyan only
    Image.fromarray(ink, mode="CMYK").save(tmp_path / "a.jpg", quality=100)
    source = opened(tmp_path / "a.jpg")
    red, green, blue = as_bytes(read_all(source))[0].reshape(-1, 3).mean(0)
    assert red < 5
    assert min(green, blue) > 250
    assert any("CMYK" in note for note in source.notes)


def test_cmyk_jpeg_without_adobes_mark_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("CMYK", (16, 16), (255, 0, 0, 0)).save(buffer, format="JPEG")
    data = buffer.getvalue()
    at = data.index(b"\xff\xee")
    length = struct.unpack(">H", data[at + 2 : at + 4])[0]
    (tmp_path / "a.jpg").write_bytes(data[:at] + data[at + 2 + length :])
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "a.jpg")
    one_line(caught.value, "a.jpg", "CMYK", "save it as RGB")


def test_cmyk_tiff(tmp_path: Path) -> None:
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.tif")
    assert as_bytes(read_path(tmp_path / "a.tif"))[0, 0, 0].tolist() == [255, 0, 0]


def test_an_srgb_profile_changes_nothing(tmp_path: Path) -> None:
    pixels = random_pixels(8, 8)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.fromarray(pixels).save(tmp_path / "a.png", icc_profile=profile)
    source = opened(tmp_path / "a.png")
    assert np.array_equal(as_bytes(read_all(source))[0], pixels)
    assert source.notes == ()


def linear_profile() -> bytes:
    """sRGB's primaries with a straight curve: the sRGB profile, its three curve tags pointed at a linear one."""
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    count = struct.unpack(">I", data[128:132])[0]
    curve = len(data)
    data += b"curv" + struct.pack(">II", 0, 0)
    for i in range(count):
        at = 132 + 12 * i
        if bytes(data[at : at + 4]) in (b"rTRC", b"gTRC", b"bTRC"):
            data[at + 4 : at + 12] = struct.pack(">II", curve, 12)
        if data[at : at + 4] == b"desc":
            offset, size = struct.unpack(">II", data[at + 4 : at + 12])
            text = bytes(data[offset : offset + size])
            data[offset : offset + size] = text.replace(b"s\0R\0G\0B", b"l\0i\0n\0e").replace(b"sRGB", b"line")
    data[:4] = struct.pack(">I", len(data))
    return bytes(data)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_another_profile_is_converted(tmp_path: Path, mode: str) -> None:
    # A linear 55 is 0.2157 of the light, which sRGB writes as 128 (1.055 * x ** (1 / 2.4) - 0.055).
    image = Image.new("RGB", (8, 8), (55, 55, 55))
    image = image.quantize(4) if mode == "P" else image.convert(mode)
    image.save(tmp_path / "a.png", icc_profile=linear_profile())
    source = opened(tmp_path / "a.png")
    out = as_bytes(read_all(source))[0]
    assert np.abs(out.astype(int) - 128).max() <= 1
    assert any("converted from" in note for note in source.notes)


def test_alpha_survives_a_profile(tmp_path: Path) -> None:
    pixels = random_pixels(8, 8, 4)
    Image.fromarray(pixels).save(tmp_path / "a.png", icc_profile=linear_profile())
    assert np.array_equal(as_bytes(read_path(tmp_path / "a.png", channels=4))[0, ..., 3], pixels[..., 3])


def test_a_broken_profile_is_said(tmp_path: Path) -> None:
    pixels = random_pixels(8, 8)
    Image.fromarray(pixels).save(tmp_path / "a.png", icc_profile=b"no profile \x1b[31m at all")
    source = opened(tmp_path / "a.png")
    assert np.array_equal(as_bytes(read_all(source))[0], pixels)
    (note,) = source.notes
    assert "passed over" in note
    assert note.isprintable()


def test_a_profile_on_16_bits_is_said(tmp_path: Path) -> None:
    chunk = (b"iCCP", b"p\0\0" + zlib.compress(linear_profile()))
    source = opened(png(tmp_path / "a.png", random_pixels(8, 8, 3, np.uint16), 16, 2, chunk))
    assert any("not converted" in note for note in source.notes)
    source.close()
