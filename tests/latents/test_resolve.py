"""What a file means: decided where it can be known, asked for where not, and said in both cases."""

from __future__ import annotations

import logging
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.latents.files import FLUX1, FLUX2, KL, QWEN, WAN, noise, resolved, save, save_comfyui
from vaepar.errors import AmbiguousInputError, InputError, UsageError
from vaepar.latents import LatentLayout, LatentRequest, LatentState, VaeFacts, read_header, read_latent, to_vae_input

WAN22 = VaeFacts.from_config(
    "AutoencoderKLWan",
    {
        "z_dim": 48,
        "is_residual": True,
        "patch_size": 2,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    },
)
LAYERED = VaeFacts.from_config("AutoencoderKLQwenImage", {"input_channels": 4})


def refusal(path: Path, vae: VaeFacts, kind: type[InputError] = InputError, **request: Any) -> str:
    with pytest.raises(InputError) as caught:
        resolved(path, vae, **request)
    assert type(caught.value) is kind
    text = str(caught.value)
    assert text.isprintable()
    assert str(path) in text
    return text


# shape, VAE, request -> layout, state, (height, width), frames, the VAE's input
KNOWN: list[tuple[tuple[int, ...], VaeFacts, dict[str, Any], str, str, tuple[int, int], int, tuple[int, ...]]] = [
    ((2, 4, 6, 10), KL, {"state": "norm"}, "bchw", "norm", (48, 80), 1, (2, 4, 6, 10)),
    ((4, 6, 10), KL, {"state": "raw"}, "chw", "raw", (48, 80), 1, (1, 4, 6, 10)),
    ((2, 16, 6, 10), FLUX1, {"state": "norm"}, "bchw", "norm", (48, 80), 1, (2, 16, 6, 10)),
    ((2, 15, 64), FLUX1, {"size": (48, 80)}, "packed2x2", "norm", (48, 80), 1, (2, 16, 6, 10)),
    ((2, 15, 64), FLUX1, {"size": (80, 48)}, "packed2x2", "norm", (80, 48), 1, (2, 16, 10, 6)),
    ((1, 15, 64), FLUX1, {"size": (55, 95)}, "packed2x2", "norm", (48, 80), 1, (1, 16, 6, 10)),
    ((2, 32, 6, 10), FLUX2, {}, "bchw", "raw", (48, 80), 1, (2, 32, 6, 10)),
    ((2, 32, 6, 10), FLUX2, {"state": "norm"}, "bchw", "norm", (48, 80), 1, (2, 32, 6, 10)),
    ((32, 5, 7), FLUX2, {}, "chw", "raw", (40, 56), 1, (1, 32, 5, 7)),
    ((2, 15, 128), FLUX2, {"size": (48, 80)}, "tokens128", "norm", (48, 80), 1, (2, 32, 6, 10)),
    ((2, 128, 3, 5), FLUX2, {"state": "norm"}, "grid128", "norm", (48, 80), 1, (2, 32, 6, 10)),
    ((128, 3, 5), FLUX2, {"state": "raw"}, "cgrid128", "raw", (48, 80), 1, (1, 32, 6, 10)),
    ((2, 15, 64), QWEN, {"size": (48, 80)}, "packed2x2", "norm", (48, 80), 1, (2, 16, 1, 6, 10)),
    ((2, 16, 1, 6, 10), QWEN, {"state": "norm"}, "bcfhw", "norm", (48, 80), 1, (2, 16, 1, 6, 10)),
    ((4, 16, 8, 8), QWEN, {"state": "raw"}, "bchw", "raw", (64, 64), 1, (4, 16, 1, 8, 8)),
    ((16, 6, 10), QWEN, {"state": "raw"}, "chw", "raw", (48, 80), 1, (1, 16, 1, 6, 10)),
    ((1, 16, 16, 40, 64), WAN, {"state": "norm"}, "bcfhw", "norm", (320, 512), 61, (1, 16, 16, 40, 64)),
    ((4, 16, 8, 8), WAN, {"state": "raw"}, "bchw", "raw", (64, 64), 1, (4, 16, 1, 8, 8)),
    ((16, 5, 6, 10), WAN, {"state": "norm"}, "cfhw", "norm", (48, 80), 17, (1, 16, 5, 6, 10)),
    ((16, 16, 6, 10), WAN, {"state": "norm", "layout": "bchw"}, "bchw", "norm", (48, 80), 1, (16, 16, 1, 6, 10)),
    ((16, 16, 6, 10), WAN, {"state": "norm", "layout": "cfhw"}, "cfhw", "norm", (48, 80), 61, (1, 16, 16, 6, 10)),
    ((2, 48, 3, 6, 10), WAN22, {"state": "norm"}, "bcfhw", "norm", (96, 160), 9, (2, 48, 3, 6, 10)),
    ((16, 6, 64), FLUX1, {"state": "raw", "size": (48, 512)}, "chw", "raw", (48, 512), 1, (1, 16, 6, 64)),
    (
        (1, 16, 5, 6, 10),
        WAN,
        {"state": "norm", "trim_latent_frames": 2},
        "bcfhw",
        "norm",
        (48, 80),
        9,
        (1, 16, 3, 6, 10),
    ),
]


