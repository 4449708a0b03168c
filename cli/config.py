"""``--config FILE.toml``: options of a command from a file, below the command line and the environment in rank."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from vaepar.errors import UsageError
from vaepar.text import listed, shown

_MAX_BYTES = 2**20
_VARIABLES = "VAEPAR_"
# Of the scripts beside this package, and of the rank that hands a list on to the others.
_NOT_OPTIONS = frozenset({"VAEPAR_PIP_ARGS", "VAEPAR_PYTHON", "VAEPAR_STDIN_LIST"})
_NOT_IN_FILES = frozenset({"config", "print_config", "help", "ctx"})


def take_file(ctx: typer.Context, value: str | None) -> str | None:
    """Callback of ``--config``: give the file's values to the options that the command line leaves out.

    Keys are the options' names (``tile-size`` or ``tile_size``); a table with the command's name holds options of that
    command alone, and comes before the keys outside of it. Raises :class:`UsageError` for a key that is no option.
    """
    if value is None or ctx.resilient_parsing:
        return value
    content = _read(Path(value))
    command = ctx.command.name or ""
    names = {plain(param.name or ""): str(param.name) for param in ctx.command.params}
    tables = {key: table for key, table in content.items() if isinstance(table, Mapping)}
    settings: dict[str, Any] = {}
    top = {key: setting for key, setting in content.items() if key not in tables}
    unknown = [key for key in tables if key not in ("decode", "encode")]
    if unknown:
        raise UsageError(f"--config {shown(value)}: no table is called {listed(unknown)}; there are decode and encode")
    for part in (top, tables.get(command, {})):
        for key, setting in part.items():
            name = _name_of(key, names, value)
            if sum(other.replace("-", "_") == key.replace("-", "_") for other in part) > 1:
                raise UsageError(f"--config {shown(value)}: '{shown(key)}' is given twice, with - and with _")
            settings[name] = setting
    ctx.default_map = {**(ctx.default_map or {}), **settings}
    return value


def unknown_variables(ctx: typer.Context, environment: Mapping[str, str]) -> list[str]:
    """A line for each ``VAEPAR_*`` variable that is no option of a command that reads them: a slip of the pen."""
    commands = getattr(ctx.find_root().command, "commands", {ctx.info_name: ctx.command}).values()
    reading = [command for command in commands if "auto_envvar_prefix" in command.context_settings]
    params = [param for command in reading for param in command.params if param.param_type_name == "option"]
    options = {plain(param.name or "").upper() for param in params}
    lines = []
    for name in sorted(environment):
        option = name[len(_VARIABLES) :]
        known = name.startswith(_VARIABLES) and (option in options or name in _NOT_OPTIONS)
        if known or not name.upper().startswith(_VARIABLES):
            continue
        close = difflib.get_close_matches(option.upper(), options, 1)
        guess = f"; did you mean {_VARIABLES}{close[0]}?" if close else ""
        lines.append(f"{shown(name)} is set and no option is called so{guess}")
    return lines


def add_sources(error: UsageError, ctx: typer.Context) -> None:
    """Say in ``error`` which variable or file a value came from that it speaks of: nobody finds that on the line.

    And call an option as it is typed: the library calls it ``png_level``.
    """
    words = re.sub(r"^(\w+) is ", lambda found: _typed(found, ctx), str(error))
    told = []
    for param in ctx.command.params:
        name, value = str(param.name), str(ctx.params.get(str(param.name)))
        source = getattr(ctx.get_parameter_source(name), "name", "")
        place = {"ENVIRONMENT": getattr(param, "envvar", None) or f"{_VARIABLES}{plain(name).upper()}"}
        place["DEFAULT_MAP"] = f"--config {shown(ctx.params.get('config_'))}"
        if source in place and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", words):
            told.append(f"--{plain(name).replace('_', '-')} comes from {place[source]}")
    error.args = (f"{words} ({', '.join(told)})" if told else words,)


def _typed(found: re.Match[str], ctx: typer.Context) -> str:
    names = {plain(str(param.name)) for param in ctx.command.params}
    return f"--{found[1].replace('_', '-')} is " if found[1] in names else found[0]


def plain(name: str) -> str:
    """An option's name as files have it: ``format_`` is ``format``."""
    return name.rstrip("_")


def to_toml(values: Mapping[str, Any]) -> str:
    """Options as lines of TOML; those without a value as comments."""
    lines = []
    for name, value in values.items():
        if plain(name) in _NOT_IN_FILES:
            continue
        key = plain(name).replace("_", "-")
        lines.append(f"# {key} =" if value is None else f"{key} = {_literal(value)}")
    return "\n".join(lines) + "\n"


def _name_of(key: str, names: Mapping[str, str], file: str) -> str:
    wanted = key.replace("-", "_")
    if wanted in names and wanted not in _NOT_IN_FILES:
        return names[wanted]
    close = difflib.get_close_matches(wanted, names.keys() - _NOT_IN_FILES, 1)
    guess = f"; did you mean '{close[0].replace('_', '-')}'?" if close else ""
    raise UsageError(f"--config {shown(file)}: '{shown(key)}' is no option of this command{guess}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"--config {shown(path)} is larger than {_MAX_BYTES} bytes; it is no file of options")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--config {shown(path)} cannot be read: {shown(words)}") from None


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    # JSON's escapes are TOML's too, except that TOML wants DEL escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
