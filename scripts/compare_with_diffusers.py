"""A folder of latents: ``vaepar decode`` against the loop over a diffusers VAE that people write themselves.

    .venv/bin/python scripts/compare_with_diffusers.py --files 16 --repeats 3

Both decode the same files with the same random Wan VAE on the same cores: the loop loads the model once, turns tiling
on, gives PyTorch as many threads as there are cores and writes MP4 with ``export_to_video``; vaepar starts a rank a
core. Whole commands are timed, in alternating order; memory is the highest sum over all processes (proportional set
size). Then the wall time of decode and MP4 on one rank is set against that of the decode alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file

from vaepar.launch import keep_memory_flat, usable_cores

SHAPE = (1, 16, 3, 20, 28)
TILE, STRIDE = 128, 96
FPS = 16
_LOOK_SECONDS = 0.5  # looking costs time of the cores that are measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loop", nargs=3, metavar=("MODEL", "IN", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--alone", nargs=2, metavar=("MODEL", "IN"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.loop:
        plain_loop(*map(Path, chosen.loop))
    elif chosen.alone:
        decode_alone(*map(Path, chosen.alone))
    else:
        with tempfile.TemporaryDirectory(prefix="vaepar-compare-") as folder:
            compare(Path(folder), chosen.files, chosen.repeats)


def plain_loop(model: Path, source: Path, out: Path) -> None:
    """What the documentation of diffusers shows, over a folder."""
    from diffusers import AutoencoderKLWan
    from diffusers.utils import export_to_video
    from diffusers.video_processor import VideoProcessor

    torch.set_num_threads(usable_cores())
    vae = AutoencoderKLWan.from_pretrained(model)
    vae.enable_tiling(TILE, TILE, STRIDE, STRIDE)
    processor = VideoProcessor(vae_scale_factor=8)
    out.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        with torch.no_grad():
            video = vae.decode(load_file(path)["latents"]).sample
        export_to_video(processor.postprocess_video(video)[0], str(out / f"{path.stem}.mp4"), fps=FPS)


def decode_alone(model: Path, source: Path) -> None:
    """Print the seconds of one rank's decodes of a folder, whose frames go nowhere."""
    from vaepar.autoencoders import DistributedAutoencoderKLWan

    keep_memory_flat()
    torch.set_num_threads(1)
    vae = DistributedAutoencoderKLWan.from_pretrained(model)
    vae.configure_tiles(TILE, STRIDE)
    started = time.perf_counter()
    for path in sorted(source.iterdir()):
        for _ in vae.decode_chunks(load_file(path)["latents"]):
            pass
    print(time.perf_counter() - started)


def compare(folder: Path, files: int, repeats: int) -> None:
    """Make the model and the latents, run everything in turn, and print medians and ratios."""
    study = Study(folder, files)
    for repeat in range(repeats):
        works = [study.run_loop, study.run_vaepar, study.run_one_rank, study.run_alone]
        for work in works if repeat % 2 == 0 else reversed(works):
            work(folder / str(repeat))
    loop, vaepar, one, alone = (statistics.median(study.seconds[name]) for name in ("loop", "vaepar", "one", "alone"))
    size = f"{SHAPE[4] * 8}x{SHAPE[3] * 8}, {1 + 4 * (SHAPE[2] - 1)} frames"
    print(f"{files} latents of {size}; {usable_cores()} cores; median of {repeats}")
    for name, words in (("loop", "diffusers loop"), ("vaepar", f"vaepar decode --ranks {usable_cores()}")):
        each = ", ".join(f"{value:.1f}" for value in study.seconds[name])
        print(f"{words}: {statistics.median(study.seconds[name]):.1f} s [{each}], {study.memory[name] >> 20} MiB")
    print(f"vaepar is {loop / vaepar:.2f} times as fast")
    print(f"one rank, decode and MP4: {one:.2f} s; decode alone: {alone:.2f} s; {one / alone:.2f} times as long")


class Study:
    """The four works that are compared, with their seconds and the highest memory of the first two (bytes)."""

    def __init__(self, folder: Path, files: int) -> None:
        import diffusers

        from vaepar.jobs.bench_models import random_model
        from vaepar.jobs.bench_presets import load_preset

        self.model, self.source, self.files = folder / "model", folder / "in", files
        self.seconds: dict[str, list[float]] = {"loop": [], "vaepar": [], "one": [], "alone": []}
        self.memory: dict[str, int] = {"loop": 0, "vaepar": 0}
        random_model(diffusers.AutoencoderKLWan, load_preset("wan", "small")).save_pretrained(self.model)
        self.source.mkdir()
        for number in range(files):
            latent = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))
            save_file({"latents": latent}, self.source / f"shot{number:03d}.safetensors")

    def run_loop(self, out: Path) -> None:
        self._whole("loop", self._myself("--loop", self.model, self.source, out / "loop"), out / "loop")

    def run_vaepar(self, out: Path) -> None:
        self._whole("vaepar", self._vaepar(out / "vaepar", usable_cores()), out / "vaepar")

    def run_one_rank(self, out: Path) -> None:
        report = out / "report.json"
        command = [*self._vaepar(out / "one", 1), "--report", str(report)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self.seconds["one"].append(json.loads(report.read_text())["groups"][0]["busy_seconds"])

    def run_alone(self, out: Path) -> None:
        command = self._myself("--alone", self.model, self.source)
        # As vaepar itself sets it, which must be before PyTorch is loaded.
        env = os.environ | {"THP_MEM_ALLOC_ENABLE": "1"}
        printed = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
        self.seconds["alone"].append(float(printed))

    def _whole(self, name: str, command: list[str], out: Path) -> None:
        took, most = timed(command)
        self.seconds[name].append(took)
        self.memory[name] = max(self.memory[name], most)
        found = len(list(out.glob("*.mp4")))
        if found != self.files:
            raise SystemExit(f"{name} made {found} of {self.files} films")

    def _myself(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, str(Path(__file__).resolve()), *map(str, arguments)]

    def _vaepar(self, out: Path, ranks: int) -> list[str]:
        command = [sys.executable, "-m", "vaepar", "decode", str(self.source), "--model", str(self.model)]
        command += ["--state", "raw", "--tile-size", str(TILE), "--tile-stride", str(STRIDE), "--fps", str(FPS)]
        return [*command, "--quiet", "--out", str(out), "--ranks", str(ranks)]


def timed(command: list[str]) -> tuple[float, int]:
    """Wall seconds of a command, and the highest memory of it and all its children (bytes)."""
    most, started = 0, time.perf_counter()
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            most = max(most, tree_bytes(process.pid))
            time.sleep(_LOOK_SECONDS)
        took = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return took, most


def tree_bytes(pid: int) -> int:
    """Proportional set size of a process and its children; pages that several share count once."""
    total = 0
    try:
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            total += int(process.memory_full_info().pss)
    except psutil.Error:
        return total
    return total


if __name__ == "__main__":
    main()
