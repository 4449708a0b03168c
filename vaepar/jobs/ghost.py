"""A decode that computes nothing: tensors without memory on the ``meta`` device, and ranks that are not there.

What it would allocate is counted, so an estimate follows every change of the code that it is about.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vaepar.parallel.group import Done, Message, Pending, RankGroup

META = torch.device("meta")

# On one thread PyTorch gives float32 convolutions to oneDNN when the first four axes have more positions than this
# (ConvParams::use_mkldnn in ATen), and unfolds the others itself; of a film's [B, C, T, H, W] the width is left out.
_ONEDNN_FROM = 20480


class GhostGroup(RankGroup):
    """Rank 0 of ``size`` ranks of which the others do not exist: what is sent is dropped, what comes is left as is."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size, META)

    def gather_values(self, value: int) -> list[int]:
        return [value] * self.size

    def all_equal(self, value: int, ranks: int) -> bool:
        return True

    def broadcast_text(self, text: str | None, src: int = 0) -> str:
        return text or ""

    def raise_alarm(self) -> None:
        return None

    def check_alarm(self) -> None:
        return None

    def renew(self) -> None:
        return None

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        return Done()

    def _irecv(self, buffer: Tensor, src: int, tag: int) -> Pending:
        return Done()

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return Done()

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        return None


class FusedAttention(TorchFunctionMode):
    """Attention as CPUs and GPUs compute it: without the matrix of all queries and keys, which ``meta`` would make."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, value = args[0], args[2]
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    """Counts the bytes of all tensors that operations make while the mode is on, and their highest sum.

    Args:
        own: tensors that were there before (weights, the latent): they are not counted.
        unfolds: count the copies of their input that small convolutions make on a CPU with one thread, where PyTorch
            computes them as one matrix product (each input value once for each tap of the kernel).
    """

    def __init__(self, own: Sequence[Tensor] = (), *, unfolds: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._unfolds = unfolds
        self.now = 0
        self.peak = 0
        self._known = weakref.WeakKeyDictionary[Any, int]()
        for tensor in own:
            self._known[tensor.untyped_storage()] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.batch_norm_update_stats.default:  # has no meta kernel
            result: Any = tuple(args[0].new_empty(args[0].shape[1]) for _ in range(2))
        elif func is torch.ops.mkldnn._convolution_pointwise_.binary:  # has no meta kernel; it writes into a map
            result = args[0]
        else:
            result = func(*args, **(kwargs or {}))
        convolves = func is torch.ops.aten.convolution.default
        if convolves and args[0].ndim == 4 and args[0].is_contiguous(memory_format=torch.channels_last):
            result = result.contiguous(memory_format=torch.channels_last)  # as devices keep it; meta does not
        if self._unfolds and convolves:
            self.peak = max(self.peak, self.now + _unfolded(args, result))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size


def _unfolded(args: Any, result: Tensor) -> int:
    """Bytes that a convolution on one thread takes beside its operands: an unfolded input, or oneDNN's own copy."""
    x, weight, stride = args[0], args[1], args[3]
    taps = int(math.prod(weight.shape[2:]))
    large = x.dtype == torch.float32 and math.prod(x.shape[:4]) > _ONEDNN_FROM
    if large or taps == 1 or max(weight.shape[-2:]) > 3 or any(step > 1 for step in stride):
        return result.numel() * result.element_size()
    unfolded = int(weight.shape[1]) * taps * math.prod(result.shape[2:])
    return int(unfolded + result.numel()) * result.element_size()
