"""How much memory a decode or an encode will take, before it is begun and without a GPU or weights.

The adapter itself runs on tensors without memory (:mod:`vaepar.jobs.ghost`), over the few latent frames after which
nothing grows any more; what it would allocate is counted. Not counted are the work spaces of convolution libraries
and the fragmentation of allocators, for which an allowance is added that measured peaks have shown to be enough.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vaepar.autoencoders import adapter_for
from vaepar.autoencoders.feed import TensorFeed
from vaepar.autoencoders.selection import DIRECT, Selection
from vaepar.autoencoders.spatial import DEFAULT_FRAMES_PER_STEP
from vaepar.errors import ModelError
from vaepar.jobs.ghost import META, FusedAttention, GhostGroup, LiveBytes
from vaepar.jobs.models import quiet_diffusers
from vaepar.latents import VaeFacts
from vaepar.layers.kernels import meta_for_cpu
from vaepar.parallel.group import SoloGroup

PROCESS_BYTES = 430 * 2**20
"""Resident memory of a rank on a CPU before it has loaded a model: the interpreter and its libraries."""

# Measured against real peaks: a convolution of oneDNN keeps reordered copies of its operands, cuDNN a work space.
_WORK_SPACE = 1.25


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Peak memory of one rank, bytes.

    Args:
        weights: the model's parameters and buffers.
        activations: everything that a request makes: feature maps, caches, the picture.
        process: the rest of the process; 0 on GPUs, where only what is allocated on the device counts.
    """

    weights: int
    activations: int
    process: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.process


def estimate_peak_bytes(
    facts: VaeFacts,
    latent_shape: tuple[int, ...],
    dtype: torch.dtype,
    selection: Selection,
    size: int,
    *,
    operation: str = "decode",
    tiles: tuple[int, int] | None = None,
    frames_per_step: int = DEFAULT_FRAMES_PER_STEP,
    device: str = "cpu",
    threads: int = 1,
) -> Estimate:
    """The peak of the busiest rank (the owner) while it decodes or encodes one item.

    Args:
        facts: of the VAE.
        latent_shape: [1, C, H, W] or [1, C, T, H, W], of what is decoded or made; a batch is decoded item by item.
        dtype: of weights and latents.
        selection: the strategy, from :func:`select_for` or an adapter's ``select_mode``.
        size: ranks that share the latent.
        operation: ``decode`` or ``encode``.
        tiles: tile size and stride in pixels; None for the VAE's own.
        frames_per_step: latent frames of one step of a spatial shard.
        device: ``cpu`` or ``cuda``.
        threads: of a rank on a CPU.
    """
    shape = (1, *latent_shape[1:])
    config = json.dumps(dict(facts.config), sort_keys=True)
    # The layers of a shard compute their convolutions without unfolding them.
    unfolds = device == "cpu" and threads == 1 and selection.axis is None
    weights, activations = _measure(
        operation,
        facts,
        config,
        shape,
        dtype,
        selection.mode,
        size,
        tiles,
        frames_per_step,
        unfolds,
        device == "cpu",
    )
    frames = 1 + (frames_per_step - 1) * facts.temporal_ratio if len(shape) == 5 else 1
    picture = 3 * shape[-1] * shape[-2] * facts.spatial_ratio**2 * frames
    in_bytes = 3 * picture if device == "cpu" else picture  # on their way to the writer or from the reader
    return Estimate(
        weights=weights,
        activations=int(activations * _WORK_SPACE) + in_bytes,
        process=PROCESS_BYTES if device == "cpu" else 0,
    )


def select_for(
    facts: VaeFacts,
    latent_shape: tuple[int, ...],
    mode: str,
    size: int,
    tiles: Any = None,
    operation: str = "decode",
) -> Selection:
    """The strategy that a latent's decode, or its making, will use on ``size`` ranks, without weights."""
    model = _ghost(facts.class_name, json.dumps(dict(facts.config), sort_keys=True), torch.float32, tiles)
    _prepare(model, mode, size)
    shape = (1, *latent_shape[1:])
    selection: Selection = (
        model.select_encode_mode(facts.pixel_shape(shape))
        if operation == "encode"
        else model.select_mode(torch.empty(shape, device=META))
    )
    return selection


