"""Embedded colour profiles: from the profile's colours to sRGB, by LittleCMS as it comes with Pillow."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

_SPACES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}


def to_srgb(image: Image.Image, profile: bytes | None) -> tuple[Image.Image, str | None]:
    """The picture in sRGB, and a note on what was done if anything was.

    Relative colorimetric: colours that sRGB has stay what they are. CMYK without a profile is converted by the plain
    formula ``(1 - ink) * (1 - black)``, since its inks are not known.

    Args:
        image: L, LA, RGB, RGBA or CMYK.
        profile: the bytes of the ICC profile, if there is one.

    Returns:
        L, LA, RGB or RGBA.
    """
    from PIL import ImageCms

    if not profile:
        if image.mode != "CMYK":
            return image, None
        return image.convert("RGB"), "CMYK without a colour profile: converted by the plain formula"
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        title = _printable(ImageCms.getProfileDescription(source))
        mode = _SPACES[source.profile.xcolor_space]
        if mode == "RGB" and "srgb" in title.lower() and image.mode != "CMYK":
            return image, None
        if (mode == "CMYK") != (image.mode == "CMYK"):
            raise ImageCms.PyCMSError(f"a profile for {mode} in a picture of {image.mode}")
        colour = image if image.mode == mode else image.convert(mode)
        srgb = ImageCms.createProfile("sRGB")
        intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
        converted = ImageCms.profileToProfile(colour, source, srgb, renderingIntent=intent, outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, KeyError, ValueError, TypeError) as exc:
        plain = image.convert("RGB") if image.mode == "CMYK" else image
        return plain, f"the colour profile cannot be used and was passed over ({_printable(str(exc))})"
    if converted is None:  # only with inPlace
        return image, None
    if image.mode in ("LA", "RGBA"):
        converted.putalpha(image.getchannel("A"))
    return converted, f"colours were converted from {title!r} to sRGB"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text).strip()[:80]
