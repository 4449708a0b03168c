"""Pictures and videos out: quantised once, written in the background, and named only when whole."""

from vaepar.media.atomic import remove_stale_temps
from vaepar.media.background import BackgroundSink
from vaepar.media.formats import CODECS, OutputFormat, parse_fps
from vaepar.media.output import is_complete, open_sink
from vaepar.media.quantise import quantise
from vaepar.media.sink import FrameSink

__all__ = [
    "CODECS",
    "BackgroundSink",
    "FrameSink",
    "OutputFormat",
    "is_complete",
    "open_sink",
    "parse_fps",
    "quantise",
    "remove_stale_temps",
]
