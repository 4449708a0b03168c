"""Whole runs of ``vaepar encode``, and back by ``vaepar decode``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import skimage.data
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.conftest import Decode, Outcome, run_command
from tests.media.helpers import read_video
from vaepar.cli.main import run
from vaepar.demo import demo_vae_folder

Encode = Callable[..., Outcome]


@pytest.fixture
def encode(tmp_path: Path, capsys: pytest.CaptureFixture[str], model_folders: dict[str, Path]) -> Encode:
    """``encode(inputs, model, *flags)`` in this process, outputs in ``tmp_path/enc``."""

    def call(inputs: list[Path | str], model: str, *flags: str) -> Outcome:
        report = tmp_path / "encode.json"
        report.unlink(missing_ok=True)
        capsys.readouterr()
        command = ["encode", *map(str, inputs), "--model", str(model_folders.get(model, model))]
        code = run([*command, "--out", str(tmp_path / "enc"), "--report", str(report), *flags])
        printed = capsys.readouterr()
        found = json.loads(report.read_text()) if report.exists() else {}
        return Outcome(code, printed.out, printed.err, found)

    return call


def picture(path: Path, height: int = 64, width: int = 48) -> Path:
    """A real photograph, cut to a size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(skimage.data.chelsea()[40 : 40 + height, 90 : 90 + width]).save(path)
    return path


def clip(path: Path, frames: int = 9, height: int = 64, width: int = 96, fps: str = "12") -> Path:
    """A real moving crop as MP4."""
    photo = skimage.data.chelsea()
    film = np.stack([photo[20 + i : 20 + i + height, 30 + 2 * i : 30 + 2 * i + width] for i in range(frames)])
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{width}x{height}", "-r", fps, "-i", "-", "-crf", "5", "-pix_fmt", "yuv420p", str(path)]
    subprocess.run(command, input=film.tobytes(), check=True, timeout=60)
    return path


def size_of(path: Path) -> tuple[int, int]:
    """(width, height) of a picture."""
    with Image.open(path) as opened:
        return opened.size


def tensor_of(path: Path) -> Tensor:
    """[1, 3, H, W] in [-1, 1] as diffusers' image processor makes it."""
    pixels = torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy()).permute(2, 0, 1)[None]
    return pixels.float() / 255 * 2 - 1


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize(
    ("model", "cls"),
    [
        ("kl", AutoencoderKL),
        ("flux2", AutoencoderKLFlux2),
        ("qwenimage", AutoencoderKLQwenImage),
        ("wan", AutoencoderKLWan),
        ("wan22", AutoencoderKLWan),
    ],
)
def test_a_picture_equals_what_diffusers_encodes(
    model: str, cls: type, tmp_path: Path, encode: Encode, model_folders: dict[str, Path]
) -> None:
    file = picture(tmp_path / "cat.png", 64, 48)
    outcome = encode([file], model, "--state", "raw")
    assert outcome.code == 0, outcome.err
    vae = cls.from_pretrained(model_folders[model])
    x = tensor_of(file)
    with torch.no_grad():
        want = vae.encode(x if model in ("kl", "flux2") else x[:, :, None]).latent_dist.mode()
    assert torch.equal(load_file(tmp_path / "enc" / "cat.safetensors")["latents"], want)
    facts = metadata_of(tmp_path / "enc" / "cat.safetensors")
    assert (facts["height"], facts["width"], facts["state"], facts["posterior"]) == ("64", "48", "raw", "mode")
    assert facts["source"] == "cat.png"
    assert len(facts["vae_sha256"]) == 64


def test_latents_of_other_weights_are_noted(
    tmp_path: Path, encode: Encode, decode: Decode, model_folders: dict[str, Path]
) -> None:
    """A fine-tuned VAE has the shapes of the one it came from; only the hash tells them apart."""
    assert encode([picture(tmp_path / "cat.png", 64, 64)], "kl").code == 0
    own = tmp_path / "enc" / "cat.safetensors"
    made = metadata_of(own)["vae_sha256"]
    other = tmp_path / "other.safetensors"
    save_file(load_file(own), other, metadata=metadata_of(own) | {"vae_sha256": "0" * 64})
    outcome = decode([own, other], "kl")
    assert outcome.code == 0, outcome.err
    assert not [note for note in outcome.row("cat.safetensors")["notes"] if "weights" in note]
    (note,) = [note for note in outcome.row("other.safetensors")["notes"] if "weights" in note]
    assert note == f"the file was made with other weights, sha256 {'0' * 12}; those of the model are {made[:12]}"


