"""Tiles over ranks: split everywhere, execute each tile once, send it once to the owner, merge as tiles arrive.

The executor knows nothing of models. An operator brings three functions: ``split`` (the same deterministic tiles on
every rank), ``exec`` (one tile) and ``merge``. It may also bring ``steps``, which gives a tile's result in time order,
so that all tiles walk through time together and memory does not grow with frames, and ``open_merge``, which takes tiles
one by one; they run instead of ``exec`` and ``merge`` then.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from vaepar.errors import UsageError
from vaepar.parallel.agreement import agree_on, agreed
from vaepar.parallel.group import Pending, RankGroup

GridCoord = tuple[int, ...]

# How many steps a rank may run ahead of the owner: enough to hide the merge, bounded so that sent tiles do not pile up.
_STEPS_AHEAD = 2


@dataclass
class GridSpec:
    """What merging needs to know about the tiles.

    Args:
        split_dims: tensor dimensions that are split, (2, 3) for [B, C, H, W].
        grid_shape: tiles along each split dimension, (rows, columns).
        tile_spec: what the model's merge needs, by name; the tile merges of this package take their ``plan``.
        output_dtype: dtype of the decoded tiles; that of the input when None.
        steps: pieces in time that each tile is made in; 1 for images.
    """

    split_dims: tuple[int, ...]
    grid_shape: tuple[int, ...]
    tile_spec: dict[str, Any] = field(default_factory=dict)
    output_dtype: torch.dtype | None = None
    steps: int = 1


@dataclass
class TileTask:
    """One tile to be computed.

    Args:
        tile_id: position in the list that ``split`` gives.
        grid_coord: position in the grid, (row, column).
        tensor: the input tile, or its pieces in time order.
        workload: cost for load balancing, area times frames.
        output_shapes: shape of the result of each step, so that the owner can receive without asking. None when
            it is not known beforehand: then the shape travels before the tile.
    """

    tile_id: int
    grid_coord: GridCoord
    tensor: Tensor | Sequence[Tensor]
    workload: int | float = 1
    output_shapes: Sequence[tuple[int, ...]] | None = None


class TileMerge(Protocol):
    """Takes the tiles of one step in any order; the result is complete when all of them were added."""

    def add(self, coord: GridCoord, tile: Tensor) -> None: ...

    def result(self) -> Tensor: ...


def joined(pieces: Sequence[Tensor], step_dim: int = 2) -> Tensor:
    """The pieces of a result, one or more in time order, as one tensor; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=step_dim)


Split = Callable[[Tensor], tuple[list[TileTask], GridSpec]]
Merge = Callable[[dict[GridCoord, Tensor], GridSpec], Tensor]


@dataclass(frozen=True)
class DistributedOperator:
    """What the executor runs on the tiles of one request.

    Args:
        split: input -> (tasks, grid). Deterministic: every rank calls it and gets the same.
        exec: one task -> its result.
        merge: results by grid coordinate -> output. Called on the owner.
        steps: like ``exec``, in time order: as many pieces as ``GridSpec.steps``. Their concatenation is the result.
        open_merge: grid and step -> a merge that takes tiles one by one; without it ``merge`` runs when all are there.
        step_dim: dimension along which the pieces of the steps are concatenated.
    """

    split: Split
    exec: Callable[[TileTask], Tensor]
    merge: Merge
    steps: Callable[[TileTask], Iterator[Tensor]] | None = None
    open_merge: Callable[[GridSpec, int], TileMerge] | None = None
    step_dim: int = 2


def assign(workloads: Sequence[int | float], workers: int) -> list[list[int]]:
    """Indices of the tasks of each worker: largest first, to the least loaded (lowest number on ties)."""
    loads = [(0.0, worker) for worker in range(workers)]
    shares: list[list[int]] = [[] for _ in range(workers)]
    for index in sorted(range(len(workloads)), key=lambda i: (-workloads[i], i)):
        load, worker = heapq.heappop(loads)
        shares[worker].append(index)
        heapq.heappush(loads, (load + workloads[index], worker))
    return shares


