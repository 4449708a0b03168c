"""A prepared model is the same model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor, nn

from tests.models import make_flux2, make_kl, make_qwenimage, make_wan21, make_wan22
from vaepar.autoencoders import (
    DistributedAutoencoderKL,
    DistributedAutoencoderKLFlux2,
    DistributedAutoencoderKLQwenImage,
    DistributedAutoencoderKLWan,
)
from vaepar.autoencoders.spatial import prepare_shards, shard_decode_chunks
from vaepar.errors import UnsupportedModeError
from vaepar.layers.blocks import ShardCausalResidualBlock, ShardResnetBlock2D
from vaepar.layers.install import WanDistCausalConv3d, WanDistConv2d, WanDistZeroPad2d, install_shards
from vaepar.parallel.group import SoloGroup

make_sharded_kl = partial(make_kl, cls=DistributedAutoencoderKL)
make_sharded_wan21 = partial(make_wan21, cls=DistributedAutoencoderKLWan)

# The plain model, the adapter with the same weights, a latent's shape.
FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[int, ...]]] = {
    "kl": (make_kl, make_sharded_kl, (1, 4, 5, 4)),
    "flux2": (make_flux2, partial(make_flux2, cls=DistributedAutoencoderKLFlux2), (1, 32, 5, 4)),
    "qwenimage": (make_qwenimage, partial(make_qwenimage, cls=DistributedAutoencoderKLQwenImage), (1, 16, 2, 5, 4)),
    "wan21": (make_wan21, make_sharded_wan21, (1, 16, 2, 5, 4)),
    "wan22": (make_wan22, partial(make_wan22, cls=DistributedAutoencoderKLWan), (1, 48, 2, 5, 4)),
}


def latent(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_names_parameters_and_direct_results_stay(family: str) -> None:
    make, adapter, shape = FAMILIES[family]
    vae, z = adapter(), latent(shape)
    parameters = dict(vae.named_parameters())
    state = {name: value.clone() for name, value in vae.state_dict().items()}
    classes = [type(module) for module in vae.modules()]
    with torch.no_grad():
        picture = make().decode(z).sample
        moments = make().encode(picture).latent_dist.parameters
    prepare_shards(vae)
    prepare_shards(vae)
    assert {name: id(value) for name, value in vae.named_parameters()} == {n: id(v) for n, v in parameters.items()}
    assert all(isinstance(module, cls) for module, cls in zip(vae.modules(), classes, strict=True))
    vae.load_state_dict(state, strict=True)
    with torch.no_grad():
        assert torch.equal(vae.decode(z).sample, picture)
        assert torch.equal(vae.encode(picture).latent_dist.parameters, moments)
        halved = copy.deepcopy(vae).to(torch.bfloat16)
        plain = make().to(torch.bfloat16)
        assert torch.equal(halved.decode(z.bfloat16()).sample, plain.decode(z.bfloat16()).sample)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_in_diffusers_loops_sum_in_place(family: str) -> None:
    vae = FAMILIES[family][1]()
    prepare_shards(vae)
    blocks = [m for m in vae.modules() if isinstance(m, ShardResnetBlock2D | ShardCausalResidualBlock)]
    assert blocks
    assert all(block.sums_in_place for block in blocks)


def test_wan_layers_are_the_named_ones() -> None:
    vae = make_sharded_wan21()
    before = sum(isinstance(module, WanCausalConv3d) for module in vae.decoder.modules())
    prepare_shards(vae)
    kinds = [type(module) for module in vae.modules()]
    assert kinds.count(WanDistConv2d) > 0
    assert kinds.count(WanDistZeroPad2d) == 3
    assert sum(isinstance(module, WanDistCausalConv3d) for module in vae.decoder.modules()) == before
    vae.clear_cache()
    assert len(vae._feat_map) == before


def test_a_reference_to_a_weight_held_elsewhere_stays_live() -> None:
    plain, vae, z = make_kl(), make_sharded_kl(), latent((1, 4, 4, 4))
    weight = vae.decoder.conv_in.weight  # as an adapter holds it
    before = next(shard_decode_chunks(vae, z, SoloGroup(), "height"))
    with torch.no_grad():
        weight.mul_(2)
        plain.decoder.conv_in.weight.mul_(2)
        expected = plain.decode(z).sample
    after = next(shard_decode_chunks(vae, z, SoloGroup(), "height"))
    assert before is not None
    assert after is not None
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=0)


class LowRank(nn.Module):
    """An adapter around a convolution, as LoRA libraries put it in its place."""

    def __init__(self, base: nn.Conv2d) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Conv2d(base.in_channels, 2, base.kernel_size, base.stride, base.padding, bias=False)
        self.up = nn.Conv2d(2, base.out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.up(self.down(x))
        return out


def test_low_rank_adapters_are_sharded_with_their_layer() -> None:
    plain, vae, z = make_kl(), make_sharded_kl(), latent((1, 4, 6, 4))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain.decoder.conv_in = LowRank(plain.decoder.conv_in)
    vae.decoder.conv_in = copy.deepcopy(plain.decoder.conv_in)
    expected = plain.decode(z).sample.detach()
    chunk = next(shard_decode_chunks(vae, z, SoloGroup(), "height"))
    assert chunk is not None
    torch.testing.assert_close(chunk, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["kl", "qwenimage"])
def test_compiled_parts_keep_the_direct_path_and_step_aside_for_a_shard(family: str) -> None:
    make, adapter, shape = FAMILIES[family]
    vae, z = adapter(), latent((*shape[:2], *([1] if len(shape) == 5 else []), 4, 4))
    with torch.no_grad():
        picture = make().decode(z).sample
        prepare_shards(vae)
        plain = vae.decoder
        compiled = torch.compile(plain, backend="eager", fullgraph=True)
        inner = vae.post_quant_conv(z)
        assert torch.equal(compiled(inner), plain(inner))
        vae.decoder = compiled
        chunk = next(shard_decode_chunks(vae, z, SoloGroup(), "height"))
        assert chunk is not None
        torch.testing.assert_close(chunk, picture, atol=1e-5, rtol=0)
        assert torch.equal(compiled(inner), plain(inner))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.ConvTranspose2d(1, 1, 2), "'1'.*ConvTranspose2d"),
        (nn.BatchNorm2d(1), "BatchNorm2d"),
        (nn.AvgPool2d(2), "AvgPool2d"),
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), "circular"),
    ],
)
def test_what_a_shard_would_compute_wrongly_is_refused_and_nothing_changes(layer: nn.Module, words: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3), layer)
    with pytest.raises(UnsupportedModeError, match=words):
        install_shards(model)
    assert type(model[0]) is nn.Conv2d
