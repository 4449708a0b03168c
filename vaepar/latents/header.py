"""Which tensor of a file is the latent, and who wrote it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vaepar.errors import AmbiguousInputError, InputError
from vaepar.latents.contract import LatentHeader
from vaepar.latents.safetensors_header import TensorEntry, read_safetensors_header, refuse
from vaepar.text import listed, shape_text, shown

FORMAT_KEY = "vaepar.format"
PLAIN_KEYS = ("latents", "latent", "samples")
COMFYUI_KEY = "latent_tensor"
COMFYUI_VERSION_KEY = "latent_format_version_0"
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")

_MUSUBI_METADATA = ("seeds", "infer_steps", "guidance_scale", "video_length")


def read_header(path: str | os.PathLike[str]) -> LatentHeader:
    """The header of a latent file. Reads no tensor; at most the header's own bytes are allocated.

    Args:
        path: a .safetensors or ComfyUI .latent file; the contents decide, not the name.

    Raises:
        InputError: for a file that is no readable latent file, on one line that names it.
        AmbiguousInputError: when several tensors could be the latent.
    """
    path = Path(path)
    header = read_safetensors_header(path)
    key = _latent_key(path, header.tensors)
    entry = header.tensors[key]
    _check_entry(path, key, entry)
    return LatentHeader(
        path=path,
        key=key,
        shape=entry.shape,
        dtype=entry.dtype,
        metadata=header.metadata,
        producer=_producer(key, entry, header.tensors, header.metadata),
        other_keys=tuple(name for name in header.tensors if name != key),
        file_bytes=header.file_bytes,
        header_digest=header.digest,
    )


def _latent_key(path: Path, tensors: Mapping[str, TensorEntry]) -> str:
    if COMFYUI_KEY in tensors:
        return COMFYUI_KEY
    found = [key for key in PLAIN_KEYS if key in tensors]
    if len(found) == 1:
        return found[0]
    if found:
        raise AmbiguousInputError(f"{shown(path)}: holds {listed(found)}; one latent tensor a file is allowed")
    wanted = ", ".join((*PLAIN_KEYS, COMFYUI_KEY))
    if any(".weight" in name or ".gamma" in name for name in tensors):
        problem = f"holds model weights ({listed(tensors, 3)}), not a latent"
    else:
        problem = f"holds no latent: found {listed(tensors)}"
    raise InputError(f"{shown(path)}: {problem}; a latent stands under {wanted}")


def _check_entry(path: Path, key: str, entry: TensorEntry) -> None:
    label = f"'{shown(key)}'"
    if entry.dtype not in READABLE_DTYPES:
        refuse(path, f"{label} has dtype {entry.dtype}; a latent is one of {', '.join(READABLE_DTYPES)}")
    if 0 in entry.shape:
        refuse(path, f"{label} has shape {shape_text(entry.shape)} with an empty axis; each must be 1 or more")
    if not 3 <= len(entry.shape) <= 5:
        refuse(path, f"{label} has {len(entry.shape)} axes {shape_text(entry.shape)}; a latent has 3 to 5")


def _producer(key: str, entry: TensorEntry, tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> str:
    if FORMAT_KEY in metadata:
        return "vaepar"
    if key == COMFYUI_KEY:
        return "comfyui"
    # musubi-tuner writes the single key "latent" without a batch axis, so never five axes; its metadata may be off.
    if set(tensors) == {"latent"} and (len(entry.shape) < 5 or musubi_metadata(metadata)):
        return "musubi"
    return "plain"


def musubi_metadata(metadata: Mapping[str, str]) -> bool:
    """Whether metadata bears musubi-tuner's names, not just a size that anyone may note."""
    return any(name in metadata for name in _MUSUBI_METADATA)
