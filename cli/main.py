"""The application: parses on every rank, speaks on the first one, and turns errors into exit codes in one place."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import typer

from vaepar import __version__
from vaepar.errors import InterruptedRunError, UsageError, VaeparError
from vaepar.launch import World, prepare_process

from . import bench, decode, encode, env, inspect, models
from .batch import with_batch
from .help import FROM_ENVIRONMENT, GroupedCommand, WholeLines
from .mistyped import MistypedError, usage_line
from .output import complain

# A command only checks its flags and appends its work here, so that a mistyped flag ends on every rank before any
# group of ranks exists, and work runs outside the parser's error handling. It gets the arguments, for ranks to start.
Work = Callable[[Sequence[str]], int]

app = typer.Typer(
    name="vaepar",
    cls=WholeLines,
    help="Decode saved diffusion latents to pictures and videos, in parallel and exactly.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
# Each option of these two can be given as VAEPAR_NAME too.
for _name, _command in (("decode", decode.command), ("encode", encode.command)):
    app.command(_name, cls=GroupedCommand, context_settings={"auto_envvar_prefix": "VAEPAR"}, epilog=FROM_ENVIRONMENT)(
        with_batch(_command)
    )
app.command("bench", cls=GroupedCommand)(bench.command)
app.command("inspect", cls=GroupedCommand)(inspect.command)
app.command("models")(models.command)
app.command("env")(env.command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"vaepar {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """The options before the command."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit code: 0 done, 2 usage, and those of ``vaepar.errors``."""
    prepare_process()
    with _stoppable():
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    try:
        world = World.from_environment()
        work: list[Work] = []
        code = _parse(arguments, work, speaks=world.rank == 0)
        return work[0](arguments) if work and code == 0 else code
    except VaeparError as error:
        ended = _stop_within(error) or error  # a peer that stops a moment earlier is lost to this rank
        if _is_first():
            complain(str(ended))
        return ended.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        stopped = _stop_within(error)
        if stopped is not None:
            complain(str(stopped))
            return stopped.exit_code
        complain(f"internal error on rank {World.from_environment().rank}: {type(error).__name__}: {error}")
        traceback.print_exc()
        return 1


def _parse(arguments: Sequence[str], work: list[Work], *, speaks: bool) -> int:
    with contextlib.nullcontext() if speaks else _muted():
        try:
            code = app(list(arguments), prog_name="vaepar", obj=work, standalone_mode=False)
        except MistypedError as error:
            if arguments:
                complain(usage_line(error, arguments))
            else:
                error.show()  # the whole help
            return int(error.exit_code)
        except SystemExit as end:  # of a broken pipe
            return int(end.code or 0) if not isinstance(end.code, str) else 1
    return code if isinstance(code, int) else 0


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let the first SIGINT or SIGTERM end a command that has not begun its work (which listens itself) as stopped.

    A second one ends the process at once.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise InterruptedRunError(f"stopped by {signal.Signals(number).name}; the same command again does the work")

    before: dict[signal.Signals, Any] = {}
    try:
        for wish in (signal.SIGINT, signal.SIGTERM):
            before[wish] = signal.signal(wish, stop)
    except ValueError:  # not the main thread, which alone gets signals
        before.clear()
    try:
        yield
    finally:
        for wish, handler in before.items():
            signal.signal(wish, handler)


def _stop_within(error: BaseException | None) -> InterruptedRunError | None:
    """The wish to stop that a library has wrapped into an error of its own, as lazy imports do."""
    while error is not None and not isinstance(error, InterruptedRunError):
        error = error.__cause__ or error.__context__
    return error


def _is_first() -> bool:
    try:
        return World.from_environment().rank == 0
    except UsageError:  # of the launcher's variables themselves: every rank sees it, and each may say so
        return True


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Usage errors and help come from the first rank alone."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,  # noqa: PTH123  # os.devnull is no path to keep
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
