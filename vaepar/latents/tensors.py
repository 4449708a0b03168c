"""The tensor of a latent file: read it, and bring it to what ``vae.decode`` takes; the way back for encoders."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from vaepar.errors import InputError, UsageError
from vaepar.latents.contract import LatentFacts, LatentLayout, LatentState
from vaepar.latents.header import read_header
from vaepar.latents.normalise import BatchNorm, arithmetic_for, cast_first, denormalise, normalise, raw_deviation
from vaepar.latents.packing import pack, unpack
from vaepar.latents.safetensors_header import refuse
from vaepar.latents.vae_facts import VaeFacts
from vaepar.text import shape_text, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_log = logging.getLogger(__name__)

_DOUBT_FROM = math.log(1.5)
_DOUBT_MARGIN = 0.3


def read_latent(facts: LatentFacts) -> Tensor:
    """The stored tensor: on the CPU, in its stored dtype and layout, independent of the file afterwards.

    NaN and infinity are left as they are, with a warning that counts them.

    Raises:
        InputError: when the file has changed since ``facts`` were made, or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    header = facts.header
    now = read_header(header.path)
    if (now.header_digest, now.file_bytes) != (header.header_digest, header.file_bytes):
        refuse(header.path, "has changed since it was inspected; run again")
    try:
        with _readable_name(header.path) as name, safe_open(name, framework="pt", device="cpu") as file:
            # The slice is a view of the mapped file; a copy of it survives the file's being cut short.
            tensor: Tensor = file.get_slice(header.key)[:].clone()
    except (SafetensorError, OSError) as error:
        raise InputError(f"{shown(header.path)}: cannot be read: {shown(error)}") from None
    nan, infinite = count_nonfinite(tensor)
    if nan or infinite:
        _log.warning(
            "%s: '%s' holds %d NaN and %d infinite of %d values",
            shown(header.path),
            shown(header.key),
            nan,
            infinite,
            tensor.numel(),
        )
    return tensor


@contextmanager
def _readable_name(path: Path) -> Iterator[str]:
    """A name under which safetensors opens a file: it takes text only, and names may hold bytes that are none."""
    name = os.fspath(path)
    if not any(0xD800 <= ord(c) <= 0xDFFF for c in name):
        yield name
        return
    with path.open("rb") as file:
        yield f"/proc/self/fd/{file.fileno()}"


def count_nonfinite(tensor: Tensor) -> tuple[int, int]:
    """(how many NaN, how many infinite) values."""
    if bool(tensor.isfinite().all()):
        return 0, 0
    return int(tensor.isnan().sum()), int(tensor.isinf().sum())


def to_vae_input(
    tensor: Tensor,
    facts: LatentFacts,
    vae: VaeFacts,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    bn: BatchNorm | None = None,
) -> Tensor:
    """What ``vae.decode`` takes: unpacked, denormalised, cast, contiguous.

    Args:
        tensor: from :func:`read_latent`, or some of its items (``tensor[i : i + 1]`` where there is a batch axis).
        facts: the file's meaning.
        vae: the VAE that ``facts`` were settled for.
        dtype: the VAE's dtype.
        device: where the arithmetic is done and the result lies.
        bn: (running_mean, running_var, batch_norm_eps) of a FLUX.2 VAE; needed for normalised latents of that family.

    Returns:
        [B, C, H, W], or [B, C, F, H, W] for the video families; of ``dtype`` on ``device``. The arithmetic and its
        order of casts are the row of :data:`vaepar.latents.normalise.ARITHMETIC` for the file.

    Raises:
        UsageError: for a tensor or a VAE that the facts are not about, or a missing ``bn``.
    """
    _check_tensor(tensor, facts, vae)
    rows, columns = facts.latent_shape[-2:]
    x = unpack(tensor.to(device), facts.layout, (rows, columns), takes_frames=vae.takes_frames)
    if facts.trim_latent_frames:
        x = x[:, :, facts.trim_latent_frames :]
    if facts.prescale is not None:
        x = x.float() * facts.prescale
    _doubt_state(x, facts, vae, bn)
    if facts.state is LatentState.NORM:
        row = arithmetic_for(vae, facts.header.producer, facts.layout)
        if cast_first(row.cast, x.dtype, dtype):
            x = x.to(dtype)
        x = denormalise(x, row.formula, vae, bn)
    return x.to(dtype).contiguous()


def from_vae_output(
    latent: Tensor,
    vae: VaeFacts,
    *,
    layout: LatentLayout,
    state: LatentState,
    bn: BatchNorm | None = None,
) -> Tensor:
    """The inverse: raw [B, C, H, W] or [B, C, F, H, W] of ``vae.encode`` to a state and a layout.

    Computed in the dtype of ``latent``; the result is contiguous.

    Raises:
        UsageError: when the layout has no place for the batch or the frames, or a ``bn`` is missing.
    """
    return pack(normalise(latent, vae, bn) if state is LatentState.NORM else latent, layout)


def _check_tensor(tensor: Tensor, facts: LatentFacts, vae: VaeFacts) -> None:
    if vae.family != facts.family or vae.latent_channels != facts.latent_shape[1]:
        raise UsageError(
            f"the facts are about a VAE of the family '{facts.family}' with {facts.latent_shape[1]} channels, the VAE"
            f" is of '{vae.family}' with {vae.latent_channels}"
        )
    stored = facts.header.shape
    first = 0 if facts.layout in (LatentLayout.CHW, LatentLayout.CFHW, LatentLayout.CGRID128) else 1
    if tensor.ndim != len(stored) or tuple(tensor.shape[first:]) != stored[first:]:
        raise UsageError(f"the tensor has shape {shape_text(tensor.shape)}; the file holds {shape_text(stored)}")


def _doubt_state(x: Tensor, facts: LatentFacts, vae: VaeFacts, bn: BatchNorm | None) -> None:
    """Warn when the deviation of the channels speaks for the other state. Never decides anything."""
    other = LatentState.RAW if facts.state is LatentState.NORM else LatentState.NORM
    by_channel = x.detach().transpose(0, 1).flatten(1)
    if by_channel.shape[1] < 64:
        return
    deviations = [float(value) for value in by_channel.float().std(dim=1)]
    if not all(math.isfinite(value) and value > 0 for value in deviations):
        return
    raw = raw_deviation(vae, bn)
    distance = {
        LatentState.NORM: abs(median(map(math.log, deviations))),
        LatentState.RAW: abs(median(math.log(a / b) for a, b in zip(deviations, raw, strict=True))),
    }
    if distance[facts.state] > _DOUBT_FROM and distance[other] + _DOUBT_MARGIN < distance[facts.state]:
        _log.warning(
            "%s: taken as %s, but the channels' deviation (median %.2f) looks like %s; see --state",
            shown(facts.header.path),
            facts.state.value,
            median(deviations),
            other.value,
        )
