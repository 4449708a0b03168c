"""Pictures and videos in, latents out, which a pipeline, a trainer or ``vaepar decode`` can use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor

from vaepar.atomic import remove_stale_temps
from vaepar.autoencoders import VaeCapability
from vaepar.autoencoders.feed import ReaderFeed
from vaepar.errors import InputError, NonFiniteError, OutputError, UsageError, VaeparError
from vaepar.jobs.inputs import Source, apart, may_replace, shard_of
from vaepar.jobs.models import batch_norm_of
from vaepar.jobs.outputs import Outputs, make_folder
from vaepar.jobs.plan import Task, fail
from vaepar.jobs.preview import write_preview
from vaepar.jobs.report import Observer, Row, RunReport
from vaepar.jobs.request import EncodeRequest
from vaepar.jobs.run import BatchRun
from vaepar.latents import (
    LatentLayout,
    LatentRecord,
    LatentState,
    VaeFacts,
    count_nonfinite,
    from_vae_output,
    write_comfyui,
    write_latent,
    write_musubi,
)
from vaepar.latents.contract import FAMILY_LAYOUTS
from vaepar.media import FrameSource, MediaItem, PictureRules, find_media, open_source, parse_frames, peek
from vaepar.parallel.agreement import agree_on
from vaepar.parallel.executor import joined
from vaepar.parallel.group import RankGroup
from vaepar.text import shown

_SUFFIXES = {"vaepar": ".safetensors", "comfyui": ".latent", "musubi": "_latent.safetensors"}
_WRITERS = {"vaepar": write_latent, "comfyui": write_comfyui, "musubi": write_musubi}


def run_encode(request: EncodeRequest, group: RankGroup, observer: Observer) -> RunReport:
    """Encode all files of a request on the ranks of ``group``; every rank calls it and gets the same report.

    Raises:
        ModelError, UsageError: when the run cannot begin. RankLostError: when a rank has died.
    """
    return _EncodeRun(request, group, observer).run()


class _EncodeRun(BatchRun):
    operation = "encode"

    def __init__(self, request: EncodeRequest, group: RankGroup, observer: Observer) -> None:
        super().__init__(request, group, observer)
        self.encoding = request

    def check_support(self, capability: VaeCapability) -> None:
        capability.require_encode(self.request.mode)

    def check_facts(self, vae: VaeFacts) -> None:
        request = self.encoding
        self._rules(vae)
        if request.layout is not None and request.layout not in FAMILY_LAYOUTS[vae.family]:
            allowed = ", ".join(FAMILY_LAYOUTS[vae.family])
            raise UsageError(f"--layout {request.layout} is not one of the family '{vae.family}'; it has {allowed}")
        if request.frames_fit != "error" and not vae.takes_frames:
            raise UsageError(f"--frames-fit {request.frames_fit} was given, but {vae.class_name} takes single pictures")

    def plan(self, vae: VaeFacts) -> list[Task]:
        request = self.encoding
        items = find_media(
            request.inputs, recursive=request.recursive, frames=request.frames, sequences=vae.takes_frames
        )
        sources = list(apart([_source(item, request, index) for index, item in enumerate(items)]))
        mine = {id(source) for source in shard_of(sources, request.farming.shard)}
        pairs = zip(sources, items, strict=True)
        tasks = [_task(source, item, request) for source, item in pairs if id(source) in mine]
        for task in tasks:
            if task.is_due and (request.farming.dry_run is not None or self.world.size > 1):
                self._look(task)
        return tasks

    def _look(self, task: Task) -> None:
        """Fill in a row's size, for the plan: memory, and which file is long.

        A dry run opens the file and says what is wrong with it; a real one reads a header, because it opens the file
        later, and counting a video's frames takes as long as reading it.
        """
        row, item = task.row, _item_from(task.path, task.item or {})
        try:
            if self.request.farming.dry_run is None:
                row.height, row.width, row.frames = peek(item, self._rules())
                return
            with closing(open_source(item, self._rules())) as source:
                row.height, row.width, row.frames = source.height, source.width, source.frames
                row.notes = [*source.notes, *self._losses(source)]
        except VaeparError as error:
            if self.request.farming.dry_run is not None:
                message = str(error)
                fail(row, message if shown(task.path) in message else f"{shown(task.path)}: {message}", error.exit_code)

    def outlook(self, task: Task) -> dict[str, Any]:
        shape = task.latent_shape(self.source.facts)
        if task.out_base is None or shape is None:
            return {}
        paths = [output_of(task.out_base, self.encoding)]
        if self.encoding.preview:
            paths.append(preview_of(task.out_base))
        return {
            "layout": self._layout().value,
            "state": self._state(self.source.facts).value,
            "latent": list(shape),
            "outputs": [str(path) for path in paths],
        }

    def work(self, task: Task, outputs: Outputs) -> None:
        if task.out_base is None or task.item is None:
            raise UsageError(f"{shown(task.path)} has no output name")
        item = _item_from(task.path, task.item)
        with closing(open_source(item, self._rules())) as source:
            self._describe(task, source, item.files or (item.path,))
            latent = self._encode(task, source)
            path, preview = output_of(task.out_base, self.encoding), preview_of(task.out_base)
            task.row.outputs = [str(path)]
            task.row.notes = []
            if self.is_owner and self._is_due(path, task.row):
                self._write(path, latent, task, source)
            task.row.notes += [*source.notes, *self._losses(source)]
        if not self.encoding.preview:
            return
        task.row.outputs.append(str(preview))
        if self.group.broadcast_text("1" if self.is_owner and self._is_due(preview, task.row) else "") != "1":
            return
        with closing(open_source(item, self._rules())) as source:
            try:
                psnr = write_preview(preview, source, self._decoded(latent), named=task.path.name, speaks=self.is_owner)
            except OutputError as error:
                raise type(error)(f"the latents are written, their preview is not: {error}") from error
        if psnr is not None:
            task.row.notes.append(f"PSNR of the decoded latents: {psnr:.2f} dB")

    def _is_due(self, path: Path, row: Row) -> bool:
        """Whether an output is to be written: not when it is there and may not be replaced, which is noted then."""
        if not _is_whole(path) or may_replace(path, self.request.overwrite):
            return True
        row.notes.append(f"{shown(path)} was there and is kept (--overwrite replaces it)")
        return False

    def _losses(self, source: FrameSource) -> list[str]:
        """What was asked for or done and cannot be noted in the file."""
        target, losses = self.encoding.target, []
        if self.encoding.fps is not None and not self._is_film(source):
            losses.append("--fps is not noted: a still has no frame rate")
        if target != "vaepar" and self._is_film(source):
            losses.append(f"{target} files hold no frame rate")
        if target != "vaepar" and (source.fitted == "pad" or self._padded_frames(source)):
            losses.append(f"{target} files cannot say what was padded; decode will not cut it off")
        return losses

    def _is_film(self, source: FrameSource) -> bool:
        return self.source.facts.takes_frames and source.frames > 1

    def _padded_frames(self, source: FrameSource) -> bool:
        return source.original_frames is not None and source.original_frames < source.frames

    def _rules(self, vae: VaeFacts | None = None) -> PictureRules:
        """What pictures must become for the VAE of this run (or for ``vae``, before the run has begun)."""
        vae, request = vae or self.source.facts, self.encoding
        multiple = vae.spatial_ratio * (vae.norm_patch if self._state(vae) is LatentState.NORM else 1)
        bound = {} if request.max_pixels is None else {"max_pixels": request.max_pixels}
        return PictureRules(
            alpha=request.alpha,
            multiple=(multiple, multiple),
            fit=request.fit,
            frames_step=vae.temporal_ratio if vae.takes_frames else None,
            frames_fit=request.frames_fit,
            channels=vae.pixel_channels,
            **bound,
        )

    def _describe(self, task: Task, source: FrameSource, files: Sequence[Path]) -> None:
        """Fill in the row, after the ranks have seen that they hold one file and that this VAE can take it."""
        row = task.row
        row.width, row.height, row.frames = source.width, source.height, source.frames
        row.fps = None if source.fps is None else float(source.fps)
        content = sum(file.stat().st_size for file in files)
        agree_on(
            self.group, f"files {shown(task.path)}", f"{source.frames} x {source.width}x{source.height} {content} bytes"
        )
        if not self.source.facts.takes_frames and source.frames > 1:
            raise InputError(
                f"{source.name}: holds {source.frames} frames; {self.source.facts.class_name} takes single pictures"
            )
        self.observer.started(str(task.path), source.frames)

    def _encode(self, task: Task, source: FrameSource) -> Tensor:
        """The raw latent of the posterior on the owner; on other ranks an empty tensor."""
        row = task.row
        pixels = (1, source.rules.channels, source.frames, source.height, source.width)
        feed = ReaderFeed(source.read, pixels, self.vae.dtype, self.group.device)
        selection = self.vae.select_encode_mode(pixels)
        row.mode, row.mode_reason = selection.mode, selection.reason
        moments = []
        with closing(self.vae.encode_chunks(feed)) as chunks:
            for chunk in chunks:
                self.stop.check()
                if chunk is not None:
                    moments.append(chunk)
                    self.observer.advanced(1 if len(moments) == 1 else self.source.facts.temporal_ratio)
        if not self.is_owner:
            return torch.empty(0)
        posterior = DiagonalGaussianDistribution(joined(moments))
        mode = self.encoding.posterior == "mode"
        latent: Tensor = posterior.mode() if mode else posterior.sample(generator=self._generator(task.path))
        return latent

    def _generator(self, path: Path) -> torch.Generator:
        """Each file's own noise, from the seed and its name: neither folder nor other files nor ranks matter."""
        name = f"{self.encoding.seed or 0}:".encode() + os.fsencode(path.name)
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name).digest()[:7], "big"))

    def _state(self, vae: VaeFacts) -> LatentState:
        if self.encoding.target == "comfyui" and vae.norm_patch == 1:
            return LatentState.RAW
        return self.encoding.state or LatentState.NORM

    def _layout(self) -> LatentLayout:
        if self.encoding.layout is not None:
            return self.encoding.layout
        vae = self.source.facts
        if vae.norm_patch > 1 and self._state(vae) is LatentState.NORM:
            return LatentLayout.GRID128
        return LatentLayout.BCFHW if vae.takes_frames else LatentLayout.BCHW

    def _write(self, path: Path, latent: Tensor, task: Task, source: FrameSource) -> None:
        request, vae = self.encoding, self.source.facts
        nan, infinite = count_nonfinite(latent)
        if nan or infinite:
            raise NonFiniteError(
                f"{shown(task.path)}: encoded to {nan} NaN and {infinite} infinite of {latent.numel()} values; another "
                f"--dtype may help"
            )
        bn = batch_norm_of(self.vae)
        stored = from_vae_output(
            latent.float(), vae, layout=self._layout(), state=self._state(self.source.facts), bn=_in_float(bn)
        )
        record = LatentRecord(
            vae=vae,
            layout=self._layout(),
            state=self._state(self.source.facts),
            height=source.height,
            width=source.width,
            num_frames=source.frames,
            fps=(request.fps or source.fps) if self._is_film(source) else None,
            vae_id=request.model,
            vae_sha256=self.report.model_sha256,
            posterior=request.posterior,
            seed=(request.seed or 0) if request.posterior == "sample" else None,
            source=task.path.name,
            original_size=source.original_size if source.fitted == "pad" else None,
            original_frames=source.original_frames if self._padded_frames(source) else None,
        )
        make_folder(path.parent)
        remove_stale_temps(path.parent, path.name)
        _WRITERS[request.target](path, stored.to(getattr(torch, request.stored)), record)

    def _decoded(self, latent: Tensor) -> Iterator[Tensor]:
        """The decoded chunks of a latent that the owner holds, [C, t, H, W] on the owner."""
        latent = self.vae.distributed_executor.shared(latent if self.is_owner else None)
        with closing(self.vae.decode_chunks(latent.to(self.vae.dtype))) as chunks:
            for chunk in chunks:
                self.stop.check()
                if chunk is not None:
                    yield chunk[0] if chunk.dim() == 5 else chunk[0][:, None]