@pytest.mark.parametrize(
    ("shape", "vae", "request_", "layout", "state", "size", "frames", "latent"),
    KNOWN,
    ids=[f"{vae.family}-{'x'.join(map(str, shape))}-{request}" for shape, vae, request, *_ in KNOWN],
)
def test_plain_tensors_of_every_family(
    tmp_path: Path,
    shape: tuple[int, ...],
    vae: VaeFacts,
    request_: dict[str, Any],
    layout: str,
    state: str,
    size: tuple[int, int],
    frames: int,
    latent: tuple[int, ...],
) -> None:
    facts = resolved(save(tmp_path / "x.safetensors", noise(*shape)), vae, **request_)
    assert (facts.layout, facts.state) == (LatentLayout(layout), LatentState(state))
    assert (facts.height, facts.width, facts.num_frames) == (*size, frames)
    assert facts.latent_shape == latent
    assert facts.batch == latent[0]
    assert any(line.startswith(f"layout {layout}:") for line in facts.decisions)
    assert any(line.startswith(f"state {state}:") for line in facts.decisions)
    assert all(line.isprintable() for line in facts.decisions)
    assert pickle.loads(pickle.dumps(facts)) == facts
    bn = (torch.zeros(128), torch.ones(128), 1e-4)
    z = to_vae_input(read_latent(facts), facts, vae, dtype=torch.float32, bn=bn)
    assert tuple(z.shape) == latent


@pytest.mark.parametrize(
    ("shape", "vae", "request_", "flag"),
    [
        ((1, 4, 6, 10), KL, {}, "--state"),
        ((1, 16, 5, 6, 10), WAN, {}, "--state"),
        ((1, 16, 1, 6, 10), QWEN, {}, "--state"),
        ((1, 128, 3, 5), FLUX2, {}, "--state"),
        ((1, 15, 64), FLUX1, {}, "--size WxH"),
        ((1, 15, 64), QWEN, {}, "--size WxH"),
        ((1, 15, 128), FLUX2, {}, "--size WxH"),
        ((16, 16, 6, 10), WAN, {"state": "norm"}, "--layout"),
        ((16, 6, 64), FLUX1, {"state": "norm"}, "--layout"),
        ((128, 3, 128), FLUX2, {"state": "norm"}, "--layout"),
        ((32, 3, 128), FLUX2, {}, "--layout"),
    ],
)
def test_what_cannot_be_known_is_asked_for(
    tmp_path: Path, shape: tuple[int, ...], vae: VaeFacts, request_: dict[str, Any], flag: str
) -> None:
    path = save(tmp_path / "x.safetensors", noise(*shape))
    assert flag in refusal(path, vae, AmbiguousInputError, **request_)


