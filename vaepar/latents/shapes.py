"""Layout and size of a latent file: what its shape can mean for a VAE, and what must be asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vaepar.latents.case import Case, pair, wxh
from vaepar.latents.contract import FAMILY_LAYOUTS, LAYOUT_AXES, LatentLayout
from vaepar.latents.header import musubi_metadata
from vaepar.text import shape_text, shown

_L = LatentLayout

_PRODUCER_LAYOUTS: Mapping[str, frozenset[LatentLayout]] = {
    "comfyui": frozenset({_L.BCHW, _L.BCFHW, _L.GRID128}),
    # Qwen-Image layers come as [L, C, H, W], which reads as a batch of stills.
    "musubi": frozenset({_L.CHW, _L.CFHW, _L.CGRID128}),
}


def _fits(layout: LatentLayout, shape: tuple[int, ...], channels: int) -> bool:
    axes = LAYOUT_AXES[layout]
    wanted = {"C": channels, "Q": 4 * channels}
    return len(axes) == len(shape) and all(wanted.get(a, n) == n for a, n in zip(axes, shape, strict=True))


def _allowed(case: Case) -> str:
    channels = case.vae.latent_channels
    names = {"C": str(channels), "Q": str(4 * channels), "P": "H/2", "R": "W/2", "N": "H/2*W/2"}
    shapes = (
        f"{layout.value} [{', '.join(names.get(a, a) for a in LAYOUT_AXES[layout])}]"
        for layout in FAMILY_LAYOUTS[case.vae.family]
    )
    return f"{case.vae.class_name} takes {', '.join(shapes)}"


def settle_layout(case: Case, own: Mapping[str, str] | None) -> LatentLayout:
    header, family, channels = case.header, case.vae.family, case.vae.latent_channels
    asked = case.request.layout
    said = None if own is None else own["layout"]
    if asked is not None:
        if said is not None and said != asked:
            case.warn(f"layout {asked.value}: asked for, against the file's '{shown(said, 40)}'")
        if asked not in FAMILY_LAYOUTS[family] or not _fits(asked, header.shape, channels):
            case.refuse(f"shape {shape_text(header.shape)} is not of the layout {asked.value}; {_allowed(case)}")
        if header.producer == "musubi" and not musubi_metadata(header.metadata) and "B" in LAYOUT_AXES[asked]:
            _call_plain(case)
        case.say(f"layout {asked.value}: asked for")
        return asked
    if said is not None:
        known = [layout for layout in FAMILY_LAYOUTS[family] if layout.value == said]
        if not known or not _fits(known[0], header.shape, channels):
            case.refuse(
                f"shape {shape_text(header.shape)} is not of its own layout '{shown(said, 40)}'; {_allowed(case)}"
            )
        return known[0]
    return _layout_by_shape(case)


def _layout_by_shape(case: Case) -> LatentLayout:
    shape, channels = case.header.shape, case.vae.latent_channels
    fitting = [layout for layout in FAMILY_LAYOUTS[case.vae.family] if _fits(layout, shape, channels)]
    found = [layout for layout in fitting if layout in _PRODUCER_LAYOUTS.get(case.header.producer, fitting)]
    if case.header.producer == "musubi":
        if case.vae.family == "qwenimage" and musubi_metadata(case.header.metadata) and _L.BCHW in fitting:
            found = [*found, _L.BCHW]
        if not found and fitting and not musubi_metadata(case.header.metadata):
            _call_plain(case)
            found = fitting
    if len(found) > 1 and case.request.size is not None:
        found = [layout for layout in found if _matches_size(case, layout, case.request.size)] or found
    if not found:
        case.refuse(f"shape {shape_text(shape)} does not fit; {_allowed(case)}")
    if len(found) > 1:
        names = ", ".join(layout.value for layout in found)
        case.ask(f"shape {shape_text(shape)} can be {names}; say which with --layout")
    case.say(f"layout {found[0].value}: the one that fits {shape_text(shape)} ({_who(case)})")
    return found[0]


def _call_plain(case: Case) -> None:
    """The lone key "latent" is musubi-tuner's, but a batch axis says that it was someone else."""
    case.header = replace(case.header, producer="plain")


def _who(case: Case) -> str:
    names = {"comfyui": "a ComfyUI file", "musubi": "a musubi-tuner file", "plain": "a plain tensor"}
    return f"{names[case.header.producer]} under '{shown(case.header.key)}'"


