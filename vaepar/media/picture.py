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
from vaepar.media.colour_profile import to_srgb
from vaepar.media.decoder import ask, check_plain_file, input_arguments
from vaepar.media.fitting import oversize_error
from vaepar.text import quoted

if TYPE_CHECKING:
    from PIL import Image

    from vaepar.media.fitting import Pixels
    from vaepar.media.source import PictureRules

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF")

_ORIENTATION = 0x0112
_TURNS, _ACROSS = range(2, 9), range(5, 9)  # those that change something, those that swap height and width
_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_BITS, _TIFF_PHOTOMETRIC = 256, 257, 258, 262
_DEEP_FORMATS = {1: "gray16le", 2: "ya16le", 3: "rgb48le", 4: "rgba64le"}
_DEFLATE_MOST = 1032  # bytes that one byte of deflate can become (RFC 1951: 258 in two bits)
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
        if image.format == "TIFF":
            h, w, orientation = _tiff_facts(image)
        else:
            h, w, orientation = image.height, image.width, 1
            # A PNG without early EXIF would be decoded whole in search of a late one; read_picture looks there.
            if image.format != "PNG" or "exif" in image.info:
                orientation = image.getexif().get(_ORIENTATION, 1)
        return (w, h) if orientation in _ACROSS else (h, w)


def read_picture(path: Path, rules: PictureRules) -> Picture:
    """The picture of a PNG, JPEG, WebP or TIFF file in sRGB.

    Greys, palettes, CMYK and embedded colour profiles are converted, EXIF orientation is obeyed, 16 bits stay 16 bits.

    Raises:
        InputError: missing, empty, cut short or no such picture; animated or of several pages; larger than
            ``rules.max_pixels`` (nothing is allocated then); of a kind whose colours are not settled.
    """
    with _opened(path, rules) as (image, notes):
        deep = _deep_format(image, path)
        tiff = _tiff_facts(image) if image.format == "TIFF" else None
        image.load()  # also where ffmpeg reads the pixels: it finds a file that is cut short
        # Pillow turns TIFF files itself while loading and forgets the tag; ffmpeg's pixels are as stored.
        orientation = tiff[2] if tiff and deep else image.getexif().get(_ORIENTATION, 1)
        if deep is None:
            pixels = _shallow(image, path, notes)
        else:
            h, w = tiff[:2] if tiff else (image.height, image.width)
            pixels = _deep(path, "tiff_pipe" if tiff else "png_pipe", deep, (h, w), rules)
        if pixels.dtype == np.uint16 and image.info.get("icc_profile"):
            notes.append("16-bit picture with a colour profile: read as sRGB, not converted")
    if orientation in _TURNS:
        notes.append(f"EXIF orientation {orientation} was obeyed")
    return Picture(_turned(pixels, orientation), tuple(notes))


@contextmanager
def _opened(path: Path, rules: PictureRules) -> Iterator[tuple[Image.Image, list[str]]]:
    """The opened picture, its header checked, and notes to add to. Whatever Pillow raises or warns of is translated."""
    from PIL import Image

    name = quoted(path)
    notes: list[str] = []
    check_plain_file(path, "a PNG, JPEG, WebP or TIFF picture")
    with _WARNINGS, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with path.open("rb") as file:
                image = _identified(file, name)
                _check_header(image, file, name, rules, notes)
                yield image, notes
        except (InputError, MemoryError):
            raise
        except Image.DecompressionBombError as exc:  # of Pillow's WebP reader, before it gives the size
            most = f"at most {min(rules.max_pixels / 1e6, 178.9):.1f} megapixels are read of WebP (--max-pixels)"
            raise InputError(f"{name} is too large: {_line(exc)} {most}") from exc
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
    for kind in FORMATS:
        factory, accept = Image.OPEN[kind]
        if accept is None or accept(prefix) is True:
            file.seek(0)
            return factory(file, "")
    raise InputError(f"{name} is no PNG, JPEG, WebP or TIFF picture by its content; these are read")


