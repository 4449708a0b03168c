"""``vaepar models``: what each family's adapter can do."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.table import Table

from .output import console


def command(
    ctx: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print JSON to standard output."),
) -> None:
    """List the supported VAE families with their operations, modes and dtypes."""
    ctx.obj.append(lambda _: _run(as_json))


def _run(as_json: bool) -> int:
    from vaepar.autoencoders import capabilities

    rows = capabilities()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    table = Table(box=None, pad_edge=False)
    for name in ("family", "diffusers class", "decode modes", "encode modes", "latent", "dtypes", "auto chooses"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(
            row.family,
            row.base_class,
            ", ".join(mode.value for mode in row.decode_modes),
            ", ".join(mode.value for mode in row.encode_modes) or "none",
            "B C T H W" if row.latent_rank == 5 else "B C H W",
            ", ".join(row.dtypes),
            row.auto_rule,
        )
    console(data=True).print(table)
    return 0
