"""A contact sheet: originals on the left, what their latents decode to on the right, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from vaepar.jobs.bench_statistics import psnr
from vaepar.media import FrameSource, OutputFormat, open_sink

_SHOWN = 4  # frames of a film


def write_preview(
    path: Path, source: FrameSource, decoded: Iterator[Tensor], *, named: str, speaks: bool
) -> float | None:
    """Compare a source with decoded chunks, frame by frame, and write some of the pairs.

    Args:
        path: a PNG.
        source: the originals, from their start.
        decoded: chunks [C, t, H, W] in time order, range [-1, 1]; nothing on ranks that do not own them.
        named: the input, for the sheet's metadata.
        speaks: whether this rank writes.

    Returns:
        PSNR over all frames in dB; None on ranks that do not write.
    """
    wanted = {round(i * (source.frames - 1) / max(1, _SHOWN - 1)) for i in range(min(_SHOWN, source.frames))}
    error, values, at, rows = 0.0, 0, 0, []
    for chunk in decoded:
        original = source.read(chunk.shape[1])
        if original is None:
            break
        found = chunk.float().cpu().clamp(-1, 1)[:, : original.shape[1]]
        error += float((found - original).double().square().sum())
        values += original.numel()
        for i in range(original.shape[1]):
            if at + i in wanted:
                rows.append(torch.cat([original[:, i], found[:, i]], dim=-1))
        at += original.shape[1]
    if not speaks or not rows:
        return None
    sheet = torch.cat(rows, dim=-2)[:, None]
    height, width = sheet.shape[-2:]
    found_ratio = psnr(error / values)
    ratio = math.inf if found_ratio is None else found_ratio
    metadata = {"source": named, "psnr_db": f"{ratio:.4f}"}
    with open_sink(
        path, OutputFormat(kind="png"), height=height, width=width, frames=1, metadata=metadata, overwrite=True
    ) as sink:
        sink.write(sheet)
    return ratio
