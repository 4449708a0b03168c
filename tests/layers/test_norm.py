"""Norms of a map that is cut among ranks."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from torch import Tensor, nn

from tests.layers.shard import random_map, run_sharded, seeded
from vaepar.layers.context import ShardContext, Slot, shard_active
from vaepar.layers.inputs import channels_last
from vaepar.layers.install import WanDistRMSNorm
from vaepar.layers.norm import ShardGroupNorm, ShardSiLU
from vaepar.parallel.group import RankGroup, SoloGroup
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import Axis, split_rows


def random_group_norm(dtype: torch.dtype = torch.float64) -> ShardGroupNorm:
    norm = seeded(lambda: ShardGroupNorm(4, 8, eps=1e-6), dtype)
    norm.weight.data.copy_(random_map(8, seed=1))
    norm.bias.data.copy_(random_map(8, seed=2))
    return norm


@pytest.mark.parametrize("axis", ["height", "width"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_group_norm_is_that_of_the_whole_picture(size: int, axis: Axis) -> None:
    norm, x = random_group_norm(), random_map(2, 8, 7, 7) + 3
    joined = run_sharded(norm, [x], [split_rows(7, size)], axis)
    torch.testing.assert_close(joined, norm(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("size", [1, 3])
def test_group_norm_does_not_cancel_where_the_mean_is_large(size: int) -> None:
    # Rows differ in mean, so that joining the ranks matters. float32 keeps 1000 +- 1 to 6e-5, a sum of 4096 such values
    # one after the other to 1e-3; a variance from sums of squares is off by more than the variance itself.
    norm = random_group_norm(torch.float32)
    x = (random_map(1, 8, 96, 160) + 1000 + torch.arange(96.0).view(96, 1) / 100).float()
    exact = random_group_norm()(x.double())
    joined = run_sharded(norm, [x], [split_rows(96, size)], "height")
    torch.testing.assert_close(joined.double(), exact, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("mean", "error"), [(0, 2e-6), (10, 5e-6), (100, 4e-5), (1000, 3e-4)])
def test_group_norm_is_as_exact_as_the_input_allows(mean: float, error: float) -> None:
    """A step of float32 at ``mean``, relative to a deviation of one, and some of them."""
    x = (random_map(1, 8, 64, 64) + mean).float()
    exact = random_group_norm()(x.double())
    joined = run_sharded(random_group_norm(torch.float32), [x], [split_rows(64, 2)], "height")
    torch.testing.assert_close(joined.double(), exact, atol=error, rtol=0)


def test_group_norm_of_many_positions_keeps_float32() -> None:
    x = (random_map(1, 8, 512, 512) + 1).float()
    joined = run_sharded(random_group_norm(torch.float32), [x], [split_rows(512, 1)], "height")
    torch.testing.assert_close(joined.double(), random_group_norm()(x.double()), atol=1e-5, rtol=0)


def test_group_norm_of_bfloat16_takes_its_statistics_in_float32() -> None:
    x = (random_map(1, 8, 40, 40) * 0.1 + 4).bfloat16()
    joined = run_sharded(random_group_norm(torch.bfloat16), [x], [split_rows(40, 2)], "height")
    exact = random_group_norm(torch.bfloat16).double()(x.double())
    assert joined.dtype == torch.bfloat16
    torch.testing.assert_close(joined.double(), exact, atol=1e-2, rtol=1e-2)  # one rounding to 8 bits


def test_group_norm_takes_one_round() -> None:
    norm, x = random_group_norm(), random_map(1, 8, 6, 4)

    def work(group: RankGroup) -> tuple[int, int, int]:
        with torch.no_grad(), shard_active(ShardContext(group, "height", [split_rows(6, 3)])):
            norm(x.narrow(2, 2 * group.rank, 2))
        return group.traffic.rounds, group.traffic.messages, group.traffic.bytes

    assert run_loopback(3, work) == [(1, 2, 2 * 2 * 4 * 8)] * 3  # mean and variance of 4 groups, to two peers


@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.1)])
def test_rms_norm(dtype: torch.dtype, atol: float, bias: bool, images: bool) -> None:
    norm = seeded(lambda: WanDistRMSNorm(6, images=images, bias=bias), dtype)
    norm.gamma.data.copy_(random_map(*norm.gamma.shape, seed=1))
    if bias:
        norm.bias.data.copy_(random_map(*norm.bias.shape, seed=2))
    x = random_map(*((1, 6, 5, 4) if images else (1, 6, 2, 5, 4))).to(dtype)
    x[:, :, ..., 0, 0] = 0  # a position without content divides by the floor, not by zero
    plain = WanRMS_norm.forward(norm, x)
    joined = run_sharded(norm, [x], [split_rows(5, 2)], "height")
    torch.testing.assert_close(joined, plain, atol=atol, rtol=0)


def test_silu_is_in_place_once_on_what_it_was_given() -> None:
    x, other = random_map(4), random_map(4)
    kept = x.clone()
    context = ShardContext(SoloGroup(), "height", [split_rows(4, 1)])
    context.give_own(x)
    assert torch.equal(ShardSiLU()(x), nn.SiLU()(kept))
    assert torch.equal(x, kept)
    with shard_active(context):
        out: Tensor = ShardSiLU()(x)
        assert out is x
        assert torch.equal(x, nn.SiLU()(kept))
        assert ShardSiLU()(x) is not x
        context.give_own(x)
        assert ShardSiLU()(other) is not other
        assert ShardSiLU()(x) is not x


@pytest.mark.parametrize("shape", [(2, 8, 7, 5), (2, 8, 3, 7, 5), (1, 8, 2, 1, 5)])
@pytest.mark.parametrize("size", [1, 100, 300, 10**6])
def test_a_norm_and_its_activation_in_pieces(
    size: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vaepar.layers.norm._PIECE_BYTES", size)
    norm = seeded(lambda: WanDistRMSNorm(8, images=len(shape) == 4))
    norm.gamma.data.copy_(random_map(8, seed=1).view_as(norm.gamma))
    x = channels_last(random_map(*shape))
    place = torch.full_like(x, torch.nan)
    context = ShardContext(SoloGroup(), "height", [split_rows(7, 1)])
    with torch.no_grad():
        norm.write_activated(context, x, Slot(place, place))
    assert context.take_slot(place) is not None
    torch.testing.assert_close(place, nn.functional.silu(norm(x)), atol=1e-12, rtol=0)