@lru_cache(maxsize=4)
def _ghost(class_name: str, config: str, dtype: torch.dtype, tiles: tuple[int, int] | None) -> Any:
    try:
        with torch.device(META), quiet_diffusers():
            model = adapter_for(class_name).from_config(json.loads(config))
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
        # diffusers takes a configuration as it is; what it cannot be built from fails somewhere inside its layers.
        words = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{class_name} cannot be built from its config.json: {type(error).__name__}: {words}"
        ) from None
    # Not model.to: diffusers would warn about modules that it wants to keep in float32.
    model = torch.nn.Module.to(model, dtype).eval()
    if tiles is None:
        model.enable_tiling()
    else:
        model.configure_tiles(*tiles)
    return model


def _prepare(model: Any, mode: str, size: int) -> None:
    model.init_distributed(GhostGroup(size) if size > 1 else SoloGroup(META))
    model.set_parallel_size(size, mode=mode)


@lru_cache(maxsize=256)
def _measure(
    operation: str,
    facts: VaeFacts,
    config: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mode: str,
    size: int,
    tiles: tuple[int, int] | None,
    frames_per_step: int,
    unfolds: bool,
    cpu: bool,
) -> tuple[int, int]:
    model = _ghost(facts.class_name, config, dtype, tiles)
    own = [*model.parameters(), *model.buffers()]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in own)
    if mode in (DIRECT, "tile"):
        _prepare(model, "tile", 1)
    else:
        _prepare(model, mode, size)
    model.frames_per_step = frames_per_step
    enough = 3 if mode == DIRECT or mode == "tile" else 1 + 2 * frames_per_step
    with meta_for_cpu(cpu):
        if operation == "encode":
            pixels = facts.pixel_shape(tuple(_latent(shape, dtype, enough).shape))
            feed = TensorFeed(torch.empty(pixels, dtype=dtype, device=META))
            return weights, _encoding(model, own, feed, mode, size, unfolds)
        if mode == "tile":
            return weights, _tiled(model, own, shape, dtype, size, unfolds)
        z = _latent(shape, dtype, enough)
        chunks = model.decode_direct(z) if mode == DIRECT else model.decode_chunks(z)
        return weights, _run(chunks, [*own, z], unfolds)[0]


def _tiled(model: Any, own: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype, size: int, unfolds: bool) -> int:
    """One tile at work, the temporal caches of this rank's other tiles, and the picture that they are merged into."""
    plan = model.tile_plan(torch.empty(shape, device=META))
    rows, columns = (min(tile, extent) for tile, extent in zip(plan.tile, plan.extent, strict=True))
    tile = _latent((*shape[:-2], rows, columns), dtype, 3)
    peak, kept, chunk = _run(model.decode_direct(tile), [*own, tile], unfolds)
    share = math.ceil(plan.grid[0] * plan.grid[1] / size)
    picture = chunk * (plan.extent[0] * plan.extent[1]) / (rows * columns)
    edges = 2 * chunk * (1 - plan.stride[0] / plan.tile[0]) * max(plan.grid)
    return int(peak + (share - 1) * kept + 2 * picture + edges)


def _encoding(model: Any, own: list[Tensor], feed: TensorFeed, mode: str, size: int, unfolds: bool) -> int:
    """An encode; of tiles one at work beside the temporal caches of this rank's others, and the merged moments."""
    step = feed.frames(0, min(feed.shape[2], 1 + 4)).nbytes  # what the reader has handed over
    if mode != "tile":
        chunks = model.encode_direct(feed) if mode == DIRECT else model.encode_chunks(feed)
        return step + _run(chunks, [*own, feed.whole], unfolds)[0]
    like, operator = model.encode_operator(feed)
    tasks, _ = operator.split(like)
    peak, kept, chunk = _run(model.encode_tile_steps(tasks[0]), [*own, feed.whole], unfolds)
    share = math.ceil(len(tasks) / size)
    return int(step + peak + (share - 1) * kept + 2 * chunk * len(tasks))


def _latent(shape: tuple[int, ...], dtype: torch.dtype, frames: int) -> Tensor:
    """A latent with as many frames as are needed until nothing grows."""
    if len(shape) == 5:
        shape = (*shape[:2], min(shape[2], frames), *shape[3:])
    return torch.empty(shape, dtype=dtype, device=META)


@torch.no_grad()
def _run(chunks: Any, own: list[Tensor], unfolds: bool) -> tuple[int, int, int]:
    """Peak bytes; bytes that are kept between two chunks; bytes of the largest chunk."""
    live = LiveBytes(own, unfolds=unfolds)
    kept = largest = 0
    with FusedAttention(), live:
        for chunk in chunks:
            held = 0 if chunk is None else chunk.numel() * chunk.element_size()
            kept, largest = max(kept, live.now - held), max(largest, held)
            del chunk
    return live.peak, kept, largest
