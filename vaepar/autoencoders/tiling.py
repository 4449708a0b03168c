"""Tile grids and the merge of decoded tiles, shared by all families.

The grid and the blend are those of diffusers' ``tiled_decode``: tiles start every stride and are cut off at the far
edges; each tile is blended with its upper, then with its left neighbour as they are after their own blending, and
cropped to the stride. Results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vaepar.errors import UsageError
from vaepar.parallel.executor import GridCoord, GridSpec, TileTask

Pair = tuple[int, int]  # (height, width)


@dataclass(frozen=True)
class TilePlan:
    """The tiles of one request, on the input's scale, and how their results are merged, on the output's scale.

    Args:
        extent: height and width of the input.
        tile: tile height and width on the input's scale.
        stride: distance between tile starts on the input's scale, at most ``tile``.
        up, down: output extent = input extent * up // down.
    """

    extent: Pair
    tile: Pair
    stride: Pair
    up: int = 1
    down: int = 1

    def __post_init__(self) -> None:
        for axis, tile, stride in zip(("height", "width"), self.tile, self.stride, strict=True):
            if tile < 1 or stride < 1 or stride > tile:
                raise UsageError(
                    f"tile {axis} {tile} and stride {stride} (of the decoder's input) do not fit together; the stride "
                    f"is at least 1 and at most the tile, or parts of the picture would be left out"
                )

    @property
    def grid(self) -> Pair:
        rows, columns = (len(range(0, n, step)) for n, step in zip(self.extent, self.stride, strict=True))
        return rows, columns

    @property
    def output(self) -> Pair:
        return self._scaled(self.extent[0]), self._scaled(self.extent[1])

    @property
    def output_stride(self) -> Pair:
        return self._scaled(self.stride[0]), self._scaled(self.stride[1])

    @property
    def output_blend(self) -> Pair:
        """Rows and columns that neighbours share."""
        return self._scaled(self.tile[0]) - self.output_stride[0], self._scaled(self.tile[1]) - self.output_stride[1]

    def tiles(self) -> Iterator[tuple[GridCoord, slice, slice]]:
        """Grid coordinate, rows and columns of each tile on the input's scale, in raster order."""
        for i, top in enumerate(range(0, self.extent[0], self.stride[0])):
            for j, left in enumerate(range(0, self.extent[1], self.stride[1])):
                rows = slice(top, min(top + self.tile[0], self.extent[0]))
                yield (i, j), rows, slice(left, min(left + self.tile[1], self.extent[1]))

    def output_size(self, rows: slice, columns: slice) -> Pair:
        """Height and width of the result of one tile."""
        return self._scaled(rows.stop - rows.start), self._scaled(columns.stop - columns.start)

    def _scaled(self, n: int) -> int:
        return n * self.up // self.down


def tile_tasks(
    plan: TilePlan,
    part: Callable[[slice, slice], Tensor | Sequence[Tensor]],
    shapes: Callable[[int, int], Sequence[tuple[int, ...]]],
    *,
    dims: Pair,
    frames: int = 1,
    steps: int = 1,
) -> tuple[list[TileTask], GridSpec]:
    """The tasks of a plan's tiles, and what their merge needs.

    Args:
        plan: the tiles.
        part: gives what a tile of these rows and columns is computed from.
        shapes: gives the shapes of a tile's ``steps`` results from their height and width.
        dims: the dimensions of the input that are height and width.
        frames: frames of the input, which load is balanced by.
        steps: pieces in time that each tile is made in.

    Returns:
        The tasks in raster order, and the grid.
    """
    tasks = [
        TileTask(
            tile_id=number,
            grid_coord=coord,
            tensor=part(rows, columns),
            workload=(rows.stop - rows.start) * (columns.stop - columns.start) * frames,
            output_shapes=shapes(*plan.output_size(rows, columns)),
        )
        for number, (coord, rows, columns) in enumerate(plan.tiles())
    ]
    return tasks, GridSpec(split_dims=dims, grid_shape=plan.grid, tile_spec={"plan": plan}, steps=steps)


def tile_settings(model: Any) -> dict[str, Any]:
    """Whether tiling is on, and the attributes (by which diffusers' classes differ) that say how large tiles are."""
    return {name: value for name, value in vars(model).items() if name.startswith("tile_") or name == "use_tiling"}


