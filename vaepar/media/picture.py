"""One picture from one file, by Pillow, and by ffmpeg where Pillow would cut 16 bits to 8.

Pictures are known by their content, never by their name's end. Letters of shapes: H, W as one sees the picture.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from vaepar.errors import InputError
from vaepar.media.atomic import shown
from vaepar.media.colour_profile import to_srgb
from vaepar.media.decoder import ask, input_arguments
from vaepar.media.fitting import oversize_error

if TYPE_CHECKING:
    from PIL import Image

    from vaepar.media.fitting import Pixels
    from vaepar.media.source import PictureRules

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF")

_ORIENTATION = 0x0112
_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262
_TOO_LONG = 4  # orientations above this one swap height and width
_DEEP_FORMATS = {1: "gray16le", 2: "ya16le", 3: "rgb48le", 4: "rgba64le"}
_WARNINGS = threading.Lock()  # warnings.catch_warnings changes the whole process


@dataclass(frozen=True)
class Picture:
    """Pixels [H, W, C], uint8 or uint16, C 1 (grey), 2 (grey, alpha), 3 (RGB) or 4 (RGBA), and what was decided."""

    pixels: Pixels
    notes: tuple[str, ...]


def picture_size(path: Path, rules: PictureRules) -> tuple[int, int]:
    """(height, width) by the header alone, orientation obeyed.

    Raises:
        InputError: as :func:`read_picture`, as far as the header tells.
    """
    with _opened(path, rules) as (image, _):
        exif = image.info.get("exif") or image.format in ("JPEG", "MPO", "TIFF", "WEBP")
        # A PNG without early EXIF would be decoded whole in search of a late one; read_picture looks there.
        turned = exif and image.getexif().get(_ORIENTATION, 1) > _TOO_LONG
        return (image.width, image.height) if turned else (image.height, image.width)


def read_picture(path: Path, rules: PictureRules) -> Picture:
    """The picture of a PNG, JPEG, WebP or TIFF file in sRGB.

    Greys, palettes, CMYK and embedded colour profiles are converted, EXIF orientation is obeyed, 16 bits stay 16 bits.

    Raises:
        InputError: missing, empty, cut short or no such picture; animated or of several pages; larger than
            ``rules.max_pixels`` (nothing is allocated then); of a kind whose colours are not settled.
    """
    with _opened(path, rules) as (image, notes):
        deep = _deep_format(image, path)
        transparent = "transparency" in image.info
        image.load()  # also where ffmpeg reads the pixels: it finds a file that is cut short
        orientation = image.getexif().get(_ORIENTATION, 1)
        profile = image.info.get("icc_profile")
        if deep is None:
            pixels = _shallow(image, path, profile, notes)
        else:
            pixels = _deep(image, path, deep, transparent, rules)
            if profile:
                notes.append("16-bit picture with a colour profile: read as sRGB, not converted")
    # Pillow turns TIFF files itself while loading and forgets the tag; ffmpeg's pixels are as stored.
    if deep is not None and image.format == "TIFF":
        orientation = _tiff_orientation(path)
    if orientation not in (0, 1):
        notes.append(f"EXIF orientation {orientation} was obeyed")
    return Picture(_turned(pixels, orientation), tuple(notes))


@contextmanager
def _opened(path: Path, rules: PictureRules) -> Iterator[tuple[Image.Image, list[str]]]:
    """The opened picture, its header checked, and notes to add to. Whatever Pillow raises or warns of is translated."""
    name = shown(path)
    notes: list[str] = []
    with _WARNINGS, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with path.open("rb") as file:
                image = _identified(file, name)
                _check_header(image, name, rules, notes)
                yield image, notes
        except (InputError, MemoryError):
            raise
        except OSError as exc:
            raise InputError(f"{name} cannot be read as a picture: {exc.strerror or _line(exc)}") from exc
        except Exception as exc:  # the decoders raise SyntaxError, struct.error, zlib.error, ... on broken data
            raise InputError(f"{name} is broken: {_line(exc)}") from exc
    notes.extend(f"Pillow: {_line(w.message)}" for w in caught if "DecompressionBomb" not in w.category.__name__)


def _identified(file: IO[bytes], name: str) -> Image.Image:
    """The picture by its first bytes.

    Not ``Image.open``: its limit of pixels is one setting of the whole process, and it would try all of Pillow's
    formats, some of which run other programs.
    """
    from PIL import Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin  # noqa: F401  # they register

    prefix = file.read(16)
    if not prefix:
        raise InputError(f"{name} is empty; a PNG, JPEG, WebP or TIFF picture is needed")
    for kind in FORMATS:
        factory, accept = Image.OPEN[kind]
        if accept is None or accept(prefix) is True:
            file.seek(0)
            return factory(file, "")
    raise InputError(f"{name} is no PNG, JPEG, WebP or TIFF picture by its content; these are read")


def _check_header(image: Image.Image, name: str, rules: PictureRules, notes: list[str]) -> None:
    if image.width * image.height > rules.max_pixels:
        raise oversize_error(name, image.height, image.width, rules)
    pages = getattr(image, "n_frames", 1)
    if pages > 1 and image.format == "MPO":
        notes.append(f"the first of {pages} pictures in the file was taken")
    elif pages > 1:
        kind = "a TIFF file of several pages" if image.format == "TIFF" else f"an animated {image.format} picture"
        raise InputError(
            f"{name} is {kind} ({pages}); one picture a file is read: save them one by one, or as GIF, MP4 or WebM"
        )


def _deep_format(image: Image.Image, path: Path) -> str | None:
    """ffmpeg's pixel format for a picture of 16 bits a channel, None for one that Pillow reads fully."""
    if image.format == "PNG":
        with path.open("rb") as file:
            header = file.read(26)
        if header[24] != 16:
            return None
        channels = {0: 1, 2: 3, 4: 2, 6: 4}[header[25]]
    elif image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]
        bits = tags.get(_TIFF_BITS, (1,))
        if image.mode in ("I;16", "I;16B", "I;16L") or 16 not in bits:
            return None
        channels = len(bits)
        if set(bits) != {16} or tags.get(_TIFF_PHOTOMETRIC) != (1 if channels < 3 else 2):
            raise InputError(
                f"{shown(path)} is a 16-bit TIFF in {image.mode}; grey, RGB and RGBA are read with 16 bits"
            )
    else:
        return None
    if "transparency" in image.info:
        channels += 1
    return _DEEP_FORMATS[channels]


