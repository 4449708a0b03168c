"""The options that commands share: declared once, as types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vaepar import launch
from vaepar.config import VaeParallelMode
from vaepar.errors import UsageError
from vaepar.jobs.request import DTYPES

from . import config
from .progress import DIALECTS

INPUT, MODEL, PARALLEL, OUTPUT, FARM, TALK = "Input", "Model", "Parallelism", "Output", "Farm", "Messages"

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

List = Annotated[
    list[str] | None,
    typer.Option(
        "--list",
        help="File with one input a line; - is standard input. As an input: @FILE, -.",
        rich_help_panel=INPUT,
        show_default=False,
    ),
]
Null = Annotated[
    bool, typer.Option("--null", "-0", help="Lists are separated by NUL, as find -print0.", rich_help_panel=INPUT)
]

VaeParallelSize = Annotated[
    str,
    typer.Option(
        "--vae-parallel-size",
        help="Ranks that share one latent; the others take other files. auto: by files and memory.",
        rich_help_panel=PARALLEL,
    ),
]
Retreat = Annotated[
    bool,
    typer.Option("--retreat/--no-retreat", help="Try again with less when memory runs out.", rich_help_panel=PARALLEL),
]

Shard = Annotated[
    str | None,
    typer.Option(
        "--shard", help="i/n: the i-th of n parts of the sorted inputs, from 0; i-j/n: several.", rich_help_panel=FARM
    ),
]
AcrossNodes = Annotated[
    bool, typer.Option("--across-nodes", help="Let ranks of several machines share a latent.", rich_help_panel=FARM)
]
MaxRestarts = Annotated[
    int,
    typer.Option("--max-restarts", help="Start the ranks again so often when one is killed.", rich_help_panel=FARM),
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        help="Seconds after SIGTERM or SIGINT in which the current file may be finished (keep it below the launcher's "
        "own patience, often 30).",
        rich_help_panel=FARM,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and do nothing.", rich_help_panel=FARM)]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="TOML file with options of this command; the command line and VAEPAR_* come first.",
        is_eager=True,
        callback=config.take_file,
        rich_help_panel=FARM,
    ),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print all options as TOML and do nothing.", rich_help_panel=FARM)
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

Progress = Annotated[str, typer.Option("--progress", help=f"One of {', '.join(DIALECTS)}.", rich_help_panel=TALK)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a file on standard output.", rich_help_panel=TALK)]
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
