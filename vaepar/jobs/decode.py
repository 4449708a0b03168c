"""The main job: saved latents in, finished pictures and videos out.

Every rank runs the same code over the same files. Rank 0 plans, speaks and writes; what one rank cannot do, all ranks
record as that file's failure and go on with the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vaepar.autoencoders import adapter_for
from vaepar.autoencoders.mixin import check_pixels, closed_on_exit
from vaepar.errors import DiskFullError, InterruptedRunError, RankLostError, UsageError, VaeparError
from vaepar.jobs.memory import peak_bytes, reset_peak
from vaepar.jobs.models import ModelSource, batch_norm_of, load_model, locate_model, settle_dtype
from vaepar.jobs.plan import Task, describe, fail, outputs_of, plan_decode, tasks_from_text, tasks_to_text
from vaepar.jobs.report import Observer, Row, RunReport, write_report
from vaepar.jobs.request import DecodeRequest
from vaepar.jobs.stop import Stop
from vaepar.latents import LatentFacts, read_header, read_latent, resolve, to_vae_input
from vaepar.latents.text import shown
from vaepar.media import BackgroundSink, OutputFormat, open_sink, remove_stale_temps
from vaepar.parallel.agreement import agree_on, agreed
from vaepar.parallel.group import RankGroup


def prepare(request: DecodeRequest) -> ModelSource:
    """Check all that can be checked without ranks and weights; the model's place on the disk.

    Raises:
        ModelError, UsageError: when the run cannot begin.
    """
    source = locate_model(request.model, variant=request.variant, allow_download=request.allow_download)
    capability = adapter_for(source.facts.class_name).capability
    capability.require_decode(request.mode)
    if request.tile_size is not None:
        _tiles(request, source.facts.spatial_ratio)
    make_folder(request.out)
    return source


def run_decode(request: DecodeRequest, group: RankGroup, observer: Observer) -> RunReport:
    """Decode all files of a request on the ranks of ``group``; every rank calls it and gets the same report.

    Raises:
        ModelError, UsageError: when the run cannot begin. RankLostError: when a rank has died.
    """
    return _DecodeRun(request, group, observer).run()


@dataclass
class _Writer:
    """An output that was handed to its writer and is not yet known to be whole."""

    row: Row
    seconds: float
    sinks: list[BackgroundSink] = field(default_factory=list)


class _DecodeRun:
    def __init__(self, request: DecodeRequest, group: RankGroup, observer: Observer) -> None:
        self.request, self.group, self.observer = request, group, observer
        self.is_owner = group.rank == 0
        self.stop = Stop()
        self.vae: Any = None
        self.full = False  # a disk without space: the next file would fail alike, after as much work
        self.report = RunReport(operation="decode", model=request.model, ranks=group.size, device=group.device.type)

    def run(self) -> RunReport:
        started = time.monotonic()
        with self.stop.listening():
            self.source = self._locate()
            tasks = self._plan()
            self.report.rows = [task.row for task in tasks]
            due = [task for task in tasks if task.is_due]
            self.observer.planned(len(tasks), self.group.size)
            for task in tasks:
                if not task.is_due:
                    self.observer.finished(task.row)
            if due:
                self._load()
                self._decode_all(due)
        self.report.seconds = time.monotonic() - started
        if self.request.report is not None and self.is_owner:
            write_report(self.request.report, self.report)
        return self.report

    def _locate(self) -> ModelSource:
        """Rank 0 first: it alone may download; the others find the files in its cache."""
        with agreed(self.group, "model"):
            source = prepare(self.request) if self.is_owner else None
            folder = self.group.broadcast_text(None if source is None else str(source.folder))
            return source or locate_model(folder, variant=self.request.variant, allow_download=False)

    def _plan(self) -> list[Task]:
        with agreed(self.group, "plan"):
            tasks = plan_decode(self.request, self.source.facts) if self.is_owner else []
            text = self.group.broadcast_text(tasks_to_text(tasks) if self.is_owner else None)
            return tasks if self.is_owner else tasks_from_text(text)

    def _load(self) -> None:
        with agreed(self.group, "model"):
            dtype, note = settle_dtype(self.request.dtype, self.source, self.group.device)
            if note is not None:
                self.observer.note(note)
            self.vae = load_model(self.source, dtype, self.group.device, self.group)
            if self.request.tile_size is not None:
                self.vae.configure_tiles(*_tiles(self.request, self.source.facts.spatial_ratio))
            else:
                self.vae.enable_tiling()
            self.vae.set_parallel_size(self.group.size, mode=self.request.mode)
            self.report.dtype = str(dtype).removeprefix("torch.")
            self.report.model_sha256 = self.source.digest() if self.is_owner else None

    def _decode_all(self, tasks: list[Task]) -> None:
        """File after file; each one's writer finishes while the next one decodes."""
        writing: _Writer | None = None
        try:
            for task in tasks:
                current = self._decode_one(task)
                if writing is not None:
                    self._finish(writing)
                writing = current
                if self.report.interrupted or self.full:
                    break
            if writing is not None:
                self._finish(writing)
        except RankLostError:
            for sink in writing.sinks if writing is not None else ():
                sink.abort()
            raise
        for row in self.report.rows:
            if row.status == "not tried":
                self.observer.finished(row)

    def _decode_one(self, task: Task) -> _Writer | None:
        """Decode one file into its writers. None when it failed (then its row says so and nothing is left of it)."""
        row, started = task.row, time.monotonic()
        writer = _Writer(row=row, seconds=0.0)
        reset_peak(self.group.device)
        try:
            with agreed(self.group, f"decode of {shown(task.path)}"):
                try:
                    self.stop.check()
                    self._decode_into(task, writer)
                except BaseException:
                    for sink in writer.sinks:
                        sink.abort()
                    raise
        except InterruptedRunError:
            self.report.interrupted = True
            row.outputs = []
            return None
        except RankLostError:
            raise
        except VaeparError as error:
            self._fail(row, error)
            return None
        finally:
            writer.seconds = time.monotonic() - started
        row.peak_bytes = self.group.gather_values(peak_bytes(self.group.device))
        return writer

    def _decode_into(self, task: Task, writer: _Writer) -> None:
        facts, latent = self._read(task)
        describe(task.row, facts)
        if task.out_base is None:
            raise UsageError(f"{shown(task.path)} has no output name")
        outputs, fmt = outputs_of(facts, task.out_base, self.request)
        self.observer.started(str(task.path), facts.num_frames * len(outputs))
        selection = self.vae.select_mode(latent[:1])
        task.row.mode, task.row.mode_reason = selection.mode, selection.reason
        task.row.outputs = [str(path) for path in outputs]
        for item, path in enumerate(outputs):
            sink = self._open(path, fmt, facts, task) if self.is_owner else None
            if sink is not None:
                writer.sinks.append(sink)
            for chunk in self._chunks(latent[item : item + 1]):
                if sink is not None:
                    sink.write(_cropped(chunk, facts))
                    self.observer.advanced(chunk.shape[1])
            if sink is not None:
                sink.end()
            for earlier in writer.sinks[:-1]:  # written while this item was decoded
                earlier.close()
            del writer.sinks[:-1]

    def _read(self, task: Task) -> tuple[LatentFacts, Tensor]:
        """The file's meaning and its latents as the VAE takes them, the same on every rank."""
        facts = task.facts or resolve(read_header(task.path), self.source.facts, self.request.latent)
        agree_on(self.group, f"files {shown(task.path)}", f"{facts.header.header_digest} {facts.header.file_bytes}")
        latent = to_vae_input(
            read_latent(facts),
            facts,
            self.source.facts,
            dtype=self.vae.dtype,
            device=self.group.device,
            bn=batch_norm_of(self.vae),
        )
        return facts, latent

    def _chunks(self, latent: Tensor) -> Iterator[Tensor]:
        """The decoded chunks of one item on the owner, [C, t, H, W]; on other ranks the work without the results."""
        with closed_on_exit(self.vae.decode_chunks(latent)) as chunks:
            for chunk in chunks:
                self.stop.check()
                if chunk is not None:
                    pixels = chunk[0]
                    yield pixels if pixels.dim() == 4 else pixels[:, None]

    def _open(self, path: Path, fmt: OutputFormat, facts: LatentFacts, task: Task) -> BackgroundSink:
        height, width = facts.original_size or (facts.height, facts.width)
        make_folder(path.parent)
        remove_stale_temps(path.parent, path.name)
        sink = open_sink(
            path,
            fmt,
            height=height,
            width=width,
            frames=facts.num_frames,
            metadata=self._metadata(task),
            # What is incomplete is always replaced; what is complete was skipped unless it may be replaced.
            overwrite=True,
        )
        return BackgroundSink(sink)

    def _metadata(self, task: Task) -> dict[str, str]:
        values = {
            "source": task.path.name,
            "model": self.request.model,
            "model_sha256": self.report.model_sha256,
            "mode": task.row.mode,
            "dtype": self.report.dtype,
        }
        return {key: str(value) for key, value in values.items() if value is not None}

    def _finish(self, writer: _Writer) -> None:
        """Wait until a file's outputs are whole, and record what came of it on every rank."""
        row, started = writer.row, time.monotonic()
        try:
            with agreed(self.group, f"writing of {shown(row.path)}"):
                for sink in writer.sinks:
                    sink.close()
        except RankLostError:
            raise
        except VaeparError as error:
            self._fail(row, error)
            return
        row.status = "ok"
        row.seconds = round(writer.seconds + time.monotonic() - started, 4)
        self.observer.finished(row)

    def _fail(self, row: Row, error: VaeparError) -> None:
        self.full = self.full or isinstance(error, DiskFullError)
        message = str(error)
        fail(row, message if shown(row.path) in message else f"{shown(row.path)}: {message}", error.exit_code)
        self.observer.finished(row)


def _cropped(pixels: Tensor, facts: LatentFacts) -> Tensor:
    """Without the rows and columns that an encoder had to add."""
    if facts.original_size is None:
        return pixels
    return pixels[..., : facts.original_size[0], : facts.original_size[1]]


def _tiles(request: DecodeRequest, ratio: int) -> tuple[int, int]:
    """Tile size and stride in pixels; a stride that was not given is three quarters of the tile."""
    size = request.tile_size or 0
    stride = request.tile_stride or max(ratio, size * 3 // 4 // ratio * ratio)
    check_pixels(size, stride, ratio)
    return size, stride


def make_folder(folder: Path) -> None:
    """Make the folder of the outputs. Raises :class:`UsageError` when that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the output folder {shown(folder)} cannot be made: {error.strerror or error}") from None


__all__ = ["prepare", "run_decode"]
