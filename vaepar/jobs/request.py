"""What a run was asked to do, as one frozen value that is checked when it is made."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import get_args

from vaepar.config import VaeParallelMode
from vaepar.errors import UsageError
from vaepar.jobs.farming import Farming
from vaepar.latents import LatentLayout, LatentRequest, LatentState
from vaepar.media import FrameRange, OutputFormat
from vaepar.media.formats import Kind
from vaepar.media.source import Alpha, Fit, FramesFit
from vaepar.text import shown

DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")
_SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp64": "float64"}
FORMATS = ("auto", *get_args(Kind))
TARGETS = ("vaepar", "comfyui", "musubi")
_NAME_FIELDS = ("stem", "parent", "index")


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """How videos and pictures are written; None means the format's default. See :class:`OutputFormat`."""

    format: str = "auto"
    fps: Fraction | None = None
    crf: int | None = None
    codec: str | None = None
    pix_fmt: str | None = None
    preset: str | None = None
    png_level: int | None = None
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"--format is '{self.format}'; it is one of {', '.join(FORMATS)}")
        for kind in ("png", "mp4"):  # the kinds that 'auto' can become, checked before any file is opened
            if self.format in ("auto", kind):
                self.output_format(kind, Fraction(16))
        if self.format in ("png-sequence", "ffv1"):
            self.output_format(self.format, Fraction(16))

    def kind_for(self, frames: int) -> str:
        """The kind of output for so many frames. Raises :class:`UsageError` when ``png`` was asked for a film."""
        if self.format == "auto":
            return "png" if frames == 1 else "mp4"
        if self.format == "png" and frames > 1:
            raise UsageError(f"--format png holds one picture, this file has {frames} frames; png-sequence holds them")
        return self.format

    def unused(self, kind: str) -> tuple[str, ...]:
        """The flags that were given and say nothing about an output of this kind, which ``auto`` has chosen."""
        video = {"--fps": self.fps, "--crf": self.crf, "--codec": self.codec, "--pix-fmt": self.pix_fmt}
        video |= {"--preset": self.preset}
        asked = {"--png-level": self.png_level} if kind in ("mp4", "ffv1") else video
        return tuple(flag for flag, value in asked.items() if value is not None) if self.format == "auto" else ()

    def output_format(self, kind: str, fps: Fraction | None) -> OutputFormat:
        """The format of one output. With ``auto``, settings that only the other kind has are left out."""
        video = kind in ("mp4", "ffv1")
        mixed = self.format == "auto"
        return OutputFormat(
            kind=kind,  # type: ignore[arg-type]  # OutputFormat checks the name itself
            # A still has no rate of its own to give; one that was asked for is refused by the format.
            fps=(self.fps if not mixed else None) if kind == "png" else (self.fps or fps),
            codec=self.codec if video or not mixed else None,
            crf=self.crf if video or not mixed else None,
            pix_fmt=self.pix_fmt if video or not mixed else None,
            preset=self.preset if video or not mixed else None,
            png_level=self.png_level if not video or not mixed else None,
            allow_nonfinite=self.allow_nonfinite,
        )


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """What every run over many files is asked.

    Args:
        inputs: files, folders and patterns, as given.
        model: pipeline folder, VAE folder, hub id, or ``demo``.
        out: folder of the outputs; made when missing.
        mode: parallel mode.
        tile_size, tile_stride: pixels; None for the VAE's own. A size without a stride gets three quarters of it.
        dtype: one of :data:`DTYPES`.
        name: template of the outputs' names without suffix, from the fields stem, parent and index.
        recursive: look for inputs in sub-folders too, and keep the tree.
        overwrite: replace outputs that exist; they are skipped otherwise.
        variant: weight variant of the model folder (``fp16``).
        allow_download: fetch a model from the hub when it is not in the local cache.
        report: file for the machine-readable report.
        farming: how ranks share the files, and how the run ends when asked to.
    """

    inputs: tuple[str, ...]
    model: str
    out: Path
    mode: VaeParallelMode = VaeParallelMode.TILE
    tile_size: int | None = None
    tile_stride: int | None = None
    dtype: str = "auto"
    name: str = "{stem}"
    recursive: bool = False
    overwrite: bool = False
    variant: str | None = None
    allow_download: bool = True
    report: Path | None = None
    farming: Farming = field(default_factory=Farming)

    def __post_init__(self) -> None:
        if not self.inputs:
            raise UsageError("no input was given; give files, folders or patterns")
        object.__setattr__(self, "dtype", dtype_name("--dtype", self.dtype))
        self._check_tiles()
        _check_template(self.name)

    def tiles(self, ratio: int) -> tuple[int, int] | None:
        """Tile size and stride in pixels for a VAE of so many pixels a latent; None for the VAE's own."""
        return None if self.tile_size is None else tile_pixels(self.tile_size, self.tile_stride, ratio)

    def _check_tiles(self) -> None:
        for flag, value in (("--tile-size", self.tile_size), ("--tile-stride", self.tile_stride)):
            if value is not None and value < 1:
                raise UsageError(f"{flag} is {value}; it is a number of pixels, 1 or more")
        if self.tile_stride is not None and self.tile_size is None:
            raise UsageError("--tile-stride was given without --tile-size; the two are pixels and go together")
        if self.tile_size is not None and self.tile_stride is not None and self.tile_stride > self.tile_size:
            raise UsageError(
                f"--tile-stride {self.tile_stride} pixels is beyond --tile-size {self.tile_size} pixels: parts of the "
                f"picture would be left out; it is at most the tile size"
            )


