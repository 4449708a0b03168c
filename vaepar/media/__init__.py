"""Pictures and videos out and in: quantised once and named only when whole; read as streams that fit the VAE."""

from vaepar.atomic import remove_stale_temps
from vaepar.media.background import BackgroundSink
from vaepar.media.find import MediaItem, find_media
from vaepar.media.formats import CODECS, PNG_LEVEL, OutputFormat, parse_fps
from vaepar.media.frame_range import FrameRange, parse_frames
from vaepar.media.input import open_source, peek
from vaepar.media.output import is_complete, open_sink
from vaepar.media.quantise import quantise
from vaepar.media.sink import FrameSink
from vaepar.media.source import FrameSource, PictureRules

__all__ = [
    "CODECS",
    "PNG_LEVEL",
    "BackgroundSink",
    "FrameRange",
    "FrameSink",
    "FrameSource",
    "MediaItem",
    "OutputFormat",
    "PictureRules",
    "find_media",
    "is_complete",
    "open_sink",
    "open_source",
    "parse_fps",
    "parse_frames",
    "peek",
    "quantise",
    "remove_stale_temps",
]
