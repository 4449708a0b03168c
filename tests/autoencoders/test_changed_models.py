"""Shards of models that somebody has changed: wrapped, hooked and compiled parts give the plain model's picture.

float64, so that 1e-12 tells a layer that read something overwritten from one that rounds otherwise.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from tests.autoencoders.shards import close, joined, plain_decode, plain_moments, shard_decode, shard_moments
from tests.families import ADAPTERS, MAKERS, latent
from vaepar.autoencoders.spatial import prepare_shards, shard_decode_chunks
from vaepar.errors import UnsupportedModeError
from vaepar.parallel.group import RankGroup, SoloGroup
from vaepar.parallel.loopback import run_loopback


class Eased(nn.Module):
    """A block of which only half is added, as some speed-ups and ablations wrap it: its input is read twice."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return x + 0.5 * self.block(x, *args, **kwargs)


class TwoNorms(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.second = norm, copy.deepcopy(norm)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        return 0.5 * (first + second * first.sign())


class Mixed(nn.Module):
    """Channels are mixed by a 1x1 convolution before the norm."""

    def __init__(self, norm: nn.Module, channels: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.mix = nn.Conv2d(channels, channels, 1).double()
        self.norm = norm

    def forward(self, x: Tensor) -> Any:
        if x.ndim == 4:
            return self.norm(self.mix(x))
        return self.norm(torch.stack([self.mix(frame) for frame in x.unbind(2)], 2))


def blocks_are_wrapped(vae: Any) -> None:
    for resnets in (vae.decoder.mid_block.resnets, vae.decoder.up_blocks[0].resnets):
        for i, block in enumerate(resnets):
            resnets[i] = Eased(block)


def blocks_read_their_input_in_a_hook(vae: Any) -> None:
    vae.decoder.mid_block.resnets[1].register_forward_hook(lambda module, args, out: 0.5 * out + args[0])


def an_early_map_is_read_late(vae: Any) -> None:
    kept: list[Any] = []
    vae.decoder.conv_in.register_forward_hook(lambda module, args, out: kept.append(out))
    vae.decoder.mid_block.register_forward_hook(lambda module, args, out: out + kept.pop())


def norms_are_two(vae: Any) -> None:
    block = vae.decoder.mid_block.resnets[0]
    block.norm1, block.norm2 = TwoNorms(block.norm1), TwoNorms(block.norm2)


def channels_are_mixed_first(vae: Any) -> None:
    block = vae.decoder.mid_block.resnets[0]
    channels = block.conv1.in_channels
    block.norm1, block.norm2 = Mixed(block.norm1, channels), Mixed(block.norm2, channels)


def upsamplers_are_changed(vae: Any) -> None:
    """The upsampling as well as its convolution."""
    ups = [m for m in vae.decoder.modules() if type(m).__name__.endswith("Upsample2D")]
    layers = [m.conv for m in ups]
    for part in vae.decoder.modules():
        if isinstance(part, nn.Sequential) and len(part) == 2 and isinstance(part[0], nn.Upsample):
            layers.extend(part)
    assert layers
    for layer in layers:
        layer.register_forward_hook(lambda module, args, out: 0.5 * out + 0.1)


def layers_are_hooked(vae: Any) -> None:
    """Every convolution and norm, those that a shard joins to their neighbours among them."""
    for module in vae.decoder.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d | nn.GroupNorm):
            module.register_forward_hook(lambda module, args, out: 1.01 * out)


def the_decoder_is_compiled(vae: Any) -> None:
    vae.decoder.forward = torch.compile(vae.decoder.forward, backend="eager")


CHANGES = [
    blocks_are_wrapped,
    blocks_read_their_input_in_a_hook,
    an_early_map_is_read_late,
    norms_are_two,
    channels_are_mixed_first,
    layers_are_hooked,
    upsamplers_are_changed,
    the_decoder_is_compiled,
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["kl", "wan21"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_gives_its_own_picture(change: Callable[[Any], None], family: str, ranks: int) -> None:
    # One latent frame, which a plain decode takes in one step as a shard does: hooks see the same maps.
    z = latent(family, 4, 6).double()
    plain = MAKERS[family](dtype=torch.float64)
    change(plain)
    expected = plain_decode(plain, z)
    models = [ADAPTERS[family](dtype=torch.float64) for _ in range(ranks)]
    for vae in models:
        change(vae)

    def work(group: RankGroup) -> Tensor | None:
        (chunk,) = shard_decode_chunks(models[group.rank], z, group, "width")
        return chunk

    close(run_loopback(ranks, work)[0], expected)


def test_a_hook_keeps_what_it_was_given() -> None:
    vae, z = ADAPTERS["kl"](), latent("kl", 4, 4)
    kept: list[tuple[Tensor, Tensor]] = []
    for module in vae.decoder.modules():
        if not list(module.children()) or isinstance(module, ResnetBlock2D):
            module.register_forward_hook(lambda module, args, out: kept.append((out, out.clone())))
    list(shard_decode_chunks(vae, z, SoloGroup(), "width"))
    assert len(kept) > 50
    assert all(torch.equal(given, then) for given, then in kept)


def test_unknown_convolutions_are_refused_children_or_not() -> None:
    class LowRankConv2d(nn.Conv2d):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.down = nn.Conv2d(self.in_channels, 2, 1)

    vae = ADAPTERS["kl"]()
    vae.decoder.mid_block.resnets[0].conv1 = LowRankConv2d(16, 16, 3, padding=1)
    with pytest.raises(UnsupportedModeError, match=r"mid_block.resnets.0.conv1' \(LowRankConv2d\)"):
        shard_decode_chunks(vae, latent("kl", 4, 4), SoloGroup(), "width")


def test_a_model_without_attention() -> None:
    def without(vae: Any) -> Any:
        config = dict(vae.config) | {"mid_block_add_attention": False}
        made = type(vae).from_config(config).eval()
        made.load_state_dict(vae.state_dict(), strict=False)
        return made

    plain, vae, z = without(MAKERS["kl"]()), without(ADAPTERS["kl"]()), latent("kl", 5, 4)
    close(shard_decode(vae, z, 2, "height")[0], plain_decode(plain, z))


@pytest.mark.parametrize("down", [[True, False, False], [False, True, False], [False, False, False]])
def test_films_of_other_ratios_in_time(down: list[bool]) -> None:
    """The encoder always takes four frames at a time, of which such a model makes two or four latent frames."""

    def other(vae: Any) -> Any:
        config = dict(vae.config) | {"temperal_downsample": down}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return type(vae).from_config(config).eval()

    plain, vae = other(MAKERS["wan21"]()), other(ADAPTERS["wan21"]())
    x = torch.rand((1, 3, 9, 24, 32), generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = plain_moments(plain, x)
    for moments in shard_moments(vae, x, 2, "width", frames_per_step=1):
        close(moments, expected)
    vae.configure_tiles(16, 8)
    plain.enable_tiling(16, 16, 8, 8)
    with torch.no_grad():
        assert torch.equal(vae.encode(x).latent_dist.parameters, plain_moments(plain, x))


def test_requests_at_once_leave_the_compiler_as_it_was() -> None:
    from torch._dynamo import eval_frame

    z = latent("kl", 4, 6)
    models = [ADAPTERS["kl"]() for _ in range(3)]
    for vae in models:
        vae.decoder = torch.compile(vae.decoder, backend="eager")

    def work(group: RankGroup) -> Tensor | None:
        (chunk,) = shard_decode_chunks(models[group.rank], z, group, "width")
        return chunk

    for _ in range(3):
        run_loopback(3, work)
        assert eval_frame._stance.stance == "default"


def test_the_last_chunk_leaves_no_memory_behind() -> None:
    """A consumer that takes one picture and never comes back holds the picture alone."""
    vae, z = ADAPTERS["kl"](), latent("kl", 8, 8)
    chunks = shard_decode_chunks(vae, z, SoloGroup(), "width")
    chunk = next(chunks)
    assert chunk is not None
    frame = chunks.gi_frame  # type: ignore[attr-defined]
    assert frame is not None
    request = frame.f_locals["request"]
    assert not request.context.pool._scratch
    assert not request.context.pool.buffers
    assert not request.context.store


@pytest.mark.parametrize("name", ["up_blocks.0.upsamplers.0.conv", "mid_block.resnets.0.conv1", "conv_norm_out"])
def test_a_layer_with_a_forward_of_its_own_is_refused(name: str) -> None:
    """It was made around the layer as it was, which knows of no other rank. One made afterwards is called."""
    vae, z = ADAPTERS["kl"](), latent("kl", 6, 6)
    layer = vae.decoder.get_submodule(name)
    layer.forward = types.MethodType(lambda self, x: 0.9 * type(self).forward(self, x), layer)
    with pytest.raises(UnsupportedModeError, match=rf"'{name}' .* forward of its own"):
        prepare_shards(vae)
    assert type(layer) in (nn.Conv2d, nn.GroupNorm)
    plain = MAKERS["kl"]()
    for model in (plain, vae):
        own = model.decoder.get_submodule(name)
        if model is vae:
            del own.forward
            prepare_shards(vae)
        own.forward = types.MethodType(lambda self, x: 0.9 * type(self).forward(self, x), own)
    close(joined(shard_decode(vae, z, 2, "height")), plain_decode(plain, z))


def watched(vae: Any) -> None:
    vae.decoder.up_blocks[0].resnets[0].norm1.register_forward_hook(lambda module, args, out: None)


def upsamplers_watched(vae: Any) -> None:
    for upsampler in vae.decoder.up_blocks[0].upsamplers:
        for part in [upsampler.conv] if hasattr(upsampler, "conv") else list(upsampler.resample):
            part.register_forward_hook(lambda module, args, out: None)


def replaced(vae: Any) -> None:
    block = vae.decoder.up_blocks[0].resnets[0]
    block.nonlinearity = nn.Sequential(block.nonlinearity)


def in_training(vae: Any) -> None:
    vae.decoder.up_blocks[0].resnets[0].dropout = nn.Dropout(1e-30).train()  # drops nothing, but could


@pytest.mark.parametrize("change", [watched, upsamplers_watched, replaced, in_training])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", ["kl", "wan21"])
def test_a_change_on_one_rank_alone(family: str, size: int, change: Any) -> None:
    """Whoever looks at maps does it on one rank; the ranks exchange the same rows in the same order all the same."""
    vae, z = ADAPTERS[family](dtype=torch.float64), latent(family, 8, 6, frames=2).double()
    models = [copy.deepcopy(vae) for _ in range(size)]
    change(models[1])

    def work(group: RankGroup) -> list[Tensor | None]:
        return list(shard_decode_chunks(models[group.rank], z, group, "height"))

    chunks = [chunk for chunk in run_loopback(size, work)[0] if chunk is not None]
    close(chunks[0] if family == "kl" else joined(chunks), plain_decode(MAKERS[family](dtype=torch.float64), z))
