"""What a caller asks of a VAE's parallelism. Names and sizes are checked here; support is the adapter's business."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vaepar.errors import UsageError


class VaeParallelMode(StrEnum):
    """How one latent is shared among the ranks of a VAE group.

    ``TILE`` cuts the latent into overlapping tiles (exact against serial tiling); ``SPATIAL_SHARD_HEIGHT`` and
    ``SPATIAL_SHARD_WIDTH`` cut every feature map along one axis (exact against the untiled result); ``AUTO`` lets
    the family choose for each request.
    """

    TILE = "tile"
    AUTO = "auto"
    SPATIAL_SHARD_HEIGHT = "spatial_shard_height"
    SPATIAL_SHARD_WIDTH = "spatial_shard_width"

    @classmethod
    def parse(cls, name: str | VaeParallelMode) -> VaeParallelMode:
        """The mode of that name. Raises :class:`UsageError` that lists the names there are."""
        try:
            return cls(name)
        except ValueError:
            raise UsageError(
                f"parallel mode '{name}' does not exist; the modes are {', '.join(m.value for m in cls)}"
            ) from None


@dataclass(frozen=True, kw_only=True)
class VaeParallelConfig:
    """How many ranks share one latent, and how.

    Args:
        vae_patch_parallel_size: ranks of one VAE group, at least 1. 1 is diffusers' own path.
        vae_parallel_mode: a :class:`VaeParallelMode` or its name.
    """

    vae_patch_parallel_size: int = 1
    vae_parallel_mode: VaeParallelMode = VaeParallelMode.TILE

    def __post_init__(self) -> None:
        size = self.vae_patch_parallel_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"vae_patch_parallel_size is {size!r}; it is a whole number of ranks, 1 or more")
        object.__setattr__(self, "vae_parallel_mode", VaeParallelMode.parse(self.vae_parallel_mode))
