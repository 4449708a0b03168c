"""What ``vaepar bench`` was asked to measure, as one frozen value that is checked when it is made. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vaepar.config import VaeParallelMode
from vaepar.errors import UsageError
from vaepar.jobs.bench_presets import Preset, load_preset
from vaepar.jobs.request import dtype_name, tile_pixels
from vaepar.text import shown

OPERATIONS = ("decode", "encode")
DEFAULT_FAMILY, DEFAULT_SCALE = "kl", "small"
_SHAPES = "HxW, TxHxW, BxCxHxW or BxCxTxHxW of the latent, as 96x128"
_MOST = 1 << 20  # of one axis


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One run of ``vaepar bench``.

    Args:
        family, scale: a made-up model with random weights; the defaults when ``model`` is None too.
        model: a model folder, hub id or ``demo`` instead.
        shapes: latents to decode, or to encode pictures and films to, as numbers; the preset's own (or 64x96) when
            empty.
        operation: one of :data:`OPERATIONS`.
        modes: parallel modes to compare, in order.
        ranks: numbers of ranks to compare, ascending, each 1 or more.
        baselines: measure stock diffusers too; its pictures are compared with either way.
        repeats, warmup: measured and unmeasured passes of every case; the first unmeasured one checks the result.
        threads: CPU threads of each rank; 1 when None (on GPUs: torch's own number).
        tile_size, tile_stride: pixels; None for the model's own. A size without a stride gets three quarters of it.
        dtype: one of ``DTYPES``; ``auto`` is float32 on CPUs and bfloat16 (a model: that of its weights) on GPUs.
        frames_per_step: latent frames of one step of a spatial shard; None for the adapter's own.
        variant, allow_download: how ``model`` is looked up.
        json, plot: files to write, none when None.
    """

    family: str | None = None
    scale: str | None = None
    model: str | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    modes: tuple[VaeParallelMode, ...] = (VaeParallelMode.TILE, VaeParallelMode.AUTO)
    ranks: tuple[int, ...] = (1,)
    operation: str = "decode"
    baselines: bool = True
    repeats: int = 3
    warmup: int = 1
    threads: int | None = None
    tile_size: int | None = None
    tile_stride: int | None = None
    dtype: str = "auto"
    frames_per_step: int | None = None
    variant: str | None = None
    allow_download: bool = True
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise UsageError(f"--operation is '{shown(self.operation)}'; it is one of {', '.join(OPERATIONS)}")
        object.__setattr__(self, "dtype", dtype_name("--dtype", self.dtype))
        self._check_model()
        self._check_numbers()
        if not self.modes or len(set(self.modes)) < len(self.modes):
            raise UsageError(f"--modes is '{','.join(self.modes)}'; it is a list of different modes, at least one")
        preset = self.preset
        if preset is not None:
            for dims in self.shapes:
                bind_shape(dims, len(preset.shape) == 5, preset.shape[1], preset.class_name)
        self._check_frames_per_step(preset)

    @property
    def preset(self) -> Preset | None:
        """The made-up model; None when one was named."""
        if self.model is not None:
            return None
        return load_preset(self.family or DEFAULT_FAMILY, self.scale or DEFAULT_SCALE)

    def tiles(self, ratio: int) -> tuple[int, int] | None:
        """Tile size and stride in pixels for a VAE of so many pixels a latent; None for the VAE's own."""
        preset = self.preset
        if self.tile_size is not None:
            return tile_pixels(self.tile_size, self.tile_stride, ratio)
        if preset is not None and preset.tile_size is not None and preset.tile_stride is not None:
            return preset.tile_size, preset.tile_stride
        return None

    def _check_model(self) -> None:
        for flag, value in (("--family", self.family), ("--scale", self.scale)):
            if self.model is not None and value is not None:
                raise UsageError(f"--model and {flag} were both given; a model is named or made up, not both")
        if self.model is None and self.variant is not None:
            raise UsageError("--variant was given without --model; made-up models have no variants")

    def _check_numbers(self) -> None:
        least = {"repeats": 1, "warmup": 1, "threads": 1, "tile_size": 1, "tile_stride": 1, "frames_per_step": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; it is a whole number, {low} or more")
        if self.tile_stride is not None and self.tile_size is None:
            raise UsageError("--tile-stride was given without --tile-size; the two are pixels and go together")
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)) or self.ranks[0] < 1:
            raise UsageError(f"ranks are {list(self.ranks)}; they are different whole numbers, ascending, 1 or more")

    def _check_frames_per_step(self, preset: Preset | None) -> None:
        if self.frames_per_step is None:
            return
        if preset is not None and len(preset.shape) == 4:
            raise UsageError(f"--frames-per-step was given, but {preset.class_name} takes pictures, which are a step")
        if all(mode is VaeParallelMode.TILE for mode in self.modes):
            raise UsageError("--frames-per-step was given, but tile takes a frame a step; add a mode that shards")


def parse_ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks from a comma list, ascending. Raises :class:`UsageError`."""
    counts = [_number(part, "--ranks", text, "a number of ranks or a list of them, as 1,2,4") for part in _parts(text)]
    if len(set(counts)) < len(counts):
        raise UsageError(f"--ranks is '{shown(text)}'; each number of ranks is given once")
    return tuple(sorted(counts))


def parse_modes(text: str) -> tuple[VaeParallelMode, ...]:
    """Parallel modes from a comma list. Raises :class:`UsageError`."""
    return tuple(VaeParallelMode.parse(shown(part)) for part in _parts(text))


def parse_shapes(texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Latent shapes from flags, each of which may be a comma list. Raises :class:`UsageError`."""
    shapes = []
    for text in texts:
        for part in _parts(text):
            dims = tuple(_number(n, "--shape", text, _SHAPES) for n in part.lower().split("x"))
            if not 2 <= len(dims) <= 5:
                raise UsageError(f"--shape is '{shown(text)}'; it is {_SHAPES}")
            shapes.append(dims)
    return tuple(shapes)


def bind_shape(dims: tuple[int, ...], takes_frames: bool, channels: int, class_name: str) -> tuple[int, ...]:
    """The whole shape of a latent: [B, C, T, H, W] where the VAE takes frames, else [B, C, H, W].

    Raises:
        UsageError: for a number of axes or of channels that the VAE does not take.
    """
    text = "x".join(map(str, dims))
    if len(dims) == 2:
        return (1, channels, *((1, *dims) if takes_frames else dims))
    if len(dims) == 3 and takes_frames:
        return (1, channels, *dims)
    if len(dims) != (5 if takes_frames else 4):
        allowed = "HxW, TxHxW or BxCxTxHxW" if takes_frames else "HxW or BxCxHxW"
        raise UsageError(f"--shape {text} does not fit {class_name}; it takes {allowed}")
    if dims[1] != channels:
        raise UsageError(f"--shape {text} has {dims[1]} channels; {class_name} takes {channels}")
    return dims


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _number(part: str, flag: str, text: str, wanted: str) -> int:
    if not (part.isascii() and part.isdecimal() and 1 <= int(part[:12]) <= _MOST and len(part) <= 12):
        raise UsageError(f"{flag} is '{shown(text)}'; it is {wanted}, each number from 1 to {_MOST}")
    return int(part)


__all__ = [
    "DEFAULT_FAMILY",
    "DEFAULT_SCALE",
    "OPERATIONS",
    "BenchRequest",
    "bind_shape",
    "parse_modes",
    "parse_ranks",
    "parse_shapes",
]
