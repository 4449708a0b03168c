"""From a header, a VAE and the user's words to one settled meaning, with a line for each decision."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from vaepar.latents.case import Case, count, pair, wxh
from vaepar.latents.contract import LatentFacts, LatentHeader, LatentLayout, LatentRequest, LatentState
from vaepar.latents.header import COMFYUI_VERSION_KEY, FORMAT_KEY
from vaepar.latents.shapes import settle_layout, settle_shape
from vaepar.latents.vae_facts import VaeFacts
from vaepar.text import listed, shown

__all__ = ["COMFYUI_LEGACY_FACTOR", "resolve"]

_L = LatentLayout

COMFYUI_LEGACY_FACTOR = 1.0 / 0.18215
"""What ComfyUI's LoadLatent multiplies files without a version mark by: they hold scaled SD 1 latents."""

# States that follow from who wrote the file. Keyed by producer, family, layout; "*" stands for any. First match wins.
_STATES: tuple[tuple[str, str, frozenset[LatentLayout] | None, LatentState, str], ...] = (
    (
        "comfyui",
        "flux2",
        frozenset({_L.GRID128}),
        LatentState.NORM,
        "ComfyUI keeps FLUX.2 latents normalised; its VAE undoes that",
    ),
    ("comfyui", "*", None, LatentState.RAW, "ComfyUI rescales latents before it hands them on"),
    ("musubi", "*", None, LatentState.NORM, "musubi-tuner saves the transformer's space"),
    (
        "plain",
        "*",
        frozenset({_L.PACKED_2X2, _L.TOKENS128}),
        LatentState.NORM,
        "only a transformer's space is ever packed into tokens",
    ),
    (
        "plain",
        "flux2",
        frozenset({_L.BCHW, _L.CHW}),
        LatentState.RAW,
        "a FLUX.2 pipeline denormalises before it unfolds the patches",
    ),
)


def resolve(header: LatentHeader, vae: VaeFacts, request: LatentRequest | None = None) -> LatentFacts:
    """Settle what a latent file means for a VAE.

    The user's word comes first, then the file's metadata, then what its producer can only have meant; the rest is
    asked for. A word that contradicts the file is followed and warned about.

    Raises:
        AmbiguousInputError: when the state, the layout or the size must be said; names the flag.
        InputError: when file, VAE and request do not fit together.
    """
    case = Case(header, vae, request or LatentRequest())
    own = _own_metadata(case) if header.producer == "vaepar" else None
    layout = settle_layout(case, own)
    state, prescale = _state(case, layout, own)
    shape, size = settle_shape(case, layout)
    patch = vae.norm_patch
    if state is LatentState.NORM and (shape[-2] % patch or shape[-1] % patch):
        case.refuse(
            f"{shape[-2]}x{shape[-1]} latents cannot be normalised in {patch}x{patch} patches; "
            f"multiples of {patch} are needed"
        )
    trim = _trim(case, shape)
    if trim:
        shape = (*shape[:2], shape[2] - trim, *shape[3:])
    frames = (shape[2] - 1) * vae.temporal_ratio + 1 if vae.takes_frames else 1
    _check_frames(case, frames, trim, own)
    _say_constants(case, state, own)
    if header.other_keys and header.other_keys != (COMFYUI_VERSION_KEY,):
        case.say(f"only '{shown(header.key)}' is read; not read: {listed(header.other_keys)}")
    text = {} if header.producer == "comfyui" else header.metadata
    return LatentFacts(
        header=case.header,
        family=vae.family,
        layout=layout,
        state=state,
        batch=shape[0],
        height=size[0],
        width=size[1],
        num_frames=frames,
        latent_shape=shape,
        trim_latent_frames=trim,
        prescale=prescale,
        fps=_fps(case),
        original_size=_original_size(case, size, own),
        original_frames=_original_frames(case, frames, trim, own),
        seed=text.get("seed", text.get("seeds")),
        prompt=text.get("prompt"),
        decisions=tuple(case.decisions),
    )


def _own_metadata(case: Case) -> Mapping[str, str]:
    metadata = case.header.metadata
    if metadata[FORMAT_KEY] != "1":
        case.refuse(f"is of vaepar's format '{shown(metadata[FORMAT_KEY], 20)}'; format 1 is known")
    missing = [key for key in ("family", "layout", "state", "height", "width", "num_frames") if key not in metadata]
    if missing:
        case.refuse(f"is of vaepar's format 1 but lacks the metadata {', '.join(missing)}")
    if metadata["family"] != case.vae.family:
        case.refuse(
            f"holds latents of the family '{shown(metadata['family'], 40)}';"
            f" the model ({case.vae.class_name}) is of the family '{case.vae.family}'"
        )
    return metadata


