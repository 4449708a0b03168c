"""The small commands: inspect, models, env, help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from tests.cli.conftest import save_latent, wan_latent
from vaepar import __version__
from vaepar.cli.main import app, run
from vaepar.media import PictureRules


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"vaepar {__version__}\n"
    assert run(["decode", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "pixels" in shown
    assert "--tile-stride" in shown
    assert run([]) == 2


@pytest.mark.parametrize("columns", ["60", "80", "200"])
@pytest.mark.parametrize("command", ["decode", "encode", "bench", "inspect"])
def test_help_has_every_name_whole(
    command: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run([command, "-h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    names = {name for option in command_named(command).params for name in option.opts if name.startswith("--")}
    words = {word.strip(",") for line in lines for word in line.split()}
    assert names <= words
    assert "…" not in "".join(lines)


def command_named(name: str) -> Any:
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]


def test_help_tells_what_is_usual(capsys: pytest.CaptureFixture[str]) -> None:
    run(["decode", "-h"])
    run(["encode", "-h"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "19 with libx264",
        "libx264 for MP4",
        "yuv420p for MP4",
        "(default: medium)",
        "owner/name[@revision]",
    ):
        assert words in shown
    assert f"(default: {PictureRules().max_pixels})" in shown
    assert "Each option can be given as VAEPAR_NAME too" in shown


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["decode", "x", "-m", "demo", "--ranks", "2x"], {}, "--ranks is '2x'; it is a whole number"),
        (["decode", "x", "-m", "demo", "--ranks=2x"], {}, "--ranks is '2x'; it is a whole number"),
        (["decode", "x", "-m", "demo"], {"VAEPAR_RANKS": "abc"}, "VAEPAR_RANKS is 'abc'; it is a whole number"),
        (["decode", "x", "-m", "demo", "--timeout", "0"], {}, "--timeout is '0'; it is 1 or more"),
        (["decode", "x", "--modle", "demo"], {}, "No such option: --modle"),
        (["decode", "x"], {}, "--model is missing (vaepar decode -h tells what there is)"),
        (["decode", "x", "-m"], {}, "'-m' requires an argument"),
        (["decod", "x"], {}, "No such command 'decod'"),
        (["inspect"], {}, "files is missing"),
        (["bench", "--threads", "a\x1bb"], {}, "--threads is 'a\\x1bb'; "),
    ],
)
def test_mistyped_lines_are_told_in_one(
    arguments: list[str],
    variables: dict[str, str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VAEPAR_MODEL", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vaepar: ")
    assert words in line


def test_models_are_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["family"] for row in rows} == {"kl", "flux2", "qwenimage", "wan"}
    assert all("tile" in row["decode_modes"] and row["dtypes"] and row["group_layouts"] for row in rows)
    assert run(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("AutoencoderKLWan" in line and "B C T H W" in line for line in lines)
    assert sum("spatial_shard_width" in line for line in lines) == 2  # once of decode, once of encode


def test_the_list_of_commands_is_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["-h"]) == 0
    printed = capsys.readouterr().out
    assert "..." not in printed.replace("[ARGS]...", "")
    assert "parallel modes are on this machine." in " ".join(printed.split())


@pytest.mark.parametrize(
    ("variable", "line", "words"),
    [
        ("VAEPAR_MODE", "tiles", "'tiles' does not exist"),
        ("VAEPAR_CRF", "99", "--crf is 99"),
        ("VAEPAR_PNG_LEVEL", "12", "--png-level is 12"),
        ("VAEPAR_SHARD", "9/3", "--shard is 9/3"),
        ("VAEPAR_VAE_PARALLEL_SIZE", "none", "none"),
    ],
)
def test_errors_name_the_variable_or_the_file_that_a_value_comes_from(
    variable: str,
    line: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    option = variable.removeprefix("VAEPAR_").lower().replace("_", "-")
    command = ["decode", "x", "--model", "demo"]
    assert run([*command, f"--{option}", line]) == 2
    assert "comes from" not in capsys.readouterr().err  # it stands on the line
    with monkeypatch.context() as changed:
        changed.setenv(variable, line)
        assert run(command) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert words in told
        assert f"(--{option} comes from {variable})" in told
    file = tmp_path / "options.toml"
    file.write_text(f"{option} = '{line}'\n")
    assert run([*command, "--config", str(file)]) == 2
    assert f"(--{option} comes from --config {file})" in " ".join(capsys.readouterr().err.split())


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