class BlendMerge:
    """Takes decoded tiles in any order and blends each as soon as its upper and left neighbours are blended.

    Only the edges that later neighbours need are kept of a tile; the rest is written to the result once.

    Args:
        plan: the tile plan of the request.
        finish: applied to the whole result, [..., H, W].
    """

    def __init__(self, plan: TilePlan, finish: Callable[[Tensor], Tensor] | None = None) -> None:
        self._plan = plan
        self._finish = finish
        self._waiting: dict[GridCoord, Tensor] = {}
        self._bottoms: dict[GridCoord, Tensor] = {}
        self._rights: dict[GridCoord, Tensor] = {}
        self._done: set[GridCoord] = set()
        self._result: Tensor | None = None

    def add(self, coord: GridCoord, tile: Tensor) -> None:
        """Take one tile, [..., h, w]. Its memory is written to."""
        self._waiting[coord] = tile
        ready = [coord]
        while ready:
            at = ready.pop()
            if at in self._waiting and self._neighbours_done(at):
                self._place(at, self._waiting.pop(at))
                ready.extend([(at[0] + 1, at[1]), (at[0], at[1] + 1)])

    def result(self) -> Tensor:
        """The merged output, when every tile was added."""
        rows, columns = self._plan.grid
        if self._result is None or len(self._done) != rows * columns:
            raise UsageError(f"{len(self._done)} of {rows * columns} tiles were merged; all are needed")
        result, self._result = self._result, None
        self._bottoms.clear()
        self._rights.clear()
        return result if self._finish is None else self._finish(result)

    def _neighbours_done(self, at: GridCoord) -> bool:
        above, left = (at[0] - 1, at[1]), (at[0], at[1] - 1)
        return (at[0] == 0 or above in self._done) and (at[1] == 0 or left in self._done)

    def _place(self, at: GridCoord, tile: Tensor) -> None:
        blend, stride = self._plan.output_blend, self._plan.output_stride
        if at[0] > 0:
            _blend(self._bottoms.pop((at[0] - 1, at[1])), tile, blend[0], dim=-2)
        if at[1] > 0:
            _blend(self._rights.pop((at[0], at[1] - 1)), tile, blend[1], dim=-1)
        if self._result is None:
            self._result = tile.new_empty((*tile.shape[:-2], *self._plan.output))
        top, left = at[0] * stride[0], at[1] * stride[1]
        piece = tile[..., : stride[0], : stride[1]]
        self._result[..., top : top + piece.shape[-2], left : left + piece.shape[-1]] = piece
        rows, columns = self._plan.grid
        if at[0] + 1 < rows:
            self._bottoms[at] = _last(tile, blend[0], dim=-2)
        if at[1] + 1 < columns:
            self._rights[at] = _last(tile, blend[1], dim=-1)
        self._done.add(at)


def _last(tile: Tensor, count: int, dim: int) -> Tensor:
    count = min(count, tile.shape[dim])
    return tile.narrow(dim, tile.shape[dim] - count, count).clone()


def _blend(before: Tensor, tile: Tensor, extent: int, dim: int) -> None:
    """Fade from the last rows (or columns) of the neighbour into the first ones of ``tile``, in place.

    Weights are rounded to float32 (float64 for float64 tiles) and each product to the tile's dtype, as PyTorch does
    when a tensor is multiplied by a Python number; so the result is that of diffusers' loop over single rows.
    """
    extent = min(before.shape[dim], tile.shape[dim], extent)
    if extent <= 0:
        return
    work = torch.float64 if tile.dtype == torch.float64 else torch.float32
    shape = [extent, 1] if dim == -2 else [extent]
    fade_in = torch.tensor([y / extent for y in range(extent)], dtype=torch.float64)
    old = before.narrow(dim, before.shape[dim] - extent, extent)
    new = tile.narrow(dim, 0, extent)
    weights_old = (1 - fade_in).to(device=tile.device, dtype=work).reshape(shape)
    weights_new = fade_in.to(device=tile.device, dtype=work).reshape(shape)
    new.copy_((old.to(work) * weights_old).to(tile.dtype) + (new.to(work) * weights_new).to(tile.dtype))
