"""Whole runs of ``vaepar decode`` on real files, compared with what diffusers makes of the same latents."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from tests.cli.conftest import Decode, run_command, save_latent, wan_latent
from tests.media.helpers import read_video

Pixels = npt.NDArray[np.uint8]


def bytes_of(pixels: Tensor) -> Pixels:
    """[C, t, H, W] in [-1, 1] as diffusers' post-processing would round it: [t, H, W, C]."""
    return ((pixels * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()


def denormalised(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """As the Wan pipelines do before they decode."""
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    return latents / std + mean


def sequence(folder: Path) -> Pixels:
    frames = sorted(folder.glob("*.png"))
    return np.stack([np.asarray(Image.open(frame)) for frame in frames])


def test_a_video_equals_what_diffusers_decodes(tmp_path: Path, decode: Decode, model_folders: dict[str, Path]) -> None:
    latents = wan_latent(frames=3, height=9, width=12)
    file = save_latent(tmp_path / "clip.safetensors", latents)
    outcome = decode([file], "wan", "--state", "norm", "--format", "png-sequence", "--tile-size", "64")
    assert outcome.code == 0, outcome.err
    vae = AutoencoderKLWan.from_pretrained(model_folders["wan"])
    vae.enable_tiling(64, 64, 48, 48)
    with torch.no_grad():
        want = bytes_of(vae.decode(denormalised(vae, latents)).sample[0])
    assert np.array_equal(sequence(tmp_path / "out" / "clip"), want)
    assert outcome.row("clip.safetensors")["mode"] == "tile"
    assert outcome.row("clip.safetensors")["frames"] == 9


def test_mp4_has_the_frames_the_size_and_the_rate(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "clip.safetensors", wan_latent(frames=3, height=5, width=7))
    outcome = decode([file], "wan", "--state", "norm")
    assert outcome.code == 0, outcome.err
    assert read_video(tmp_path / "out" / "clip.mp4").shape == (9, 40, 56, 3)
    row = outcome.row("clip.safetensors")
    assert (row["frames"], row["height"], row["width"], row["fps"]) == (9, 40, 56, 16.0)
    assert row["peak_bytes"][0] > 1e6
    assert "state norm: asked for" in row["notes"]
    assert "clip.safetensors" in outcome.err


@pytest.mark.parametrize(
    ("model", "cls", "shape"),
    [
        ("kl", AutoencoderKL, (1, 4, 8, 6)),
        ("flux2", AutoencoderKLFlux2, (1, 32, 6, 8)),
        ("qwenimage", AutoencoderKLQwenImage, (1, 16, 1, 6, 5)),
        ("wan22", AutoencoderKLWan, (1, 48, 1, 5, 6)),
    ],
)
def test_a_picture_of_every_family(
    model: str, cls: type, shape: tuple[int, ...], tmp_path: Path, decode: Decode, model_folders: dict[str, Path]
) -> None:
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    outcome = decode([save_latent(tmp_path / "picture.safetensors", latents)], model, "--state", "raw")
    assert outcome.code == 0, outcome.err
    vae = cls.from_pretrained(model_folders[model])
    with torch.no_grad():
        pixels = vae.decode(latents).sample[0]
    want = bytes_of(pixels if pixels.dim() == 4 else pixels[:, None])[0]
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out" / "picture.png")), want)


def test_three_producers_of_one_latent_give_equal_frames(
    tmp_path: Path, decode: Decode, model_folders: dict[str, Path]
) -> None:
    latents = wan_latent(frames=2)
    vae = AutoencoderKLWan.from_pretrained(model_folders["wan"])
    plain = save_latent(tmp_path / "plain.safetensors", latents)
    musubi = save_latent(tmp_path / "musubi_latent.safetensors", latents[0], "latent", {"height": "48", "width": "64"})
    comfy = tmp_path / "comfy.latent"
    save_file(
        {"latent_tensor": denormalised(vae, latents).contiguous(), "latent_format_version_0": torch.tensor([])}, comfy
    )
    assert decode([plain], "wan", "--state", "norm", "--format", "png-sequence").code == 0
    assert decode([musubi, comfy], "wan", "--format", "png-sequence").code == 0
    want = sequence(tmp_path / "out" / "plain")
    assert np.array_equal(sequence(tmp_path / "out" / "musubi_latent"), want)
    assert np.array_equal(sequence(tmp_path / "out" / "comfy"), want)


def test_what_a_plain_file_cannot_tell_is_asked_for(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "clip.safetensors", wan_latent())
    outcome = decode([file], "wan")
    assert outcome.code == 4
    assert "--state" in outcome.err
    assert not list((tmp_path / "out").iterdir())


def test_a_batch_gives_one_output_an_item(tmp_path: Path, decode: Decode) -> None:
    latents = torch.randn((3, 4, 6, 5), generator=torch.Generator().manual_seed(0))
    together = save_latent(tmp_path / "batch.safetensors", latents)
    alone = save_latent(tmp_path / "second.safetensors", latents[1:2])
    outcome = decode([together, alone], "kl", "--state", "norm")
    assert outcome.code == 0, outcome.err
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["batch_0000.png", "batch_0001.png", "batch_0002.png", "second.png"]
    # One value of 255: a convolution may add in another order for another place in memory.
    pictures = [
        np.asarray(Image.open(tmp_path / "out" / name)).astype(int) for name in ("batch_0001.png", "second.png")
    ]
    assert np.abs(pictures[0] - pictures[1]).max() <= 1


def test_whole_outputs_are_skipped_unless_overwritten(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "a.safetensors", torch.zeros(1, 4, 4, 4))
    output = tmp_path / "out" / "a.png"
    assert decode([file], "kl", "--state", "raw").code == 0
    first = output.stat().st_mtime_ns
    again = decode([file], "kl", "--state", "raw")
    assert (again.code, again.row("a.safetensors")["status"], output.stat().st_mtime_ns) == (0, "skipped", first)
    assert "is there already" in again.err
    replaced = decode([file], "kl", "--state", "raw", "--overwrite")
    assert (replaced.code, replaced.row("a.safetensors")["status"]) == (0, "ok")
    assert output.stat().st_mtime_ns > first
    output.write_bytes(b"")  # an empty file is not whole
    assert decode([file], "kl", "--state", "raw").row("a.safetensors")["status"] == "ok"


def test_folders_patterns_and_trees(tmp_path: Path, decode: Decode) -> None:
    for name in ("in/a", "in/b", "in/deep/c"):
        save_latent(tmp_path / f"{name}.safetensors", torch.zeros(1, 4, 4, 4))
    (tmp_path / "in" / "notes.txt").write_text("not a latent")
    assert [Path(r["path"]).name for r in decode([tmp_path / "in"], "kl", "--state", "raw").report["files"]] == [
        "a.safetensors",
        "b.safetensors",
    ]
    assert decode([tmp_path / "in"], "kl", "--state", "raw", "--recursive").code == 0
    assert (tmp_path / "out" / "deep" / "c.png").is_file()
    pattern = decode([f"{tmp_path}/in/[b]*.safetensors"], "kl", "--state", "raw")
    assert [Path(r["path"]).name for r in pattern.report["files"]] == ["b.safetensors"]
    nothing = decode([f"{tmp_path}/in/z*", tmp_path / "out"], "kl", "--state", "raw")
    assert nothing.code == 4
    assert "no file matches" in nothing.err
    assert "holds no file ending in" in nothing.err


def test_a_pipeline_folder_is_a_model(tmp_path: Path, decode: Decode, model_folders: dict[str, Path]) -> None:
    file = save_latent(tmp_path / "a.safetensors", torch.zeros(1, 4, 4, 4))
    pipeline = tmp_path / "pipeline"
    pipeline.mkdir()
    (pipeline / "model_index.json").write_text(json.dumps({"_class_name": "P", "vae": ["diffusers", "AutoencoderKL"]}))
    (pipeline / "vae").symlink_to(model_folders["kl"])
    assert decode([file], str(pipeline), "--state", "raw").code == 0


def test_tiles_of_one_file_do_not_leak_into_the_next_run(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "clip.safetensors", wan_latent(frames=1, height=9, width=12))
    assert decode([file], "wan", "--state", "raw").row(file.name)["mode"] == "direct"
    assert decode([file], "wan", "--state", "raw", "--overwrite", "--tile-size", "64").row(file.name)["mode"] == "tile"
    assert decode([file], "wan", "--state", "raw", "--overwrite").row(file.name)["mode"] == "direct"


def test_quiet_says_nothing_and_verbose_more(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "a.safetensors", torch.zeros(1, 4, 4, 4))
    assert decode([file], "kl", "--state", "raw", "-q").err == ""
    assert "ok: " in decode([file], "kl", "--state", "raw", "-v", "--overwrite").err


@pytest.mark.processes
def test_two_ranks_by_our_launcher_and_by_torchrun_give_the_bytes_of_one(
    tmp_path: Path, decode: Decode, model_folders: dict[str, Path]
) -> None:
    file = save_latent(tmp_path / "clip.safetensors", wan_latent(frames=3, height=9, width=12))
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\x00" * 20)
    flags = ["--model", str(model_folders["wan"]), "--state", "norm", "--tile-size", "64", "--report", "r.json"]
    arguments = ["decode", str(file), str(bad), *flags]
    assert decode([file, bad], "wan", "--state", "norm", "--tile-size", "64").code == 3
    one = (tmp_path / "out" / "clip.mp4").read_bytes()
    own = run_command(["vaepar", *arguments, "--ranks", "2", "--out", "own"], tmp_path)
    assert own.returncode == 3, own.stderr
    assert len(json.loads((tmp_path / "r.json").read_text())["files"][0]["peak_bytes"]) == 2
    assert own.stderr.count("failed: ") == 1
    assert "Traceback" not in own.stderr
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vaepar"]
    torchrun = run_command([*launcher, *arguments, "--out", "theirs"], tmp_path)
    assert torchrun.returncode == 1, torchrun.stderr  # torchrun's own code for any failure
    assert (tmp_path / "own" / "clip.mp4").read_bytes() == one
    assert (tmp_path / "theirs" / "clip.mp4").read_bytes() == one


def test_files_are_left_with_the_permissions_of_the_user(tmp_path: Path, decode: Decode) -> None:
    file = save_latent(tmp_path / "a.safetensors", torch.zeros(1, 4, 4, 4))
    assert decode([file], "kl", "--state", "raw").code == 0
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "out" / "a.png").stat().st_mode & 0o777 == 0o666 & ~umask


def test_only_the_missing_items_of_a_batch_are_made(tmp_path: Path, decode: Decode) -> None:
    batch = save_latent(tmp_path / "batch.safetensors", torch.zeros(2, 4, 4, 4))
    (tmp_path / "out").mkdir()
    kept = tmp_path / "out" / "batch_0000.png"
    kept.write_bytes(b"somebody's picture")
    assert decode([batch], "kl", "--state", "raw").code == 0
    assert kept.read_bytes() == b"somebody's picture"
    assert (tmp_path / "out" / "batch_0001.png").is_file()
    assert decode([batch], "kl", "--state", "raw", "--overwrite").code == 0
    assert kept.read_bytes() != b"somebody's picture"


def test_originals_are_believed_of_our_own_files_only(tmp_path: Path, decode: Decode) -> None:
    lying = save_latent(
        tmp_path / "plain.safetensors",
        torch.zeros(1, 4, 4, 4),
        metadata={"original_height": "9999", "original_width": "9999"},
    )
    assert decode([lying], "kl", "--state", "raw").code == 0
    with Image.open(tmp_path / "out" / "plain.png") as picture:
        assert picture.size == (32, 32)


def test_settings_of_the_other_kind_are_said_to_be_unused(tmp_path: Path, decode: Decode) -> None:
    still = save_latent(tmp_path / "still.safetensors", wan_latent(frames=1))
    film = save_latent(tmp_path / "film.safetensors", wan_latent(frames=2))
    outcome = decode([still, film], "wan", "--state", "norm", "--crf", "18", "--png-level", "9")
    assert outcome.code == 0
    assert "--crf not used: the output is png" in outcome.row("still.safetensors")["notes"]
    assert "--png-level not used: the output is mp4" in outcome.row("film.safetensors")["notes"]


def test_hidden_files_are_passed_over_and_numbers_sort_by_value(tmp_path: Path, decode: Decode) -> None:
    for name in ("shot10", "shot2", "._shot2"):
        save_latent(tmp_path / "in" / f"{name}.safetensors", torch.randn(1, 4, 2, 2))
    outcome = decode([tmp_path / "in"], "kl", "--state", "raw", "--progress", "plain")
    assert [Path(row["path"]).stem for row in outcome.report["files"]] == ["shot2", "shot10"]


def test_an_input_that_cannot_be_looked_at_fails_alone(tmp_path: Path, decode: Decode) -> None:
    good = save_latent(tmp_path / "good.safetensors", torch.randn(1, 4, 2, 2))
    outcome = decode(["x" * 300, good], "kl", "--state", "raw")
    assert outcome.code == 3
    assert outcome.row("good.safetensors")["status"] == "ok"
    assert "cannot be looked at" in outcome.err