def _latent_rows(case: Case, layout: LatentLayout, size: tuple[int, int]) -> tuple[int, int]:
    """Latent (rows, columns) of a picture of that size, rounded down as the pipelines round."""
    ratio = case.vae.spatial_ratio
    if LAYOUT_AXES[layout][-2:] in ("NQ", "PR"):
        return 2 * (size[0] // (2 * ratio)), 2 * (size[1] // (2 * ratio))
    return size[0] // ratio, size[1] // ratio


def _matches_size(case: Case, layout: LatentLayout, size: tuple[int, int]) -> bool:
    rows, columns = _latent_rows(case, layout, size)
    axes = dict(zip(LAYOUT_AXES[layout], case.header.shape, strict=True))
    if "N" in axes:
        return axes["N"] == (rows // 2) * (columns // 2)
    if "P" in axes:
        return (2 * axes["P"], 2 * axes["R"]) == (rows, columns)
    return (axes["H"], axes["W"]) == (rows, columns)


def settle_shape(case: Case, layout: LatentLayout) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The VAE's input shape before trimming, and (height, width) in pixels."""
    axes = dict(zip(LAYOUT_AXES[layout], case.header.shape, strict=True))
    stated = pair(case, "height", "width")
    if "N" in axes:
        rows, columns = _token_rows(case, layout, axes["N"], stated)
    else:
        rows, columns = (2 * axes["P"], 2 * axes["R"]) if "P" in axes else (axes["H"], axes["W"])
        _check_size(case, layout, (rows, columns), stated)
    batch, channels = axes.get("B", 1), case.vae.latent_channels
    frames = axes.get("F", 1)
    if case.vae.layered and frames > 1:
        case.refuse(f"holds {frames} layers of a layered picture; one layer a file is decoded, as [B, C, 1, H, W]")
    shape = (batch, channels, frames, rows, columns) if case.vae.takes_frames else (batch, channels, rows, columns)
    if case.vae.takes_frames and "F" not in axes and batch > 1:
        case.say(f"{batch} stills: no frame axis, so each item becomes a picture of its own")
    ratio = case.vae.spatial_ratio
    return shape, (rows * ratio, columns * ratio)


def _token_rows(case: Case, layout: LatentLayout, tokens: int, stated: tuple[int, int] | None) -> tuple[int, int]:
    size = case.request.size or stated
    if size is None:
        case.ask(
            f"shape {shape_text(case.header.shape)} is {tokens} packed tokens, whose rows and columns are not known;"
            " say the size of the picture with --size WxH"
        )
    asked = case.request.size is not None
    if asked and stated is not None and stated != case.request.size:
        case.warn(f"size {wxh(size)}: asked for, against {wxh(stated)} in the file's metadata")
    rows, columns = _latent_rows(case, layout, size)
    if (rows // 2) * (columns // 2) != tokens:
        source = "--size" if asked else "its metadata"
        case.refuse(
            f"has {tokens} packed tokens; {wxh(size)} ({source}) makes {rows // 2 * (columns // 2)};"
            " say the right size with --size WxH"
        )
    case.say(f"size {wxh(size)}: " + ("asked for" if asked else "the file's metadata"))
    ratio = case.vae.spatial_ratio
    if (rows * ratio, columns * ratio) != size:
        case.say(f"size {wxh((rows * ratio, columns * ratio))}: {wxh(size)} rounded down to whole patches")
    return rows, columns


def _check_size(case: Case, layout: LatentLayout, found: tuple[int, int], stated: tuple[int, int] | None) -> None:
    ratio = case.vae.spatial_ratio
    pixels = wxh((found[0] * ratio, found[1] * ratio))
    asked = case.request.size
    if asked is not None and not _matches_size(case, layout, asked):
        case.refuse(f"holds {pixels} pixels by its shape {shape_text(case.header.shape)}; --size asks for {wxh(asked)}")
    if stated is not None and not _matches_size(case, layout, stated):
        if case.header.producer == "vaepar":
            case.refuse(f"holds {pixels} pixels by its shape, {wxh(stated)} by its metadata; the two must agree")
        case.warn(f"size {pixels}: the shape's, against {wxh(stated)} in the file's metadata")
