"""The options that every command over many files has: which files, model and ranks, how it writes, talks and ends.

Declared once and added to a command's signature by :func:`with_batch`, because Typer has no groups of options.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.models import OptionInfo

from vaepar.config import VaeParallelMode
from vaepar.errors import UsageError
from vaepar.jobs.farming import DEFAULT_GRACE_SECONDS, Farming, parse_parallel_size, parse_shard
from vaepar.jobs.lists import expand_inputs

from . import config, options
from .progress import DIALECTS, Dialect
from .start import Start, Talk


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What these options said. The names are those of the options; ``remarks`` are to be told when the run begins."""

    list_: tuple[str, ...]
    null: bool
    recursive: bool
    model: str
    dtype: str
    variant: str | None
    no_download: bool
    mode: str
    ranks: int | None
    device: str
    timeout: float
    tile_size: int | None
    tile_stride: int | None
    vae_parallel_size: str
    retreat: bool
    name: str
    overwrite: bool
    shard: str | None
    across_nodes: bool
    max_restarts: int
    grace: float
    dry_run: bool
    progress: str
    json_: bool
    report: Path | None
    verbose: bool
    quiet: bool
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts is {self.max_restarts}; it is a whole number, 0 or more")
        if self.progress not in DIALECTS:
            raise UsageError(f"--progress is '{self.progress}'; it is one of {', '.join(DIALECTS)}")
        if self.json_ and self.progress == "openjd":
            raise UsageError("--json and --progress openjd were both given; both need standard output for themselves")

    @property
    def talk(self) -> Talk:
        dialect = Dialect(name=self.progress, rows=self.json_)
        return Talk(verbose=self.verbose, quiet=self.quiet, dialect=dialect, remarks=self.remarks)

    @property
    def where(self) -> Start:
        return Start(
            ranks=self.ranks,
            device=self.device,
            timeout=self.timeout,
            max_restarts=self.max_restarts,
            dry_run=self.dry_run,
        )

    @property
    def request(self) -> dict[str, Any]:
        """The arguments that every :class:`BatchRequest` takes, its inputs and its folder apart."""
        return {
            "model": self.model,
            "mode": VaeParallelMode.parse(self.mode),
            "tile_size": self.tile_size,
            "tile_stride": self.tile_stride,
            "dtype": self.dtype,
            "name": self.name,
            "recursive": self.recursive,
            "overwrite": self.overwrite,
            "variant": self.variant,
            "allow_download": not self.no_download,
            "report": self.report,
            "farming": Farming(
                vae_parallel_size=parse_parallel_size(self.vae_parallel_size),
                across_nodes=self.across_nodes,
                grace=self.grace,
                retreat=self.retreat,
                shard=None if self.shard is None else parse_shard(self.shard),
            ),
        }

    def inputs(self, named: list[str] | None) -> tuple[str, ...]:
        """The inputs of the command line and of the lists."""
        return expand_inputs(named or (), self.list_, null=self.null)


def _declare(
    *,
    list_: options.List = None,
    null: options.Null = False,
    recursive: options.Recursive = False,
    model: options.Model,
    dtype: options.Dtype = "auto",
    variant: options.Variant = None,
    no_download: options.NoDownload = False,
    mode: options.Mode = "tile",
    ranks: options.Ranks = None,
    device: options.Device = "auto",
    timeout: options.Timeout = 300,
    tile_size: options.TileSize = None,
    tile_stride: options.TileStride = None,
    vae_parallel_size: options.VaeParallelSize = "auto",
    retreat: options.Retreat = True,
    name: options.Name = "{stem}",
    overwrite: options.Overwrite = False,
    shard: options.Shard = None,
    across_nodes: options.AcrossNodes = False,
    max_restarts: options.MaxRestarts = 0,
    grace: options.Grace = DEFAULT_GRACE_SECONDS,
    dry_run: options.DryRun = False,
    config_: options.Config = None,
    print_config: options.PrintConfig = False,
    progress: options.Progress = "auto",
    json_: options.Json = False,
    report: options.Report = None,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
) -> None:
    """Only its signature is used."""


def with_batch(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these options in place of its parameter ``batch``."""
    shared = inspect.signature(_declare, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "batch"]
    # Keyword only: one that must be given may then follow others. The order is that of the help.
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own[:2], *shared.values(), *own[2:])]
    for parameter in parameters:
        _name_variable(parameter)

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        if values["print_config"]:
            typer.echo(config.to_toml(values), nl=False)
            return
        chosen = {name: values.pop(name) for name in shared}
        del chosen["config_"], chosen["print_config"]
        chosen["list_"] = tuple(chosen["list_"] or ())
        remarks = config.unknown_variables(values["ctx"], os.environ)
        try:
            command(**values, batch=Batch(**chosen, remarks=tuple(remarks)))
        except UsageError as error:
            config.add_sources(error, values["ctx"])
            raise

    del expanded.__dict__["__wrapped__"]  # its signature would be taken for this one's
    expanded.__dict__["__signature__"] = signature.replace(parameters=parameters)
    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    return expanded


def _name_variable(parameter: inspect.Parameter) -> None:
    """Name the environment variable of an option whose parameter had to avoid a word of Python.

    They are not shown with each option: the help says once how they are called.
    """
    for part in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(part, OptionInfo):
            part.show_envvar = False
        if parameter.name.endswith("_") and isinstance(part, OptionInfo) and part.envvar is None:
            part.envvar = f"VAEPAR_{config.plain(parameter.name).upper()}"
