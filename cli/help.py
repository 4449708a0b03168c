"""The help of a command: its options under headings, whole names at any width of a terminal."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

FROM_ENVIRONMENT = "Each option can be given as VAEPAR_NAME too, and in a TOML file (--config)."


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each of ``rich_help_panel``.

    Typer's own help with such sections is a table, which cuts names and values off at 80 columns.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class WholeLines(TyperGroup):
    """The commands, each with the whole first sentence of its help; the parser's own list ends in dots."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = self.list_commands(ctx)
        commands = [(name, self.get_command(ctx, name)) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl([(name, known.get_short_help_str(10_000)) for name, known in commands if known])
