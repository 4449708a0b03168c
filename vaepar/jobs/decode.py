"""The main job: saved latents in, finished pictures and videos out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from vaepar.autoencoders import VaeCapability
from vaepar.errors import UsageError
from vaepar.jobs.inputs import may_replace
from vaepar.jobs.models import batch_norm_of
from vaepar.jobs.outputs import Outputs, make_folder
from vaepar.jobs.plan import Task, describe, outputs_of, plan_decode
from vaepar.jobs.report import Observer, RunReport
from vaepar.jobs.request import DecodeRequest
from vaepar.jobs.run import BatchRun
from vaepar.latents import LatentFacts, VaeFacts, read_header, read_latent, resolve, to_vae_input
from vaepar.media import BackgroundSink, OutputFormat, is_complete, open_sink, remove_stale_temps
from vaepar.parallel.agreement import agree_on
from vaepar.parallel.group import RankGroup
from vaepar.text import shown


def run_decode(request: DecodeRequest, group: RankGroup, observer: Observer) -> RunReport:
    """Decode all files of a request on the ranks of ``group``; every rank calls it and gets the same report.

    Raises:
        ModelError, UsageError: when the run cannot begin. RankLostError: when a rank has died.
    """
    return _DecodeRun(request, group, observer).run()


class _DecodeRun(BatchRun):
    operation = "decode"

    def __init__(self, request: DecodeRequest, group: RankGroup, observer: Observer) -> None:
        super().__init__(request, group, observer)
        self.decoding = request

    def check_support(self, capability: VaeCapability) -> None:
        capability.require_decode(self.request.mode)

    def plan(self, vae: VaeFacts) -> list[Task]:
        return plan_decode(self.decoding, vae)

    def outlook(self, task: Task) -> dict[str, Any]:
        if task.facts is None or task.out_base is None:
            return {}
        paths, _ = outputs_of(task.facts, task.out_base, self.decoding)
        return {
            "layout": task.facts.layout.value,
            "state": task.facts.state.value,
            "latent": list(task.facts.latent_shape),
            "outputs": [str(path) for path in paths],
        }

    def work(self, task: Task, outputs: Outputs) -> None:
        facts, latent = self._read(task)
        describe(task.row, facts, self.decoding.video.fps)
        task.row.notes.extend(_other_vae(facts, self.report.model_sha256))
        if task.out_base is None:
            raise UsageError(f"{shown(task.path)} has no output name")
        paths, fmt = outputs_of(facts, task.out_base, self.decoding)
        unused = self.decoding.video.unused(fmt.kind)
        if unused:
            task.row.notes.append(f"{', '.join(unused)} not used: the output is {fmt.kind}")
        self.observer.started(str(task.path), facts.num_frames * len(paths))
        selection = self.vae.select_mode(latent[:1])
        task.row.mode, task.row.mode_reason = selection.mode, selection.reason
        task.row.outputs = [str(path) for path in paths]
        for item in self._due(paths, fmt):
            path = paths[item]
            sink = self._open(path, fmt, facts, task) if self.is_owner else None
            if sink is not None:
                outputs.under_way.append(sink)
            left = facts.original_frames or facts.num_frames
            for chunk in self._chunks(latent[item : item + 1]):
                wanted = _cropped(chunk[:, :left], facts)
                left -= wanted.shape[1]
                if sink is not None and wanted.shape[1]:
                    sink.write(wanted)
                self.observer.advanced(chunk.shape[1])
            if sink is not None:
                sink.end()
            outputs.close_all_but_last()

    def _due(self, paths: list[Path], fmt: OutputFormat) -> list[int]:
        """The items whose outputs are to be made, by the owner's look at the folder; the others are whole already."""
        due = [
            item
            for item, path in enumerate(paths)
            if not is_complete(path, fmt) or may_replace(path, self.request.overwrite)
        ]
        return [int(item) for item in self.group.broadcast_text(" ".join(map(str, due))).split()]

    def _read(self, task: Task) -> tuple[LatentFacts, Tensor]:
        """The file's meaning and its latents as the VAE takes them, the same on every rank."""
        facts = task.facts or resolve(read_header(task.path), self.source.facts, self.decoding.latent)
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
        with closing(self.vae.decode_chunks(latent)) as chunks:
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
            frames=facts.original_frames or facts.num_frames,
            metadata=self._metadata(task),
            # What is complete and may not be replaced was left out; what is incomplete is always replaced.
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


def _other_vae(facts: LatentFacts, loaded: str | None) -> list[str]:
    """A note when the file names the weights that it was made with, and they are others than the loaded ones."""
    made = facts.header.metadata.get("vae_sha256")
    if made is None or loaded is None or made == loaded:
        return []
    return [f"the file was made with other weights, sha256 {shown(made[:12])}; those of the model are {loaded[:12]}"]


def _cropped(pixels: Tensor, facts: LatentFacts) -> Tensor:
    """Without the rows and columns that an encoder had to add."""
    if facts.original_size is None:
        return pixels
    return pixels[..., : facts.original_size[0], : facts.original_size[1]]
