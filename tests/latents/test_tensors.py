"""Reading the tensor, and what is said about its values."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.latents.files import FLUX1, FLUX2, KL, QWEN, WAN, noise, resolved, save, save_comfyui
from tests.models import make_kl
from vaepar.errors import InputError, UsageError
from vaepar.latents import (
    LatentLayout,
    LatentState,
    VaeFacts,
    count_nonfinite,
    from_vae_output,
    read_latent,
    to_vae_input,
)
from vaepar.latents.packing import unfold


def test_reading_gives_the_stored_tensor(tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = noise(2, 4, 6, 10, dtype=dtype)
        back = read_latent(resolved(save(tmp_path / "x", x), KL, state="raw"))
        assert back.dtype == dtype
        assert torch.equal(back, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_any_float_latent_reaches_a_model_of_another_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """The library alone raises when latent and weights differ in dtype."""
    x = noise(1, 4, 6, 10, dtype=dtype)
    facts = resolved(save_comfyui(tmp_path / "x.latent", x), KL)
    for weights in (torch.float32, torch.bfloat16):
        vae = make_kl(dtype=weights)
        z = to_vae_input(read_latent(facts), facts, KL, dtype=weights)
        with torch.no_grad():
            assert vae.decode(z, return_dict=False)[0].dtype == weights


def test_the_tensor_outlives_its_file(tmp_path: Path) -> None:
    """A view of the mapped file would end the process with SIGBUS once the file is cut short."""
    path = save(tmp_path / "x", noise(1, 4, 64, 64))
    facts = resolved(path, KL, state="raw")
    x = read_latent(facts)
    with path.open("r+b") as file:
        file.truncate(10)
    assert torch.equal(x, noise(1, 4, 64, 64))


def test_a_file_that_changed_since_it_was_inspected_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x", noise(1, 4, 6, 10))
    facts = resolved(path, KL, state="raw")
    save(path, noise(1, 4, 10, 6))
    with pytest.raises(InputError, match="has changed since it was inspected"):
        read_latent(facts)
    path.unlink()
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_latent(facts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_no_numbers_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    x = noise(1, 4, 6, 10, dtype=dtype)
    x[0, 1, 2, 3] = float("nan")
    x[0, 2, :, 1] = float("inf")
    x[0, 3, 0, 0] = float("-inf")
    back = read_latent(resolved(save(tmp_path / "x", x), KL, state="raw"))
    assert torch.equal(back.isnan(), x.isnan())
    assert count_nonfinite(back) == (1, 7)
    assert "holds 1 NaN and 7 infinite of 240 values" in caplog.text


def test_clean_values_are_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    facts = resolved(save(tmp_path / "x", noise(1, 16, 3, 12, 20)), WAN, state="norm")
    x = read_latent(facts)
    assert count_nonfinite(x) == (0, 0)
    to_vae_input(x, facts, WAN, dtype=torch.float32)
    assert not caplog.records


BN = (torch.zeros(128), torch.full((128,), 9.0), 1e-4)


@pytest.mark.parametrize(
    ("vae", "shape"),
    [
        (KL, (1, 4, 32, 32)),
        (FLUX1, (1, 16, 32, 32)),
        (FLUX2, (1, 32, 32, 32)),
        (QWEN, (1, 16, 1, 32, 32)),
        (WAN, (1, 16, 3, 32, 32)),
    ],
    ids=lambda value: value.family if isinstance(value, VaeFacts) else None,
)
def test_a_doubtful_state_is_said_and_never_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, vae: VaeFacts, shape: tuple[int, ...]
) -> None:
    raw = to_raw(noise(*shape), vae)
    for state, stored in (("norm", noise(*shape)), ("raw", raw)):
        path = save(tmp_path / f"{state}.safetensors", stored)
        other = "raw" if state == "norm" else "norm"
        for claimed in (state, other):
            facts = resolved(path, vae, state=claimed)
            caplog.clear()
            with caplog.at_level(logging.WARNING, "vaepar.latents.tensors"):
                z = to_vae_input(read_latent(facts), facts, vae, dtype=torch.float32, bn=BN)
            said = [r.getMessage() for r in caplog.records if r.name == "vaepar.latents.tensors"]
            assert bool(said) == (claimed != state)
            assert all(f"taken as {claimed}" in line and f"looks like {state}" in line for line in said)
            if claimed == "raw":
                assert torch.equal(z, stored)


def to_raw(x: torch.Tensor, vae: VaeFacts) -> torch.Tensor:
    if vae is FLUX2:
        return x * 3.0
    if vae.latents_std is None:
        return x / (vae.scaling_factor or 1.0)
    return x * torch.tensor(vae.latents_std).view(1, -1, 1, 1, 1)


@pytest.mark.parametrize("fill", [0.0, 0.3])
def test_flat_and_broken_latents_raise_no_doubt(tmp_path: Path, caplog: pytest.LogCaptureFixture, fill: float) -> None:
    x = torch.full((1, 4, 16, 16), fill)
    x[0, 0, 0, 0] = 0.3 if fill else float("nan")
    facts = resolved(save(tmp_path / "x", x), KL, state="raw")
    to_vae_input(x, facts, KL, dtype=torch.float32)
    assert not caplog.records


def test_flux2_without_its_statistics_is_an_error(tmp_path: Path) -> None:
    facts = resolved(save(tmp_path / "x", noise(1, 6, 128)), FLUX2, size=(32, 48))
    with pytest.raises(UsageError, match="running_mean"):
        to_vae_input(read_latent(facts), facts, FLUX2, dtype=torch.float32)


def test_facts_of_another_tensor_or_model_are_refused(tmp_path: Path) -> None:
    facts = resolved(save(tmp_path / "x", noise(2, 16, 6, 10)), FLUX1, state="raw")
    for bad in (noise(2, 16, 6, 8), noise(16, 6, 10), noise(2, 16, 1, 6, 10)):
        with pytest.raises(UsageError, match="the file holds"):
            to_vae_input(bad, facts, FLUX1, dtype=torch.float32)
    with pytest.raises(UsageError, match="the facts are about"):
        to_vae_input(noise(2, 16, 6, 10), facts, QWEN, dtype=torch.float32)


def test_trimming_drops_the_leading_frames(tmp_path: Path) -> None:
    x = noise(2, 16, 5, 6, 10)
    facts = resolved(save(tmp_path / "x", x), WAN, state="raw", trim_latent_frames=2)
    assert torch.equal(to_vae_input(x, facts, WAN, dtype=torch.float32), x[:, :, 2:])
    assert facts.num_frames == 9


def test_normalising_is_the_pipelines_formula() -> None:
    """Written out as the img2img, edit and image-to-video pipelines have it; the same operations, so equal bits."""
    x4, x5 = noise(1, 4, 6, 10, seed=1), noise(1, 16, 1, 6, 10, seed=2)

    def norm(x: torch.Tensor, vae: VaeFacts) -> torch.Tensor:
        layout = LatentLayout.BCHW if x.ndim == 4 else LatentLayout.BCFHW
        return from_vae_output(x, vae, layout=layout, state=LatentState.NORM)

    assert torch.equal(norm(x4, KL), x4 * 0.18215)
    x16 = x5[:, :, 0]
    assert torch.equal(norm(x16, FLUX1), (x16 - 0.1159) * 0.3611)
    statistics = {"latents_mean": [0.5, -1.0, 0.0, 2.0], "latents_std": [2.0, 3.0, 0.7, 1.1], "scaling_factor": 0.5}
    sdxl = VaeFacts.from_config("AutoencoderKL", statistics)
    mean, std = (torch.tensor(statistics[key]).view(1, 4, 1, 1) for key in ("latents_mean", "latents_std"))
    assert torch.equal(norm(x4, sdxl), (x4 - mean) * 0.5 / std)
    mean, std = (torch.tensor(values).view(1, 16, 1, 1, 1) for values in (WAN.latents_mean, WAN.latents_std))
    assert torch.equal(norm(x5, WAN), (x5 - mean) * (1.0 / std))
    assert torch.equal(norm(x5, QWEN), (x5 - mean) / std)


@pytest.mark.parametrize(
    ("vae", "shape", "expected"),
    [
        (FLUX1, (16, 8, 8), lambda x: (x.bfloat16() / 0.3611 + 0.1159)[None]),
        (FLUX2, (128, 4, 4), lambda x: unfold(x.bfloat16()[None] * 3.0)),
    ],
)
def test_musubi_files_are_denormalised_in_the_vaes_dtype(
    tmp_path: Path, vae: VaeFacts, shape: tuple[int, ...], expected: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Its VAEs undo the scaling inside, so after the cast."""
    x = noise(*shape)
    facts = resolved(save(tmp_path / "x", x, key="latent"), vae)
    bn = (torch.zeros(128), torch.full((128,), 8.75), 0.25)
    assert torch.equal(to_vae_input(x, facts, vae, dtype=torch.bfloat16, bn=bn), expected(x))


