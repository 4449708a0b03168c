"""What ranks of a shard send each other: what the arithmetic of shards says, and in few rounds."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from tests.autoencoders.shards import AXES
from tests.families import ADAPTERS, latent
from vaepar.autoencoders.spatial import prepare_shards, shard_decode_chunks
from vaepar.layers.attention import ShardFrameAttention
from vaepar.layers.conv import ShardCausalConv3d
from vaepar.layers.resample import ShardUpsampleConv
from vaepar.parallel.group import RankGroup, SoloGroup
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import Axis, Window, decode_layouts, halo_plan


def chunks_of(vae: Any, z: Tensor, group: RankGroup, axis: Axis) -> list[Tensor | None]:
    return list(shard_decode_chunks(vae, z, group, axis))


def predicted(vae: Any, z: Tensor, axis: Axis, size: int) -> list[tuple[int, int, int]]:
    """(messages, bytes, rounds) of each rank by the arithmetic of shards alone, from what a lone rank computes."""
    dim, other = (-2, -1) if axis == "height" else (-1, -2)
    layouts = {layout.extent: layout for layout in decode_layouts(z.shape[dim], size, 3)}
    totals = [[size - 1, 8 * (size - 1), 1] for _ in range(size)]  # the number by which ranks know that they are alike
    window = Window(3, before=1, after=1)

    def halo(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        row = x.numel() // x.shape[dim] * 4
        layout = layouts[x.shape[dim]]
        for rank, total in enumerate(totals):
            plan = halo_plan(layout, layout, window, rank)
            total[0] += len(plan.sends)
            total[1] += plan.sent_rows * row
            total[2] += 1

    def gather(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        for rank, total in enumerate(totals):
            total[0] += size - 1
            total[1] += (
                (size - 1) * 2 * x.shape[1] * x.shape[2] * x.shape[other] * layouts[x.shape[dim]].length(rank) * 4
            )
            total[2] += 1

    prepare_shards(vae)
    inside_upsampling = {id(layer[1]) for layer in vae.modules() if isinstance(layer, ShardUpsampleConv)}
    handles = []
    for layer in vae.decoder.modules():
        spatial = isinstance(layer, ShardCausalConv3d) and layer.kernel_size[1:] == (3, 3)
        if (spatial and id(layer) not in inside_upsampling) or isinstance(layer, ShardUpsampleConv):
            handles.append(layer.register_forward_pre_hook(halo))
        elif isinstance(layer, ShardFrameAttention):
            handles.append(layer.register_forward_pre_hook(gather))
    for chunk in shard_decode_chunks(vae, z, SoloGroup(), axis):
        assert chunk is not None
        for rank in range(1, size):
            totals[rank][0] += 1
            totals[rank][1] += chunk.numel() // chunk.shape[dim] * 8 * layouts[z.shape[dim]].length(rank) * 4
    for handle in handles:
        handle.remove()
    return [(total[0], total[1], total[2]) for total in totals]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [2, 3])
def test_what_travels_is_what_the_arithmetic_says(size: int, axis: Axis) -> None:
    vae, z = ADAPTERS["wan21"](), latent("wan21", 5, 4, frames=6)
    models = [copy.deepcopy(vae) for _ in range(size)]

    def work(group: RankGroup) -> tuple[int, int, int]:
        chunks_of(models[group.rank], z, group, axis)
        return group.traffic.messages, group.traffic.bytes, group.traffic.rounds

    assert run_loopback(size, work) == predicted(vae, z, axis, size)


@pytest.mark.parametrize("family", ["kl", "flux2"])
def test_a_picture_takes_a_round_for_each_norm_and_its_convolution(family: str) -> None:
    """And one for each norm and each convolution elsewhere, one for keys and values, one to agree on all this."""
    vae, z = ADAPTERS[family](), latent(family, 6, 4)
    models = [copy.deepcopy(vae) for _ in range(2)]

    def work(group: RankGroup) -> int:
        chunks_of(models[group.rank], z, group, "height")
        return group.traffic.rounds

    kinds = Counter(type(part) for part in vae.decoder.modules())
    blocks, attentions, upsamplers = kinds[ResnetBlock2D], kinds[Attention], kinds[Upsample2D]
    assert blocks
    assert run_loopback(2, work) == [1 + 2 * blocks + 2 * attentions + upsamplers + 3] * 2


def test_wan21_takes_at_most_nine_rounds_for_each_latent_frame_after_the_first() -> None:
    vae, z = ADAPTERS["wan21"](real_topology=True), latent("wan21", 3, 2, frames=9)
    models = [copy.deepcopy(vae) for _ in range(2)]

    def work(group: RankGroup) -> list[int]:
        rounds = []
        for _ in shard_decode_chunks(models[group.rank], z, group, "height", frames_per_step=4):
            rounds.append(group.traffic.rounds + 1)  # and the finished rows, which the owner waits for
            group.traffic.reset()
        return rounds

    first, *rest = run_loopback(2, work)[0]
    assert len(rest) == 2
    assert sum(rest) / 8 <= 9
    assert first <= 36
