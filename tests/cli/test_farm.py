"""Options of runs over many files: lists, parts, configuration, and what is said to whom."""

from __future__ import annotations

import io
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.cli.conftest import Decode, run_command, save_latent, wan_latent
from vaepar.cli.main import run

NAMES = ["a", "b [1]", "c\x1b[31m", "d", "e"]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [save_latent(tmp_path / "in" / f"{name}.safetensors", torch.zeros(1, 4, 4, 4)) for name in NAMES]


def done(tmp_path: Path) -> set[str]:
    return {path.stem for path in (tmp_path / "out").iterdir()}


def test_lists(tmp_path: Path, files: list[Path], decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text(f"{files[0]}\r\n\n{files[1]}\n")
    assert decode([], "kl", "--state", "raw", "--list", str(listed)).code == 0
    assert done(tmp_path) == {"a", "b [1]"}
    assert decode([f"@{listed}", files[3]], "kl", "--state", "raw").code == 0
    assert done(tmp_path) == {"a", "b [1]", "d"}
    content = b"\0".join(str(path).encode() for path in files[2:]) + b"\0"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert decode(["-"], "kl", "--state", "raw", "-0").code == 0
    assert done(tmp_path) == set(NAMES)
    missing = decode([], "kl", "--list", str(tmp_path / "none.txt"))
    assert (missing.code, "cannot be read" in missing.err) == (4, True)
    assert decode([], "kl").code == 2


@pytest.mark.processes
def test_standard_input_reaches_the_ranks(tmp_path: Path, files: list[Path], model_folders: dict[str, Path]) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "vaepar", "decode", "-", "--model", str(model_folders["kl"]), "--state", "raw"]
    result = subprocess.run(
        [*command, "--ranks", "2", "--out", "out"],
        input="".join(f"{path}\n" for path in files[3:]),
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert done(tmp_path) == {"d", "e"}
    assert "2 groups of 1 rank(s)" in result.stderr


def test_parts_cover_everything_once_in_any_order(tmp_path: Path, files: list[Path], decode: Decode) -> None:
    seen: list[str] = []
    for part in ("0/3", "1-2/3"):
        outcome = decode(list(reversed(files)), "kl", "--state", "raw", "--shard", part)
        assert outcome.code == 0
        seen += [row["path"] for row in outcome.report["files"]]
    assert sorted(seen) == sorted(str(path) for path in files)
    assert decode(files, "kl", "--state", "raw", "--shard", "3/3").code == 2


def test_json_is_one_object_a_file_and_one_a_run(tmp_path: Path, files: list[Path], decode: Decode) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\x00")
    outcome = decode([*files, bad], "kl", "--state", "raw", "--json", "--quiet")
    rows = [json.loads(line) for line in outcome.out.splitlines()]
    assert outcome.code == 3
    assert [row["event"] for row in rows] == ["file"] * 6 + ["run"]
    assert {row["status"] for row in rows[:-1]} == {"ok", "failed"}
    assert rows[-1]["exit_code"] == 3
    assert rows[-1]["counts"] == {"ok": 5, "failed": 1}


def test_dialects(tmp_path: Path, files: list[Path], decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    openjd = decode(files, "kl", "--state", "raw", "--progress", "openjd")
    lines = openjd.out.splitlines()
    assert all(line.startswith(("openjd_progress: ", "openjd_status: ")) for line in lines)
    progress = [float(line.split()[1]) for line in lines if "progress" in line]
    assert progress == sorted(progress)
    assert progress[-1] == 100
    assert "\x1b" not in openjd.out + openjd.err
    events = decode(files, "kl", "--state", "raw", "--progress", "json", "--overwrite")
    assert events.out == ""
    kinds = [json.loads(line)["event"] for line in events.err.splitlines()]
    assert kinds.count("file") == 5
    assert kinds.count("started") == 5
    assert decode(files, "kl", "--state", "raw", "--progress", "none").err == ""
    monkeypatch.setenv("OPENJD_SESSION_WORKING_DIR", "/nowhere")
    assert "openjd_progress: 100" in decode(files, "kl", "--state", "raw").out
    assert decode(files, "kl", "--progress", "loud").code == 2
    assert decode(files, "kl", "--progress", "openjd", "--json").code == 2


def test_the_plan_needs_no_weights_and_makes_nothing(
    tmp_path: Path, decode: Decode, model_folders: dict[str, Path]
) -> None:
    film = save_latent(tmp_path / "in" / "film.safetensors", wan_latent(frames=3, height=9, width=12))
    (tmp_path / "in" / "bad.safetensors").write_bytes(b"\x00")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((model_folders["wan"] / "config.json").read_text())
    flags = ["--state", "norm", "--ranks", "4", "--dry-run", "--mode", "auto", "--tile-size", "64"]
    outcome = decode([film.parent], str(bare), *flags)
    assert outcome.code == 3  # as the run itself would end: what cannot be read is known before
    assert not (tmp_path / "out").exists()
    for words in ("bcfhw", "norm", "96x72", "spatial_shard_width", "film.mp4", "[[0, 1, 2, 3]]", "about "):
        assert words in outcome.out
    rows = [json.loads(line) for line in decode([film], str(bare), *flags, "--json").out.splitlines()]
    assert rows[0]["status"] == "due"
    assert rows[0]["plan"]["mode"] == rows[0]["mode"] == "spatial_shard_width"
    assert rows[0]["mode_reason"].startswith("auto: ")
    assert rows[0]["plan"]["estimated_bytes_per_rank"] > rows[0]["plan"]["estimated_activations"] > 0
    assert rows[1]["dry_run"] is True


def test_configuration_files(
    tmp_path: Path, files: list[Path], decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "vaepar.toml"
    config.write_text(
        'state = "raw"\ntile-size = 64\nname = "x_{stem}"\n[decode]\nname = "y_{stem}"\n[encode]\nseed = 3\n'
    )
    assert decode(files[:1], "kl", "--config", str(config)).code == 0
    assert done(tmp_path) == {"y_a"}
    monkeypatch.setenv("VAEPAR_NAME", "z_{stem}")
    assert decode(files[:1], "kl", "--config", str(config)).code == 0
    assert decode(files[:1], "kl", "--config", str(config), "--name", "w_{stem}").code == 0
    assert done(tmp_path) == {"y_a", "z_a", "w_a"}
    for text, words in (
        ("tilesize = 64", "did you mean 'tile-size'?"),
        ("colour = 1", "no option of this command"),
        ("[bench]\nx = 1", "there are decode and encode"),
        ("config = 'x'", "no option"),
        ("= 3", "cannot be read"),
        ("ranks = 'two'", "--ranks is 'two'"),
    ):
        config.write_text(text)
        outcome = decode(files[:1], "kl", "--config", str(config))
        assert outcome.code == 2, text
        assert words in " ".join(outcome.err.split()), outcome.err
    assert decode(files[:1], "kl", "--config", str(tmp_path / "none.toml")).code == 2


def test_variables_that_are_no_options(files: list[Path], decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = (Path(__file__).parents[2] / "scripts" / "environment").read_text()
    known = {"VAEPAR_PREVIEW", "VAEPAR_FORMAT", *re.findall(r"VAEPAR_[A-Z_]+", scripts)}
    for name in ("VAEPAR_TILE_SIZ", "VAEPAR_ZZZ", "VAEPAR_FAMILY", "VAEPAR_INPUTS", "vaepar_mode", *known):
        monkeypatch.setenv(name, "auto")
    outcome = decode(files[:1], "kl", "--state", "raw")
    assert outcome.code == 0, outcome.err
    err = " ".join(outcome.err.split())
    assert "warning: VAEPAR_TILE_SIZ is set and no option is called so; did you mean VAEPAR_TILE_SIZE?" in err
    assert "VAEPAR_ZZZ is set and no option is called so;" not in err
    assert "VAEPAR_ZZZ is set and no option is called so" in err
    assert "VAEPAR_FAMILY is set" in err  # an option of the bench, which reads no variables
    assert "VAEPAR_INPUTS is set" in err
    assert "vaepar_mode is set and no option is called so; did you mean VAEPAR_MODE?" in err
    assert not any(f"{name} is set" in err for name in known)
    assert "VAEPAR" not in decode(files[:1], "kl", "--state", "raw", "--overwrite", "--quiet").err


def test_print_config_is_a_configuration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["decode", "x", "--model", 'my "model"', "--tile-size", "64", "--crf", "3", "--list", "l"]
    assert run([*command, "--print-config"]) == 0
    printed = capsys.readouterr().out
    found = tomllib.loads(printed)
    assert (found["model"], found["tile-size"], found["list"], found["format"]) == ('my "model"', 64, ["l"], "auto")
    (tmp_path / "again.toml").write_text(printed)
    assert run(["decode", "--config", str(tmp_path / "again.toml"), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--vae-parallel-size", "2"), "more than the 1 rank(s)"),
        (("--vae-parallel-size", "3", "--ranks", "4", "--dry-run"), "does not divide"),
        (("--vae-parallel-size", "many"), "whole number"),
        (("--grace", "-1"), "0 or more"),
        (("--max-restarts", "-1"), "0 or more"),
        (("--shard", "1"), "i/n"),
        (("--shard", "16/16"), "--shard is 16/16; it is i/n"),
        (("--dtype", "fp8"), "--dtype is 'fp8'"),
    ],
)
def test_usage(flags: tuple[str, ...], words: str, files: list[Path], decode: Decode) -> None:
    outcome = decode(files, "kl", "--state", "raw", *flags)
    assert outcome.code == 2
    assert words in outcome.err


def test_no_color_and_completion(tmp_path: Path) -> None:
    shown = run_command(["vaepar", "decode", "--help"], tmp_path, NO_COLOR="1", FORCE_COLOR="")
    assert shown.returncode == 0
    assert "\x1b[3" not in shown.stdout
    completed = run_command(
        ["vaepar"], tmp_path, _VAEPAR_COMPLETE="complete_bash", COMP_WORDS="vaepar de", COMP_CWORD="1"
    )
    assert "decode" in completed.stdout
