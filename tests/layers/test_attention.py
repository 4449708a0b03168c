"""Attention over the picture with the queries of one rank."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import Attention, SlicedAttnProcessor
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock

from tests.layers.shard import random_map, run_sharded, seeded
from vaepar.errors import UnsupportedModeError
from vaepar.layers.attention import ShardSpatialAttention, check_attention
from vaepar.layers.install import install_shards
from vaepar.parallel.shards import Axis, split_rows

EXACT = {"atol": 1e-12, "rtol": 0}


def spatial_attention(heads: int = 1) -> Attention:
    return seeded(
        lambda: Attention(
            8, heads=heads, dim_head=8 // heads, norm_num_groups=2, residual_connection=True, bias=True,
            rescale_output_factor=2.0, _from_deprecated_attn_block=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("axis", ["height", "width"])
@pytest.mark.parametrize(("size", "heads"), [(1, 1), (2, 2), (5, 1)])
def test_spatial_attention(size: int, heads: int, axis: Axis) -> None:
    plain = spatial_attention(heads)
    x = random_map(2, 8, 5, 5)
    expected = plain(x)
    install_shards(plain)
    assert isinstance(plain, ShardSpatialAttention)
    torch.testing.assert_close(run_sharded(plain, [x], [split_rows(5, size)], axis), expected, **EXACT)


@pytest.mark.parametrize("axis", ["height", "width"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_frame_attention(size: int, axis: Axis) -> None:
    block = seeded(lambda: torch.nn.Sequential(WanAttentionBlock(6)))
    x = random_map(2, 6, 3, 4, 4)
    expected = block(x)
    install_shards(block)
    torch.testing.assert_close(run_sharded(block, [x], [split_rows(4, size)], axis), expected, **EXACT)


def test_another_processor_is_refused() -> None:
    attention = spatial_attention()
    attention.set_processor(SlicedAttnProcessor(1))
    with pytest.raises(UnsupportedModeError, match="SlicedAttnProcessor"):
        check_attention(attention)