def test_the_normalised_state_is_the_pipelines(tmp_path: Path, encode: Encode, model_folders: dict[str, Path]) -> None:
    file = picture(tmp_path / "cat.png", 64, 64)
    assert encode([file], "wan").code == 0
    vae = AutoencoderKLWan.from_pretrained(model_folders["wan"])
    with torch.no_grad():
        raw = vae.encode(tensor_of(file)[:, :, None]).latent_dist.mode()
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    got = load_file(tmp_path / "enc" / "cat.safetensors")["latents"]
    assert torch.allclose(got, (raw - mean) / std, atol=1e-6, rtol=0)  # one rounding apart: divided or multiplied


def test_a_clip_goes_there_and_back(tmp_path: Path, encode: Encode) -> None:
    film = clip(tmp_path / "clip.mp4", frames=9, fps="24000/1001")
    assert encode([film], "demo").code == 0
    assert load_file(tmp_path / "enc" / "clip.safetensors")["latents"].shape == (1, 16, 3, 8, 12)
    back = ["decode", str(tmp_path / "enc" / "clip.safetensors"), "--model", "demo", "--out", str(tmp_path / "dec")]
    assert run(back) == 0
    assert read_video(tmp_path / "dec" / "clip.mp4").shape == (9, 64, 96, 3)
    probe = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(tmp_path / "dec" / "clip.mp4")]
    said = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=60).stderr
    assert "23.98 fps" in said
    assert "bt709" in said


def test_a_photograph_survives_the_demo_vae(tmp_path: Path, encode: Encode) -> None:
    file = picture(tmp_path / "cat.png", 192, 192)
    outcome = encode([file], "demo", "--preview")
    assert outcome.code == 0, outcome.err
    note = next(note for note in outcome.row("cat.png")["notes"] if "PSNR" in note)
    assert float(note.split()[-2]) > 25, note
    assert size_of(tmp_path / "enc" / "cat.preview.png") == (384, 192)


def test_padded_sizes_and_frames_come_back_as_they_were(tmp_path: Path, encode: Encode) -> None:
    odd = tmp_path / "odd.png"
    Image.fromarray(skimage.data.chelsea()[:77, :101]).save(odd)
    film = clip(tmp_path / "clip.mp4", frames=7)
    refused = encode([odd, film], "wan")
    assert refused.code == 4
    assert "96" in refused.row("odd.png")["error"]
    assert "--fit" in refused.row("odd.png")["error"]
    assert "--frames-fit" in refused.row("clip.mp4")["error"]
    assert encode([odd, film], "wan", "--fit", "pad", "--frames-fit", "pad").code == 0
    files = [str(tmp_path / "enc" / name) for name in ("odd.safetensors", "clip.safetensors")]
    model = str(demo_vae_folder())
    assert run(["decode", *files, "--model", model, "--out", str(tmp_path / "dec")]) == 0
    assert size_of(tmp_path / "dec" / "odd.png") == (101, 77)
    assert read_video(tmp_path / "dec" / "clip.mp4").shape == (7, 64, 96, 3)


def test_stills_stay_stills_with_a_video_vae(tmp_path: Path, encode: Encode) -> None:
    files: list[Path | str] = [
        picture(tmp_path / "many" / f"{name}.png", 32 + 8 * i, 32) for i, name in enumerate("abcd")
    ]
    assert encode(files, "qwenimage").code == 0
    shapes = [load_file(tmp_path / "enc" / f"{name}.safetensors")["latents"].shape for name in "abcd"]
    assert shapes == [(1, 16, 1, 4 + i, 4) for i in range(4)]
    assert all((tmp_path / "enc" / f"{name}.safetensors").stat().st_size < 20_000 for name in "abcd")


@pytest.mark.parametrize(("model", "mode"), [("wan", "tile"), ("kl", "auto"), ("flux2", "tile")])
def test_other_programs_layouts_decode_to_the_same_pictures(
    model: str, mode: str, tmp_path: Path, encode: Encode, model_folders: dict[str, Path]
) -> None:
    file = picture(tmp_path / "cat.png", 64, 64)
    for target in ("vaepar", "comfyui", "musubi"):
        assert encode([file], model, "--as", target, "--mode", mode).code == 0
    names = ["cat.safetensors", "cat.latent", "cat_latent.safetensors"]
    arguments = [str(tmp_path / "enc" / name) for name in names]
    command = ["decode", *arguments, "--model", str(model_folders[model]), "--out", str(tmp_path / "dec")]
    assert run([*command, "--name", "{stem}_{index}"]) == 0
    pictures = [np.asarray(Image.open(path)).astype(int) for path in sorted((tmp_path / "dec").iterdir())]
    assert len(pictures) == 3
    # Normalising and back rounds in float32, which can move a value over a half.
    assert max(np.abs(other - pictures[0]).max() for other in pictures[1:]) <= 1


