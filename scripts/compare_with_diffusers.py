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

from vaepar.launch import usable_cores

SHAPE = (1, 16, 3, 20, 28)
TILE, STRIDE = 128, 96
FPS = 16
_LOOK_SECONDS = 0.05


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
    import diffusers

    from vaepar.jobs.bench_models import random_model
    from vaepar.jobs.bench_presets import load_preset

    model, source = folder / "model", folder / "in"
    preset = load_preset("wan", "small")
    random_model(diffusers.AutoencoderKLWan, preset).save_pretrained(model)
    source.mkdir()
    for number in range(files):
        generator = torch.Generator().manual_seed(number)
        save_file({"latents": torch.randn(SHAPE, generator=generator)}, source / f"shot{number:03d}.safetensors")
    ranks = usable_cores()
    vaepar = [sys.executable, "-m", "vaepar", "decode", str(source), "--model", str(model), "--state", "raw"]
    vaepar += ["--tile-size", str(TILE), "--tile-stride", str(STRIDE), "--fps", str(FPS), "--quiet"]
    myself = [sys.executable, str(Path(__file__).resolve())]
    seconds: dict[str, list[float]] = {"loop": [], "vaepar": [], "mp4": [], "alone": []}
    memory: dict[str, int] = {"loop": 0, "vaepar": 0}
    for repeat in range(repeats):
        turns = ["loop", "vaepar"] if repeat % 2 == 0 else ["vaepar", "loop"]
        for name in turns:
            out = folder / f"{name}{repeat}"
            command = [*myself, "--loop", str(model), str(source), str(out)]
            if name == "vaepar":
                command = [*vaepar, "--out", str(out), "--ranks", str(ranks)]
            took, most = timed(command)
            seconds[name].append(took)
            memory[name] = max(memory[name], most)
            found = len(list(out.glob("*.mp4")))
            if found != files:
                raise SystemExit(f"{name} made {found} of {files} films")
        report = folder / f"report{repeat}.json"
        mp4 = [*vaepar, "--out", str(folder / f"mp4{repeat}"), "--ranks", "1", "--report", str(report)]
        turns = ["mp4", "alone"] if repeat % 2 == 0 else ["alone", "mp4"]
        for name in turns:
            if name == "mp4":
                subprocess.run(mp4, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
                seconds[name].append(json.loads(report.read_text())["groups"][0]["busy_seconds"])
            else:
                alone = [*myself, "--alone", str(model), str(source)]
                printed = subprocess.run(alone, check=True, capture_output=True, text=True).stdout
                seconds[name].append(float(printed))
    frames = 1 + 4 * (SHAPE[2] - 1)
    print(f"{files} latents of {SHAPE[4] * 8}x{SHAPE[3] * 8}, {frames} frames; {ranks} cores; median of {repeats}")
    for name, words in (("loop", "diffusers loop"), ("vaepar", f"vaepar decode --ranks {ranks}")):
        print(f"{words}: {statistics.median(seconds[name]):.1f} s {rounded(seconds[name])}, {memory[name] >> 20} MiB")
    print(f"vaepar is {statistics.median(seconds['loop']) / statistics.median(seconds['vaepar']):.2f} times as fast")
    mp4_, alone_ = (statistics.median(seconds[name]) for name in ("mp4", "alone"))
    print(f"one rank, decode and MP4: {mp4_:.2f} s; decode alone: {alone_:.2f} s; {mp4_ / alone_:.2f} times as long")


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


def rounded(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.1f}" for value in values) + "]"


if __name__ == "__main__":
    main()
