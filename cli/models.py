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
    texts = [
        {
            "family": row.family,
            "diffusers class": row.base_class,
            "latent": "B C T H W" if row.latent_rank == 5 else "B C H W",
            "decode modes": ", ".join(mode.value for mode in row.decode_modes),
            "encode modes": ", ".join(mode.value for mode in row.encode_modes) or "none",
            "dtypes": ", ".join(row.dtypes),
            "auto chooses": row.auto_rule,
        }
        for row in rows
    ]
    # What all families have in common is said once.
    common = [name for name in texts[0] if len(texts) > 1 and len({text[name] for text in texts}) == 1]
    table = Table(box=None, pad_edge=False)
    for name in texts[0]:
        if name not in common:
            table.add_column(name, overflow="fold")
    for text in texts:
        table.add_row(*(value for name, value in text.items() if name not in common))
    out = console(data=True)
    out.print(table)
    for name in common:
        out.print(f"{name}: {texts[0][name]}", soft_wrap=True)
    return 0
