"""Whether the files of a run fit the memory of its ranks, for the plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from vaepar.autoencoders.selection import Selection
from vaepar.errors import VaeparError
from vaepar.jobs.estimate import Estimate, estimate_peak_bytes, select_for
from vaepar.jobs.plan import Task
from vaepar.jobs.request import BatchRequest
from vaepar.latents import VaeFacts
from vaepar.text import shown

logger = logging.getLogger(__name__)

_USABLE = 0.9  # of what a device has: contexts, fragments and other processes take the rest


def memory_for_a_rank(device: torch.device, local_ranks: int) -> int:
    """Bytes that a rank may use: of its own GPU, or its share of what this machine has available."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _USABLE)
    return int(psutil.virtual_memory().available * _USABLE) // local_ranks


class Budget:
    """Estimates for the files of one run.

    Args:
        operation: ``decode`` or ``encode``.
        request: of the run.
        vae: the VAE's numbers.
        dtype: of weights and latents.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, operation: str, request: BatchRequest, vae: VaeFacts, dtype: torch.dtype, device: str) -> None:
        self._operation = operation
        self._request, self._vae, self._dtype, self._device = request, vae, dtype, device
        self._tiles = request.tiles(vae.spatial_ratio)

    def holds(self, tasks: Sequence[Task], size: int, memory: int) -> bool:
        """Whether each of the tasks fits when ``size`` ranks share it. Tasks of unknown size are taken to fit."""
        largest = max(tasks, key=lambda task: task.row.cost, default=None)
        if largest is None:
            return True
        found = self._estimate(largest, size)
        return found is None or found[1].total <= memory

    def outlook(self, task: Task, size: int) -> dict[str, Any]:
        """Mode and memory that a task will have, for a dry run."""
        found = self._estimate(task, size)
        if found is None:
            return {}
        selection, estimate = found
        return {
            "mode": selection.mode,
            "mode_reason": selection.reason,
            "estimated_bytes_per_rank": estimate.total,
            "estimated_weights": estimate.weights,
            "estimated_activations": estimate.activations,
        }

    def _estimate(self, task: Task, size: int) -> tuple[Selection, Estimate] | None:
        shape = task.latent_shape(self._vae)
        if shape is None:
            return None
        try:
            selection = select_for(self._vae, shape, self._request.mode.value, size, self._tiles, self._operation)
            estimate = estimate_peak_bytes(
                self._vae,
                shape,
                self._dtype,
                selection,
                size,
                operation=self._operation,
                tiles=self._tiles,
                device=self._device,
                threads=torch.get_num_threads(),
            )
        except (VaeparError, RuntimeError) as error:  # an estimate is advice: the run itself will say what is wrong
            logger.info("no estimate for %s: %s", shown(task.path), shown(error))
            return None
        return selection, estimate
