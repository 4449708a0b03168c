"""Unpacking and denormalising against diffusers' own lines, bit for bit.

No tolerance: the same operations in the same order and dtypes give the same bits.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.latents.files import FLUX1, FLUX2, MODELS, QWEN, WAN, facts_of, noise, resolved, save
from tests.latents.pipelines import decode_input, static_method
from tests.models import make_flux2, make_kl, make_qwenimage, make_wan21, make_wan22
from vaepar.latents import LatentLayout, LatentState, VaeFacts, from_vae_output, read_latent, to_vae_input
from vaepar.latents.normalise import BatchNorm
from vaepar.latents.packing import fold, grid_to_tokens, pack, tokens_to_grid, unfold, unpack

HALVES = (torch.float32, torch.bfloat16)
PAIRS = [(stored, vae) for stored in (*HALVES, torch.float16) for vae in HALVES]
FLUX = "flux/pipeline_flux.py"
FLUX2_DEV = "flux2/pipeline_flux2.py"
QWEN_IMAGE = "qwenimage/pipeline_qwenimage.py"
Z_IMAGE = "z_image/pipeline_z_image.py"
SD3 = "stable_diffusion_3/pipeline_stable_diffusion_3.py"
SD = "stable_diffusion/pipeline_stable_diffusion.py"
SDXL = "stable_diffusion_xl/pipeline_stable_diffusion_xl.py"


def kl(**config: Any) -> Any:
    vae = make_kl(real_topology=config.pop("channels", 4) == 16)
    vae.register_to_config(**config)
    return vae


def batch_norm(vae: Any) -> BatchNorm | None:
    bn = getattr(vae, "bn", None)
    return None if bn is None else (bn.running_mean, bn.running_var, vae.config.batch_norm_eps)


def ours(path: Path, vae: Any, dtype: torch.dtype, **request: Any) -> torch.Tensor:
    """The VAE's input by way of the file: header, facts, tensor, arithmetic."""
    vae_facts = facts_of(vae)
    facts = resolved(path, vae_facts, **request)
    result = to_vae_input(read_latent(facts), facts, vae_facts, dtype=dtype, bn=batch_norm(vae))
    assert tuple(result.shape) == facts.latent_shape
    assert result.is_contiguous()
    return result


