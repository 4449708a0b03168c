"""Model folders and latent files for whole runs of the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import models
from vaepar.cli.main import run

FACTORIES = {
    "wan": models.make_wan21,
    "wan22": models.make_wan22,
    "kl": models.make_kl,
    "flux2": models.make_flux2,
    "qwenimage": models.make_qwenimage,
}


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A VAE folder of each family."""
    root = tmp_path_factory.mktemp("models")
    for name, factory in FACTORIES.items():
        factory().save_pretrained(root / name)
    return {name: root / name for name in FACTORIES}


@dataclass
class Outcome:
    """One run: exit code, what it printed, and its report."""

    code: int
    out: str
    err: str
    report: dict[str, Any]

    def row(self, name: str) -> dict[str, Any]:
        rows = [row for row in self.report["files"] if Path(row["path"]).name == name]
        if len(rows) != 1:
            raise AssertionError(f"{len(rows)} rows for {name} in {self.report['files']}")
        return rows[0]


Decode = Callable[..., Outcome]


@pytest.fixture
def decode(tmp_path: Path, capsys: pytest.CaptureFixture[str], model_folders: dict[str, Path]) -> Decode:
    """``decode(files, model, *flags)`` in this process, with a report, outputs in ``tmp_path/out``."""

    def call(inputs: Sequence[Path | str], model: str, *flags: str) -> Outcome:
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        model = str(model_folders.get(model, model))
        capsys.readouterr()
        command = ["decode", *map(str, inputs), "--model", model, "--out", str(tmp_path / "out"), *flags]
        code = run([*command, "--report", str(report)])
        printed = capsys.readouterr()
        found = json.loads(report.read_text()) if report.exists() else {}
        return Outcome(code, printed.out, printed.err, found)

    return call


def run_command(
    arguments: Sequence[str], cwd: Path, timeout: float = 180, **env: str
) -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def wan_latent(frames: int = 2, height: int = 6, width: int = 8, batch: int = 1, seed: int = 0) -> Tensor:
    """A normalised Wan 2.1 latent, [B, 16, T, H, W]."""
    return torch.randn((batch, 16, frames, height, width), generator=torch.Generator().manual_seed(seed))


def save_latent(path: Path, tensor: Tensor, key: str = "latents", metadata: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous()}, path, metadata)
    return path
