"""Convolutions of a large picture, one band of rows after the other, with the norm and the activation ahead of them.

Between the norm and the convolution stands a band, not a map: at full resolution that is a third of the peak memory.

Shapes: b batch, c channels, h and w the local height and width; bands lie along the height, whichever axis is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from vaepar.layers.context import ShardContext
from vaepar.layers.conv import ShardConv2d
from vaepar.layers.inputs import Stencil, empty_maps, shape_around, shard_plan
from vaepar.layers.kernels import Result, adds_convolutions, band_rows, convolve
from vaepar.layers.norm import ShardGroupNorm
from vaepar.parallel.halo import Pieces
from vaepar.parallel.shards import HaloPlan


def goes_in_bands(context: ShardContext, conv: ShardConv2d, x: Tensor) -> bool:
    """True where :func:`convolve_in_bands` can take a norm of ``x`` [b, c, h, w] and ``conv``, and has more than one.

    Devices whose convolutions cannot write into a part of a map would have to copy every band.
    """
    if not (context.overwrites and adds_convolutions(x) and conv.weight.dtype == x.dtype):
        return False
    stencil = conv.stencil()
    other = stencil.along(context.other_dim)
    return stencil.keeps_size and other.before == other.after and rows_of_a_band(x, stencil, conv.weight) < x.shape[2]


def convolve_in_bands(context: ShardContext, norm: ShardGroupNorm, conv: ShardConv2d, x: Tensor) -> Tensor:
    """``conv(silu(norm(x)))`` of [b, c, h, w], channels_last, into the result that is open or one of the pool's.

    The result may have the memory of ``x`` itself: each row is read before one is written there.
    """
    stencil = conv.stencil()
    plan = shard_plan(context, x, stencil)
    normed, halos = norm.activated(context, x, plan)
    shape = (x.shape[0], conv.out_channels, *x.shape[2:])
    result = context.take_result() or context.passing_result(shape, x) or Result(x.new_empty(shape))
    rows = rows_of_a_band(x, stencil, conv.weight)
    for image in range(x.shape[0]):
        write = normed.image(image).write
        for start, band, padding in bands_of(context, x, image, stencil, plan, halos, rows, write):
            part = result.part(image, slice(start, start + rows))
            part.put(convolve(band, conv.weight, conv.bias, (1, 1), padding, stencil.dilations, conv.groups, part))
    result.taken = True
    return result.memory


def rows_of_a_band(x: Tensor, stencil: Stencil, weight: Tensor, channels: int = 0) -> int:
    """As :func:`band_rows`, and not fewer than two bands have in common."""
    return max(stencil.height.reach, band_rows(x, weight, channels))


def bands_of(
    context: ShardContext,
    x: Tensor,
    image: int,
    stencil: Stencil,
    plan: HaloPlan | None,
    halos: Pieces,
    rows: int,
    write: Callable[[Tensor, Tensor], object] | None = None,
) -> Iterator[tuple[int, Tensor, tuple[int, int]]]:
    """What a convolution that keeps the size reads of one image of [b, c, h, w], for ``rows`` of its rows at a time.

    Args:
        plan: that of ``shard_plan``; ``halos`` has come by it.
        write: makes of some of the image's own rows what is read of them; they are copied when None.

    Yields:
        The first row of a band's result; what is read, void after the next; the padding left to the kernel (h, w).
    """
    one, (height, width), dim = x[image : image + 1], x.shape[2:], context.dim
    shared = stencil.height.reach - 1
    if plan is None and write is None and rows >= height:
        yield 0, one, (stencil.height.before, stencil.width.before)
        return
    around, first = shape_around(one, dim, plan, 0)
    whole = dim == -1 and plan is not None  # zeros at the picture's sides stand in the map
    shape = [1, x.shape[1], min(rows, height) + shared, around[3] if whole else width]
    buffer = empty_maps(context, shape, x)
    pieces = [(start - (0 if plan is None else plan.own[0]), piece[image : image + 1]) for start, piece in halos]
    source = _Source(one, write or _copy, pieces, dim, first if whole else 0)
    for start in range(0, height, rows):
        stop = min(start + rows, height)
        band = buffer[:, :, : stop - start + shared]
        if start:  # what two bands read is made once
            band[:, :, :shared].copy_(buffer[:, :, rows : rows + shared])
        source.write_rows(band[:, :, shared if start else 0 :], start + shared * (start > 0) - stencil.height.before)
        yield start, band, (0, 0 if whole else stencil.width.before)


def _copy(rows: Tensor, out: Tensor) -> None:
    out.copy_(rows)


@dataclass(frozen=True)
class _Source:
    """What a convolution reads of one image: its own rows, the halo, zeros around the picture.

    Args:
        own: [1, c, h, w].
        write: makes of some of these rows what is read of them.
        halos: (first, rows) of other ranks, counted along ``dim`` from the first own row.
        left: columns ahead of the own ones.
    """

    own: Tensor
    write: Callable[[Tensor, Tensor], object]
    halos: Pieces
    dim: int
    left: int

    def write_rows(self, out: Tensor, first: int) -> None:
        """Fill ``out`` [1, c, n, w'] with rows from ``first`` on, counted from the first own one."""
        stop, (height, width) = first + out.shape[2], self.own.shape[2:]
        low, high = min(max(first, 0), height), max(min(stop, height), 0)
        if low >= high:
            out.zero_()
        else:
            out[:, :, : low - first].zero_()
            out[:, :, high - first :].zero_()
            rows = out[:, :, low - first : high - first]
            self.write(self.own[:, :, low:high], rows[..., self.left : self.left + width])
            rows[..., : self.left].zero_()
            rows[..., self.left + width :].zero_()
        for start, piece in self.halos:
            if self.dim == -2:
                begin, end = max(start, first), min(start + piece.shape[2], stop)
                if begin < end:
                    out[:, :, begin - first : end - first].copy_(piece[:, :, begin - start : end - start])
            elif low < high:
                columns = slice(self.left + start, self.left + start + piece.shape[3])
                out[:, :, low - first : high - first, columns].copy_(piece[:, :, low:high])