def _deep(image: Image.Image, path: Path, pix_fmt: str, transparent: bool, rules: PictureRules) -> Pixels:
    """16-bit pixels as stored, by ffmpeg."""
    channels = next(c for c, name in _DEEP_FORMATS.items() if name == pix_fmt)
    demuxer = "png_pipe" if image.format == "PNG" else "tiff_pipe"
    answer = ask(
        (
            "-noautorotate", "-f", demuxer, *input_arguments(path, rules.max_pixels, demuxer),
            "-frames:v", "1", "-pix_fmt", pix_fmt, "-f", "rawvideo", "pipe:1",
        ),
        shown(path),
    )  # fmt: skip
    pixels = np.frombuffer(answer.stdout, dtype="<u2")
    h, w = _stored_size(path) if image.format == "TIFF" else (image.height, image.width)
    if answer.failed or pixels.size != h * w * channels:
        raise InputError(f"{shown(path)} cannot be read with 16 bits: {answer.reason}")
    return pixels.reshape(h, w, channels)


def _shallow(image: Image.Image, path: Path, profile: bytes | None, notes: list[str]) -> Pixels:
    """What Pillow reads fully: 8 bits or fewer, and grey of 16 bits."""
    mode = image.mode
    if mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.uint16)[..., None]
        if image.tag_v2.get(_TIFF_PHOTOMETRIC) == 0:  # type: ignore[attr-defined]  # only TIFF has this mode here
            grey = 65535 - grey
        if profile:
            notes.append("16-bit picture with a colour profile: read as sRGB, not converted")
        return grey
    if mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        raise InputError(
            f"{shown(path)} is a CMYK JPEG without Adobe's mark, so whether 0 means ink or paper is not said; "
            "save it as RGB, or as CMYK with the mark"
        )
    if mode in ("RGBa", "La", "PA") or (mode in ("P", "1", "L", "RGB") and "transparency" in image.info):
        image = image.convert("RGBA")
    elif mode == "P":
        image = image.convert("RGBA" if image.palette and image.palette.mode.endswith("A") else "RGB")
    elif mode == "1":
        image = image.convert("L")
    elif mode in ("RGBX", "YCbCr"):
        image = image.convert("RGB")
    if image.mode not in ("L", "LA", "RGB", "RGBA", "CMYK"):
        raise InputError(
            f"{shown(path)} has pixels of the kind {mode}; grey, palette, RGB, RGBA and CMYK of 8 bits are read, "
            "grey, RGB and RGBA of 16 bits"
        )
    image, note = to_srgb(image, profile)
    notes.extend([note] if note else [])
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _turned(pixels: Pixels, orientation: int) -> Pixels:
    """EXIF orientation 1 to 8 undone. Source: EXIF 2.32, tag 274; anything else is taken as 1, as viewers do."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _stored_size(path: Path) -> tuple[int, int]:
    """(height, width) of a TIFF file before any turning."""
    from PIL import TiffImagePlugin

    with path.open("rb") as file, TiffImagePlugin.TiffImageFile(file, "") as image:
        return image.height, image.width


def _tiff_orientation(path: Path) -> int:
    from PIL import TiffImagePlugin

    with path.open("rb") as file, TiffImagePlugin.TiffImageFile(file, "") as image:
        return int(image.tag_v2.get(_ORIENTATION, 1))


def _line(reason: object) -> str:
    text = " ".join(str(reason).split()) or type(reason).__name__
    return "".join(c if c.isprintable() else "?" for c in text)[:200]