@pytest.mark.parametrize(
    ("shape", "vae", "request_", "part"),
    [
        ((1, 3, 6, 10), KL, {"state": "raw"}, "[1, 3, 6, 10] does not fit; AutoencoderKL takes bchw [B, 4, H, W]"),
        ((1, 16, 6, 10), KL, {"state": "raw"}, "does not fit"),
        ((1, 4, 1, 6, 10), KL, {"state": "raw"}, "does not fit"),
        ((1, 1, 15, 128), FLUX2, {"size": (48, 80)}, "[1, 1, 15, 128] does not fit"),
        ((1, 48, 3, 6, 10), WAN, {"state": "norm"}, "does not fit"),
        ((1, 16, 3, 6, 10), WAN22, {"state": "norm"}, "bcfhw [B, 48, F, H, W]"),
        ((1, 15, 64), FLUX1, {"size": (64, 64)}, "has 15 packed tokens; 64x64 (--size) makes 16"),
        ((1, 15, 64), FLUX1, {"size": (8, 8)}, "8x8 (--size) makes 0"),
        ((1, 4, 6, 10), KL, {"state": "raw", "size": (80, 48)}, "holds 80x48 pixels"),
        ((1, 4, 6, 10), KL, {"state": "raw", "layout": "bcfhw"}, "is not of the layout bcfhw"),
        ((1, 4, 6, 10), KL, {"state": "raw", "layout": "chw"}, "is not of the layout chw"),
        ((1, 32, 5, 6), FLUX2, {"state": "norm"}, "multiples of 2 are needed"),
        ((1, 16, 3, 6, 10), WAN, {"state": "norm", "trim_latent_frames": 3}, "has 3 latent frames"),
        ((1, 4, 6, 10), KL, {"state": "norm", "trim_latent_frames": 1}, "has 1 latent frames"),
        ((1, 16, 3, 6, 10), LAYERED, {"state": "norm"}, "3 layers"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, shape: tuple[int, ...], vae: VaeFacts, request_: dict[str, Any], part: str
) -> None:
    assert part in refusal(save(tmp_path / "x.safetensors", noise(*shape)), vae, **request_)


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        ({"state": "normal"}, "--state is 'normal'; it is one of raw, norm"),
        ({"layout": "bhwc"}, "--layout is 'bhwc'; it is one of bchw"),
        ({"size": (0, 8)}, "--size"),
        ({"size": (8.0, 8)}, "--size"),
        ({"size": (8,)}, "--size"),
        ({"trim_latent_frames": -1}, "--trim-latent-frames"),
        ({"trim_latent_frames": True}, "--trim-latent-frames"),
        ({"state": "x\x1b[0m\n"}, "\\x1b"),
    ],
)
def test_a_request_that_cannot_be_is_a_usage_error(request_: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError) as caught:
        LatentRequest(**request_)
    assert part in str(caught.value)
    assert str(caught.value).isprintable()


def test_sizes_come_from_the_metadata_of_any_producer(tmp_path: Path) -> None:
    path = save(tmp_path / "x", noise(1, 15, 64), height="48", width="80")
    assert resolved(path, FLUX1).latent_shape == (1, 16, 6, 10)
    assert "(its metadata) makes 12" in refusal(save(tmp_path / "y", noise(1, 15, 64), height="48", width="64"), FLUX1)


def test_the_users_size_goes_before_the_metadata_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path / "x", noise(1, 15, 64), height="48", width="80")
    facts = resolved(path, FLUX1, size=(80, 48))
    assert facts.latent_shape == (1, 16, 10, 6)
    assert "48x80: asked for, against 80x48" in caplog.text


@pytest.mark.parametrize("height", ["", "-8", "4.8e1", "9" * 5000, "٤٨", "0", "48 ", "\x1b[2J"])
def test_broken_numbers_in_metadata_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, height: str) -> None:
    path = save(tmp_path / "x", noise(1, 15, 64), height=height, width="80")
    assert "--size WxH" in refusal(path, FLUX1, AmbiguousInputError)
    assert "metadata height is" in caplog.text
    assert "\x1b" not in caplog.text


