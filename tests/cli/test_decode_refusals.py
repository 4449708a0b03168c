"""What ``vaepar decode`` refuses, and how it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from tests.cli.conftest import Decode, run_command, save_latent, wan_latent
from vaepar.cli.main import run

Pixels = npt.NDArray[np.uint8]


def test_one_bad_file_does_not_stop_the_others(tmp_path: Path, decode: Decode) -> None:
    good = save_latent(tmp_path / "good one ü.safetensors", torch.zeros(1, 4, 4, 4))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(good.read_bytes()[:-7])
    picture = tmp_path / "picture.safetensors"
    Image.new("RGB", (8, 8)).save(picture, format="PNG")
    wide = save_latent(tmp_path / "wide.safetensors", torch.zeros(1, 5, 4, 4))
    whole = save_latent(tmp_path / "whole.safetensors", torch.zeros(1, 4, 4, 4, dtype=torch.int32))
    missing = tmp_path / "missing.safetensors"
    outcome = decode([cut, picture, wide, whole, missing, good], "kl", "--state", "raw")
    assert outcome.code == 3
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["good one ü.png"]
    failures = [line for line in outcome.err.splitlines() if "failed: " in line]
    assert len(failures) == 5
    for name in ("cut", "picture", "wide", "whole", "missing"):
        row = outcome.row(f"{name}.safetensors")
        assert row["status"] == "failed"
        assert row["exit_code"] == 4
        assert f"{name}.safetensors" in row["error"]
    assert "Traceback" not in outcome.err


def test_links_to_nothing_in_a_folder_fail_by_name(tmp_path: Path, decode: Decode) -> None:
    folder = tmp_path / "in"
    save_latent(folder / "a.safetensors", wan_latent(frames=1))
    (folder / "b.safetensors").symlink_to("nowhere.safetensors")
    (folder / "c.safetensors").symlink_to("c.safetensors")
    (folder / "d.txt").symlink_to("nowhere")
    outcome = decode([folder], "wan", "--state", "norm")
    assert outcome.code == 3
    assert outcome.row("a.safetensors")["status"] == "ok"
    assert "b.safetensors: cannot be read: No such file" in outcome.err
    assert "c.safetensors: cannot be read: Too many levels" in outcome.err
    assert "d.txt" not in outcome.err


def test_nan_in_a_latent_warns_with_counts_and_writes_nothing(tmp_path: Path, decode: Decode) -> None:
    latents = wan_latent(frames=1)
    latents[0, 3, 0, 2, 2] = float("nan")
    latents[0, 4, 0, 2, 2] = float("inf")
    file = save_latent(tmp_path / "broken.safetensors", latents)
    outcome = decode([file], "wan", "--state", "norm")
    assert outcome.code == 3
    assert "1 NaN and 1 infinite" in outcome.err
    assert "NaN or infinite" in outcome.row("broken.safetensors")["error"]
    assert not list((tmp_path / "out").iterdir())
    allowed = decode([file], "wan", "--state", "norm", "--allow-nonfinite")
    assert allowed.code == 0
    assert (tmp_path / "out" / "broken.png").is_file()


def test_two_inputs_with_one_output_name(tmp_path: Path, decode: Decode) -> None:
    first = save_latent(tmp_path / "a" / "x.safetensors", torch.zeros(1, 4, 4, 4))
    second = save_latent(tmp_path / "b" / "x.safetensors", torch.ones(1, 4, 4, 4))
    third = save_latent(tmp_path / "b" / "y.safetensors", torch.ones(1, 4, 4, 4))
    outcome = decode([first, second, third], "kl", "--state", "raw")
    assert outcome.code == 3
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["y.png"]
    assert "would get the same output" in outcome.err
    named = decode([first, second], "kl", "--state", "raw", "--name", "{parent}_{stem}")
    assert named.code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a_x.png", "b_x.png", "y.png"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--mode", "diagonal"), "the modes are tile, auto"),
        (("--tile-size", "48", "--tile-stride", "64"), "beyond"),
        (("--tile-size", "60"), "multiples of 8 pixels"),
        (("--tile-size", "-8"), "1 or more"),
        (("--tile-stride", "32"), "go together"),
        (("--dtype", "int8"), "one of auto, float32"),
        (("--device", "abacus"), "one of auto, cpu, cuda"),
        (("--fps", "0"), "above 0"),
        (("--fps", "-1"), "above 0"),
        (("--crf", "99"), "from 0 to 51"),
        (("--codec", "theora"), "takes libx264"),
        (("--format", "gif"), "one of auto, png"),
        (("--format", "png", "--crf", "18"), "png has none"),
        (("--state", "cooked"), "one of raw, norm"),
        (("--layout", "sideways"), "one of"),
        (("--size", "64"), "WxH"),
        (("--name", "fixed"), "fields"),
        (("--name", "../{stem}"), "no folder"),
        (("--ranks", "0"), "1 or more"),
        (("--timeout", "inf"), "--timeout is inf"),
        (("--fps", "1e400000000"), "a number above 0"),
        (("--name", "{stem:>9999999999999}"), "at least one of the fields"),
        (("--name", "{stem:.0}"), "at least one of the fields"),
        (("--ranks", "-3", "--dry-run"), "1 or more"),
        (("-0",), "without a list"),
        (("--verbose", "--quiet"), "both"),
        (("--no-such-flag",), "No such option"),
    ],
)
def test_usage_errors_end_before_any_work(flags: tuple[str, ...], words: str, tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "a.safetensors", wan_latent())
    outcome = decode([file], "wan", *flags)
    assert outcome.code == 2, outcome.err
    assert words in " ".join(outcome.err.replace("│", " ").split())
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    assert "Traceback" not in outcome.err


def test_an_output_folder_that_cannot_be_made(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "a.safetensors", wan_latent())
    (tmp_path / "out").write_text("in the way")
    outcome = decode([file], "wan", "--state", "raw")
    assert outcome.code == 2
    assert "output folder" in outcome.err


def test_models_that_cannot_be_used(tmp_path: Path, decode: Decode, model_folders: dict[str, Path]) -> None:
    file = save_latent(tmp_path / "a.safetensors", wan_latent())

    def folder(name: str, change: dict[str, object], keep_weights: bool = True) -> str:
        target = tmp_path / name
        target.mkdir()
        config = json.loads((model_folders["wan"] / "config.json").read_text()) | change
        (target / "config.json").write_text(json.dumps(config))
        if keep_weights:
            (target / "diffusion_pytorch_model.safetensors").symlink_to(
                model_folders["wan"] / "diffusion_pytorch_model.safetensors"
            )
        return str(target)

    pickled = folder("pickled", {}, keep_weights=False)
    (Path(pickled) / "diffusion_pytorch_model.bin").write_bytes(b"\x80\x04")
    for model, words in (
        (str(tmp_path / "nowhere"), "no such folder"),
        (str(tmp_path), "neither config.json nor model_index.json"),
        (str(file), "is a file"),
        (folder("class", {"_class_name": "AutoencoderTiny"}), "the classes are AutoencoderKL"),
        (folder("none", {"_class_name": None}), "names no class"),
        (folder("bare", {}, keep_weights=False), "no weights"),
        (pickled, "pickle never"),
        (folder("other", {"num_res_blocks": 3}), "missing keys"),
        (folder("width", {"base_dim": 8}), "model"),
        (folder("words", {"base_dim": "four"}), "cannot be loaded"),
        ("someone/who-is-not-cached", "not in the local cache"),
    ):
        outcome = decode([file], model, "--state", "raw")
        assert outcome.code == 5, (model, outcome.err)
        assert words in outcome.err, (model, outcome.err)
        assert "Traceback" not in outcome.err
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_half_on_a_cpu_and_upcast_are_said(tmp_path: Path, decode: Decode) -> None:
    video = save_latent(tmp_path / "a.safetensors", wan_latent(frames=1))
    outcome = decode([video], "wan", "--state", "raw", "--dtype", "float16")
    assert outcome.code == 0
    assert "float16 on a CPU: using float32" in outcome.err
    picture = save_latent(tmp_path / "b.safetensors", torch.zeros(1, 4, 4, 4))
    outcome = decode([picture], "kl", "--state", "raw", "--dtype", "float16")
    assert "force_upcast" in outcome.err
    assert outcome.report["dtype"] == "float32"


def test_names_with_markup_and_escapes_are_shown_as_they_are(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "[red]x[16,64]\x1b[31m.safetensors", torch.zeros(1, 4, 4, 4))
    outcome = decode([file], "kl", "--state", "raw")
    assert outcome.code == 0
    assert "[red]x[16,64]" in outcome.err
    assert "\x1b" not in outcome.err


@pytest.mark.processes
def test_a_usage_error_under_a_launcher_is_said_once(tmp_path: Path) -> None:
    arguments = ["decode", "x.safetensors", "--model", "demo", "--tile-size", "8", "--tile-stride", "16"]
    own = run_command(["vaepar", *arguments, "--ranks", "2"], tmp_path)
    assert own.returncode == 2
    assert own.stderr.count("beyond") == 1
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vaepar"]
    assert run_command([*launcher, *arguments], tmp_path).stderr.count("pixels is beyond") == 1


def test_ranks_beyond_the_memory_are_refused(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "a.safetensors", wan_latent())
    outcome = decode([file], "wan", "--state", "raw", "--ranks", "100000")
    assert outcome.code == 2
    assert "GiB" in outcome.err


def test_a_report_that_cannot_be_written_is_known_before_the_work(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "a.safetensors", torch.zeros(1, 4, 4, 4))
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "elsewhere.json")
    latent = file.read_bytes()
    for report in (file / "report.json", tmp_path, link, file, Path("/dev/full")):
        flags = ["--model", "demo", "--state", "raw", "--out", str(tmp_path / "o"), "--report", str(report)]
        assert run(["decode", str(file), *flags]) == 2
    assert not list((tmp_path / "o").iterdir())
    assert file.read_bytes() == latent
    assert link.is_symlink()
    assert Path("/dev/full").is_char_device()


@pytest.mark.processes
def test_a_reader_that_leaves_does_not_stop_the_work(tmp_path: Path, model_folders: dict[str, Path]) -> None:
    for name in "abc":
        save_latent(tmp_path / "in" / f"{name}.safetensors", torch.zeros(1, 4, 4, 4))
    command = [sys.executable, "-m", "vaepar", "decode", "in", "--model", str(model_folders["kl"]), "--state", "raw"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*command, "--json", "--out", "out"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "standard output takes no more" in done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.png", "b.png", "c.png"]


def test_a_rate_for_a_still_is_refused_where_stills_are_asked_for(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "a.safetensors", torch.zeros(1, 4, 4, 4))
    outcome = decode([file], "kl", "--state", "raw", "--format", "png", "--fps", "24")
    assert outcome.code == 2
    assert "one picture (png) has none" in outcome.err


def test_an_item_of_a_batch_and_another_file_cannot_share_a_name(tmp_path: Path, decode: Decode) -> None:
    batch = save_latent(tmp_path / "b.safetensors", torch.randn(2, 4, 2, 2))
    other = save_latent(tmp_path / "b_0001.safetensors", torch.randn(1, 4, 2, 2))
    outcome = decode([batch, other], "kl", "--state", "raw")
    assert outcome.code == 2
    assert outcome.err.count("would get the same output") == 2
    assert not list((tmp_path / "out").iterdir())


def test_a_report_replaces_reports_only(tmp_path: Path, model_folders: dict[str, Path]) -> None:
    """Not even other JSON, such as the configuration of the model in use."""
    file = save_latent(tmp_path / "a.safetensors", torch.randn(1, 4, 2, 2))
    config = tmp_path / "config.json"
    config.write_text((model_folders["kl"] / "config.json").read_text())
    before = config.read_bytes()
    command = ["decode", str(file), "--model", str(model_folders["kl"]), "--state", "raw", "--out", str(tmp_path / "o")]
    assert run([*command, "--report", str(config)]) == 2
    assert config.read_bytes() == before
    assert run([*command, "--report", str(tmp_path / "o" / "a.png")]) == 2
    report = tmp_path / "mine.json"
    for _ in range(2):
        assert run([*command, "--report", str(report)]) == 0
    assert json.loads(report.read_text())["counts"] == {"skipped": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers_per_block": 1000000}, "1 to 64 is possible"),
        ({"_class_name": "AutoencoderKLWan", "scale_factor_spatial": None}, "scale_factor_spatial is None"),
        ({"_class_name": "AutoencoderKLWan", "dropout": float("nan")}, "dropout is nan"),
    ],
)
def test_configurations_that_would_be_built_for_hours_or_fail_late(
    changes: dict[str, object], words: str, tmp_path: Path, decode: Decode, model_folders: dict[str, Path]
) -> None:
    source = model_folders["wan" if "_class_name" in changes else "kl"]
    (tmp_path / "m").mkdir()
    for path in source.iterdir():
        (tmp_path / "m" / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | changes))
    file = save_latent(tmp_path / "a.safetensors", torch.randn(1, 4, 2, 2))
    outcome = decode([file], str(tmp_path / "m"), "--state", "raw")
    assert outcome.code == 5
    assert words in outcome.err


def test_names_that_are_too_long_to_be_looked_at(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "a.safetensors", torch.randn(1, 4, 2, 2))
    assert decode([file], "x" * 5000, "--state", "raw").code == 5
    assert run(["decode", str(file), "--model", "demo", "--report", "x" * 5000]) == 2
    assert run(["inspect", "x" * 5000]) == 4