def output_of(out_base: Path, request: EncodeRequest) -> Path:
    """The file of one input's latents."""
    return out_base.with_name(f"{out_base.name}{_SUFFIXES[request.target]}")


def preview_of(out_base: Path) -> Path:
    """The contact sheet of one input."""
    return out_base.with_name(f"{out_base.name}.preview.png")


def _source(item: MediaItem, request: EncodeRequest, index: int) -> Source:
    if item.problem is not None:
        return Source(path=item.path, problem=item.problem)
    parent = item.path.resolve().parent.name
    name = request.name.format(stem=item.stem, parent=parent, index=f"{index:05d}")
    return Source(path=item.path, out_base=request.out / item.below / name)


def _task(source: Source, item: MediaItem, request: EncodeRequest) -> Task:
    row = Row(path=str(source.path))
    task = Task(path=source.path, out_base=source.out_base, row=row)
    if source.problem is not None or source.out_base is None:
        fail(row, source.problem or "", source.exit_code)
        return task
    task.item = {
        "kind": item.kind,
        "stem": item.stem,
        "files": [str(file) for file in item.files],
        "frames": None if item.frames is None else str(item.frames),
    }
    wanted = [output_of(source.out_base, request)]
    if request.preview:
        wanted.append(preview_of(source.out_base))
    if all(_is_whole(path) and not may_replace(path, request.overwrite) for path in wanted):
        row.status = "skipped"
        row.outputs = [str(path) for path in wanted]
    return task


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _item_from(path: Path, value: dict[str, Any]) -> MediaItem:
    frames = value["frames"]
    return MediaItem(
        kind=value["kind"],
        path=path,
        stem=value["stem"],
        files=tuple(Path(file) for file in value["files"]),
        frames=None if frames is None else parse_frames(frames),
    )


def _in_float(bn: Any) -> Any:
    return None if bn is None else (bn[0].float(), bn[1].float(), bn[2])
