"""``vaepar encode``: pictures and videos in, latents out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vaepar.jobs.request import TARGETS, EncodeRequest
from vaepar.latents import LatentLayout, LatentState
from vaepar.media import PictureRules, parse_fps, parse_frames

from . import options
from .batch import Batch
from .options import INPUT, OUTPUT
from .start import start

Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        help="Pictures, videos, folders, patterns, or sequences such as shot.%04d.png and shot.####.png.",
        show_default=False,
    ),
]
Frames = Annotated[
    str | None, typer.Option(help="Frames of videos and sequences, as 1-100x2,120.", rich_help_panel=INPUT)
]
Alpha = Annotated[str, typer.Option(help="Transparency: refuse, drop, white, black, or keep.", rich_help_panel=INPUT)]
Fit = Annotated[
    str, typer.Option(help="Sizes that the VAE cannot take: error, crop, pad, resize.", rich_help_panel=INPUT)
]
FramesFit = Annotated[
    str, typer.Option(help="Frame counts that it cannot take: error, trim, pad.", rich_help_panel=INPUT)
]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        help=f"Largest picture that is read, width times height (default: {PictureRules().max_pixels}).",
        rich_help_panel=INPUT,
    ),
]
Posterior = Annotated[str, typer.Option(help="mode (deterministic) or sample.", rich_help_panel=OUTPUT)]
Seed = Annotated[
    int | None, typer.Option(help="Of samples; a file draws from it and its name.", rich_help_panel=OUTPUT)
]
State = Annotated[
    str | None,
    typer.Option(help=f"Scale of the latents: {', '.join(LatentState)} (default: norm).", rich_help_panel=OUTPUT),
]
Layout = Annotated[
    str | None,
    typer.Option(help=f"Order of the axes: {', '.join(LatentLayout)} (default: the family's).", rich_help_panel=OUTPUT),
]
As = Annotated[str, typer.Option("--as", help=f"Whose files: {', '.join(TARGETS)}.", rich_help_panel=OUTPUT)]
SaveDtype = Annotated[
    str, typer.Option(help="Dtype of the stored latents: float32, float16, bfloat16, float64.", rich_help_panel=OUTPUT)
]
Fps = Annotated[
    str | None, typer.Option(help="Frames per second to note (default: the video's own).", rich_help_panel=OUTPUT)
]
Preview = Annotated[
    bool,
    typer.Option(help="Decode the latents again: originals and results side by side, PSNR.", rich_help_panel=OUTPUT),
]


def command(
    ctx: typer.Context,
    batch: Batch,
    inputs: Inputs = None,
    out: options.Out = Path("encoded"),
    frames: Frames = None,
    alpha: Alpha = "refuse",
    fit: Fit = "error",
    frames_fit: FramesFit = "error",
    max_pixels: MaxPixels = None,
    posterior: Posterior = "mode",
    seed: Seed = None,
    state: State = None,
    layout: Layout = None,
    as_: As = "vaepar",
    save_dtype: SaveDtype = "float32",
    fps: Fps = None,
    preview: Preview = False,
) -> None:
    """Encode pictures and videos to latents, on one or many ranks."""
    request = EncodeRequest(
        inputs=batch.inputs(inputs),
        out=out,
        **batch.request,
        frames=None if frames is None else parse_frames(frames),
        # Names are checked by the request itself, whose types are narrower than text.
        alpha=alpha,  # type: ignore[arg-type]
        fit=fit,  # type: ignore[arg-type]
        frames_fit=frames_fit,  # type: ignore[arg-type]
        max_pixels=max_pixels,
        posterior=posterior,
        seed=seed,
        state=state,  # type: ignore[arg-type]
        layout=layout,  # type: ignore[arg-type]
        target=as_,
        stored=save_dtype,
        fps=None if fps is None else parse_fps(fps),
        preview=preview,
    )
    ctx.obj.append(lambda arguments: start(request, batch.where, batch.talk, _load, arguments))


def _load() -> Any:
    from vaepar.jobs.encode import run_encode

    return run_encode
