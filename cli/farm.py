"""The options of a run over many files that every such command has: which files, which ranks, how it talks and ends.

Declared once and added to a command's signature by :func:`with_farm`, because Typer has no groups of options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from vaepar.errors import UsageError
from vaepar.jobs.farming import DEFAULT_GRACE_SECONDS, Farming, parse_parallel_size, parse_shard
from vaepar.jobs.lists import expand_inputs

from . import config
from .options import INPUT, PARALLEL, TALK
from .progress import DIALECTS, Dialect

FARM = "Farm"


@dataclass(frozen=True, kw_only=True)
class Farm:
    """What these options said. The names are those of the options."""

    list_: tuple[str, ...]
    null: bool
    shard: str | None
    vae_parallel_size: str
    across_nodes: bool
    max_restarts: int
    grace: float
    retreat: bool
    dry_run: bool
    progress: str
    json_: bool

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts is {self.max_restarts}; it is a whole number, 0 or more")
        if self.progress not in DIALECTS:
            raise UsageError(f"--progress is '{self.progress}'; it is one of {', '.join(DIALECTS)}")
        if self.json_ and self.progress == "openjd":
            raise UsageError("--json and --progress openjd were both given; both need standard output for themselves")

    @property
    def dialect(self) -> Dialect:
        return Dialect(name=self.progress, rows=self.json_)

    @property
    def farming(self) -> Farming:
        return Farming(
            vae_parallel_size=parse_parallel_size(self.vae_parallel_size),
            across_nodes=self.across_nodes,
            grace=self.grace,
            retreat=self.retreat,
            shard=None if self.shard is None else parse_shard(self.shard),
        )

    def inputs(self, named: list[str] | None) -> tuple[str, ...]:
        """The inputs of the command line and of the lists."""
        return expand_inputs(named or (), self.list_, null=self.null)


def _declare(
    list_: Annotated[
        list[str] | None,
        typer.Option(
            "--list",
            help="File with one input a line; - is standard input. As an input: @FILE, -.",
            rich_help_panel=INPUT,
            show_default=False,
        ),
    ] = None,
    null: Annotated[
        bool, typer.Option("--null", "-0", help="Lists are separated by NUL, as find -print0.", rich_help_panel=INPUT)
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            help="i/n: the i-th of n parts of the sorted inputs, from 0; i-j/n: several.",
            rich_help_panel=FARM,
        ),
    ] = None,
    vae_parallel_size: Annotated[
        str,
        typer.Option(
            "--vae-parallel-size",
            help="Ranks that share one latent; the others take other files. auto: by files and memory.",
            rich_help_panel=PARALLEL,
        ),
    ] = "auto",
    across_nodes: Annotated[
        bool, typer.Option("--across-nodes", help="Let ranks of several machines share a latent.", rich_help_panel=FARM)
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", help="Start the ranks again so often when one is killed.", rich_help_panel=FARM),
    ] = 0,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            help="Seconds after SIGTERM or SIGINT in which the current file may be finished (keep it below the "
            "launcher's own patience, often 30).",
            rich_help_panel=FARM,
        ),
    ] = DEFAULT_GRACE_SECONDS,
    retreat: Annotated[
        bool,
        typer.Option(
            "--retreat/--no-retreat", help="Try again with less when memory runs out.", rich_help_panel=PARALLEL
        ),
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and do nothing.", rich_help_panel=FARM)
    ] = False,
    progress: Annotated[
        str, typer.Option("--progress", help=f"One of {', '.join(DIALECTS)}.", rich_help_panel=TALK)
    ] = "auto",
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON object a file on standard output.", rich_help_panel=TALK)
    ] = False,
    config_: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="TOML file with options of this command; the command line and VAEPAR_* come first.",
            is_eager=True,
            callback=config.take_file,
            rich_help_panel=FARM,
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all options as TOML and do nothing.", rich_help_panel=FARM)
    ] = False,
) -> None:
    """Only its signature is used."""


def with_farm(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these options in place of its parameter ``farm``."""
    extra = inspect.signature(_declare, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.name != "farm"] + list(extra.values())
    for parameter in parameters:
        _name_variable(parameter)

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        if values["print_config"]:
            typer.echo(config.to_toml(values), nl=False)
            return
        chosen = {name: values.pop(name) for name in extra}
        del chosen["config_"], chosen["print_config"]
        chosen["list_"] = tuple(chosen["list_"] or ())
        command(**values, farm=Farm(**chosen))

    del expanded.__dict__["__wrapped__"]  # its signature would be taken for this one's
    expanded.__dict__["__signature__"] = signature.replace(parameters=parameters)
    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    return expanded


def _name_variable(parameter: inspect.Parameter) -> None:
    """Name the environment variable of an option whose parameter had to avoid a word of Python."""
    for part in getattr(parameter.annotation, "__metadata__", ()):
        if parameter.name.endswith("_") and isinstance(part, OptionInfo) and part.envvar is None:
            part.envvar = f"VAEPAR_{config.plain(parameter.name).upper()}"