def test_samples_depend_on_seed_and_name_only(tmp_path: Path, encode: Encode) -> None:
    first, second = picture(tmp_path / "a.png"), picture(tmp_path / "b.png")
    flags = ("--posterior", "sample", "--seed", "5", "--overwrite")
    assert encode([first, second], "kl", *flags).code == 0
    one = load_file(tmp_path / "enc" / "a.safetensors")["latents"]
    other = load_file(tmp_path / "enc" / "b.safetensors")["latents"]
    assert not torch.equal(one, other)
    assert encode([second, first], "kl", *flags).code == 0
    assert torch.equal(load_file(tmp_path / "enc" / "a.safetensors")["latents"], one)
    assert encode([first], "kl", *flags[:3], "6", "--overwrite").code == 0
    assert not torch.equal(load_file(tmp_path / "enc" / "a.safetensors")["latents"], one)


def test_the_folder_of_a_file_does_not_change_its_sample(
    tmp_path: Path, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = picture(tmp_path / "in" / "a.png")
    flags = ("--posterior", "sample", "--seed", "5", "--overwrite")
    latents = []
    for folder, named in ((tmp_path, file), (tmp_path, "in/a.png"), (tmp_path / "in", "a.png")):
        monkeypatch.chdir(folder)
        assert encode([named], "kl", *flags).code == 0
        latents.append(load_file(tmp_path / "enc" / "a.safetensors")["latents"])
    assert torch.equal(latents[0], latents[1])
    assert torch.equal(latents[0], latents[2])


def test_latents_that_are_not_finite_are_not_written(
    tmp_path: Path, encode: Encode, model_folders: dict[str, Path]
) -> None:
    """Weights that are finite and overflow: the file would be passed on and fail far from its cause."""
    vae = AutoencoderKL.from_pretrained(model_folders["kl"])
    vae.encoder.conv_out.bias.data.fill_(3e38)
    vae.quant_conv.weight.data.fill_(3e38)
    vae.save_pretrained(tmp_path / "hot")
    outcome = encode([picture(tmp_path / "a.png")], str(tmp_path / "hot"))
    assert outcome.code == 3
    assert "infinite of" in outcome.err or "NaN" in outcome.err
    assert not list((tmp_path / "enc").glob("*.safetensors"))


def test_a_missing_preview_is_made_and_nothing_else_changes(tmp_path: Path, encode: Encode) -> None:
    file = picture(tmp_path / "a.png")
    assert encode([file], "kl", "--posterior", "sample", "--seed", "7").code == 0
    before = (tmp_path / "enc" / "a.safetensors").read_bytes()
    outcome = encode([file], "kl", "--preview")
    assert outcome.code == 0
    assert (tmp_path / "enc" / "a.safetensors").read_bytes() == before
    assert (tmp_path / "enc" / "a.preview.png").is_file()
    assert any("was there and is kept" in note for note in outcome.row("a.png")["notes"])
    photo = picture(tmp_path / "enc" / "b.preview.png").read_bytes()
    assert encode([picture(tmp_path / "b.png")], "kl", "--preview").code == 0
    assert (tmp_path / "enc" / "b.preview.png").read_bytes() == photo
    assert (tmp_path / "enc" / "b.safetensors").is_file()


def test_a_second_run_does_nothing(tmp_path: Path, encode: Encode) -> None:
    picture(tmp_path / "enc" / "cat.png")
    assert encode([tmp_path / "enc"], "kl").row("cat.png")["status"] == "ok"
    again = encode([tmp_path / "enc"], "kl")
    assert (again.code, again.row("cat.png")["status"]) == (0, "skipped")
    assert sorted(path.name for path in (tmp_path / "enc").iterdir()) == ["cat.png", "cat.safetensors"]


def test_bad_inputs_fail_alone(tmp_path: Path, encode: Encode) -> None:
    good = picture(tmp_path / "good.png")
    film = clip(tmp_path / "clip.mp4")
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(film.read_bytes()[:700])
    empty = tmp_path / "empty.png"
    empty.write_bytes(b"")
    tiny = picture(tmp_path / "tiny.png", 1, 1)
    text = tmp_path / "text.png"
    text.write_text("not a picture")
    alpha = tmp_path / "alpha.png"
    Image.new("RGBA", (32, 32), (255, 0, 0, 0)).save(alpha)
    outcome = encode([cut, empty, tiny, text, alpha, film, tmp_path / "none.png", good], "kl")
    assert outcome.code == 3
    for name in ("cut.mp4", "empty.png", "tiny.png", "text.png", "alpha.png", "clip.mp4", "none.png"):
        row = outcome.row(name)
        assert (row["status"], row["exit_code"]) == ("failed", 4), row
        assert name in row["error"]
        assert "\n" not in row["error"]
    assert outcome.row("good.png")["status"] == "ok"
    assert [path.name for path in (tmp_path / "enc").iterdir()] == ["good.safetensors"]
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--posterior", "mean"), "one of mode, sample"),
        (("--fit", "stretch"), "one of error, crop"),
        (("--frames", "1-10:2"), "x"),
        (("--as", "png"), "one of vaepar"),
        (("--as", "musubi", "--state", "raw"), "fixes state"),
        (("--save-dtype", "int8"), "one of float32"),
        (("--layout", "upside"), "one of"),
        (("--alpha", "purple"), "one of refuse"),
        (("--seed", "3"), "--posterior sample"),
        (("--layout", "bcfhw"), "--layout bcfhw is not one of the family 'kl'"),
        (("--frames-fit", "trim"), "takes single pictures"),
        (("--max-pixels", "0"), "--max-pixels is 0"),
        (("--alpha", "keep"), "3 channels"),
    ],
)
def test_usage_errors(flags: tuple[str, ...], words: str, tmp_path: Path, encode: Encode) -> None:
    outcome = encode([picture(tmp_path / "a.png")], "kl", *flags)
    assert outcome.code == 2, outcome.err
    assert words in outcome.err
    assert not (tmp_path / "enc").exists()


