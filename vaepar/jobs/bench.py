"""``vaepar bench``: every way to decode or encode, side by side in one run, against one rank and stock diffusers.

Each pass is a stage that all ranks agree on: those that have nothing to do in it go straight to the meeting point and
sleep there, so that a pass on few ranks has the machine to itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Protocol

import torch
from torch import Tensor

from vaepar.autoencoders.feed import TensorFeed
from vaepar.autoencoders.selection import DIRECT, Selection, axis_of
from vaepar.autoencoders.tiling import tile_settings
from vaepar.config import VaeParallelMode
from vaepar.errors import DeviceMemoryError, UsageError
from vaepar.jobs.bench_meter import Meter, Reading, describe_machine, threads_set
from vaepar.jobs.bench_models import BenchModel
from vaepar.jobs.bench_plan import STOCK_TILED, STOCK_UNTILED, Case, in_order, plan_cases
from vaepar.jobs.bench_report import BenchReport, CaseResult, Sample, ShapeResult, probe, write_json
from vaepar.jobs.bench_request import BenchRequest
from vaepar.jobs.bench_statistics import difference, load_bound
from vaepar.jobs.estimate import estimate_peak_bytes, select_for
from vaepar.jobs.report import check_report
from vaepar.launch import World
from vaepar.parallel.agreement import agreed
from vaepar.parallel.executor import assign, joined
from vaepar.parallel.group import RankGroup, SoloGroup
from vaepar.parallel.torch_group import TorchGroup

_BUSY = 0.2  # of all cores, used by others: times scatter visibly beyond it


class Progress(Protocol):
    """Who is told how far a bench is; only rank 0 has one that speaks."""

    def begin(self, passes: int) -> None: ...
    def step(self, text: str) -> None: ...
    def stop(self) -> None: ...


class SilentProgress:
    """The progress of the ranks that do not speak."""

    def begin(self, passes: int) -> None:
        return None

    def step(self, text: str) -> None:
        return None

    def stop(self) -> None:
        return None


def run_bench(request: BenchRequest, group: RankGroup, progress: Progress) -> BenchReport:
    """Measure what a request asks for; every rank of ``group`` calls it. Only rank 0's report holds differences.

    Args:
        request: its largest number of ranks is the size of ``group``.
        progress: told about each pass, on every rank.

    Raises:
        UsageError: a shape, tile, dtype or forced mode does not fit. ModelError: the model cannot be loaded.
        OutputError: the JSON or the plot cannot be written.
    """
    if request.ranks[-1] != group.size:
        raise UsageError(f"the bench compares up to {request.ranks[-1]} ranks, and {group.size} are there")
    with agreed(group, "outputs"):
        if group.rank == 0 and request.json is not None:
            check_report("--json", request.json)
        if group.rank == 0 and request.plot is not None:
            probe(request.plot)
    report = _Bench(request, group, progress).run()
    with agreed(group, "report"):
        if group.rank == 0 and request.json is not None:
            write_json(request.json, report)
        if group.rank == 0 and request.plot is not None:
            from vaepar.jobs.bench_plot import write_plot

            write_plot(request.plot, report)
    return report


class _Bench:
    def __init__(self, request: BenchRequest, group: RankGroup, progress: Progress) -> None:
        self._request, self._world, self._progress = request, group, progress
        self._cpu = group.device.type == "cpu"
        self._threads = request.threads or (1 if self._cpu else torch.get_num_threads())
        self._encodes = request.operation == "encode"
        self._groups = rank_groups(group, request.ranks)
        self._meter = Meter(group.device)
        self._report = BenchReport(operation=request.operation)
        with agreed(group, "model"), threads_set(self._threads):
            self._model = BenchModel(request, group)
            self._stock: Any = self._model.stock() if group.rank == 0 else None

    def run(self) -> BenchReport:
        self._describe()
        results = [ShapeResult(shape=shape) for shape in self._model.shapes]
        for result in results:
            result.cases = [CaseResult(case=case) for case in self._plan(result.shape)]
        passes = self._request.warmup + self._request.repeats
        self._progress.begin(sum(2 + passes * len(result.cases) for result in results))
        for result in results:
            self._measure(result)
        self._report.results = results
        share = self._report.idle_share()
        if share is not None:
            self._report.notes.append(f"idle ranks used {share:.1%} of a core while others were measured")
        return self._report

    def _plan(self, shape: tuple[int, ...]) -> list[Case]:
        """The cases of one latent, the same on every rank."""
        capability, request, facts = self._model.adapter.capability, self._request, self._model.facts

        def choose(mode: VaeParallelMode, count: int) -> Selection:
            (capability.require_encode if self._encodes else capability.require_decode)(mode)
            tiles = request.tiles(facts.spatial_ratio)
            return select_for(facts, shape, mode.value, count, tiles, request.operation)

        totals = [1, *(count * self._threads for count in request.ranks)]
        stock_threads = (totals if self._cpu else [self._threads]) if request.baselines else []
        return plan_cases(request.modes, request.ranks, self._threads, choose, stock_threads=stock_threads)

    def _measure(self, result: ShapeResult) -> None:
        """Check and warm up every case, then measure them in alternating repeats."""
        with agreed(self._world, "latents"):
            z = self._model.pixels(result.shape) if self._encodes else self._model.latent(result.shape)
        untiled, tiled = (self._reference(name, z) for name in (STOCK_UNTILED, STOCK_TILED))
        for measured in result.cases:
            for count in range(self._request.warmup):
                self._progress.step(f"warm-up: {measured.case.label}")
                kept: list[Tensor] = []
                if self._pass(measured, z, kept if count == 0 else None) is None:
                    break
                if kept:
                    picture = joined(kept)
                    measured.to_untiled = None if untiled is None else difference(picture, untiled)
                    measured.to_tiled = None if tiled is None else difference(picture, tiled)
                    del picture
            measured.notes.extend(self._explain(measured.case, z))
            measured.estimated_bytes = self._estimate(measured.case, result.shape)
        for repeat in range(self._request.repeats):
            for measured in in_order(result.cases, repeat):
                self._progress.step(f"repeat {repeat + 1} of {self._request.repeats}: {measured.case.label}")
                if measured.failed is None and (sample := self._pass(measured, z, None, repeat)) is not None:
                    measured.samples.append(sample)

    def _reference(self, name: str, z: Tensor | TensorFeed) -> Tensor | None:
        """Stock diffusers' picture on rank 0, with the threads that a rank has; None elsewhere and without memory."""
        self._progress.step(f"reference: {name}")
        kept: list[Tensor] = []
        case = Case(name=name, strategy=name, threads=self._threads)
        self._pass(CaseResult(case=case), z, kept)
        return kept[0] if kept else None

    def _pass(
        self, measured: CaseResult, z: Tensor | TensorFeed, kept: list[Tensor] | None, repeat: int = 0
    ) -> Sample | None:
        """One pass on the ranks of a case, while the others sleep; None when a rank ran out of memory.

        Args:
            kept: gets the chunks on rank 0; when None they are dropped as they come, as a writer would.
        """
        case, reading = measured.case, Reading()
        group = self._groups.get(case.ranks)
        if group is not None:
            group.traffic.reset()
        with agreed(self._world, "preparation"):  # its end is where the ranks of the pass start together
            self._meter.settle()
        cpu = time.process_time_ns()
        try:
            with agreed(self._world, case.label):
                if group is not None:
                    with threads_set(case.threads), self._meter.timed(reading):
                        self._work(case, group, z, kept)
        except DeviceMemoryError as error:
            measured.failed = str(error)
            if not self._cpu:
                torch.cuda.empty_cache()  # what the failed pass has cached would be missing in the next one
            return None
        reading.cpu_nanoseconds = time.process_time_ns() - cpu
        return self._gather(repeat, reading, group)

    def _work(self, case: Case, group: RankGroup, z: Tensor | TensorFeed, kept: list[Tensor] | None) -> None:
        with torch.no_grad():
            if case.is_stock:
                self._stock.use_tiling = case.name == STOCK_TILED
                whole = self._stock_result(z)
                if kept is not None:
                    kept.append(whole)
                return
            model = self._model.adapter
            model.init_distributed(group)
            model.set_parallel_size(case.ranks, mode=case.mode)
            with closing(model.decode_chunks(z) if isinstance(z, Tensor) else model.encode_chunks(z)) as chunks:
                for chunk in chunks:
                    if kept is not None and chunk is not None:
                        kept.append(chunk)

    def _stock_result(self, z: Tensor | TensorFeed) -> Tensor:
        """The picture of a latent, or the moments of pixels, as plain diffusers makes them."""
        if isinstance(z, Tensor):
            picture: Tensor = self._stock.decode(z).sample
            return picture
        x = self._model.adapter.shard_pixels(z)
        moments: Tensor = self._stock.encode(x if isinstance(x, Tensor) else x.whole).latent_dist.parameters
        return moments

    def _estimate(self, case: Case, shape: tuple[int, ...]) -> int | None:
        """What the plan of a run would expect the pass to take beyond the weights; None for stock diffusers."""
        if case.is_stock:
            return None
        return estimate_peak_bytes(
            self._model.facts,
            shape,
            self._model.dtype,
            Selection(mode=case.strategy, axis=axis_of(case.strategy), reason=case.reason),
            case.ranks,
            operation=self._request.operation,
            tiles=self._request.tiles(self._model.facts.spatial_ratio),
            frames_per_step=self._model.adapter.frames_per_step,
            device=self._world.device.type,
            threads=case.threads,
        ).activations

    def _gather(self, repeat: int, reading: Reading, group: RankGroup | None) -> Sample:
        """What all ranks have to say about the pass they just made."""
        sent = None if group is None else group.traffic
        told = (
            reading.nanoseconds,
            reading.cpu_nanoseconds,
            reading.peak_bytes,
            *((sent.bytes, sent.messages, sent.rounds) if sent is not None else (0, 0, 0)),
        )
        wall, cpu, peaks, sent_bytes, messages, rounds = (self._world.gather_values(value) for value in told)
        return Sample(
            repeat=repeat,
            seconds=max(wall) / 1e9,
            rank_seconds=[value / 1e9 for value in wall],
            rank_cpu_seconds=[value / 1e9 for value in cpu],
            peak_bytes=[None if value < 0 else value for value in peaks],
            sent_bytes=sent_bytes,
            messages=messages,
            rounds=rounds,
        )

    def _explain(self, case: Case, z: Tensor | TensorFeed) -> list[str]:
        """Why a case cannot be faster than it is."""
        if case.is_stock or case.ranks == 1:
            return []
        if case.strategy == DIRECT:
            return ["it fits one tile, so one rank does it; a smaller --tile-size shares it"]
        if case.strategy != VaeParallelMode.TILE:
            return []
        model = self._model.adapter
        like, operator = (z, model.tile_operator()) if isinstance(z, Tensor) else model.encode_operator(z)
        tasks, _ = operator.split(like)
        shares = assign([task.workload for task in tasks], case.ranks)
        bound = load_bound([sum(tasks[i].workload for i in share) for share in shares])
        return [f"{len(tasks)} tiles on {case.ranks} ranks: at most {bound:.2f} times as fast as one rank"]

    def _describe(self) -> None:
        request, model, report, world = self._request, self._model, self._report, self._world
        with agreed(world, "machine"):
            report.machine = describe_machine(world.device) if world.rank == 0 else {}
        local = World.from_environment().local_size
        report.model = {
            "name": model.name,
            "class": model.facts.class_name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in model.adapter.parameters()),
        }
        report.settings = {
            "ranks": list(request.ranks),
            "local_ranks": local,
            "threads_per_rank": self._threads,
            "device": world.device.type,
            "modes": [mode.value for mode in request.modes],
            "repeats": request.repeats,
            "warmup": request.warmup,
            "tiles": tile_settings(model.adapter),
            "frames_per_step": model.adapter.frames_per_step if model.facts.takes_frames else None,
        }
        if model.note is not None:
            report.notes.append(model.note)
        if world.rank == 0:
            report.notes.extend(self._machine_notes(local))

    def _machine_notes(self, local: int) -> list[str]:
        notes = []
        cores, busy = self._report.machine["cores"], self._report.machine["busy_before"]
        for count in self._request.ranks:
            ranks = min(count, local)
            if self._cpu and ranks * self._threads > cores:
                notes.append(
                    f"oversubscribed: {ranks} ranks x {self._threads} thread(s) on {cores} core(s); their times show "
                    f"that it works, not how fast it is where each rank has a core"
                )
        if busy > _BUSY:
            notes.append(f"other programs used {busy:.0%} of the cores just before; the times are noisy")
        return notes


def rank_groups(world: RankGroup, counts: Sequence[int]) -> dict[int, RankGroup]:
    """The groups of the first N ranks of ``world`` that this rank is in, for one rank and for each of ``counts``.

    Every rank of ``world`` calls it. Groups are nested and made from the largest on: their members number the groups
    that they make, and would not find each other if a rank had made one that another has not.
    """
    groups: dict[int, RankGroup] = {}
    for count in sorted({1, *counts}, reverse=True):
        if world.rank >= count:
            continue
        if count == 1:
            groups[count] = SoloGroup(world.device)
        elif count == world.size:
            groups[count] = world
        else:
            groups[count] = TorchGroup(range(count), world.device)
    return groups


__all__ = ["Progress", "SilentProgress", "rank_groups", "run_bench"]