class DistributedVaeExecutor:
    """Runs :class:`DistributedOperator` requests over the first ``parallel_size`` ranks of a group.

    Rank 0 of the group is the owner. The remaining ranks get no tiles; they take part in the agreement and receive
    the result when it is broadcast.

    Args:
        group: the ranks that make every request together.
        parallel_size: how many of them compute; all when None.
    """

    owner = 0

    def __init__(self, group: RankGroup, parallel_size: int | None = None) -> None:
        self.group = group
        size = group.size if parallel_size is None else parallel_size
        if not 1 <= size <= group.size:
            raise UsageError(f"parallel size {size} does not fit a group of {group.size} ranks; 1 to {group.size} do")
        self.parallel_size = size

    @property
    def is_owner(self) -> bool:
        return self.group.rank == self.owner

    def execute(self, z: Tensor, operator: DistributedOperator, broadcast_result: bool = True) -> Tensor:
        """The merged result of one request, all of it at once.

        Args:
            z: the input, equal on all ranks (shape and dtype are compared, not the values).
            operator: what to run.
            broadcast_result: whether ranks other than the owner get the result; they get an empty tensor otherwise.

        Raises:
            The same error on all ranks when one of them failed, see :func:`agreed`.
        """
        return self.collect(z, lambda: self.stream(z, operator), broadcast_result, operator.step_dim)

    def collect(
        self,
        z: Tensor,
        stream: Callable[[], Iterator[Tensor | None]],
        broadcast_result: bool = True,
        step_dim: int = 2,
    ) -> Tensor:
        """All chunks of a stream as one tensor: on every rank, or on the owner alone (empty elsewhere)."""
        with agreed(self.group, "request"):
            chunks = [chunk for chunk in stream() if chunk is not None]
            result = None
            if self.is_owner:
                result = joined(chunks, step_dim)
            del chunks
            if broadcast_result and self.group.size > 1:
                result = self._broadcast(result)
            return z.new_empty(0) if result is None else result

    def stream(self, z: Tensor, operator: DistributedOperator) -> Generator[Tensor | None]:
        """The merged result step by step, in time order: the tensor on the owner, None on the other ranks.

        Every rank must consume it to the end, or close it inside an :func:`agreed` block.
        """
        with agreed(self.group, "tiles"):
            tasks, grid = operator.split(z)
            agree_on(self.group, "latents", _fingerprint(z, tasks, grid))
            shares = assign([task.workload for task in tasks], self.parallel_size)
            if self.is_owner:
                yield from self._own(z, tasks, grid, shares, operator)
            else:
                mine = shares[self.group.rank] if self.group.rank < self.parallel_size else []
                yield from self._serve([tasks[i] for i in mine], grid, operator)

    def _serve(self, tasks: list[TileTask], grid: GridSpec, operator: DistributedOperator) -> Iterator[None]:
        """Compute own tiles and send each to the owner as soon as it is done."""
        walks = [_walk(task, operator) for task in tasks]
        under_way: deque[list[Pending]] = deque()
        for step in range(grid.steps):
            sent: list[Pending] = []
            for task, walk in zip(tasks, walks, strict=True):
                self.group.check_alarm()
                tile = next(walk).contiguous()
                tag = _tag(task, step)
                if task.output_shapes is None:
                    sent.append(self.group.isend(_shape_header(tile), self.owner, tag=tag))
                sent.append(self.group.isend(tile, self.owner, tag=tag))
            under_way.append(sent)
            if len(under_way) > _STEPS_AHEAD:
                _wait(under_way.popleft())
            yield None
        while under_way:
            _wait(under_way.popleft())

    def _own(
        self, z: Tensor, tasks: list[TileTask], grid: GridSpec, shares: list[list[int]], operator: DistributedOperator
    ) -> Iterator[Tensor]:
        """Compute own tiles, merge them and those of the others in the order in which they should be ready."""
        mine = [tasks[i] for i in shares[self.owner]]
        walks = [_walk(task, operator) for task in mine]
        foreign = _by_expected_time(tasks, shares, self.owner)
        dtype = grid.output_dtype or z.dtype
        for step in range(grid.steps):
            merge = operator.open_merge(grid, step) if operator.open_merge else _MergeAtEnd(operator.merge, grid)
            arriving = [(task, self._receive(task, rank, step, grid, dtype)) for task, rank in foreign]
            for task, walk in zip(mine, walks, strict=True):
                self.group.check_alarm()
                merge.add(task.grid_coord, next(walk))
            arriving.reverse()
            while arriving:
                task, arrival = arriving.pop()
                merge.add(task.grid_coord, arrival())
                del arrival
            yield merge.result()

    def _receive(
        self, task: TileTask, rank: int, step: int, grid: GridSpec, dtype: torch.dtype
    ) -> Callable[[], Tensor]:
        """Start receiving one tile; the returned function waits for it."""
        group, tag = self.group, _tag(task, step)
        if task.output_shapes is not None:
            buffer = torch.empty(task.output_shapes[step], dtype=dtype, device=group.device)
            pending = group.irecv(buffer, rank, tag=tag)

            def arrived() -> Tensor:
                pending.wait()
                return buffer

            return arrived

        def ask() -> Tensor:
            header = torch.empty(_HEADER, dtype=torch.int64, device=group.device)
            group.irecv(header, rank, tag=tag).wait()
            dims = [int(n) for n in header]
            unknown = torch.empty(dims[1 : 1 + dims[0]], dtype=dtype, device=group.device)
            group.irecv(unknown, rank, tag=tag).wait()
            return unknown

        return ask

    def shared(self, tensor: Tensor | None) -> Tensor:
        """The owner's tensor on every rank, inside an agreed block; other ranks give None."""
        return self._broadcast(tensor) if self.group.size > 1 else _given(tensor)

    def _broadcast(self, result: Tensor | None) -> Tensor:
        told = self.group.broadcast_text(
            None if result is None else f"{str(result.dtype).removeprefix('torch.')} {' '.join(map(str, result.shape))}"
        ).split()
        if result is None:
            shape = [int(n) for n in told[1:]]
            result = torch.empty(shape, dtype=getattr(torch, told[0]), device=self.group.device)
        result = result.contiguous()
        self.group.broadcast(result, self.owner)
        return result


