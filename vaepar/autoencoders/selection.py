"""Which strategy a request gets. What ``auto`` chooses and what a refused mode leads to are each family's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vaepar.config import VaeParallelMode
from vaepar.parallel.shards import Axis, eligible_axes

DIRECT = "direct"

AutoRule = Callable[[int, int, int], Axis | None]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The strategy of one request.

    Args:
        mode: what will run: ``direct``, ``tile``, or the value of a spatial mode.
        axis: the sharded axis, for the spatial modes.
        reason: why, for the report.
        refused: why a forced mode cannot be had; None when it can or none was forced.
    """

    mode: str
    axis: Axis | None = None
    reason: str
    refused: str | None = None


def axis_of(strategy: str) -> Axis | None:
    """The axis that a strategy of :attr:`Selection.mode` shards; None where it shards none."""
    if strategy == VaeParallelMode.SPATIAL_SHARD_HEIGHT:
        return "height"
    return "width" if strategy == VaeParallelMode.SPATIAL_SHARD_WIDTH else None


def longer_axis(height: int, width: int, size: int) -> Axis | None:
    """The longer axis that gives every rank a row, width on ties; None when neither does."""
    axes = eligible_axes((("height", height), ("width", width)), size)
    if len(axes) == 2:
        return "height" if height > width else "width"
    return axes[0] if axes else None


def select(
    mode: VaeParallelMode, height: int, width: int, size: int, group_size: int, auto: AutoRule = longer_axis
) -> Selection:
    """The strategy for a request that diffusers would tile. Depends on the arguments alone.

    Args:
        mode: what was asked for.
        height, width: rows and columns that would be sharded.
        size: ranks that share the request.
        group_size: ranks of the group; a shard needs all of them.
        auto: the family's rule for ``auto``: the axis to shard for a height, a width and a number of ranks, or None.
    """
    tile = VaeParallelMode.TILE.value
    extents: dict[Axis, int] = {"height": height, "width": width}
    if mode is VaeParallelMode.TILE:
        return Selection(mode=tile, reason="asked for (tile is the default)")
    if size != group_size:
        why = f"a spatial shard needs all {group_size} ranks of the group, and {size} share a request"
        refused = None if mode is VaeParallelMode.AUTO else why
        return Selection(mode=tile, reason=f"{mode.value}: {why}", refused=refused)
    if mode is VaeParallelMode.AUTO:
        axis = auto(height, width, size) if size > 1 else None
        if axis is None:
            why = f"neither of {height} rows and {width} columns covers {size} ranks" if size > 1 else "one rank"
            return Selection(mode=tile, reason=f"auto: {why}")
        return Selection(
            mode=f"spatial_shard_{axis}",
            axis=axis,
            reason=f"auto: the longer axis of {height}x{width} that covers {size} ranks",
        )
    axis = "height" if mode is VaeParallelMode.SPATIAL_SHARD_HEIGHT else "width"
    if extents[axis] < size:
        why = f"{mode.value} needs one latent along the {axis} for each of {size} ranks; there are {extents[axis]}"
        return Selection(mode=tile, reason=why, refused=why)
    return Selection(mode=mode.value, axis=axis, reason="asked for")
