"""What the parser has to say about a mistyped command line, in our one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer

from vaepar.text import shown

# The parser's own class of errors, of which typer shows this descendant only: it is the last one above Exception.
MistypedError: Any = next(cls for cls in reversed(typer.BadParameter.__mro__) if cls.__name__ == "ClickException")


def usage_line(error: Any, arguments: Sequence[str]) -> str:
    """What was asked, what was found, what is allowed, and where help is."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    message = _plainly(str(error.message if parameter is not None else error.format_message()).rstrip("."))
    command = "vaepar" if context is None else context.command_path
    if parameter is not None and parameter.opts:
        name, value = _found(context, parameter, arguments)
        if value is None:
            message = f"{name}: {message}" if message else f"{name} is missing"
        else:
            message = f"{name} is '{shown(value)}'; {message}"
    return f"{message} ({command} -h tells what there is)"


def _plainly(message: str) -> str:
    """The words of the parser's checks, which speak of inputs, in ours."""
    for words, ours in (
        (r"Input should be a valid integer.*", "it is a whole number"),
        (r"Input should be a valid number.*", "it is a number"),
        (r"Input should be a valid boolean.*", "it is true or false"),
        (r"Input should be greater than or equal to (\S+)", r"it is \1 or more"),
    ):
        message = re.sub(words, ours, message)
    return message


def _found(context: Any, parameter: Any, arguments: Sequence[str]) -> tuple[str, str | None]:
    """Where a parameter's value came from, and the value; None when it has none."""
    given = list(arguments)
    given = given[: given.index("--")] if "--" in given else given
    for place in reversed(range(len(given))):  # the last one counts
        flag, equals, value = given[place].partition("=")
        if flag in parameter.opts:
            after = given[place + 1] if place + 1 < len(given) else None
            return flag, value if equals else after
    variable = None if context is None else parameter.resolve_envvar_value(context)
    if variable is not None:
        prefix = context.auto_envvar_prefix
        return parameter.envvar or f"{prefix}_{str(parameter.name).upper()}", str(variable)
    name = max(parameter.opts, key=len)
    filed = ((context and context.default_map) or {}).get(parameter.name)
    return name, None if filed is None else str(filed)