class _MergeAtEnd:
    def __init__(self, merge: Merge, grid: GridSpec) -> None:
        self._merge, self._grid = merge, grid
        self._tiles: dict[GridCoord, Tensor] = {}

    def add(self, coord: GridCoord, tile: Tensor) -> None:
        self._tiles[coord] = tile

    def result(self) -> Tensor:
        tiles, self._tiles = self._tiles, {}
        return self._merge(tiles, self._grid)


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise UsageError("the owner has no tensor to share")
    return tensor


_HEADER = 9


def _shape_header(tile: Tensor) -> Tensor:
    shape = list(tile.shape)
    if len(shape) >= _HEADER:
        raise UsageError(f"a tile has {len(shape)} dimensions; at most {_HEADER - 1} can be sent")
    return torch.tensor([len(shape), *shape, *[0] * (_HEADER - 1 - len(shape))], dtype=torch.int64, device=tile.device)


def _tag(task: TileTask, step: int) -> int:
    # The step's parity is enough: a rank is at most a few steps ahead, and equal tags between two ranks keep order.
    return 2 * task.tile_id + step % 2


def _walk(task: TileTask, operator: DistributedOperator) -> Iterator[Tensor]:
    """The results of a task's steps; the model is called only when the next one is asked for."""
    if operator.steps is not None:
        yield from operator.steps(task)
    else:
        yield operator.exec(task)


def _by_expected_time(tasks: list[TileTask], shares: list[list[int]], owner: int) -> list[tuple[TileTask, int]]:
    """Tasks of the other ranks with their rank, in the order in which they should be finished."""
    expected: list[tuple[float, int, int]] = []
    for rank, share in enumerate(shares):
        load = 0.0
        for index in share:
            load += tasks[index].workload
            if rank != owner:
                expected.append((load, index, rank))
    return [(tasks[index], rank) for _, index, rank in sorted(expected)]


def _wait(pending: list[Pending]) -> None:
    for transfer in pending:
        transfer.wait()


def _fingerprint(z: Tensor, tasks: list[TileTask], grid: GridSpec) -> str:
    total = math.fsum(task.workload for task in tasks)
    spec: Mapping[str, Any] = grid.tile_spec
    return f"{tuple(z.shape)} {z.dtype} in {len(tasks)} tiles of {grid.grid_shape}, {grid.steps} steps, {total} {spec}"
