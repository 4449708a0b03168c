"""What reads frames for a VAE: the rules that the VAE and the caller set, and the one interface of all readers.

Letters of shapes: C channels, t frames of one read, H and W after fitting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, get_args

from vaepar.errors import UsageError

if TYPE_CHECKING:
    from fractions import Fraction

    import torch

    from vaepar.media.fitting import FramePlan, Pixels, SizePlan

Alpha = Literal["refuse", "drop", "white", "black", "keep"]
Fit = Literal["error", "crop", "pad", "resize"]
FramesFit = Literal["error", "trim", "pad"]

DEFAULT_MAX_PIXELS = 89_478_485  # Pillow's own threshold: a quarter of a gigabyte as RGB


@dataclass(frozen=True, kw_only=True)
class PictureRules:
    """What pixels must become before a VAE can take them.

    Args:
        alpha: what happens to transparency. ``refuse``: an error, unless it is opaque everywhere or ``channels`` is 4;
            ``drop``: the colours as stored, also the hidden ones; ``white``, ``black``: laid over that colour;
            ``keep``: the fourth channel, for ``channels`` 4 only.
        multiple: height and width must divide by (height, width), pixels.
        fit: what happens to other sizes. ``error``; ``crop``: centred; ``pad``: at the bottom and right, by repeating
            the edge; ``resize``: to the nearest size that fits, Lanczos.
        frames_step: frame counts must be ``frames_step * k + 1``; None: any count.
        frames_fit: what happens to other counts. ``error``; ``trim``: the last frames go; ``pad``: the last frame is
            repeated.
        channels: of the VAE, 3 (RGB) or 4 (RGBA).
        max_pixels: the largest picture or frame that is read, height * width. A header that claims more is refused
            before anything is allocated.

    Raises:
        UsageError: a value that cannot be.
    """

    alpha: Alpha = "refuse"
    multiple: tuple[int, int] = (1, 1)
    fit: Fit = "error"
    frames_step: int | None = None
    frames_fit: FramesFit = "error"
    channels: int = 3
    max_pixels: int = DEFAULT_MAX_PIXELS

    def __post_init__(self) -> None:
        for name, allowed in (("alpha", Alpha), ("fit", Fit), ("frames_fit", FramesFit)):
            if getattr(self, name) not in get_args(allowed):
                raise UsageError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(get_args(allowed))}")
        if not isinstance(self.multiple, tuple) or len(self.multiple) != 2:
            raise UsageError(f"multiple is {self.multiple!r}; it is a pair (height, width)")
        numbers = [("multiple", self.multiple[0]), ("multiple", self.multiple[1]), ("max_pixels", self.max_pixels)]
        for name, value in numbers if self.frames_step is None else [*numbers, ("frames_step", self.frames_step)]:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} is {value!r}; it is a whole number, 1 or more")
        if self.channels not in (3, 4):
            raise UsageError(f"channels is {self.channels!r}; a VAE for pixels has 3 or 4")
        if self.alpha == "keep" and self.channels != 4:
            raise UsageError("alpha is 'keep'; this VAE has 3 channels: refuse, drop, white or black are possible")


class FrameSource(ABC):
    """One picture, sequence or video as frames that fit the VAE. A context manager; :meth:`close` is enough too.

    Attributes:
        name: the input as messages show it, quoted.
        height, width: of every frame, after fitting.
        frames: how many frames come, after fitting; exact.
        fps: frames per second, exact; None where there is none (a picture) or none is known (most sequences).
        original_size: (height, width) before fitting, as one sees it (orientation and rotation obeyed).
        original_frames: how many frames there were before trimming or padding.
        fitted: which fit was needed: ``none``, ``crop``, ``pad`` or ``resize``.
    """

    def __init__(self, name: str, size: SizePlan, frames: FramePlan, rules: PictureRules, fps: Fraction | None) -> None:
        self.name = name
        self.height, self.width = size.height, size.width
        self.frames = frames.total
        self.fps = fps
        self.original_size = size.original
        self.original_frames = frames.available
        self.fitted = size.fit
        self.rules = rules
        self._size = size
        self._frames = frames
        self._given = 0
        self._last: Pixels | None = None
        self._closed = False
        self._notes: dict[str, None] = dict.fromkeys((*size.notes, *frames.notes))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided for the caller, a line each; complete when all frames are read."""
        return tuple(self._notes)

    def read(self, count: int) -> torch.Tensor | None:
        """The next frames, at most ``count``.

        The range is that of diffusers' VaeImageProcessor, in float32: divided by 255 (65535 for deeper sources), then
        ``2 * x - 1``.

        Returns:
            float32 [C, t, H, W] in [-1, 1] with 1 <= t <= count, on the CPU; None at the end.

        Raises:
            InputError: the file is cut short or broken; the source is closed then.
            UsageError: count below 1, or the source is closed.
        """
        import torch

        from vaepar.media.fitting import to_range

        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"{count!r} frames of {self.name} were asked for; it is a whole number, 1 or more")
        if self._closed:
            raise UsageError(f"{self.name} is closed; it gives no more frames")
        t = min(count, self.frames - self._given)
        if t == 0:
            return None
        frames = torch.empty((self.rules.channels, t, self.height, self.width), dtype=torch.float32)
        try:
            for i in range(t):
                frames[:, i] = to_range(self._frame())
        except BaseException:
            self.close()
            raise
        return frames

    def _frame(self) -> Pixels:
        """The next frame [H, W, C], fitted; past the end of a padded source the last one again."""
        if self._last is None or self._given < self._frames.read:
            self._last = self._size.apply(self._next())
        self._given += 1
        return self._last

    @abstractmethod
    def _next(self) -> Pixels:
        """The next frame as stored, [H, W, C] with the VAE's channels, before fitting."""

    def close(self) -> None:
        """Let go of files and processes; allowed at any time, also twice."""
        self._closed = True
        self._last = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
