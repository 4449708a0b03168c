"""Tile decode against diffusers' own serial ``tiled_decode``.

The arithmetic of a tile does not depend on the rank that computes it and blending is done in the same order with the
same roundings, so results are required to be equal bit for bit, not just within the promised 1e-5.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import FAMILIES, latent, plain_and_distributed
from vaepar.errors import UnsupportedModeError, UsageError
from vaepar.parallel.loopback import LoopbackGroup, run_loopback


def decode_on(model: Any, z: Tensor, ranks: int, size: int | None = None) -> list[Tensor]:
    def work(group: LoopbackGroup) -> Tensor:
        vae = copy.deepcopy(model)
        vae.init_distributed(group)
        vae.set_parallel_size(size or ranks)
        with torch.no_grad():
            out: Tensor = vae.decode(z).sample
        return out

    return run_loopback(ranks, work)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(("height", "width"), [(20, 24), (13, 11), (24, 9)], ids=lambda n: str(n))
def test_every_rank_count_equals_serial_tiling(family: str, height: int, width: int) -> None:
    plain, distributed = plain_and_distributed(family, 8, 6)
    z = latent(family, height, width, frames=2, batch=2)
    with torch.no_grad():
        want = plain.decode(z).sample
    for ranks in (1, 2, 3, 4):
        for got in decode_on(distributed, z, ranks):
            assert torch.equal(got, want), f"{ranks} ranks differ by {(got - want).abs().max()}"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_random_shapes_equal_serial_tiling(family: str) -> None:
    rng = random.Random(family)
    for _ in range(4):
        tile = rng.randint(4, 8)
        stride = rng.choice(
            [s for s in range(2, tile + 1) if family not in ("kl", "flux2") or s * 4 == tile * 3] or [0]
        )
        if not stride:
            tile, stride = 8, 6
        plain, distributed = plain_and_distributed(family, tile, stride)
        z = latent(family, rng.randint(1, 14), rng.randint(tile + 1, 14), rng.randint(1, 3), seed=rng.randint(0, 99))
        with torch.no_grad():
            want = plain.decode(z).sample
        ranks = rng.randint(2, 5)
        assert all(torch.equal(got, want) for got in decode_on(distributed, z, ranks)), (tile, stride, z.shape, ranks)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_equal_serial_tiling(family: str, dtype: torch.dtype) -> None:
    plain, distributed = plain_and_distributed(family, 8, 6)
    z = latent(family, 10, 13, frames=2).to(dtype)
    with torch.no_grad():
        want = plain.to(dtype).decode(z).sample
    assert all(torch.equal(got, want) for got in decode_on(distributed.to(dtype), z, 2))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_real_topologies_on_three_ranks(family: str) -> None:
    factory, adapter, channels, ratio = FAMILIES[family]
    plain, distributed = factory(real_topology=True), factory(real_topology=True, cls=adapter)
    distributed.configure_tiles(8 * ratio, 6 * ratio)
    for name, value in vars(distributed).items():
        if name.startswith(("tile_", "use_tiling")):
            setattr(plain, name, value)
    channels = 16 if family == "kl" else channels
    shape = (1, channels, 9, 13) if family in ("kl", "flux2") else (1, channels, 3, 9, 13)
    z = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = plain.decode(z).sample
    assert all(torch.equal(got, want) for got in decode_on(distributed, z, 3))


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_chunks_concatenate_to_the_one_shot_result(family: str, ranks: int) -> None:
    plain, distributed = plain_and_distributed(family, 8, 6)
    for z in (latent(family, 13, 10, frames=3), latent(family, 6, 8, frames=3)):  # tiled, direct
        with torch.no_grad():
            want = plain.decode(z).sample

        def work(group: LoopbackGroup, z: Tensor = z) -> list[Tensor | None]:
            vae = copy.deepcopy(distributed)
            vae.init_distributed(group)
            vae.set_parallel_size(ranks)
            return list(vae.decode_chunks(z))

        owner, *others = run_loopback(ranks, work)
        chunks = [chunk for chunk in owner if chunk is not None]
        assert torch.equal(torch.cat(chunks, dim=2) if len(chunks) > 1 else chunks[0], want)
        assert len(chunks) == (z.shape[2] if z.dim() == 5 else 1)
        assert all(chunk is None for other in others for chunk in other)


def test_fewer_tiles_than_ranks_and_ranks_outside_the_group() -> None:
    plain, distributed = plain_and_distributed("wan21", 8, 6)
    z = latent("wan21", 8, 9, frames=2)  # two tiles
    with torch.no_grad():
        want = plain.decode(z).sample
    for ranks, size in ((5, 5), (4, 2), (4, 3), (3, 1)):
        assert all(torch.equal(got, want) for got in decode_on(distributed, z, ranks, size))


def test_without_broadcast_only_the_owner_has_the_result() -> None:
    plain, distributed = plain_and_distributed("kl", 8, 6)
    distributed.broadcast_result = False
    z = latent("kl", 9, 12)
    with torch.no_grad():
        want = plain.decode(z).sample
    first, second = decode_on(distributed, z, 2)
    assert torch.equal(first, want)
    assert second.numel() == 0


def test_a_small_request_takes_the_direct_path_also_after_a_large_one() -> None:
    plain, distributed = plain_and_distributed("wan21", 8, 6)
    large, small = latent("wan21", 12, 14, frames=2), latent("wan21", 7, 8, frames=3)
    with torch.no_grad():
        want = [plain.decode(z).sample for z in (small, large, small)]

    def work(group: LoopbackGroup) -> list[Tensor]:
        vae = copy.deepcopy(distributed)
        vae.init_distributed(group)
        vae.set_parallel_size(2)
        with torch.no_grad():
            return [vae.decode(z).sample for z in (small, large, small)]

    for got in run_loopback(2, work):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_batch_decodes_as_its_items_do() -> None:
    # Convolutions of a batch may take another algorithm than those of one item, hence not bit for bit.
    _, distributed = plain_and_distributed("kl", 8, 6)
    z = latent("kl", 12, 9, batch=4)
    together = decode_on(distributed, z, 2)[0]
    alone = torch.cat([decode_on(distributed, z[i : i + 1], 2)[0] for i in range(4)])
    assert torch.allclose(together, alone, atol=1e-5, rtol=0)


def test_slicing_and_non_contiguous_latents() -> None:
    plain, distributed = plain_and_distributed("wan21", 8, 6)
    z = latent("wan21", 9, 14, frames=2, batch=2).transpose(3, 4)
    assert not z.is_contiguous()
    plain.use_slicing = distributed.use_slicing = True
    with torch.no_grad():
        want = plain.decode(z).sample
    assert all(torch.equal(got, want) for got in decode_on(distributed, z, 2))


def test_a_stride_beyond_the_tile_is_refused() -> None:
    _, distributed = plain_and_distributed("wan21", 8, 6)
    with pytest.raises(UsageError, match=r"stride 512 pixels is beyond the tile of 64 pixels"):
        distributed.configure_tiles(64, 512)
    with pytest.raises(UsageError, match="multiples of 8 pixels"):
        distributed.configure_tiles(60, 48)
    distributed.tile_sample_min_height = 32  # as diffusers' enable_tiling would leave it: smaller than the stride
    with pytest.raises(UsageError, match="left out"):
        decode_on(distributed, latent("wan21", 20, 20), 2)


@pytest.mark.parametrize("mode", ["spatial_shard_height", "nonsense"])
def test_modes_that_a_family_or_nobody_has(mode: str) -> None:
    _, distributed = plain_and_distributed("flux2", 8, 6)
    if mode == "nonsense":
        with pytest.raises(UsageError, match="the modes are tile, auto"):
            distributed.set_parallel_size(1, mode=mode)
    elif "spatial_shard_height" not in [m.value for m in distributed.capability.decode_modes]:
        with pytest.raises(UnsupportedModeError, match="it has tile"):
            distributed.set_parallel_size(1, mode=mode)


def test_a_size_larger_than_the_group_warns_once_and_uses_the_group(caplog: pytest.LogCaptureFixture) -> None:
    plain, distributed = plain_and_distributed("kl", 8, 6)
    z = latent("kl", 12, 9)
    with torch.no_grad():
        want = plain.decode(z).sample
    assert all(torch.equal(got, want) for got in decode_on(distributed, z, 2, size=7))
    assert [record.message for record in caplog.records if record.name.startswith("vaepar")] == [
        "parallel size 7 is more than the 2 ranks there are; using 2"
    ]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_one_rank_is_diffusers_own_path(family: str) -> None:
    plain, distributed = plain_and_distributed(family, 8, 6)
    distributed.init_distributed()
    distributed.set_parallel_size(1)
    assert not distributed.is_distributed_enabled()
    for z in (latent(family, 13, 9, frames=2), latent(family, 5, 5, frames=2)):
        with torch.no_grad():
            assert torch.equal(distributed.decode(z).sample, plain.decode(z).sample)
            assert torch.equal(distributed.decode(z, return_dict=False)[0], plain.decode(z).sample)