@pytest.mark.parametrize(
    ("vae", "shape", "layout"),
    [
        (KL, (2, 4, 6, 10), "chw"),
        (KL, (2, 4, 6, 10), "bcfhw"),
        (FLUX1, (1, 16, 5, 10), "packed2x2"),
        (FLUX2, (1, 32, 6, 9), "grid128"),
        (FLUX2, (2, 32, 6, 8), "cgrid128"),
        (QWEN, (1, 16, 2, 6, 10), "packed2x2"),
        (WAN, (1, 16, 2, 6, 10), "bchw"),
        (WAN, (2, 16, 2, 6, 10), "cfhw"),
    ],
)
def test_a_layout_without_place_is_refused(vae: VaeFacts, shape: tuple[int, ...], layout: str) -> None:
    with pytest.raises(UsageError, match="cannot be stored in the layout"):
        from_vae_output(noise(*shape), vae, layout=LatentLayout(layout), state=LatentState.RAW)


def test_planning_loads_no_torch(tmp_path: Path) -> None:
    """Header and meaning are settled without torch, so help texts and dry runs stay quick."""
    path = save(tmp_path / "x", noise(1, 16, 3, 6, 10))
    code = (
        "import sys; from vaepar.latents import *\n"
        "vae = VaeFacts.from_config('AutoencoderKLWan', {})\n"
        "facts = resolve(read_header(sys.argv[1]), vae, LatentRequest(state='norm'))\n"
        "assert facts.num_frames == 9\n"
        "assert not {'torch', 'diffusers', 'numpy'} & set(sys.modules), 'loaded'"
    )
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code, path], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """File systems take any bytes; the library that reads the format takes text only."""
    x = noise(2, 4, 6, 10)
    plain = save(tmp_path / "plain", x)
    odd = plain.rename(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.safetensors")))
    assert torch.equal(read_latent(resolved(odd, KL, state="raw")), x)
