"""The small commands: inspect, models, env, help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import save_latent, wan_latent
from vaepar import __version__
from vaepar.cli.main import run


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"vaepar {__version__}\n"
    assert run(["decode", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "pixels" in shown
    assert "--tile-stride" in shown
    assert run([]) == 2


def test_models_are_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["family"] for row in rows} == {"kl", "flux2", "qwenimage", "wan"}
    assert all("tile" in row["decode_modes"] and row["dtypes"] and row["group_layouts"] for row in rows)
    assert run(["models"]) == 0
    assert "AutoencoderKLWan" in capsys.readouterr().out


def test_env_names_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"] == torch.__version__
    assert facts["gloo"] is True
    assert facts["ffmpeg"]


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str], model_folders: dict[str, Path]) -> None:
    file = save_latent(tmp_path / "a.safetensors", wan_latent(frames=3))
    assert run(["inspect", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [1, 16, 3, 6, 8]
    assert run(["inspect", str(file), "--model", str(model_folders["wan"]), "--state", "norm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_frames"], found["height"], found["width"], found["state"]) == (9, 48, 64, "norm")
    assert run(["inspect", str(model_folders["kl"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class_name"] == "AutoencoderKL"
    assert run(["inspect", str(file), "--state", "norm"]) == 2
    assert "give --model too" in capsys.readouterr().err
    assert run(["inspect", str(file), str(tmp_path / "none.safetensors")]) == 4
    printed = capsys.readouterr()
    assert "shape" in printed.out
    assert "none.safetensors" in printed.err


def test_inspect_shows_what_is_known_of_an_undecided_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_folders: dict[str, Path]
) -> None:
    file = save_latent(tmp_path / "a.safetensors", wan_latent(frames=3), metadata={"note": "x"})
    command = ["inspect", str(file), "--model", str(model_folders["wan"])]
    assert run(command) == 4
    printed = capsys.readouterr()
    assert "shape: 1, 16, 3, 6, 8" in printed.out
    assert "metadata.note: x" in printed.out
    assert "undecided: " in printed.out
    assert "--state" in printed.err
    assert run([*command, "--json"]) == 4
    assert "--state" in json.loads(capsys.readouterr().out)["undecided"]
    assert run([*command, "--state", "raw", "--trim-latent-frames", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_frames"] == 5
    assert run(["inspect", str(file), "--trim-latent-frames", "1"]) == 2
