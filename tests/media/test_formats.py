from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from vaepar.errors import UsageError
from vaepar.media import CODECS, OutputFormat, parse_fps


def test_defaults_are_those_of_the_codec() -> None:
    h264 = OutputFormat(kind="mp4", fps=16)  # type: ignore[arg-type]  # a number is taken as well
    assert (h264.codec, h264.pix_fmt, h264.crf, h264.preset) == ("libx264", "yuv420p", 19, "medium")
    assert h264.fps == Fraction(16)
    assert OutputFormat(kind="ffv1", fps=Fraction(16)).pix_fmt == "bgr0"
    assert OutputFormat(kind="png").png_level == 1


@pytest.mark.parametrize(("kind", "suffix"), [("png", ".png"), ("png-sequence", ""), ("mp4", ".mp4"), ("ffv1", ".mkv")])
def test_suffix(kind: Any, suffix: str) -> None:
    assert OutputFormat(kind=kind, fps=Fraction(8) if kind in ("mp4", "ffv1") else None).suffix == suffix


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "gif"}, ["'gif'", "png-sequence", "ffv1"]),
        ({"kind": "mp4"}, ["fps", "mp4"]),
        ({"kind": "mp4", "fps": 0}, ["fps is 0", "above 0"]),
        ({"kind": "mp4", "fps": -1}, ["fps is -1"]),
        ({"kind": "mp4", "fps": 1001}, ["at most 1000"]),
        ({"kind": "mp4", "fps": True}, ["fps is True"]),
        ({"kind": "mp4", "fps": 23.976}, ["exact"]),
        ({"kind": "mp4", "fps": Fraction(10_000_019, 1_000_003)}, ["kept exactly"]),
        ({"kind": "png-sequence", "fps": 0}, ["fps is 0"]),
        ({"kind": "png", "fps": 16}, ["fps is 16", "png"]),
        ({"kind": "mp4", "fps": 16, "crf": 52}, ["crf is 52", "0 to 51"]),
        ({"kind": "mp4", "fps": 16, "crf": -1}, ["crf is -1"]),
        ({"kind": "mp4", "fps": 16, "crf": True}, ["crf is True"]),
        ({"kind": "mp4", "fps": 16, "codec": "libx999"}, ["'libx999'", "libx264", "libx265"]),
        ({"kind": "mp4", "fps": 16, "codec": "ffv1"}, ["'ffv1'", "libx264"]),
        ({"kind": "mp4", "fps": 16, "pix_fmt": "bgr0"}, ["'bgr0'", "yuv420p", "yuv444p"]),
        ({"kind": "mp4", "fps": 16, "pix_fmt": "yuv420"}, ["'yuv420'", "yuv420p"]),
        ({"kind": "ffv1", "fps": 16, "pix_fmt": "yuv420p"}, ["'yuv420p'", "bgr0"]),
        ({"kind": "ffv1", "fps": 16, "codec": "libx264"}, ["'libx264'", "ffv1"]),
        ({"kind": "ffv1", "fps": 16, "crf": 19}, ["crf is 19", "lossless"]),
        ({"kind": "ffv1", "fps": 16, "preset": "fast"}, ["preset", "lossless"]),
        ({"kind": "mp4", "fps": 16, "preset": "quick"}, ["'quick'", "medium"]),
        ({"kind": "mp4", "fps": 16, "png_level": 1}, ["png_level", "mp4"]),
        ({"kind": "mp4", "fps": 16, "threads": 0}, ["threads is 0"]),
        ({"kind": "png", "png_level": 10}, ["png_level is 10", "0 to 9"]),
        ({"kind": "png", "crf": 19}, ["crf is 19", "png"]),
        ({"kind": "png-sequence", "codec": "libx264"}, ["codec is 'libx264'"]),
        ({"kind": "mp4", "fps": 16, "codec": "a\x1b[31m\n"}, [r"a\x1b[31m\n"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        OutputFormat(**settings)
    message = str(caught.value)
    assert message.isprintable()
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "fps"),
    [
        ("16", Fraction(16)),
        ("12.5", Fraction(25, 2)),
        ("24000/1001", Fraction(24000, 1001)),
        ("30000/1001", Fraction(30000, 1001)),
        ("23.976", Fraction(24000, 1001)),
        ("23.98", Fraction(24000, 1001)),
        ("29.97", Fraction(30000, 1001)),
        ("59.94", Fraction(60000, 1001)),
    ],
)
def test_parse_fps(text: str, fps: Fraction) -> None:
    assert parse_fps(text) == fps


@pytest.mark.parametrize("text", ["", "0", "-1", "fast", "1/0", "nan", "inf", "1e99", "0.0000001"])
def test_parse_fps_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="fps"):
        parse_fps(text)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_every_pixel_format_says_what_sizes_it_takes(codec: str) -> None:
    facts = CODECS[codec]
    for pix_fmt in facts.pix_fmts:
        fmt = OutputFormat(kind=facts.kind, fps=Fraction(16), codec=codec, pix_fmt=pix_fmt)
        expected = (2, 2) if "420" in pix_fmt else (1, 2) if "422" in pix_fmt else (1, 1)
        assert fmt.size_step == expected