# --- ComfyUI --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "vae", "layout", "state"),
    [
        ((1, 4, 6, 10), KL, "bchw", "raw"),
        ((1, 16, 6, 10), FLUX1, "bchw", "raw"),
        ((1, 16, 1, 6, 10), QWEN, "bcfhw", "raw"),
        ((1, 16, 3, 6, 10), WAN, "bcfhw", "raw"),
        ((16, 16, 6, 10), WAN, "bchw", "raw"),
        ((1, 128, 3, 5), FLUX2, "grid128", "norm"),
    ],
)
def test_comfyui_files_are_raw_but_for_flux2(
    tmp_path: Path, shape: tuple[int, ...], vae: VaeFacts, layout: str, state: str
) -> None:
    facts = resolved(save_comfyui(tmp_path / "x.latent", noise(*shape), prompt="{}", workflow="{}"), vae)
    assert (facts.layout.value, facts.state.value, facts.prescale) == (layout, state, None)
    assert facts.prompt is None  # ComfyUI's prompt is the node graph
    assert not any("not read" in line for line in facts.decisions)


def test_an_old_comfyui_file_is_scaled_as_loadlatent_does(tmp_path: Path) -> None:
    x = noise(1, 4, 6, 10, dtype=torch.float16)
    path = save_comfyui(tmp_path / "x.latent", x, version=False)
    for request in ({}, {"state": "raw"}):
        facts = resolved(path, KL, **request)
        assert any("1/0.18215" in line for line in facts.decisions)
        z = to_vae_input(read_latent(facts), facts, KL, dtype=torch.bfloat16)
        assert torch.equal(z, (x.float() * (1.0 / 0.18215)).to(torch.bfloat16))


def test_calling_an_old_comfyui_file_normalised_takes_the_numbers_as_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = noise(1, 4, 6, 10)
    facts = resolved(save_comfyui(tmp_path / "x.latent", x, version=False), KL, state="norm")
    assert facts.prescale is None
    assert torch.equal(to_vae_input(read_latent(facts), facts, KL, dtype=torch.float32), x / 0.18215)
    assert "state norm: asked for, against raw" in caplog.text


# --- musubi-tuner ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [True, False])
@pytest.mark.parametrize(
    ("shape", "vae", "layout", "latent"),
    [
        ((16, 6, 10), FLUX1, "chw", (1, 16, 6, 10)),
        ((128, 3, 5), FLUX2, "cgrid128", (1, 32, 6, 10)),
        ((128, 3, 128), FLUX2, "cgrid128", (1, 32, 6, 256)),
        ((16, 1, 6, 10), QWEN, "cfhw", (1, 16, 1, 6, 10)),
        ((16, 5, 6, 10), WAN, "cfhw", (1, 16, 5, 6, 10)),
        ((16, 16, 6, 10), WAN, "cfhw", (1, 16, 16, 6, 10)),
    ],
)
def test_musubi_files_are_normalised_without_batch(
    tmp_path: Path, shape: tuple[int, ...], vae: VaeFacts, layout: str, latent: tuple[int, ...], metadata: bool
) -> None:
    strings = {"seeds": "42", "prompt": "a fox", "infer_steps": "20"}
    strings |= {"height": str(8 * latent[-2]), "width": str(8 * latent[-1])}
    path = save(tmp_path / "x_latent.safetensors", noise(*shape), key="latent", **(strings if metadata else {}))
    facts = resolved(path, vae)
    assert (facts.layout.value, facts.state.value, facts.latent_shape) == (layout, "norm", latent)
    assert (facts.seed, facts.prompt) == (("42", "a fox") if metadata else (None, None))


def test_musubis_qwen_layers_are_a_batch_of_stills(tmp_path: Path) -> None:
    path = save(tmp_path / "x", noise(3, 16, 6, 10), key="latent", seeds="1")
    facts = resolved(path, QWEN)
    assert (facts.layout.value, facts.batch, facts.num_frames) == ("bchw", 3, 1)
    both = save(tmp_path / "y", noise(16, 16, 6, 10), key="latent", seeds="1")
    assert "--layout" in refusal(both, QWEN, AmbiguousInputError)


def test_the_key_latent_with_a_batch_axis_is_a_plain_tensor(tmp_path: Path) -> None:
    path = save(tmp_path / "x", noise(2, 4, 6, 10), key="latent")
    assert "--state" in refusal(path, KL, AmbiguousInputError)
    facts = resolved(path, KL, state="raw")
    assert (facts.layout.value, facts.header.producer) == ("bchw", "plain")
    stills = save(tmp_path / "y", noise(16, 16, 6, 10), key="latent")
    assert "--state" in refusal(stills, WAN, AmbiguousInputError, layout="bchw")


