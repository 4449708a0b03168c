"""Wan's spatial shard against the plain untiled decode of diffusers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import make_wan21
from vaepar.autoencoders import DistributedAutoencoderKLWan
from vaepar.autoencoders.spatial import shard_decode_chunks
from vaepar.parallel.loopback import run_loopback


def decode(vae: Any, z: Tensor, size: int, axis: Any) -> Tensor:
    models = [copy.deepcopy(vae) for _ in range(size)]
    results = run_loopback(size, lambda group: list(shard_decode_chunks(models[group.rank], z, group, axis)))
    assert all(chunk is None for other in results[1:] for chunk in other)
    return torch.cat(results[0], 2)


@pytest.mark.parametrize("axis", ["height", "width"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_spatial_shard_decode_matches_reference(size: int, axis: str) -> None:
    vae = make_wan21(real_topology=True, cls=DistributedAutoencoderKLWan)
    z = torch.randn(1, 16, 6, 5, 7, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        reference = make_wan21(real_topology=True).decode(z).sample
    # float32 sums of up to 27 * 32 products in another order; diffusers itself is 5e-6 from its float64 result.
    torch.testing.assert_close(decode(vae, z, size, axis), reference, atol=1e-5, rtol=0)
