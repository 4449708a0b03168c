"""``vaepar inspect``: what is in a latent file or a model folder, as understood, without decoding anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from vaepar.errors import AmbiguousInputError, InputError, UsageError, VaeparError
from vaepar.latents import LatentRequest, VaeFacts, read_header, resolve
from vaepar.text import shown

from .options import parse_size
from .output import complain


def command(
    ctx: typer.Context,
    files: list[Path] = typer.Argument(help="Latent files or model folders.", show_default=False),
    model: str | None = typer.Option(None, "--model", "-m", help="Say what the files mean for this model."),
    state: str | None = typer.Option(None, "--state", help="As for decode."),
    layout: str | None = typer.Option(None, "--layout", help="As for decode."),
    size: str | None = typer.Option(None, "--size", help="As for decode."),
    trim_latent_frames: int = typer.Option(0, "--trim-latent-frames", help="As for decode."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object a file to standard output."),
) -> None:
    """Show a file's tensors, metadata and meaning."""
    if model is None and (state is not None or layout is not None or size is not None or trim_latent_frames):
        raise UsageError(
            "--state, --layout, --size and --trim-latent-frames say what a file means for a model; give --model too"
        )
    request = LatentRequest(
        state=state,  # type: ignore[arg-type]  # names are parsed there
        layout=layout,  # type: ignore[arg-type]
        size=parse_size("--size", size),
        trim_latent_frames=trim_latent_frames,
    )
    ctx.obj.append(lambda _: _run(files, model, request, as_json))


def _run(files: list[Path], model: str | None, request: LatentRequest, as_json: bool) -> int:
    from vaepar.jobs.models import locate_model

    facts = locate_model(model, allow_download=False).facts if model is not None else None
    code = 0
    for path in files:
        try:
            found = _model(path) if _is_folder(path) else _latent(path, facts, request)
        except VaeparError as error:
            code = max(code, error.exit_code)
            complain(f"error: {error}")
            if as_json:
                typer.echo(json.dumps({"path": str(path), "error": str(error)}))
            continue
        typer.echo(json.dumps(found) if as_json else _lines(found))
        if "undecided" in found:
            code = max(code, AmbiguousInputError.exit_code)
            complain(f"error: {found['undecided']}")
    return code


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{shown(path)}: cannot be looked at: {shown(words)}") from None


def _model(path: Path) -> dict[str, Any]:
    from vaepar.jobs.models import locate_model

    source = locate_model(str(path), allow_download=False)
    numbers = {key: value for key, value in vars(source.facts).items() if key != "config"}
    weights = {weight.name: weight.stat().st_size for weight in source.weights}
    return {"path": str(path), "kind": "model"} | numbers | {"weights": weights, "sha256": source.digest()}


def _latent(path: Path, vae: VaeFacts | None, request: LatentRequest) -> dict[str, Any]:
    header = read_header(path)
    found: dict[str, Any] = {
        "path": str(path),
        "kind": "latent",
        "producer": header.producer,
        "key": header.key,
        "shape": list(header.shape),
        "dtype": header.dtype,
        "metadata": dict(header.metadata),
        "file_bytes": header.file_bytes,
    }
    if vae is None:
        return found
    try:
        return found | resolve(header, vae, request).to_json()
    except AmbiguousInputError as error:  # what is known helps to say what is not
        return found | {"undecided": str(error)}


def _lines(found: dict[str, Any]) -> str:
    """A line for each value; those of a table are named ``table.key``, lists are joined by commas."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            lines += [f"{key}.{shown(name)}: {_words(part)}" for name, part in value.items()]
        else:
            lines.append(f"{key}: {_words(value)}")
    return "\n".join(lines) + "\n"


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_words(part) for part in value)
    return "-" if value is None else shown(value, 2000)
