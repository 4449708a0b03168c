"""The templates that ship, run by the engines' own tools."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.farm.conftest import make_latents
from tests.farm.ranks import contents, temporary, wait_for

FARM = Path(__file__).parent.parent.parent / "configs" / "farm"
TEMPLATE = FARM / "openjd-decode.yaml"
VAEPAR = f"{sys.executable} -m vaepar"

pytestmark = pytest.mark.processes


def openjd(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("openjd")), *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_template_runs_chunks_of_files(tmp_path: Path, wan: Path) -> None:
    make_latents(tmp_path / "in", 5, frames=1)
    assert openjd("check", str(TEMPLATE), cwd=tmp_path).returncode == 0
    parameters = {
        "LatentDir": "in",
        "OutDir": "out",
        "Model": str(wan),
        "Parts": "6",  # one part more than files: it has nothing to do
        "LastPart": "5",
        "ChunkSize": "3",
        "Vaepar": VAEPAR,
        "MoreOptions": "--state norm --format png",
    }
    arguments = [part for name, value in parameters.items() for part in ("-p", f"{name}={value}")]
    run = openjd("run", str(TEMPLATE), "--step", "Decode", *arguments, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Chunks run: 2" in run.stdout
    assert sorted(contents(tmp_path / "out")) == [f"shot{n:03d}.png" for n in range(5)]
    progress = [float(value) for value in re.findall(r"openjd_progress: ([\d.]+)", run.stdout)]
    assert progress.count(100.0) >= 2
    assert "openjd_status: " in run.stdout
    (tmp_path / "in" / "shot005.safetensors").write_bytes(b"\x00" * 9)
    failed = openjd("run", str(TEMPLATE), "--step", "Decode", *arguments, cwd=tmp_path)
    assert failed.returncode != 0
    assert "openjd_fail: " in failed.stdout


def test_a_cancelled_task_stops_cleanly_and_a_second_one_does_the_rest(tmp_path: Path, wan: Path) -> None:
    """The runner's cancel (here by its own interrupt) reaches vaepar, which drops nothing half-written."""
    make_latents(tmp_path / "in", 6, frames=12, height=12, width=12)
    parameters = {"LatentDir": "in", "OutDir": "out", "Model": str(wan), "Parts": "6", "LastPart": "5"}
    parameters |= {"ChunkSize": "6", "Vaepar": VAEPAR, "MoreOptions": "--state norm --tile-size 64 --ranks 2"}
    arguments = [part for name, value in parameters.items() for part in ("-p", f"{name}={value}")]
    command = ["run", str(TEMPLATE), "--step", "Decode", *arguments]
    with subprocess.Popen(
        [str(Path(sys.executable).with_name("openjd")), *command],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # the signal must come to vaepar from the runner, not from a terminal
    ) as process:
        wait_for(lambda: bool(list((tmp_path / "out").glob("*.mp4"))), "the first output")
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=120)[0]
    assert process.returncode != 0, printed
    assert "the file under way has 45 s" in printed
    assert temporary(tmp_path / "out") == []
    first = contents(tmp_path / "out")
    assert 1 <= len(first) < 6
    again = openjd(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    second = contents(tmp_path / "out")
    assert sorted(second) == [f"shot{n:03d}.mp4" for n in range(6)]
    assert first.items() <= second.items()


def test_the_array_script_takes_its_part_and_hands_on_signals(tmp_path: Path, wan: Path) -> None:
    """Without Slurm: its variables and its signal to the batch shell, and the code that makes it requeue."""
    folder = make_latents(tmp_path / "in", 6, frames=10, height=12, width=12)
    (tmp_path / "files.txt").write_text("".join(f"{path}\n" for path in sorted(folder.iterdir())))
    script = tmp_path / "vaepar"
    script.write_text(f'#!/bin/sh\nexec {VAEPAR} "$@"\n')
    script.chmod(0o755)
    command = [str(FARM / "slurm-array.sbatch"), "files.txt", "out", "--model", str(wan), "--state", "norm"]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VAEPAR": str(script),
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_ARRAY_TASK_COUNT": "2",
    }
    with subprocess.Popen([*command, "--grace", "0"], cwd=tmp_path, env=env, stderr=subprocess.PIPE) as process:
        wait_for(lambda: bool(list((tmp_path / "out").glob("*.mp4"))), "the first output")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    assert not [child for child in psutil.Process().children() if child.pid == process.pid]
    assert temporary(tmp_path / "out") == []
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=240, capture_output=True)
    outputs = [name for name in contents(tmp_path / "out") if name.endswith(".mp4")]
    assert sorted(outputs) == ["shot001.mp4", "shot003.mp4", "shot005.mp4"]
    refused = subprocess.run(
        command, cwd=tmp_path, env=env | {"SLURM_ARRAY_TASK_MIN": "1"}, check=False, timeout=60, capture_output=True
    )
    assert refused.returncode == 2
