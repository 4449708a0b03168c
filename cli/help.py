"""The help of a command: its options under headings, whole names at any width of a terminal."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

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
