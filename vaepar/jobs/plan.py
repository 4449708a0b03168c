"""What will be done with each file, decided before any weight is loaded and without a GPU."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from vaepar.errors import UsageError, VaeparError
from vaepar.jobs.inputs import Source, find_sources, may_replace, shard_of
from vaepar.jobs.report import Row
from vaepar.jobs.request import DecodeRequest
from vaepar.latents import LatentFacts, VaeFacts, read_header, resolve
from vaepar.media import OutputFormat, is_complete
from vaepar.text import shown


@dataclass(kw_only=True)
class Task:
    """One file of a run: what it means (None where that is not known yet), its outputs, and its row of the report.

    ``item`` is what an operation needs to know beyond the path, as plain values.
    """

    path: Path
    out_base: Path | None
    row: Row
    facts: LatentFacts | None = None
    item: dict[str, Any] | None = None

    @property
    def is_due(self) -> bool:
        return self.row.status == "not tried"

    def latent_shape(self, vae: VaeFacts) -> tuple[int, ...] | None:
        """[B, C, H, W] or [B, C, T, H, W] of what is decoded or made; None while the size is not known."""
        if self.facts is not None:
            return self.facts.latent_shape
        row, ratio = self.row, vae.spatial_ratio
        if row.width is None or row.height is None or min(row.width, row.height) < ratio:
            return None
        frames = (1 + max(0, (row.frames or 1) - 1) // vae.temporal_ratio,) if vae.takes_frames else ()
        return 1, vae.latent_channels, *frames, row.height // ratio, row.width // ratio


def plan_decode(request: DecodeRequest, vae: VaeFacts) -> list[Task]:
    """The tasks of a run, in the order of its inputs. Reads headers only; a file with a problem fails alone."""
    sources = find_sources(request.inputs, request.out, request.name, request.recursive)
    tasks = [_plan_one(source, request, vae) for source in shard_of(sources, request.farming.shard)]
    _refuse_clashes(tasks, request)
    return tasks


def _refuse_clashes(tasks: Sequence[Task], request: DecodeRequest) -> None:
    """Fail files that would write one output: an item of a batch gets a number, which another file's name may have."""
    makers: dict[Path, list[Task]] = defaultdict(list)
    for task in tasks:
        if task.facts is not None and task.out_base is not None and task.row.status != "failed":
            for path in outputs_of(task.facts, task.out_base, request)[0]:
                makers[path].append(task)
    for path, rivals in makers.items():
        for task in rivals if len(rivals) > 1 else ():
            other = next(rival for rival in rivals if rival is not task)
            words = f"{shown(task.path)}: would get the same output {shown(path)} as {shown(other.path)}"
            fail(task.row, f"{words}; give another --name", UsageError.exit_code)


def tasks_to_text(tasks: Sequence[Task]) -> str:
    """The plan for the other ranks; they read the headers of the files that are due themselves."""
    return json.dumps(
        [
            {"path": str(task.path), "out_base": None if task.out_base is None else str(task.out_base)}
            | {"row": asdict(task.row), "item": task.item}
            for task in tasks
        ]
    )


def tasks_from_text(text: str) -> list[Task]:
    """The inverse of :func:`tasks_to_text`, without the facts."""
    return [_task_from(value) for value in json.loads(text)]


def outputs_of(facts: LatentFacts, out_base: Path, request: DecodeRequest) -> tuple[list[Path], OutputFormat]:
    """Paths of the outputs, one for each item of the file, and how they are written.

    Raises:
        UsageError: for settings that do not fit this file.
    """
    kind = request.video.kind_for(facts.num_frames)
    fmt = request.video.output_format(kind, facts.fps)
    tags = [""] if facts.batch == 1 else [f"_{item:04d}" for item in range(facts.batch)]
    return [out_base.with_name(f"{out_base.name}{tag}{fmt.suffix}") for tag in tags], fmt


def _task_from(value: dict[str, Any]) -> Task:
    base = value["out_base"]
    row = Row(**value["row"])
    return Task(path=Path(value["path"]), out_base=None if base is None else Path(base), row=row, item=value["item"])


def _plan_one(source: Source, request: DecodeRequest, vae: VaeFacts) -> Task:
    row = Row(path=str(source.path))
    task = Task(path=source.path, out_base=source.out_base, row=row)
    if source.problem is not None or source.out_base is None:
        fail(row, source.problem or "", source.exit_code)
        return task
    try:
        task.facts = resolve(read_header(source.path), vae, request.latent)
        describe(row, task.facts, request.video.fps)
        outputs, fmt = outputs_of(task.facts, source.out_base, request)
    except VaeparError as error:
        message = str(error)
        named = message if shown(source.path) in message else f"{shown(source.path)}: {message}"
        fail(row, named, error.exit_code)
        return task
    if all(is_complete(path, fmt) and not may_replace(path, request.overwrite) for path in outputs):
        row.status = "skipped"
        row.outputs = [str(path) for path in outputs]
    return task


def fail(row: Row, message: str, exit_code: int) -> None:
    """Mark a row as failed, with one line."""
    row.status, row.error, row.exit_code = "failed", " ".join(message.split()), exit_code
    row.outputs = []


def describe(row: Row, facts: LatentFacts, asked_fps: Fraction | None = None) -> None:
    """Fill in what the facts say about the outputs; a frame rate that was asked for comes before the file's."""
    row.height, row.width = facts.original_size or (facts.height, facts.width)
    row.frames = facts.original_frames or facts.num_frames
    row.items = facts.batch
    fps = asked_fps or facts.fps
    row.fps = None if fps is None or facts.num_frames == 1 else float(fps)
    row.notes = list(facts.decisions)
    if asked_fps is not None and asked_fps != facts.fps and facts.num_frames > 1:
        row.notes.append(f"{asked_fps} frames per second: asked for")
