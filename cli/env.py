"""``vaepar env``: versions, devices and backends, for a bug report."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from vaepar.errors import OutputError

_PACKAGES = ("torch", "diffusers", "safetensors", "typer", "rich", "imageio", "imageio-ffmpeg", "pillow", "numpy")


def command(
    ctx: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show versions, devices and backends."""
    ctx.obj.append(lambda _: _run(as_json))


def _run(as_json: bool) -> int:
    facts = _facts()
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(f"{key}: {value}" for key, value in facts.items()))
    return 0


def _facts() -> dict[str, Any]:
    import psutil
    import torch
    import torch.distributed as dist

    from vaepar import __version__
    from vaepar.launch import World, usable_cores

    world = World.from_environment()
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "vaepar": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "ffmpeg": _ffmpeg(),
        "rank": f"{world.rank} of {world.size}",
    }


def _ffmpeg() -> str:
    from vaepar.media.ffmpeg import ffmpeg_exe

    try:
        return str(ffmpeg_exe())
    except OutputError as error:
        return f"not found: {error}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