@dataclass(frozen=True, kw_only=True)
class DecodeRequest(BatchRequest):
    """One run of ``vaepar decode``.

    Args:
        latent: what the user said about the files.
        video: how outputs are written.
    """

    latent: LatentRequest = field(default_factory=LatentRequest)
    video: VideoSettings = field(default_factory=VideoSettings)


def tile_pixels(size: int, stride: int | None, ratio: int) -> tuple[int, int]:
    """Tile size and stride in pixels; without a stride three quarters of the size, in whole latents of ``ratio``."""
    return size, stride or max(ratio, size * 3 // 4 // ratio * ratio)


def dtype_name(flag: str, name: str, allowed: tuple[str, ...] = DTYPES) -> str:
    """The name of a dtype as PyTorch has it, from that or a short form. Raises :class:`UsageError`."""
    full = _SHORT_DTYPES.get(name, name)
    if full not in allowed:
        raise UsageError(f"{flag} is '{shown(name)}'; it is one of {', '.join(allowed)}")
    return full


def _check_template(template: str) -> None:
    try:
        parts = [part for part in string.Formatter().parse(template) if part[1] is not None]
        fields = [str(name) for _, name, _, _ in parts]
        if any(spec or conversion for _, _, spec, conversion in parts):
            fields = []  # a width could ask for gigabytes, and a precision of 0 for no name at all
    except ValueError as error:
        raise UsageError(f"--name '{template}' is not a template: {error}") from None
    try:
        if fields:
            template.format(stem="x", parent="x", index="00000")
    except (KeyError, IndexError, ValueError, AttributeError):
        fields = []
    unknown = [name for name in fields if name not in _NAME_FIELDS]
    if unknown or not fields or "/" in template or "\\" in template:
        raise UsageError(
            f"--name is '{template}'; it is a file name with at least one of the fields "
            f"{', '.join('{' + name + '}' for name in _NAME_FIELDS)} and no folder"
        )


@dataclass(frozen=True, kw_only=True)
class EncodeRequest(BatchRequest):
    """One run of ``vaepar encode``.

    Args:
        frames: which frames of videos and sequences; None for all.
        alpha, fit, frames_fit, max_pixels: see :class:`vaepar.media.PictureRules`.
        posterior: ``mode`` (deterministic) or ``sample``.
        seed: of the samples, 0 when None; each file draws its own from it and its name.
        state: ``norm`` as a denoiser takes latents, or ``raw`` as ``vae.decode`` does.
        layout: order of the axes; None for the family's usual one.
        target: ``vaepar``, ``comfyui`` or ``musubi``: whose files are written.
        stored: dtype of the stored latents.
        fps: for sequences, which have none of their own, and for videos to be noted otherwise.
        preview: write a picture of originals beside decoded latents, with their PSNR.
    """

    frames: FrameRange | None = None
    alpha: Alpha = "refuse"
    fit: Fit = "error"
    frames_fit: FramesFit = "error"
    max_pixels: int | None = None
    posterior: str = "mode"
    seed: int | None = None
    state: LatentState | None = None
    layout: LatentLayout | None = None
    target: str = "vaepar"
    stored: str = "float32"
    fps: Fraction | None = None
    preview: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stored", dtype_name("--save-dtype", self.stored, DTYPES[1:]))
        if self.max_pixels is not None and self.max_pixels < 1:
            raise UsageError(f"--max-pixels is {self.max_pixels}; it is a whole number of pixels, 1 or more")
        for flag, value, allowed in (
            ("--alpha", self.alpha, get_args(Alpha)),
            ("--fit", self.fit, get_args(Fit)),
            ("--frames-fit", self.frames_fit, get_args(FramesFit)),
            ("--posterior", self.posterior, ("mode", "sample")),
            ("--as", self.target, TARGETS),
        ):
            if value not in allowed:
                raise UsageError(f"{flag} is '{value}'; it is one of {', '.join(allowed)}")
        if self.target != "vaepar" and (self.state is not None or self.layout is not None):
            raise UsageError(
                f"--as {self.target} fixes state and layout; --state and --layout go with --as vaepar only"
            )
        if self.seed is not None and self.posterior != "sample":
            raise UsageError(f"--seed {self.seed}: --posterior mode draws nothing; it goes with --posterior sample")
        # Parsed by the rules of latent files, so that names are checked in one place.
        asked = LatentRequest(state=self.state, layout=self.layout)
        object.__setattr__(self, "state", asked.state)
        object.__setattr__(self, "layout", asked.layout)
