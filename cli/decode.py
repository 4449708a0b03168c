"""``vaepar decode``: saved latents in, pictures and videos out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vaepar.jobs.request import FORMATS, DecodeRequest, VideoSettings
from vaepar.latents import LatentLayout, LatentRequest, LatentState
from vaepar.media import CODECS, PNG_LEVEL, parse_fps

from . import options
from .batch import Batch
from .options import INPUT, OUTPUT
from .start import start

Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        help="Latent files (.safetensors, .latent), folders of them, or quoted patterns.", show_default=False
    ),
]
State = Annotated[
    str | None,
    typer.Option(
        help=f"Scale of the latents, where a file cannot tell: {', '.join(LatentState)} "
        "(raw: as vae.decode takes them; norm: as the denoiser leaves them).",
        rich_help_panel=INPUT,
    ),
]
Layout = Annotated[
    str | None, typer.Option(help=f"Order of the axes: {', '.join(LatentLayout)}.", rich_help_panel=INPUT)
]
Size = Annotated[
    str | None, typer.Option(help="WxH of the picture in pixels, for packed latents.", rich_help_panel=INPUT)
]
Trim = Annotated[int, typer.Option(help="Leading latent frames to drop (reference pictures).", rich_help_panel=INPUT)]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help=f"One of {', '.join(FORMATS)} (auto: png for stills, mp4 for videos).",
        rich_help_panel=OUTPUT,
    ),
]
Fps = Annotated[
    str | None,
    typer.Option(help="Frames per second, as 24 or 24000/1001 (default: the file's).", rich_help_panel=OUTPUT),
]
_X264 = CODECS["libx264"]
_CRFS = ", ".join(f"{codec.crf[2]} with {name}" for name, codec in CODECS.items() if codec.crf)
Crf = Annotated[
    int | None, typer.Option(help=f"Quality of MP4, 0 (lossless) to 51 (default: {_CRFS}).", rich_help_panel=OUTPUT)
]
Codec = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join(CODECS)} (default: libx264 for MP4).", rich_help_panel=OUTPUT),
]
PixFmt = Annotated[
    str | None,
    typer.Option(
        help=f"Pixel format of videos, as yuv420p or yuv444p (default: {_X264.pix_fmts[0]} for MP4).",
        rich_help_panel=OUTPUT,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(help=f"Speed of the encoder, ultrafast to placebo (default: {_X264.preset}).", rich_help_panel=OUTPUT),
]
PngLevel = Annotated[
    int | None, typer.Option(help=f"Compression of PNG, 0 to 9 (default: {PNG_LEVEL}).", rich_help_panel=OUTPUT)
]
AllowNonfinite = Annotated[
    bool, typer.Option(help="Write NaN and infinity as black instead of failing.", rich_help_panel=OUTPUT)
]


def command(
    ctx: typer.Context,
    batch: Batch,
    inputs: Inputs = None,
    out: options.Out = Path("decoded"),
    state: State = None,
    layout: Layout = None,
    size: Size = None,
    trim_latent_frames: Trim = 0,
    format_: Format = "auto",
    fps: Fps = None,
    crf: Crf = None,
    codec: Codec = None,
    pix_fmt: PixFmt = None,
    preset: Preset = None,
    png_level: PngLevel = None,
    allow_nonfinite: AllowNonfinite = False,
) -> None:
    """Decode latents to pictures (PNG) and videos (MP4), on one or many ranks."""
    request = DecodeRequest(
        inputs=batch.inputs(inputs),
        out=out,
        **batch.request,
        latent=LatentRequest(
            state=state,  # type: ignore[arg-type]  # names are parsed there
            layout=layout,  # type: ignore[arg-type]
            size=options.parse_size("--size", size),
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
    )
    ctx.obj.append(lambda arguments: start(request, batch.where, batch.talk, _load, arguments))


def _load() -> Any:
    from vaepar.jobs.decode import run_decode

    return run_decode