@pytest.mark.processes
def test_two_ranks_encode_what_one_does(tmp_path: Path, encode: Encode, model_folders: dict[str, Path]) -> None:
    film = clip(tmp_path / "clip.mp4", frames=9)
    assert encode([film], "wan", "--tile-size", "48", "--tile-stride", "32").code == 0
    one = load_file(tmp_path / "enc" / "clip.safetensors")["latents"]
    command = ["vaepar", "encode", str(film), "--model", str(model_folders["wan"]), "--ranks", "2", "--tile-size", "48"]
    two = run_command([*command, "--tile-stride", "32", "--out", "two", "--preview"], tmp_path)
    assert two.returncode == 0, two.stderr
    assert torch.equal(load_file(tmp_path / "two" / "clip.safetensors")["latents"], one)
    assert (tmp_path / "two" / "clip.preview.png").is_file()


def test_what_a_file_cannot_hold_is_said(tmp_path: Path, encode: Encode) -> None:
    odd = tmp_path / "odd.png"
    Image.fromarray(skimage.data.chelsea()[:60, :60]).save(odd)
    outcome = encode([odd], "kl", "--fit", "pad", "--as", "comfyui", "--fps", "24")
    notes = " ".join(outcome.row("odd.png")["notes"])
    assert "comfyui files cannot say what was padded" in notes
    assert "a still has no frame rate" in notes


def test_a_preview_that_is_missing_is_made(tmp_path: Path, encode: Encode) -> None:
    file = picture(tmp_path / "cat.png", 32, 32)
    assert encode([file], "kl").row("cat.png")["status"] == "ok"
    assert encode([file], "kl", "--preview").row("cat.png")["status"] == "ok"
    assert (tmp_path / "enc" / "cat.preview.png").is_file()
    assert encode([file], "kl", "--preview").row("cat.png")["status"] == "skipped"


def test_the_plan_of_an_encode(tmp_path: Path, encode: Encode) -> None:
    """Sizes, latents, memory and what is wrong, before anything is made."""
    files = [
        picture(tmp_path / "cat.png", 64, 96),
        clip(tmp_path / "walk.mp4", 9),
        picture(tmp_path / "odd.png", 60, 50),
    ]
    flags = ["--dry-run", "--json", "--ranks", "2", "--vae-parallel-size", "2", "--mode", "auto", "--tile-size", "64"]
    outcome = encode(files, "wan", *flags)
    assert outcome.code == 3, outcome.err
    assert not (tmp_path / "enc").exists()
    cat, walk, odd = [json.loads(line) for line in outcome.out.splitlines()][:3]
    assert (cat["status"], cat["width"], cat["height"], cat["frames"]) == ("due", 96, 64, 1)
    assert cat["plan"]["latent"] == [1, 16, 1, 8, 12]
    assert cat["plan"]["outputs"] == [str(tmp_path / "enc" / "cat.safetensors")]
    assert (walk["mode"], walk["plan"]["latent"]) == ("spatial_shard_width", [1, 16, 3, 8, 12])
    assert walk["plan"]["estimated_activations"] > cat["plan"]["estimated_activations"] > 0
    assert odd["status"] == "failed"
    assert "multiples" in odd["error"] or "48x56" in odd["error"] or "nearest" in odd["error"]
