"""What every distributed VAE can do beyond its diffusers class: know its ranks, cut into tiles, decode in chunks."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from vaepar.autoencoders.capability import VaeCapability
from vaepar.autoencoders.family import ShardFamily
from vaepar.autoencoders.feed import FrameFeed
from vaepar.autoencoders.naming import SavedAsDiffusers
from vaepar.autoencoders.selection import DIRECT, Selection, longer_axis, select
from vaepar.autoencoders.spatial import DEFAULT_FRAMES_PER_STEP, shard_decode_chunks, shard_encode
from vaepar.autoencoders.tiling import BlendMerge, TilePlan
from vaepar.config import VaeParallelConfig, VaeParallelMode
from vaepar.errors import UnsupportedModeError, UsageError
from vaepar.parallel.agreement import agree_on, agreed
from vaepar.parallel.executor import (
    DistributedOperator,
    DistributedVaeExecutor,
    GridCoord,
    GridSpec,
    Split,
    TileMerge,
    TileTask,
    joined,
)
from vaepar.parallel.group import RankGroup
from vaepar.parallel.shards import Axis
from vaepar.parallel.torch_group import default_group

logger = logging.getLogger(__name__)


class DistributedVaeMixin(ShardFamily, SavedAsDiffusers):
    """Makes a diffusers VAE decode and encode over the ranks of a group.

    A family's class has this mixin (by way of :class:`ImageTileMixin` or :class:`CausalTileMixin`) before its diffusers
    class, so that the methods here come first and hand over to diffusers' own where nothing is shared: with a parallel
    size of 1 every method does what it always did.
    """

    capability: ClassVar[VaeCapability]

    #: Latent frames of one step of a spatial shard after the first: more of them need more memory and fewer rounds.
    frames_per_step: int = DEFAULT_FRAMES_PER_STEP

    #: Whether ranks other than the owner get the result of ``decode`` too (``decode_chunks`` never sends it).
    broadcast_result: bool = True

    use_tiling: bool
    _executor: DistributedVaeExecutor | None = None
    _in_default_group: bool = False
    _mode: VaeParallelMode = VaeParallelMode.TILE

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "capability" in vars(cls):
            lacking = [name for name in dir(cls) if getattr(getattr(cls, name), "__isabstractmethod__", False)]
            if lacking:
                raise TypeError(f"{cls.__name__} declares a capability and lacks {', '.join(lacking)}")

    @classmethod
    def from_pretrained(cls, *args: Any, group: RankGroup | None = None, **kwargs: Any) -> Any:
        """As diffusers' ``from_pretrained``; the model joins ``group``, or the default group of ranks."""
        plain: Any = super()
        loaded = plain.from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        model.init_distributed(group)
        return loaded

    def init_distributed(self, group: RankGroup | None = None) -> None:
        """Join a group of ranks; until :meth:`set_parallel_size` is called all of them compute.

        Args:
            group: the ranks that decode together. When None: all ranks of ``torch.distributed``, on this model's
                device, or this process alone where that is not initialised. That group follows a model that is
                moved later; a group given here does not.
        """
        self._join(group)

    def _join(self, group: RankGroup | None) -> DistributedVaeExecutor:
        self._in_default_group = group is None
        if group is None:
            group = default_group(next(iter(self.parameters())).device)  # type: ignore[attr-defined]  # every adapter is a module
        executor = self._executor = DistributedVaeExecutor(group)
        self._mode = VaeParallelMode.TILE
        return executor

    @property
    def distributed_executor(self) -> DistributedVaeExecutor:
        """The executor of this model's group. Joins the default group when none was joined yet."""
        return self._executor or self._join(None)

    @property
    def parallel_mode(self) -> VaeParallelMode:
        return self._mode

    def is_distributed_enabled(self) -> bool:
        """Whether a request that diffusers would tile is shared among ranks."""
        return self._executor is not None and self._executor.parallel_size > 1 and self.use_tiling

    def set_parallel_size(self, size: int, mode: VaeParallelMode | str = VaeParallelMode.TILE) -> None:
        """Let the first ``size`` ranks of the group compute, in the given mode.

        A size larger than the group falls back to the group, with a warning on its first rank. Raises
        :class:`UsageError` for a size below 1 or an unknown mode, :class:`UnsupportedModeError` for a mode that this
        family does not have.
        """
        config = VaeParallelConfig(vae_patch_parallel_size=size, vae_parallel_mode=VaeParallelMode.parse(mode))
        self.capability.require_decode(config.vae_parallel_mode)
        group = self.distributed_executor.group
        if size > group.size:
            if group.rank == 0:
                logger.warning(
                    "parallel size %d is more than the %d ranks there are; using %d", size, *[group.size] * 2
                )
            size = group.size
        self._executor = DistributedVaeExecutor(group, size)
        self._mode = config.vae_parallel_mode

    def _follow(self, tensor: Tensor) -> None:
        """Join the default group again where a request is on another device, as after ``pipe.to("cuda")``."""
        group, device = self.distributed_executor.group, tensor.device
        same = group.device.type == device.type and group.device.index in (None, device.index)
        if same or group.size == 1:
            return
        with agreed(group, "device"):
            if not self._in_default_group:
                raise UsageError(f"the request is on {device}, the group of ranks given was made for {group.device}")
            # All ranks must come here: one that has not moved brings another fingerprint, and all of them fail.
            agree_on(group, "devices", f"a request on {device.type}")
        self._executor = DistributedVaeExecutor(default_group(device), self.distributed_executor.parallel_size)

    # What a family brings, beside what :class:`ShardFamily` asks for.

    @abstractmethod
    def tile_plan(self, z: Tensor) -> TilePlan:
        """The tiles of a latent, from this model's tiling attributes."""

    @property
    @abstractmethod
    def pixels_per_latent(self) -> int:
        """Pixels for each latent row or column."""

    @abstractmethod
    def needs_tiling(self, z: Tensor) -> bool:
        """Whether diffusers' own ``_decode`` would take its tiled path for this latent."""

    @abstractmethod
    def tile_split(self, z: Tensor) -> tuple[list[TileTask], GridSpec]:
        """Cut a latent into tile tasks, the same on every rank."""

    @property
    @abstractmethod
    def tile_pixels(self) -> tuple[int, int]:
        """Tile size and stride in pixels (rows, where columns differ)."""

    @abstractmethod
    def configure_tiles(self, tile_size: int, tile_stride: int) -> None:
        """Turn tiling on with square tiles, in pixels. Raises :class:`UsageError` when they do not fit the ratio."""

    @abstractmethod
    def decode_direct(self, z: Tensor) -> Iterator[Tensor]:
        """Decode without tiles on this rank alone, piece by piece in time order, as diffusers' direct path does."""

    @abstractmethod
    def needs_encode_tiling(self, shape: Sequence[int]) -> bool:
        """Whether diffusers' own ``_encode`` would take its tiled path for pixels of this shape."""

    @abstractmethod
    def encode_tile_split(self, x: Tensor) -> tuple[list[TileTask], GridSpec]:
        """Cut pixels into tile tasks, the same on every rank."""

    @abstractmethod
    def encode_direct(self, feed: FrameFeed) -> Iterator[Tensor]:
        """Encode without tiles on this rank alone, piece by piece in time order: moments."""

    @abstractmethod
    def encode_operator(self, feed: FrameFeed) -> tuple[Tensor, DistributedOperator]:
        """The tile encode of a feed for the executor, and a tensor of its input's shape."""

    def shard_pixels(self, feed: FrameFeed) -> Tensor | FrameFeed:
        """A feed as a shard takes it: step by step, or the one picture of an image family."""
        return feed

    def finish_tiles(self, merged: Tensor) -> Tensor:
        """What the family does to merged tiles before they are pixels (unpatchify, clamp)."""
        return merged

    # What follows from it.

    def tile_steps(self, task: TileTask) -> Iterator[Tensor]:
        """Decode one tile, piece by piece in time order."""
        return self.decode_pieces(_pieces(task))

    def encode_tile_steps(self, task: TileTask) -> Iterator[Tensor]:
        """Encode one tile, piece by piece in time order: moments (mean and log variance)."""
        return self.encode_pieces(_pieces(task))

    def tile_exec(self, task: TileTask) -> Tensor:
        """Decode one tile, all of it at once."""
        return joined(list(self.tile_steps(task)))

    def tile_merge(self, coord_tensor_map: dict[GridCoord, Tensor], grid_spec: GridSpec) -> Tensor:
        """Blend decoded tiles, [..., h, w] by grid coordinate, into the whole output. Their memory is written to."""
        return _merge_all(BlendMerge(grid_spec.tile_spec["plan"], self.finish_tiles), coord_tensor_map)

    def encode_tile_exec(self, task: TileTask) -> Tensor:
        """Encode one tile, all of it at once: moments."""
        return joined(list(self.encode_tile_steps(task)))

    def encode_tile_merge(self, coord_tensor_map: dict[GridCoord, Tensor], grid_spec: GridSpec) -> Tensor:
        """Blend encoded tiles into the moments of the whole. Their memory is written to."""
        return _merge_all(BlendMerge(grid_spec.tile_spec["plan"]), coord_tensor_map)

    def _encode_operator(self, split: Split) -> DistributedOperator:
        return DistributedOperator(
            split=split,
            exec=self.encode_tile_exec,
            merge=self.encode_tile_merge,
            steps=self.encode_tile_steps,
            open_merge=lambda grid, step: BlendMerge(grid.tile_spec["plan"]),
        )

    def tile_operator(self) -> DistributedOperator:
        """The tile decode of this model, for the executor."""

        def open_merge(grid: GridSpec, step: int) -> TileMerge:
            return BlendMerge(grid.tile_spec["plan"], self.finish_tiles)

        return DistributedOperator(
            split=self.tile_split,
            exec=self.tile_exec,
            merge=self.tile_merge,
            steps=self.tile_steps,
            open_merge=open_merge,
        )

    def select_mode(self, z: Tensor) -> Selection:
        """The strategy that a latent's decode will use, and why. Depends on the request alone, changes nothing."""
        if not self.needs_tiling(z):
            return Selection(mode=DIRECT, reason="the latent fits one tile")
        return self._select(z.shape[-2], z.shape[-1])

    def auto_axis(self, rows: int, columns: int, size: int) -> Axis | None:
        """What ``auto`` shards of so many latent rows and columns, None for tiles; a family may have another rule."""
        return longer_axis(rows, columns, size)

    def on_refused(self, selection: Selection) -> None:
        """What a forced mode leads to that this request cannot have. Raising refuses; returning falls back to tile."""
        raise UnsupportedModeError(f"{selection.refused}; {self.capability.base_class} also has tile and auto")

    @torch.no_grad()
    def decode_chunks(self, z: Tensor) -> Generator[Tensor | None]:
        """Decode a latent piece by piece: pixels on the owner (rank 0 of the group), None on the other ranks.

        The chunks are [B, C, t, H, W] for video families ([B, C, H, W] for image families, one chunk), nominally in
        [-1, 1] (only Wan clamps its tiles, as in diffusers); concatenated in time they are what ``decode`` gives, bit
        for bit. All ranks of the group call it with the same latent and consume it to the end, or close it inside an
        ``agreed`` block. Unlike ``decode``, a spatial mode is also honoured on a single rank: it gives the untiled
        picture.

        Raises:
            UnsupportedModeError: for a forced mode that this request cannot have (Wan falls back to tile instead).
            RankLostError: when a rank has died; else the error of the rank that failed, see :func:`agreed`.
        """
        selection = self.select_mode(z)
        if selection.refused is not None:
            self.on_refused(selection)
        executor = self.distributed_executor
        if selection.axis is not None:
            with agreed(executor.group, selection.mode):
                agree_on(executor.group, "latents", f"{tuple(z.shape)} {z.dtype}")
                yield from shard_decode_chunks(
                    self, z, executor.group, selection.axis, frames_per_step=self.frames_per_step
                )
        elif selection.mode == DIRECT:
            with agreed(executor.group, "decode"):
                if executor.is_owner:
                    yield from self.decode_direct(z)
        else:
            yield from executor.stream(z, self.tile_operator())

    def tiled_decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """Decode what does not fit one tile: over the ranks when distributed, else as diffusers does.

        Args:
            z: [B, C, H, W] for image families, [B, C, T, H, W] for video families, not normalised.
            return_dict: a ``DecoderOutput`` with ``sample``, else a tuple of it.

        Returns:
            Pixels [B, 3, rH, rW] or [B, 3, t, rH, rW], nominally in [-1, 1], in the dtype of ``z``.
        """
        if not self.is_distributed_enabled():
            plain: Any = super()
            serial: DecoderOutput | tuple[Tensor] = plain.tiled_decode(z, return_dict=return_dict)
            return serial
        self._follow(z)
        with torch.no_grad():
            result = self.distributed_executor.collect(z, lambda: self.decode_chunks(z), self.broadcast_result)
        return DecoderOutput(sample=result) if return_dict else (result,)

    def select_encode_mode(self, shape: Sequence[int]) -> Selection:
        """The strategy that the encode of pixels of this shape will use, and why."""
        if not self.needs_encode_tiling(shape):
            return Selection(mode=DIRECT, reason="the picture fits one tile")
        ratio = self.pixels_per_latent
        return self._select(shape[-2] // ratio, shape[-1] // ratio)

    def _select(self, rows: int, columns: int) -> Selection:
        executor = self.distributed_executor
        return select(self._mode, rows, columns, executor.parallel_size, executor.group.size, self.auto_axis)

    @torch.no_grad()
    def encode_chunks(self, feed: FrameFeed) -> Generator[Tensor | None]:
        """Encode pixels piece by piece: moments on the owner (rank 0 of the group), None on the other ranks.

        The chunks are [B, 2C, t, h, w] for video families ([B, 2C, h, w] for image families, one chunk): mean and log
        variance of the posterior, concatenated in time those that ``encode`` gives. All ranks call it with feeds of
        the same pixels, and consume it to the end or close it inside an ``agreed`` block.
        """
        selection = self.select_encode_mode(feed.shape)
        if selection.refused is not None:
            self.on_refused(selection)
        executor = self.distributed_executor
        if selection.axis is not None:
            with agreed(executor.group, selection.mode):
                yield self._shard_encode(self.shard_pixels(feed), selection, owner=executor.owner)
        elif selection.mode == DIRECT:
            with agreed(executor.group, "encode"):
                if executor.is_owner:
                    yield from self.encode_direct(feed)
        else:
            yield from executor.stream(*self.encode_operator(feed))

    def _encode(self, x: Tensor) -> Tensor:
        """Pixels to moments, on every rank: a shard where one is selected, else what diffusers' own does."""
        plain: Any = super()
        selection = None
        if self.is_distributed_enabled():
            self._follow(x)
            selection = self.select_encode_mode(x.shape)
            if selection.refused is not None:
                self.on_refused(selection)
        if selection is None or selection.axis is None:
            return cast(Tensor, plain._encode(x))
        with torch.no_grad(), agreed(self.distributed_executor.group, selection.mode):
            moments = self._shard_encode(x, selection, owner=None)
        return x.new_empty(0) if moments is None else moments

    def _shard_encode(self, x: Tensor | FrameFeed, selection: Selection, owner: int | None) -> Tensor | None:
        group = self.distributed_executor.group
        agree_on(group, "pixels", f"{tuple(x.shape)} {x.dtype}")
        axis = selection.axis or "height"
        return shard_encode(self, x, group, axis, frames_per_step=self.frames_per_step, owner=owner)

    def _tiled_encode_distributed(self, x: Tensor) -> Tensor:
        """Tiled encode when :meth:`is_distributed_enabled`: moments on every rank."""
        self._follow(x)
        operator = self._encode_operator(self.encode_tile_split)
        with torch.no_grad():
            return self.distributed_executor.execute(x, operator, broadcast_result=True)


def _pieces(task: TileTask) -> Sequence[Tensor]:
    return [task.tensor] if isinstance(task.tensor, Tensor) else task.tensor


def _merge_all(merge: BlendMerge, tiles: dict[GridCoord, Tensor]) -> Tensor:
    for coord in sorted(tiles):
        merge.add(coord, tiles[coord])
    return merge.result()


def check_pixels(tile_size: int, tile_stride: int, ratio: int) -> None:
    """Raise :class:`UsageError` unless a tile size and stride in pixels fit together and the VAE's ratio."""
    for name, value in (("tile size", tile_size), ("tile stride", tile_stride)):
        if value < ratio or value % ratio:
            raise UsageError(f"{name} {value} pixels does not fit; this VAE takes multiples of {ratio} pixels")
    if tile_stride > tile_size:
        raise UsageError(
            f"tile stride {tile_stride} pixels is beyond the tile of {tile_size} pixels: parts of the picture "
            f"would be left out; it is at most the tile size"
        )


def require_rank(z: Tensor, rank: int, family: str) -> None:
    """Raise :class:`UsageError` unless a latent has the number of dimensions that the family decodes."""
    if z.dim() != rank:
        layout = "[B, C, H, W]" if rank == 4 else "[B, C, T, H, W]"
        raise UsageError(f"a latent of shape {tuple(z.shape)} cannot be decoded by {family}; it takes {layout}")
