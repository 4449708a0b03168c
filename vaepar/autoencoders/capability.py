"""What a family's adapter can do, as data that a command can print and a caller can check before loading anything."""

from __future__ import annotations

from dataclasses import dataclass

from vaepar.config import VaeParallelMode
from vaepar.errors import UnsupportedModeError

AUTO_RULE = (
    "the longer axis that covers every rank, width on ties; tile where neither does; what fits one tile is direct"
)


@dataclass(frozen=True, kw_only=True)
class VaeCapability:
    """The operations, modes and inputs of one adapter.

    Args:
        family: short name, as in reports.
        base_class: the diffusers class whose checkpoints it loads.
        decode_modes, encode_modes: parallel modes of the two operations; empty when an operation is not offered.
        latent_rank: dimensions of the latent, 4 for [B, C, H, W] or 5 for [B, C, T, H, W].
        dtypes: names of the torch dtypes it is tested with.
        group_layouts: which ranks may share one latent.
        auto_rule: in words, what ``auto`` chooses.
        forced_rule: in words, what happens to a forced spatial mode that this request cannot have.
    """

    family: str
    base_class: str
    decode_modes: tuple[VaeParallelMode, ...]
    encode_modes: tuple[VaeParallelMode, ...]
    latent_rank: int
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "float16")
    group_layouts: str = "tile: the first N ranks of any group; spatial shards: all ranks of a group"
    auto_rule: str = "tile"
    forced_rule: str = "not offered"

    def require_decode(self, mode: VaeParallelMode) -> None:
        """Raise :class:`UnsupportedModeError`, listing what there is, unless decode has ``mode``."""
        if mode not in self.decode_modes:
            raise UnsupportedModeError(
                f"{self.base_class} has no decode mode '{mode.value}'; it has "
                f"{', '.join(m.value for m in self.decode_modes)}"
            )

    def require_encode(self, mode: VaeParallelMode) -> None:
        """Raise :class:`UnsupportedModeError`, listing what there is, unless encode has ``mode``."""
        if mode not in self.encode_modes:
            raise UnsupportedModeError(
                f"{self.base_class} has no encode mode '{mode.value}'; it has "
                f"{', '.join(m.value for m in self.encode_modes) or 'none'}"
            )