def _check_header(image: Image.Image, file: IO[bytes], name: str, rules: PictureRules, notes: list[str]) -> None:
    if image.width * image.height > rules.max_pixels:
        raise oversize_error(name, image.height, image.width, rules)
    if image.format == "PNG":
        depth, channels = _png_facts(Path(file.name))
        needed = image.width * image.height * depth * channels / 8
        size = Path(file.name).stat().st_size
        # Pillow leaves black what the data does not fill, and would allocate it first.
        if needed > size * _DEFLATE_MOST:
            raise InputError(
                f"{name} says it is {image.width}x{image.height}, and its {size} bytes cannot hold that; "
                "a whole PNG is needed"
            )
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
        depth, channels = _png_facts(path)
        if depth != 16:
            return None
    elif image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]  # of TIFF files only
        bits = tags.get(_TIFF_BITS, (1,))
        if image.mode in ("I;16", "I;16B", "I;16L") or 16 not in bits:
            return None
        channels = len(bits)
        if set(bits) != {16} or tags.get(_TIFF_PHOTOMETRIC) != (1 if channels < 3 else 2):
            raise InputError(
                f"{quoted(path)} is a 16-bit TIFF in {image.mode}; grey, RGB and RGBA are read with 16 bits"
            )
    else:
        return None
    if "transparency" in image.info:
        channels += 1
    return _DEEP_FORMATS[channels]


def _png_facts(path: Path) -> tuple[int, int]:
    """Bits a channel and channels of a PNG, behind the size in IHDR. Source: PNG specification, 11.2.2."""
    with path.open("rb") as file:
        header = file.read(26)
    return header[24], {2: 3, 4: 2, 6: 4}.get(header[25], 1)


def _deep(path: Path, demuxer: str, pix_fmt: str, size: tuple[int, int], rules: PictureRules) -> Pixels:
    """16-bit pixels as stored, by ffmpeg."""
    channels = next(c for c, name in _DEEP_FORMATS.items() if name == pix_fmt)
    answer = ask(
        (
            "-noautorotate", "-f", demuxer, *input_arguments(path, rules.max_pixels, demuxer),
            "-frames:v", "1", "-pix_fmt", pix_fmt, "-f", "rawvideo", "pipe:1",
        ),
        quoted(path),
    )  # fmt: skip
    pixels = np.frombuffer(answer.stdout, dtype="<u2").astype(np.uint16)
    if answer.failed or pixels.size != size[0] * size[1] * channels:
        raise InputError(f"{quoted(path)} cannot be read with 16 bits: {answer.reason}")
    return pixels.reshape(*size, channels)


def _shallow(image: Image.Image, path: Path, notes: list[str]) -> Pixels:
    """What Pillow reads fully: 8 bits or fewer, and grey of 16 bits."""
    mode = image.mode
    if mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.uint16)[..., None]
        if image.tag_v2.get(_TIFF_PHOTOMETRIC) == 0:  # type: ignore[attr-defined]  # of TIFF files only  # only TIFF has this mode here
            grey = 65535 - grey
        return grey
    if mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        raise InputError(
            f"{quoted(path)} is a CMYK JPEG without Adobe's mark, so whether 0 means ink or paper is not said; "
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
            f"{quoted(path)} has pixels of the kind {mode}; grey, palette, RGB, RGBA and CMYK of 8 bits are read, "
            "grey, RGB and RGBA of 16 bits"
        )
    image, note = to_srgb(image, image.info.get("icc_profile"))
    notes.extend([note] if note else [])
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _turned(pixels: Pixels, orientation: int) -> Pixels:
    """EXIF orientation 1 to 8 undone. Source: EXIF 2.32, tag 274; anything else is taken as 1, as viewers do."""
    if orientation in _ACROSS:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _tiff_facts(image: Image.Image) -> tuple[int, int, int]:
    """Height and width as stored (Pillow's are turned already, in some versions) and the orientation."""
    tags = image.tag_v2  # type: ignore[attr-defined]  # of TIFF files only
    return int(tags[_TIFF_HEIGHT]), int(tags[_TIFF_WIDTH]), int(tags.get(_ORIENTATION, 1))


def _line(reason: object) -> str:
    text = " ".join(str(reason).split()) or type(reason).__name__
    return "".join(c if c.isprintable() else "?" for c in text)[:200]
