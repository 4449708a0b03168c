"""Convolutions of a large picture, one band of rows after the other, with the norm and the activation ahead of them.

Between the norm and the convolution stands a band, not a map: at full resolution that is a third of the peak memory.

Shapes: b batch, c channels, h and w the local height and width; bands lie along the height, whichever axis is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from vaepar.layers.context import ShardContext
from vaepar.layers.conv import ShardConv2d
from vaepar.layers.inputs import Stencil, empty_maps, shape_around, shard_plan
from vaepar.layers.kernels import Result, adds_convolutions, convolve, is_on_cpu
from vaepar.layers.norm import ShardGroupNorm
from vaepar.parallel.halo import Pieces, empty
from vaepar.parallel.shards import HaloPlan

# oneDNN reorders the weights in every call and makes its plan again: bands of this size and more cost next to nothing,
# those of a quarter of it 4 % of the time. They are large against their weights too.
_BAND_BYTES = 16 * 2**20
_BAND_PER_WEIGHTS = 4


def goes_in_bands(context: ShardContext, conv: ShardConv2d, x: Tensor) -> bool:
    """True where :func:`convolve_in_bands` can take a norm of ``x`` [b, c, h, w] and ``conv``, and has more than one.

    Devices whose convolutions cannot write into a part of a map would have to copy every band.
    """
    if not (context.overwrites and adds_convolutions(x) and conv.weight.dtype == x.dtype):
        return False
    stencil = conv.stencil()
    other = stencil.along(context.other_dim)
    parts, rows = _cut(x, stencil, conv.weight, 0)
    return stencil.keeps_size and other.before == other.after and (len(parts) > 1 or rows < x.shape[2])


def convolve_in_bands(context: ShardContext, norm: ShardGroupNorm, conv: ShardConv2d, x: Tensor) -> Tensor:
    """``conv(silu(norm(x)))`` of [b, c, h, w], channels_last, into the result that is open or a fresh map.

    The result may have the memory of ``x`` itself: each row is read before one is written there.
    """
    stencil = conv.stencil()
    plan = shard_plan(context, x, stencil)
    normed, halos = norm.activated(context, x, plan)
    result = context.take_result() or Result(empty((x.shape[0], *x.shape[2:], conv.out_channels), x).movedim(-1, 1))

    def write(images: slice, rows: Tensor, out: Tensor) -> None:
        normed.of_images(images).write(rows, out)

    for images, start, band, padding in bands_of(context, x, stencil, plan, halos, conv.weight, write=write):
        count = band.shape[2] - stencil.height.reach + 1
        part = result.part(images, slice(start, start + count))
        part.put(convolve(band, conv.weight, conv.bias, (1, 1), padding, stencil.dilations, conv.groups, part))
    result.taken = True
    return result.memory


def _cut(x: Tensor, stencil: Stencil, weight: Tensor, channels: int) -> tuple[list[slice], int]:
    """The images of [b, c, h, w] that go together, and how many rows of them: all at once where one band holds them.

    Args:
        weight: what a band is convolved with.
        channels: those of a band, if they are more than the input's.
    """
    batch, height = x.shape[0], x.shape[2]
    if not is_on_cpu(x):
        return [slice(0, batch)], height
    row = max(channels, x.shape[1]) * x.shape[3] * x.element_size()
    rows = max(_BAND_BYTES, _BAND_PER_WEIGHTS * weight.numel() * weight.element_size()) // row
    if rows >= batch * height:
        return [slice(0, batch)], height
    # What two bands have in common comes from one of them alone.
    return [slice(i, i + 1) for i in range(batch)], min(max(rows, stencil.height.reach), height)


def bands_of(
    context: ShardContext,
    x: Tensor,
    stencil: Stencil,
    plan: HaloPlan | None,
    halos: Pieces,
    weight: Tensor,
    channels: int = 0,
    write: Callable[[slice, Tensor, Tensor], object] | None = None,
) -> Iterator[tuple[slice, int, Tensor, tuple[int, int]]]:
    """What a convolution that keeps the size reads of [b, c, h, w], channels_last, one band of rows after the other.

    Args:
        plan: that of ``shard_plan``; ``halos`` has come by it.
        weight: of the convolution; with ``channels``, as many as a band's result has, it decides how large bands are.
        write: makes of some rows of some images (which, the rows, the place) what is read of them; None: a copy.

    Yields:
        The images; the first row of a band's result; what is read, void after the next; the padding left to the
        kernel (h, w).
    """
    parts, rows = _cut(x, stencil, weight, channels)
    height, width, dim = x.shape[2], x.shape[3], context.dim
    if plan is None and write is None and rows >= height:
        for images in parts:
            yield images, 0, x[images], (stencil.height.before, stencil.width.before)
        return
    around, first = shape_around(x, dim, plan, 0)
    whole = dim == -1 and plan is not None  # zeros at the picture's sides stand in the band
    left, padding = (first, 0) if whole else (0, stencil.width.before)
    own, shared = 0 if plan is None else plan.own[0], stencil.height.reach - 1
    count = parts[0].stop - parts[0].start
    buffer = empty_maps(context, [count, x.shape[1], rows + shared, around[3] if whole else width], x)
    for images in parts:
        pieces = [(start - own, piece[images]) for start, piece in halos]
        source = _Source(x[images], partial(write or _copy, images), pieces, dim, left)
        for start in range(0, height, rows):
            stop = min(start + rows, height)
            band = buffer[:, :, : stop - start + shared]
            if start:  # what two bands read is made once
                band[:, :, :shared].copy_(buffer[:, :, rows : rows + shared])
            made = shared if start else 0
            source.fill(band[:, :, made:], start + made - stencil.height.before)
            yield images, start, band, (0, padding)


def _copy(images: slice, rows: Tensor, out: Tensor) -> None:
    out.copy_(rows)


@dataclass(frozen=True)
class _Source:
    """What a convolution reads of some images: their own rows, the halo, zeros around the picture.

    Args:
        own: [b', c, h, w].
        make: makes of some of these rows, in a place for them, what is read of them.
        halos: (first, rows) of other ranks, counted along ``dim`` from the first own row.
        left: columns ahead of the own ones.
    """

    own: Tensor
    make: Callable[[Tensor, Tensor], object]
    halos: Pieces
    dim: int
    left: int

    def fill(self, out: Tensor, first: int) -> None:
        """Fill ``out`` [b', c, n, w'] with rows from ``first`` on, counted from the first own one."""
        stop, (height, width) = first + out.shape[2], self.own.shape[2:]
        low, high = min(max(first, 0), height), max(min(stop, height), 0)
        if low >= high:
            out.zero_()
        else:
            out[:, :, : low - first].zero_()
            out[:, :, high - first :].zero_()
            rows = out[:, :, low - first : high - first]
            self.make(self.own[:, :, low:high], rows[..., self.left : self.left + width])
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
