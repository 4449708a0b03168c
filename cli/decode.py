"""``vaepar decode``: saved latents in, pictures and videos out."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import typer

from vaepar import launch
from vaepar.config import VaeParallelMode
from vaepar.errors import UsageError
from vaepar.jobs.request import DTYPES, FORMATS, DecodeRequest, VideoSettings
from vaepar.latents import LatentLayout, LatentRequest, LatentState
from vaepar.media import CODECS, parse_fps

from .output import closing_table, observer, set_up_logging

_MODES = ", ".join(mode.value for mode in VaeParallelMode)
_INPUT, _MODEL, _PARALLEL, _OUTPUT, _TALK = "Input", "Model", "Parallelism", "Output", "Messages"


def command(
    ctx: typer.Context,
    inputs: list[str] = typer.Argument(
        help="Latent files (.safetensors, .latent), folders of them, or quoted patterns.", show_default=False
    ),
    model: str = typer.Option(
        ...,
        "--model",
        "-m",
        envvar="VAEPAR_MODEL",
        help="Pipeline folder, VAE folder, hub id 'owner/name[@revision]', or 'demo'.",
        rich_help_panel=_MODEL,
    ),
    out: Path = typer.Option(Path("decoded"), "--out", "-o", help="Folder of the outputs.", rich_help_panel=_OUTPUT),
    mode: str = typer.Option(
        "tile",
        "--mode",
        "--vae-parallel-mode",
        help=f"How ranks share one latent: {_MODES}.",
        rich_help_panel=_PARALLEL,
    ),
    ranks: int | None = typer.Option(
        None, "--ranks", help="Processes to start here (default: one for each GPU, else 1).", rich_help_panel=_PARALLEL
    ),
    device: str = typer.Option(
        "auto", "--device", help=f"One of {', '.join(launch.DEVICES)}.", rich_help_panel=_PARALLEL
    ),
    timeout: float = typer.Option(
        300, "--timeout", min=1, help="Seconds to wait for ranks that do not come.", rich_help_panel=_PARALLEL
    ),
    tile_size: int | None = typer.Option(
        None, "--tile-size", help="Side of a tile in pixels (default: the VAE's own).", rich_help_panel=_PARALLEL
    ),
    tile_stride: int | None = typer.Option(
        None,
        "--tile-stride",
        help="Pixels between the starts of two tiles (default: three quarters of the tile size).",
        rich_help_panel=_PARALLEL,
    ),
    dtype: str = typer.Option("auto", "--dtype", help=f"One of {', '.join(DTYPES)}.", rich_help_panel=_MODEL),
    variant: str | None = typer.Option(None, "--variant", help="Weight variant, as in fp16.", rich_help_panel=_MODEL),
    no_download: bool = typer.Option(
        False, "--no-download", help="Use only what is on this machine.", rich_help_panel=_MODEL
    ),
    state: str | None = typer.Option(
        None,
        "--state",
        help=f"Scale of the latents, where a file cannot tell: {', '.join(LatentState)} "
        "(raw: as vae.decode takes them; norm: as the denoiser leaves them).",
        rich_help_panel=_INPUT,
    ),
    layout: str | None = typer.Option(
        None, "--layout", help=f"Order of the axes: {', '.join(LatentLayout)}.", rich_help_panel=_INPUT
    ),
    size: str | None = typer.Option(
        None, "--size", help="WxH of the picture in pixels, for packed latents.", rich_help_panel=_INPUT
    ),
    trim_latent_frames: int = typer.Option(
        0, "--trim-latent-frames", help="Leading latent frames to drop (reference pictures).", rich_help_panel=_INPUT
    ),
    recursive: bool = typer.Option(
        False, "--recursive", "-r", help="Look into sub-folders too, and keep their tree.", rich_help_panel=_INPUT
    ),
    name: str = typer.Option(
        "{stem}", "--name", help="Names of the outputs, from {stem}, {parent}, {index}.", rich_help_panel=_OUTPUT
    ),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace whole outputs that exist (default: skip).", rich_help_panel=_OUTPUT
    ),
    format_: str = typer.Option(
        "auto",
        "--format",
        help=f"One of {', '.join(FORMATS)} (auto: png for stills, mp4 for videos).",
        rich_help_panel=_OUTPUT,
    ),
    fps: str | None = typer.Option(
        None, "--fps", help="Frames per second, as 24 or 24000/1001 (default: the file's).", rich_help_panel=_OUTPUT
    ),
    crf: int | None = typer.Option(None, "--crf", help="Quality of MP4, 0 to 51.", rich_help_panel=_OUTPUT),
    codec: str | None = typer.Option(None, "--codec", help=f"One of {', '.join(CODECS)}.", rich_help_panel=_OUTPUT),
    pix_fmt: str | None = typer.Option(
        None, "--pix-fmt", help="Pixel format of videos, as yuv420p or yuv444p.", rich_help_panel=_OUTPUT
    ),
    preset: str | None = typer.Option(None, "--preset", help="Speed of the encoder.", rich_help_panel=_OUTPUT),
    png_level: int | None = typer.Option(None, "--png-level", help="Compression, 0 to 9.", rich_help_panel=_OUTPUT),
    allow_nonfinite: bool = typer.Option(
        False, "--allow-nonfinite", help="Write NaN and infinity as black instead of failing.", rich_help_panel=_OUTPUT
    ),
    report: Path | None = typer.Option(
        None, "--report", help="Write what happened to each file as JSON.", rich_help_panel=_TALK
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more.", rich_help_panel=_TALK),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Say errors only.", rich_help_panel=_TALK),
) -> None:
    """Decode latents to pictures (PNG) and videos (MP4), on one or many ranks."""
    if verbose and quiet:
        raise UsageError("--verbose and --quiet were both given; one of them at most")
    if device not in launch.DEVICES:
        raise UsageError(f"--device is '{device}'; it is one of {', '.join(launch.DEVICES)}")
    request = DecodeRequest(
        inputs=tuple(inputs),
        model=model,
        out=out,
        mode=VaeParallelMode.parse(mode),
        latent=LatentRequest(
            state=state,  # type: ignore[arg-type]  # names are parsed there
            layout=layout,  # type: ignore[arg-type]
            size=_size(size),
            trim_latent_frames=trim_latent_frames,
        ),
        video=VideoSettings(
            format=format_,
            fps=None if fps is None else parse_fps(fps),
            crf=crf,
            codec=codec,
            pix_fmt=pix_fmt,
            preset=preset,
            png_level=png_level,
            allow_nonfinite=allow_nonfinite,
        ),
        tile_size=tile_size,
        tile_stride=tile_stride,
        dtype=dtype,
        device=device,
        name=name,
        recursive=recursive,
        overwrite=overwrite,
        variant=variant,
        allow_download=not no_download,
        report=report,
    )
    ctx.obj.append(partial(_run, request, ranks, timeout, verbose, quiet))


def _run(request: DecodeRequest, ranks: int | None, timeout: float, verbose: bool, quiet: bool) -> int:
    world = launch.World.from_environment()
    speaks = world.rank == 0
    set_up_logging(verbose=verbose, quiet=quiet, speaks=speaks)
    count = launch.choose_ranks(ranks, request.device, world)
    if count > 1 and not world.launched:
        from vaepar.jobs.models import locate_model

        source = locate_model(request.model, variant=request.variant, allow_download=request.allow_download)
        launch.check_memory(count, source.weight_bytes)
        return launch.start_ranks(sys.argv[1:], count)
    from vaepar.jobs.decode import run_decode
    from vaepar.jobs.report import Silent

    with launch.joined(world, request.device, timeout) as group:
        watching = observer(quiet=quiet) if speaks else Silent()
        try:
            result = run_decode(request, group, watching)
        finally:
            if (stop := getattr(watching, "stop", None)) is not None:
                stop()
        if speaks and not quiet:
            closing_table(result)
        group.gather_values(0)  # a launcher stops all ranks when the first one ends with an error: leave together
    return result.exit_code


def _size(text: str | None) -> tuple[int, int] | None:
    """``WxH`` as (height, width)."""
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise UsageError(f"--size is '{text}'; it is WxH in pixels, as 832x480")
    return int(height), int(width)