def _state(case: Case, layout: LatentLayout, own: Mapping[str, str] | None) -> tuple[LatentState, float | None]:
    """The state of the stored numbers, and the factor that old ComfyUI files need first."""
    known = _known_state(case, layout, own)
    asked = case.request.state
    if asked is not None and known is not None and known[0] is not asked:
        case.warn(f"state {asked.value}: asked for, against {known[0].value} ({known[1]})")
        return asked, None
    if asked is not None:
        case.say(f"state {asked.value}: asked for")
        state = asked
    elif known is not None:
        case.say(f"state {known[0].value}: {known[1]}")
        state = known[0]
    else:
        case.ask(
            "the file does not say its state; say --state norm (the transformer's space, as pipelines return it)"
            " or --state raw (what the VAE itself decodes)"
        )
    legacy = case.header.producer == "comfyui" and COMFYUI_VERSION_KEY not in case.header.other_keys
    if legacy:
        case.say("values times 1/0.18215: a ComfyUI file without latent_format_version_0 holds scaled SD 1 latents")
    return state, COMFYUI_LEGACY_FACTOR if legacy else None


def _known_state(case: Case, layout: LatentLayout, own: Mapping[str, str] | None) -> tuple[LatentState, str] | None:
    if own is not None:
        if own["state"] not in list(LatentState):
            case.refuse(f"has the state '{shown(own['state'], 40)}' in its metadata; raw and norm are allowed")
        return LatentState(own["state"]), "the file's metadata"
    for producer, family, layouts, state, why in _STATES:
        if (
            producer == case.header.producer
            and family in ("*", case.vae.family)
            and (layouts is None or layout in layouts)
        ):
            return state, why
    return None


def _trim(case: Case, shape: tuple[int, ...]) -> int:
    trim = case.request.trim_latent_frames
    if not trim:
        return 0
    frames = shape[2] if case.vae.takes_frames else 1
    if trim >= frames:
        case.refuse(f"has {frames} latent frames; --trim-latent-frames {trim} leaves none")
    case.say(f"{trim} leading latent frames are dropped: asked for")
    return trim


def _check_frames(case: Case, frames: int, trim: int, own: Mapping[str, str] | None) -> None:
    name = "num_frames" if own is not None else "video_length"
    stated = count(case, name)
    if trim or stated is None or stated == frames:
        return
    if own is not None:
        case.refuse(f"holds {frames} frames by its shape, {stated} by its metadata; the two must agree")
    case.warn(f"{frames} frames: the shape's, against {name} {stated} in the file's metadata")


_FINEST_FPS = 1_001_000  # what the clocks of video files keep exactly


def _fps(case: Case) -> Fraction | None:
    default = case.vae.default_fps
    text = case.header.metadata.get("fps")
    if text is not None and case.vae.takes_frames:
        try:
            fps = Fraction(text) if len(text) <= 40 and "e" not in text.lower() else None
        except (ValueError, ZeroDivisionError):
            fps = None
        if fps is not None and 0 < fps <= 1000 and max(fps.numerator, fps.denominator) <= _FINEST_FPS:
            case.say(f"{float(fps):g} frames per second: the file's metadata")
            return fps
        problem = f"metadata fps is '{shown(text, 40)}', not a rate above 0 and up to 1000"
        if case.header.producer == "vaepar":
            case.refuse(f"has broken metadata: {problem}")
        case.warn(f"{problem}; it is not used")
    return None if default is None else Fraction(default)


def _say_constants(case: Case, state: LatentState, own: Mapping[str, str] | None) -> None:
    vae = case.vae
    if state is LatentState.RAW:
        return
    if vae.family == "kl" and vae.scaling_factor is None:
        case.say("scaling factor 1: the model's config has none")
    if vae.takes_frames and vae.latents_std is None:
        case.say("mean 0 and deviation 1: the model's config has neither latents_mean nor latents_std")
    if own is not None and "scaling" in own and not _same_constants(own["scaling"], vae.constants()):
        case.warn(
            "the model's normalisation constants differ from those that the file was written with; the model's are used"
        )


def _original_size(case: Case, size: tuple[int, int], own: Mapping[str, str] | None) -> tuple[int, int] | None:
    """(height, width) before our encoder padded the picture; only our own files may say so."""
    original = pair(case, "original_height", "original_width") if own is not None else None
    if original is not None and (original[0] > size[0] or original[1] > size[1]):
        case.refuse(f"says that it was {wxh(original)} before it was padded to {wxh(size)}; it was at most that large")
    return original


def _original_frames(case: Case, frames: int, trim: int, own: Mapping[str, str] | None) -> int | None:
    """Frames before our encoder padded the film; not known any more when leading frames are dropped."""
    original = count(case, "original_frames") if own is not None else None
    if original is None or trim:
        return None
    if original > frames:
        case.refuse(f"says that it had {original} frames before it was padded to {frames}; it had at most that many")
    return original


def _same_constants(text: str, wanted: Mapping[str, Any]) -> bool:
    try:
        written = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(written, dict) and all(_close(written.get(key), value) for key, value in wanted.items())


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    return bool(a == b)
