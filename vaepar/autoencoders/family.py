"""What the spatial engine asks of a family's adapter. The engine names no family: a new one answers these questions.

Shapes: B batch, C latent channels, T latent frames, t pixel frames, h and w latent rows and columns, H and W pixels.
Image families have no T and t.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from vaepar.autoencoders.capability import VaeCapability


@dataclass(frozen=True)
class ShardStep:
    """One step of a walk through time.

    Args:
        start, stop: frames of the input, from the first to before the last; 0 and 1 for a picture, which has none.
        shape: of what the step makes, of all ranks together.
    """

    start: int
    stop: int
    shape: tuple[int, ...]


class ShardFamily:
    """The facts and the arithmetic of one model that several ranks run as a spatial shard.

    Everything here is local: each method sees the rows of one rank and knows nothing of others.
    """

    capability: ClassVar[VaeCapability]

    modules: Callable[[], Iterator[nn.Module]]  # every adapter is a module
    encoder: nn.Module
    decoder: nn.Module
    quant_conv: nn.Module | None
    post_quant_conv: nn.Module | None

    @property
    @abstractmethod
    def doublings(self) -> int:
        """How often the decoder doubles rows and columns, patches apart; the encoder halves them as often."""

    @property
    def patch_size(self) -> int:
        """Pixels per side that are folded into channels; 1 where none are."""
        return 1

    @property
    def shard_ratio(self) -> int:
        """Pixels for each latent row or column, as the layers make them (tiles go by the configuration's number)."""
        return self.patch_size << self.doublings

    @property
    def pixel_multiple(self) -> int:
        """What height and width of pixels must be multiples of to be encoded; the rest of them is cut off."""
        return self.patch_size

    @property
    def shard_parts(self) -> tuple[nn.Module | None, ...]:
        """The parts of the model whose layers must know about shards."""
        return self.encoder, self.decoder, self.quant_conv, self.post_quant_conv

    @abstractmethod
    def decode_pieces(self, pieces: Iterable[Tensor]) -> Generator[Tensor]:
        """What the decoder makes of latents [B, C, (T,) h, w], given piece by piece in time order.

        Takes a piece when its result is asked for, and keeps its temporal cache to itself.
        """

    @abstractmethod
    def encode_pieces(self, pieces: Iterable[Tensor]) -> Generator[Tensor]:
        """Moments (mean and log variance) [B, 2C, (T,) h, w] of (patchified) pixels, as :meth:`decode_pieces`."""

    def finish_untiled(self, decoded: Tensor) -> Tensor:
        """What the family does to an untiled piece of the decoder before it is pixels (unpatchify, clamp)."""
        return decoded

    def patchify(self, pixels: Tensor) -> Tensor:
        """Pixels as the encoder takes them."""
        return pixels

    @abstractmethod
    def shard_decode_steps(self, shape: Sequence[int], frames_per_step: int) -> list[ShardStep]:
        """The steps from a latent of this shape to pixels [B, 3, (t,) H, W], which has the frames of all steps."""

    @abstractmethod
    def shard_encode_steps(self, shape: Sequence[int], frames_per_step: int) -> list[ShardStep]:
        """The steps from pixels of this shape to moments [B, 2C, (T,) h, w]."""