def same(result: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal bits, where the pipelines that denormalise in the latent's dtype leave the cast to the VAE."""
    assert result.dtype == dtype
    assert result.shape == reference.shape
    assert torch.equal(result, reference.to(dtype))


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_flux1_tokens_of_a_portrait_follow_the_pipeline(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    vae = kl(channels=16, scaling_factor=0.3611, shift_factor=0.1159).to(dtype)
    tokens = noise(2, 15, 64, dtype=stored)
    path = save(tmp_path / "t.safetensors", tokens)
    expected = decode_input(FLUX, vae, tokens, ("_unpack_latents",), height=80, width=48)
    same(ours(path, vae, dtype, size=(80, 48)), expected, dtype)


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_flux2_tokens_follow_the_pipeline(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    vae = make_flux2().to(dtype)
    tokens = noise(2, 15, 128, dtype=stored)
    path = save(tmp_path / "t.safetensors", tokens)
    ids = static_method(FLUX2_DEV, "_prepare_latent_ids")(torch.empty(2, 128, 3, 5))
    methods = ("_unpack_latents_with_ids", "_unpatchify_latents")
    expected = decode_input(FLUX2_DEV, vae, tokens, methods, latent_ids=ids)
    same(ours(path, vae, dtype, size=(48, 80)), expected, dtype)


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_qwen_tokens_follow_the_pipeline(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    vae = make_qwenimage().to(dtype)
    tokens = noise(2, 15, 64, dtype=stored)
    path = save(tmp_path / "t.safetensors", tokens)
    expected = decode_input(QWEN_IMAGE, vae, tokens, ("_unpack_latents",), height=48, width=80)
    result = ours(path, vae, dtype, size=(48, 80))
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


@pytest.mark.parametrize("make", [make_wan21, make_wan22])
@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_wan_latents_follow_the_pipeline(tmp_path: Path, make: Any, stored: torch.dtype, dtype: torch.dtype) -> None:
    vae = make().to(dtype)
    if vae.config.z_dim == 48:
        statistics = noise(2, 48, seed=3).abs() + 0.1
        vae.register_to_config(latents_mean=statistics[0].tolist(), latents_std=statistics[1].tolist())
    latents = noise(2, vae.config.z_dim, 3, 5, 7, dtype=stored)
    path = save(tmp_path / "t.safetensors", latents)
    expected = decode_input("wan/pipeline_wan.py", vae, latents)
    result = ours(path, vae, dtype, state="norm")
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_z_image_casts_before_it_denormalises(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    vae = kl(channels=16, scaling_factor=0.3611, shift_factor=0.1159).to(dtype)
    latents = noise(2, 16, 6, 10, dtype=stored)
    path = save(tmp_path / "t.safetensors", latents)
    result = ours(path, vae, dtype, state="norm")
    assert torch.equal(result, decode_input(Z_IMAGE, vae, latents))


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_sd3_denormalises_in_the_stored_dtype(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    vae = kl(channels=16, scaling_factor=1.5305, shift_factor=0.0609).to(dtype)
    latents = noise(1, 16, 6, 10, dtype=stored)
    path = save(tmp_path / "t.safetensors", latents)
    same(ours(path, vae, dtype, state="norm"), decode_input(SD3, vae, latents), dtype)


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_sd1_divides_only(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    vae = kl(scaling_factor=0.18215).to(dtype)
    latents = noise(1, 4, 6, 10, dtype=stored)
    path = save(tmp_path / "t.safetensors", latents)
    same(ours(path, vae, dtype, state="norm"), decode_input(SD, vae, latents), dtype)


@pytest.mark.parametrize("statistics", [False, True], ids=["sdxl", "playground"])
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16, torch.float16])
def test_sdxl_follows_the_pipeline_through_its_upcast(tmp_path: Path, model: torch.dtype, statistics: bool) -> None:
    config: dict[str, Any] = {"scaling_factor": 0.13025, "force_upcast": True}
    if statistics:
        config |= {"scaling_factor": 0.5, "latents_mean": [-1.6, 1.0, 0.2, -0.4], "latents_std": [8.4, 5.2, 3.5, 4.1]}
    vae = kl(**config).to(model)
    latents = noise(1, 4, 6, 10, dtype=model)
    path = save(tmp_path / "t.safetensors", latents)
    expected = decode_input(SDXL, vae, latents, image_processor=None)
    result = ours(path, vae, vae.dtype, state="norm")  # float32 after the pipeline's upcast of a float16 VAE
    assert vae.dtype == (torch.float32 if model is torch.float16 else model)
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


def test_half_precision_shows_the_order_of_casts() -> None:
    """The parity tests above can fail: the other order gives other bits."""
    x = noise(1, 16, 32, 32)
    first = x.to(torch.bfloat16) / 0.3611 + 0.1159
    last = (x / 0.3611 + 0.1159).to(torch.bfloat16)
    assert not torch.equal(first, last)


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_packing_of_random_shapes_is_diffusers_and_goes_back(seed: int) -> None:
    draw = random.Random(seed)
    batch, channels = draw.randint(1, 3), draw.choice([1, 4, 16, 32])
    rows, columns = 2 * draw.randint(1, 6), 2 * draw.randint(1, 6)
    latent = noise(batch, channels, rows, columns, seed=seed)
    tokens = static_method(FLUX, "_pack_latents")(latent, batch, channels, rows, columns)
    assert torch.equal(pack(latent, LatentLayout.PACKED_2X2), tokens)
    assert torch.equal(unpack(tokens, LatentLayout.PACKED_2X2, (rows, columns), takes_frames=False), latent)
    grid = static_method(FLUX2_DEV, "_patchify_latents")(latent)
    assert torch.equal(fold(latent), grid)
    assert torch.equal(unfold(grid), static_method(FLUX2_DEV, "_unpatchify_latents")(grid))
    flat = static_method(FLUX2_DEV, "_pack_latents")(grid)
    assert torch.equal(grid_to_tokens(grid), flat)
    assert torch.equal(tokens_to_grid(flat, rows // 2, columns // 2), grid)


LAYOUTS = {
    FLUX1: ("bchw", "chw", "packed2x2"),
    FLUX2: ("bchw", "chw", "grid128", "cgrid128", "tokens128"),
    QWEN: ("bcfhw", "bchw", "cfhw", "chw", "packed2x2"),
    WAN: ("bcfhw", "bchw", "cfhw", "chw"),
}


@pytest.mark.parametrize(
    ("vae", "layout", "state"),
    [(vae, name, state) for vae, names in LAYOUTS.items() for name in names for state in LatentState],
    ids=lambda value: value.family if isinstance(value, VaeFacts) else str(value),
)
def test_every_layout_and_state_goes_out_and_back(
    tmp_path: Path, vae: VaeFacts, layout: str, state: LatentState
) -> None:
    """float64 and 1e-9: the way back multiplies where the way out divided, a few last bits apart.

    The constants go through float32 in both directions, so they are the same numbers and do not add to that.
    """
    frames = (3,) if layout in ("bcfhw", "cfhw") else (1,) if vae.takes_frames else ()
    raw = noise(1, vae.latent_channels, *frames, 6, 10, seed=4).double()
    bn = (noise(128, seed=5), noise(128, seed=6).abs() + 0.5, 1e-4) if vae is FLUX2 else None
    stored = from_vae_output(raw, vae, layout=LatentLayout(layout), state=state, bn=bn)
    path = save(tmp_path / "t.safetensors", stored, key="samples")
    facts = resolved(path, vae, layout=layout, state=state, size=(48, 80))
    back = to_vae_input(read_latent(facts), facts, vae, dtype=torch.float64, bn=bn)
    assert back.shape == raw.shape
    torch.testing.assert_close(back, raw, rtol=0, atol=1e-9)
    if state is LatentState.NORM:
        assert not torch.allclose(from_vae_output(raw, vae, layout=LatentLayout(layout), state=LatentState.RAW), stored)


def test_flux2_normalised_is_the_hand_computed_value(tmp_path: Path) -> None:
    """mean 1 and variance 4: z * sqrt(4 + eps) + 1, then the patches unfolded; as raw it is not touched."""
    vae = make_flux2()
    vae.bn.running_mean.fill_(1.0)
    vae.bn.running_var.fill_(4.0)
    grid = noise(1, 128, 8, 8)
    path = save(tmp_path / "t.safetensors", grid)
    by_hand = torch.empty(1, 32, 16, 16)
    for c in range(32):
        for i in range(2):
            for j in range(2):
                by_hand[0, c, i::2, j::2] = grid[0, 4 * c + 2 * i + j] * (4.0 + 1e-4) ** 0.5 + 1.0
    norm, raw = (ours(path, vae, torch.float32, state=state) for state in ("norm", "raw"))
    torch.testing.assert_close(norm, by_hand, rtol=0, atol=2e-6)  # one rounding of sqrt, one of the product
    assert torch.equal(raw, unfold(grid))
    assert (norm - raw).abs().max() > 0.5


def test_decoding_a_batch_is_decoding_its_items(tmp_path: Path) -> None:
    """Each item of a packed file gives the VAE the same bits as the item saved alone."""
    tokens = noise(4, 6, 64, dtype=torch.bfloat16)
    whole = resolved(save(tmp_path / "all.safetensors", tokens), FLUX1, size=(32, 48))
    together = to_vae_input(read_latent(whole), whole, FLUX1, dtype=torch.float32)
    for i in range(4):
        alone = resolved(save(tmp_path / f"{i}.safetensors", tokens[i : i + 1].clone()), FLUX1, size=(32, 48))
        assert alone.batch == 1
        item = to_vae_input(read_latent(alone), alone, FLUX1, dtype=torch.float32)
        assert torch.equal(item, together[i : i + 1])
        sliced = to_vae_input(read_latent(whole)[i : i + 1], whole, FLUX1, dtype=torch.float32)
        assert torch.equal(sliced, item)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_facts_say_the_size_that_the_model_decodes_to(tmp_path: Path, make: Any) -> None:
    vae = make()
    facts_ = facts_of(vae)
    frames = (2,) if facts_.takes_frames else ()
    path = save(tmp_path / "t.safetensors", noise(1, facts_.latent_channels, *frames, 4, 6))
    facts = resolved(path, facts_, state="raw")
    latent = to_vae_input(read_latent(facts), facts, facts_, dtype=torch.float32)
    with torch.no_grad():
        sample = vae.decode(latent, return_dict=False)[0]
    size = (facts.num_frames,) if frames else ()
    assert tuple(sample.shape) == (1, 3, *size, facts.height, facts.width)
