"""vaepar's own latent files: safetensors with metadata that leave no question open."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vaepar.atomic import write_whole
from vaepar.errors import UsageError
from vaepar.latents.contract import FAMILY_LAYOUTS, LAYOUT_AXES, LatentLayout, LatentState
from vaepar.latents.header import COMFYUI_KEY, COMFYUI_VERSION_KEY, FORMAT_KEY, READABLE_DTYPES
from vaepar.latents.vae_facts import VaeFacts
from vaepar.text import shape_text, shown

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LatentRecord:
    """All that is written beside the numbers.

    Args:
        vae: the VAE that the latents belong to.
        layout, state: of the tensor that is written.
        height, width: of the picture in pixels, as it will be decoded.
        num_frames: frames of the picture (1 for a still).
        fps: frames per second; None for pictures.
        vae_id, vae_sha256: which model, and the hash of its weights.
        posterior: ``mode`` or ``sample``, for encoded latents.
        seed: of that sample.
        source: what was encoded.
        prompt: free text.
        original_size: (height, width) before the picture was padded.
        original_frames: how many frames there were before the film was padded.

    Raises:
        UsageError: for values that no file may have.
    """

    vae: VaeFacts
    layout: LatentLayout
    state: LatentState
    height: int
    width: int
    num_frames: int = 1
    fps: Fraction | None = None
    vae_id: str | None = None
    vae_sha256: str | None = None
    posterior: str | None = None
    seed: int | None = None
    source: str | None = None
    prompt: str | None = None
    original_size: tuple[int, int] | None = None
    original_frames: int | None = None

    def __post_init__(self) -> None:
        if self.layout not in FAMILY_LAYOUTS[self.vae.family]:
            allowed = ", ".join(FAMILY_LAYOUTS[self.vae.family])
            raise UsageError(f"layout {self.layout} is not one of the family '{self.vae.family}'; it has {allowed}")
        if min(self.height, self.width, self.num_frames) < 1:
            raise UsageError(f"a picture of {self.width}x{self.height} with {self.num_frames} frames cannot be")
        if self.posterior not in (None, "mode", "sample"):
            raise UsageError(f"posterior is '{shown(self.posterior)}'; it is mode or sample")

    def to_metadata(self) -> dict[str, str]:
        """The strings of the file's metadata. ``video_length`` is musubi-tuner's name for the frames."""
        from vaepar import __version__

        values: Mapping[str, Any] = {
            FORMAT_KEY: 1,
            "producer": f"vaepar/{__version__}",
            "family": self.vae.family,
            "vae_class": self.vae.class_name,
            "vae_id": self.vae_id,
            "vae_sha256": self.vae_sha256,
            "layout": self.layout.value,
            "state": self.state.value,
            "height": self.height,
            "width": self.width,
            "num_frames": self.num_frames,
            "video_length": self.num_frames,
            "fps": self.fps,
            "scaling": json.dumps(self.vae.constants()),
            "posterior": self.posterior,
            "seed": self.seed,
            "source": self.source,
            "prompt": self.prompt,
            "original_height": None if self.original_size is None else self.original_size[0],
            "original_width": None if self.original_size is None else self.original_size[1],
            "original_frames": self.original_frames,
        }
        # File names may hold bytes that are no text; safetensors takes only text.
        return {
            key: str(value).encode("utf-8", "backslashreplace").decode("utf-8")
            for key, value in values.items()
            if value is not None
        }


def write_latent(path: str | os.PathLike[str], tensor: Tensor, record: LatentRecord) -> None:
    """Write one latent file whole or not at all: a temporary file in the same folder, synced, then renamed.

    Args:
        path: the file; an older one of that name is replaced.
        tensor: in the record's layout; any memory format, any device; float64, float32, float16 or bfloat16.
        record: its meaning.

    Raises:
        UsageError: when the tensor is not what the record says.
        DiskFullError, OutputError: when it cannot be written; no file of that name is left behind then.
    """
    _check_tensor(tensor, record)
    _write(Path(path), {"latents": tensor}, record.to_metadata())


def write_comfyui(path: str | os.PathLike[str], tensor: Tensor, record: LatentRecord) -> None:
    """Write a ``.latent`` file as ComfyUI's SaveLatent does: batched, ``latent_tensor`` and an empty version key.

    ComfyUI keeps latents raw, except FLUX.2, whose patched grid it keeps normalised. Arguments and errors are those
    of :func:`write_latent`; a record of another state or layout is a :class:`UsageError`.
    """
    patched = record.vae.norm_patch > 1
    state = LatentState.NORM if patched else LatentState.RAW
    layouts = (LatentLayout.GRID128,) if patched else (LatentLayout.BCHW, LatentLayout.BCFHW)
    _require(record, state, layouts, "a ComfyUI latent")
    _check_tensor(tensor, record)
    _write(Path(path), {COMFYUI_KEY: tensor, COMFYUI_VERSION_KEY: tensor.new_empty(0)}, {})


def write_musubi(path: str | os.PathLike[str], tensor: Tensor, record: LatentRecord) -> None:
    """Write a file as musubi-tuner's generators do: one item without its batch axis under ``latent``, normalised.

    Args:
        path: the file; musubi-tuner calls it ``*_latent.safetensors``.
        tensor: [1, C, H, W] or [1, C, F, H, W].
        record: its meaning.

    Raises:
        UsageError: more than one item, or a record of another state or layout. OutputError: as :func:`write_latent`.
    """
    layouts = (LatentLayout.BCHW, LatentLayout.BCFHW, LatentLayout.GRID128)
    _require(record, LatentState.NORM, layouts, "a musubi-tuner latent")
    _check_tensor(tensor, record)
    if tensor.shape[0] != 1:
        raise UsageError(f"a musubi-tuner latent holds one item; {tensor.shape[0]} were given")
    words = {"height": record.height, "width": record.width, "video_length": record.num_frames, "seeds": record.seed}
    metadata = {key: str(value) for key, value in words.items() if value is not None}
    _write(Path(path), {"latent": tensor[0]}, metadata | {"prompt": record.prompt or ""})


def _require(record: LatentRecord, state: LatentState, layouts: tuple[LatentLayout, ...], what: str) -> None:
    if record.state is not state or record.layout not in layouts:
        wanted = " or ".join(layout.value for layout in layouts)
        raise UsageError(
            f"{what} of family '{record.vae.family}' is {state.value} {wanted}; {record.state.value} "
            f"{record.layout.value} was asked for"
        )


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    from safetensors.torch import save

    data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, metadata=metadata)
    write_whole(path, data)


def _check_tensor(tensor: Tensor, record: LatentRecord) -> None:
    """The file must resolve to exactly this record, so what would be refused when read is refused here."""
    axes = LAYOUT_AXES[record.layout]
    vae, shape = record.vae, tuple(tensor.shape)
    dtype = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(
        str(tensor.dtype).removeprefix("torch.")
    )
    if dtype not in READABLE_DTYPES:
        raise UsageError(f"a latent of dtype {tensor.dtype} cannot be written; float64, float32, float16, bfloat16 can")
    ratio = vae.spatial_ratio
    rows, columns = record.height // ratio, record.width // ratio
    frames = (record.num_frames - 1) // vae.temporal_ratio + 1
    known = {"C": vae.latent_channels, "Q": 4 * vae.latent_channels, "F": frames, "H": rows, "W": columns}
    known |= {"P": rows // 2, "R": columns // 2, "N": (rows // 2) * (columns // 2)}
    wanted = tuple(known.get(axis, 0) for axis in axes)
    if len(shape) != len(axes) or any(n < 1 or w not in (0, n) for n, w in zip(shape, wanted, strict=True)):
        raise UsageError(
            f"a tensor of shape {shape_text(shape)} is not {record.layout.value} of"
            f" {record.num_frames} frames of {record.width}x{record.height}; that is {shape_text(wanted)}, any batch"
        )
