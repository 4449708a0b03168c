"""Plain convolutions of an input that holds all that they read, into memory that is there where there is some.

On a CPU the fresh pages of a large map take longer than the arithmetic that fills it once. oneDNN can add a convolution
to what already stands in a map, which saves the sum of a residual block its map and its pass over memory as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Result:
    """Memory for the result of the next convolution.

    Args:
        memory: of the result's shape, [b, c, h, w] or [b, c, t, h, w], channels_last.
        adds: add to what stands in ``memory``; else write over it.
        taken: set by the convolution that has used it.
        fill: writes what is added to into a part of ``memory``: it gets the images, their rows, and the part. For a
            convolution in bands; None where all stands there already.
    """

    memory: Tensor
    adds: bool = False
    taken: bool = False
    fill: Callable[[slice, slice, Tensor], None] | None = None

    def part(self, images: slice, rows: slice) -> Result:
        """The memory of some rows of some images, [b', c, n, w]; what is added to stands there."""
        memory = self.memory[images, :, rows]
        if self.fill is not None:
            self.fill(images, rows, memory)
        return Result(memory, self.adds)

    def put(self, out: Tensor) -> None:
        """Bring ``out`` here if the convolution that made it could not do it itself."""
        if self.taken:
            return
        if self.adds:
            self.memory.add_(out)
        else:
            self.memory.copy_(out)


_META_FOR_CPU: ContextVar[bool] = ContextVar("vaepar_meta_for_cpu", default=False)


@contextmanager
def meta_for_cpu(on: bool = True) -> Iterator[None]:
    """Let tensors without memory go the way that those of a CPU go, for whoever counts what is made there."""
    token = _META_FOR_CPU.set(on)
    try:
        yield
    finally:
        _META_FOR_CPU.reset(token)


def uses_onednn(x: Tensor) -> bool:
    """True where oneDNN is there for ``x`` and has not been switched off."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and _has_onednn()


def adds_convolutions(x: Tensor) -> bool:
    """True where oneDNN can add a convolution of ``x`` to a map: float32 on CPUs, outside of autocast.

    The operator is the one that torch's own compiler calls for this sum.
    """
    there = is_on_cpu(x) and x.dtype == torch.float32 and _has_onednn()
    return there and hasattr(torch.ops.mkldnn, "_convolution_pointwise_") and not torch.is_autocast_enabled("cpu")


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def is_on_cpu(x: Tensor) -> bool:
    """True for a tensor of a CPU, and for one that stands for such a tensor (:func:`meta_for_cpu`)."""
    return x.device.type == "cpu" or (x.device.type == "meta" and _META_FOR_CPU.get())


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    strides: Sequence[int],
    padding: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
    result: Result | None = None,
) -> Tensor:
    """Convolve [b, c, h, w] or [b, c, t, h, w]; into ``result`` where that has the shape and the device can.

    Args:
        weight: [c', c / groups, (kt,) kh, kw].
        strides: and ``padding`` and ``dilations``: one number for each axis but the first two.
    """
    if result is not None and adds_convolutions(x) and weight.dtype == x.dtype:
        shape = out_shape(x, weight, strides, padding, dilations)
        fits = tuple(result.memory.shape) == shape and result.memory.dtype == x.dtype
        if fits and _is_dense(result.memory) and _is_dense(x):  # of others oneDNN's sum would be a copy's
            result.taken = True
            out = result.memory if result.adds else result.memory.zero_()
            torch.ops.mkldnn._convolution_pointwise_.binary(
                out, x, weight, bias, padding, strides, dilations, groups, "add", 1.0, None, [], None
            )
            return out
    if x.ndim == 4:
        return F.conv2d(x, weight, bias, tuple(strides), tuple(padding), tuple(dilations), groups)
    if uses_onednn(x):
        # conv3d itself leaves oneDNN for a kernel five times slower where b * c * t * h is at most 20480.
        return torch.mkldnn_convolution(x, weight, bias, tuple(padding), tuple(strides), tuple(dilations), groups)
    return F.conv3d(x, weight, bias, tuple(strides), tuple(padding), tuple(dilations), groups)


def mix_channels(x: Tensor, weight: Tensor, bias: Tensor | None, result: Result | None = None) -> Tensor:
    """A 1x1 convolution of a channels_last map, as a product of matrices; into ``result`` where that has the shape.

    Args:
        weight: [c', c, 1, ...].
    """
    inner = x.movedim(1, -1)
    matrix = weight.flatten(1)
    shape = (x.shape[0], weight.shape[0], *x.shape[2:])
    # Products with ``out`` know no autocast, and want one dtype.
    if result is None or tuple(result.memory.shape) != shape or not weight.dtype == x.dtype == result.memory.dtype:
        return F.linear(inner, matrix, bias).movedim(-1, 1)
    result.taken = True
    rows = result.memory.movedim(1, -1).flatten(0, -2)
    flat = inner.flatten(0, -2)
    if result.adds:
        rows.addmm_(flat, matrix.t())
        if bias is not None:
            rows.add_(bias)
    elif bias is None:
        torch.mm(flat, matrix.t(), out=rows)
    else:
        torch.addmm(bias, flat, matrix.t(), out=rows)
    return result.memory


def out_shape(
    x: Tensor, weight: Tensor, strides: Sequence[int], padding: Sequence[int], dilations: Sequence[int]
) -> tuple[int, ...]:
    """The shape of a convolution's result."""
    axes = zip(x.shape[2:], weight.shape[2:], strides, padding, dilations, strict=True)
    sizes = [(size + 2 * pad - dilation * (taps - 1) - 1) // step + 1 for size, taps, step, pad, dilation in axes]
    return x.shape[0], weight.shape[0], *sizes


def _is_dense(x: Tensor) -> bool:
    """True for a channels_last map without gaps."""
    return x.movedim(1, -1).is_contiguous()