def test_metadata_against_the_shape_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(
        tmp_path / "x", noise(16, 5, 6, 10), key="latent", seeds="1", height="80", width="80", video_length="21"
    )
    facts = resolved(path, WAN)
    assert (facts.height, facts.width, facts.num_frames) == (48, 80, 17)
    assert "80x48: the shape's, against 80x80" in caplog.text
    assert "17 frames: the shape's, against video_length 21" in caplog.text


def test_a_contradicted_state_is_followed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path / "x", noise(16, 5, 6, 10), key="latent", seeds="1")
    assert resolved(path, WAN, state="raw").state is LatentState.RAW
    assert "state raw: asked for, against norm (musubi-tuner" in caplog.text
    caplog.clear()
    assert resolved(path, WAN, state="norm").state is LatentState.NORM
    assert not caplog.records


def test_the_same_latent_of_three_producers_gives_the_vae_the_same_bits(tmp_path: Path) -> None:
    """Normalised as a pipeline and musubi-tuner save it, and denormalised as ComfyUI does."""
    x = noise(1, 16, 3, 6, 10)
    plain = resolved(save(tmp_path / "plain", x), WAN, state="norm")
    musubi = resolved(save(tmp_path / "musubi", x[0], key="latent"), WAN)
    z = to_vae_input(read_latent(plain), plain, WAN, dtype=torch.float32)
    comfyui = resolved(save_comfyui(tmp_path / "comfyui.latent", z), WAN)
    for facts in (musubi, comfyui):
        assert torch.equal(to_vae_input(read_latent(facts), facts, WAN, dtype=torch.float32), z)
        assert facts.num_frames == plain.num_frames == 9


# --- rates and constants --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fps"),
    [("24", 24), ("24000/1001", Fraction(24000, 1001)), ("23.976", Fraction("23.976")), ("30.0", 30)],
)
def test_the_rate_of_the_file_goes_before_the_familys(tmp_path: Path, text: str, fps: Fraction | int) -> None:
    assert resolved(save(tmp_path / "x", noise(1, 16, 3, 6, 10), fps=text), WAN, state="raw").fps == fps


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1/0", "1e9", "1e999999999", "9" * 9000, "x", ""])
def test_a_rate_that_cannot_be_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    assert resolved(save(tmp_path / "x", noise(1, 16, 3, 6, 10), fps=text), WAN, state="raw").fps == 16
    assert "metadata fps is" in caplog.text


def test_default_rates(tmp_path: Path) -> None:
    assert resolved(save(tmp_path / "a", noise(1, 16, 3, 6, 10)), WAN, state="raw").fps == 16
    assert resolved(save(tmp_path / "b", noise(1, 48, 3, 6, 10)), WAN22, state="raw").fps == 24
    assert resolved(save(tmp_path / "c", noise(1, 4, 6, 10)), KL, state="raw").fps is None


def test_missing_constants_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A null scaling factor counts as 1, a null shift as 0; both used to end in a division by None."""
    vae = VaeFacts.from_config("AutoencoderKL", {"scaling_factor": None, "block_out_channels": [1] * 4})
    x = noise(1, 4, 6, 10)
    facts = resolved(save(tmp_path / "x", x), vae, state="norm")
    assert "scaling factor 1: the model's config has none" in facts.decisions
    assert torch.equal(to_vae_input(read_latent(facts), facts, vae, dtype=torch.float32), x)
    wan = VaeFacts.from_config("AutoencoderKLWan", {"latents_mean": None, "latents_std": None})
    y = noise(1, 16, 3, 6, 10)
    facts = resolved(save(tmp_path / "y", y), wan, state="norm")
    assert any("neither latents_mean nor latents_std" in line for line in facts.decisions)
    assert torch.equal(to_vae_input(read_latent(facts), facts, wan, dtype=torch.float32), y)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_other_tensors_of_the_file_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    save_file({"latents": noise(1, 4, 6, 10), "noise\x1b": noise(3)}, str(path))
    facts = resolved(path, KL, state="raw")
    assert any("not read: noise\\x1b" in line for line in facts.decisions)
    assert read_header(path).other_keys == ("noise\x1b",)
