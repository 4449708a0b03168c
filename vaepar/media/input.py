"""From an item to a source of frames."""

from __future__ import annotations

from vaepar.errors import InputError
from vaepar.media.find import MediaItem
from vaepar.media.source import FrameSource, PictureRules
from vaepar.text import quoted


def open_source(item: MediaItem, rules: PictureRules) -> FrameSource:
    """A source for one item; everything that can be checked before the first frame is checked here.

    Raises:
        InputError: the item has a problem, cannot be read, or does not fit the rules; one line that names the file.
    """
    # Late, so that naming the inputs of a run loads neither NumPy nor Pillow.
    from vaepar.media.picture_source import PictureSource
    from vaepar.media.video_source import VideoSource

    if item.problem is not None:
        raise InputError(item.problem)
    if item.kind == "video":
        return VideoSource(item.path, rules, item.frames)
    return PictureSource(quoted(item.path), item.files or (item.path,), rules)


def peek(item: MediaItem, rules: PictureRules) -> tuple[int, int, int | None]:
    """Height, width and number of frames of an item before fitting, by headers alone; None where they do not tell.

    Raises:
        InputError: the item has a problem or cannot be read.
    """
    from vaepar.media.picture import picture_size
    from vaepar.media.video_probe import probe

    if item.problem is not None:
        raise InputError(item.problem)
    if item.kind == "video":
        facts = probe(item.path, rules.max_pixels)
        if facts.seconds is None or facts.nominal is None:
            return facts.height, facts.width, None
        return facts.height, facts.width, max(1, round(facts.seconds * facts.nominal))
    files = item.files or (item.path,)
    return *picture_size(files[0], rules), len(files)
