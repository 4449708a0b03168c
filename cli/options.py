"""The options that commands share: declared once, as types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vaepar import launch
from vaepar.config import VaeParallelMode
from vaepar.errors import UsageError
from vaepar.jobs.request import DTYPES

INPUT, MODEL, PARALLEL, OUTPUT, TALK = "Input", "Model", "Parallelism", "Output", "Messages"

_MODES = ", ".join(mode.value for mode in VaeParallelMode)

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="VAEPAR_MODEL",
        help="Pipeline folder, VAE folder, hub id 'owner/name[@revision]', or 'demo'.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help=f"One of {', '.join(DTYPES)}.", rich_help_panel=MODEL)]
Variant = Annotated[str | None, typer.Option("--variant", help="Weight variant, as in fp16.", rich_help_panel=MODEL)]
NoDownload = Annotated[
    bool, typer.Option("--no-download", help="Use only what is on this machine.", rich_help_panel=MODEL)
]

Mode = Annotated[
    str,
    typer.Option(
        "--mode",
        "--vae-parallel-mode",
        help=f"How ranks share one latent: {_MODES}.",
        rich_help_panel=PARALLEL,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks", help="Processes to start here (default: one for each GPU, else 1).", rich_help_panel=PARALLEL
    ),
]
Device = Annotated[str, typer.Option("--device", help=f"One of {', '.join(launch.DEVICES)}.", rich_help_panel=PARALLEL)]
Timeout = Annotated[
    float,
    typer.Option("--timeout", min=1, help="Seconds to wait for ranks that do not come.", rich_help_panel=PARALLEL),
]
TileSize = Annotated[
    int | None,
    typer.Option("--tile-size", help="Side of a tile in pixels (default: the VAE's own).", rich_help_panel=PARALLEL),
]
TileStride = Annotated[
    int | None,
    typer.Option(
        "--tile-stride",
        help="Pixels between the starts of two tiles (default: three quarters of the tile size).",
        rich_help_panel=PARALLEL,
    ),
]

Recursive = Annotated[
    bool,
    typer.Option("--recursive", "-r", help="Look into sub-folders too, and keep their tree.", rich_help_panel=INPUT),
]

Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the outputs.", rich_help_panel=OUTPUT)]
Name = Annotated[
    str,
    typer.Option("--name", help="Names of the outputs, from {stem}, {parent}, {index}.", rich_help_panel=OUTPUT),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace whole outputs that exist (default: skip).", rich_help_panel=OUTPUT),
]

Report = Annotated[
    Path | None,
    typer.Option("--report", help="Write what happened to each file as JSON.", rich_help_panel=TALK),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.", rich_help_panel=TALK)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say errors only.", rich_help_panel=TALK)]


def parse_size(flag: str, text: str | None) -> tuple[int, int] | None:
    """``WxH`` as (height, width). Raises :class:`UsageError`."""
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise UsageError(f"{flag} is '{text}'; it is WxH in pixels, as 832x480")
    return int(height), int(width)
