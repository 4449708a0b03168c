"""A VAE's configuration, against the real classes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

from tests.latents.files import MODELS, facts_of
from tests.models import make_wan22
from vaepar.errors import ModelError
from vaepar.latents import VaeFacts


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("depth", [False, True])
def test_the_ratios_are_the_models(make: Any, depth: bool) -> None:
    vae = make(real_topology=depth)
    facts = facts_of(vae)
    assert facts.spatial_ratio == (16 if make is make_wan22 else 8)
    assert facts.temporal_ratio == (4 if facts.takes_frames else 1)
    channels = vae.config.z_dim if facts.takes_frames else vae.config.latent_channels
    assert facts.latent_channels == channels


@pytest.mark.parametrize("cls", [AutoencoderKLWan, AutoencoderKLQwenImage])
def test_the_defaults_are_those_of_the_classes(cls: type[Any]) -> None:
    import inspect

    defaults = {name: p.default for name, p in inspect.signature(cls.__init__).parameters.items()}
    facts = VaeFacts.from_config(cls.__name__, {})
    assert facts.latents_mean == tuple(defaults["latents_mean"])
    assert facts.latents_std == tuple(defaults["latents_std"])
    assert facts.latent_channels == defaults["z_dim"]


def test_a_distributed_subclass_is_its_family() -> None:
    assert VaeFacts.from_config("DistributedAutoencoderKLWan", {}).class_name == "AutoencoderKLWan"


@pytest.mark.parametrize("name", ["AutoencoderTiny", "", "autoencoderkl", "x\x1b[31m\n", "Distributed"])
def test_an_unknown_class_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        VaeFacts.from_config(name, {})
    for known in ("AutoencoderKL,", "AutoencoderKLFlux2", "AutoencoderKLQwenImage", "AutoencoderKLWan"):
        assert known in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        ("AutoencoderKL", {"scaling_factor": 0}),
        ("AutoencoderKL", {"scaling_factor": "0.18"}),
        ("AutoencoderKL", {"shift_factor": float("nan")}),
        ("AutoencoderKL", {"latent_channels": 0}),
        ("AutoencoderKL", {"latent_channels": True}),
        ("AutoencoderKL", {"block_out_channels": []}),
        ("AutoencoderKL", {"block_out_channels": 4}),
        ("AutoencoderKL", {"latents_mean": [0.0] * 4}),
        ("AutoencoderKL", {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 3}),
        ("AutoencoderKL", {"latents_mean": [0.0] * 4, "latents_std": [1.0, 0.0, 1.0, 1.0]}),
        ("AutoencoderKLFlux2", {"patch_size": [1, 1]}),
        ("AutoencoderKLWan", {"z_dim": 48}),
        ("AutoencoderKLWan", {"latents_std": [1.0] * 15 + ["1"]}),
        ("AutoencoderKLWan", {"patch_size": "2"}),
        ("AutoencoderKLQwenImage", {"temperal_downsample": None}),
    ],
)
def test_numbers_that_cannot_be_are_refused(cls: str, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        VaeFacts.from_config(cls, config)
    assert str(caught.value).startswith(cls)
    assert str(caught.value).isprintable()


def test_constants_go_through_json() -> None:
    facts = VaeFacts.from_config("AutoencoderKLWan", {})
    assert json.loads(json.dumps(facts.constants())) == facts.constants()
    assert hash(facts) == hash(VaeFacts.from_config("AutoencoderKLWan", {}))
