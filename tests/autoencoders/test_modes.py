"""The selection of a strategy for each request, and sequences of strategies on one model."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import FAMILIES, latent, plain_and_distributed
from vaepar.autoencoders.selection import select
from vaepar.config import VaeParallelConfig, VaeParallelMode
from vaepar.errors import UnsupportedModeError, UsageError
from vaepar.parallel.loopback import LoopbackGroup, run_loopback

HEIGHT, WIDTH = VaeParallelMode.SPATIAL_SHARD_HEIGHT, VaeParallelMode.SPATIAL_SHARD_WIDTH


@pytest.mark.parametrize(
    ("mode", "height", "width", "size", "group", "want"),
    [
        (VaeParallelMode.AUTO, 20, 40, 4, 4, "spatial_shard_width"),
        (VaeParallelMode.AUTO, 40, 20, 4, 4, "spatial_shard_height"),
        (VaeParallelMode.AUTO, 20, 20, 4, 4, "spatial_shard_width"),
        (VaeParallelMode.AUTO, 2, 2, 4, 4, "tile"),
        (VaeParallelMode.AUTO, 3, 9, 4, 4, "spatial_shard_width"),
        (VaeParallelMode.AUTO, 20, 40, 1, 1, "tile"),
        (VaeParallelMode.AUTO, 20, 40, 2, 4, "tile"),
        (VaeParallelMode.TILE, 20, 40, 4, 4, "tile"),
        (HEIGHT, 4, 40, 4, 4, "spatial_shard_height"),
        (HEIGHT, 3, 40, 4, 4, "tile"),
        (WIDTH, 20, 40, 3, 4, "tile"),
        (WIDTH, 20, 40, 1, 1, "spatial_shard_width"),
    ],
)
def test_the_selector_is_a_table(
    mode: VaeParallelMode, height: int, width: int, size: int, group: int, want: str
) -> None:
    selection = select(mode, height, width, size, group)
    assert selection.mode == want
    assert selection.reason
    assert (selection.refused is not None) == (mode in (HEIGHT, WIDTH) and want == "tile")


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_sizes_are_checked_in_the_config(value: Any) -> None:
    with pytest.raises(UsageError, match="vae_patch_parallel_size"):
        VaeParallelConfig(vae_patch_parallel_size=value)
    assert VaeParallelConfig(vae_parallel_mode="auto").vae_parallel_mode is VaeParallelMode.AUTO  # type: ignore[arg-type]


def on_ranks(model: Any, z: Tensor, ranks: int, mode: str, size: int | None = None) -> list[Tensor]:
    def work(group: LoopbackGroup) -> Tensor:
        vae = copy.deepcopy(model)
        vae.init_distributed(group)
        vae.set_parallel_size(size or ranks, mode=mode)
        with torch.no_grad():
            found: Tensor = vae.decode(z).sample
        return found

    return run_loopback(ranks, work)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("mode", ["auto", "spatial_shard_height", "spatial_shard_width"])
def test_spatial_modes_give_every_rank_the_untiled_picture(family: str, mode: str) -> None:
    plain, distributed = plain_and_distributed(family, 8, 6)
    plain.use_tiling = False
    z = latent(family, 11, 9, frames=3, batch=2)
    with torch.no_grad():
        want = plain.decode(z).sample
    for got in on_ranks(distributed, z, 3, mode):
        assert torch.allclose(got, want, atol=1e-5, rtol=0), (got - want).abs().max()


def test_a_forced_shard_that_cannot_be_had_warns_on_wan_and_is_refused_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, wan = plain_and_distributed("wan21", 8, 6)
    z = latent("wan21", 2, 12)
    with torch.no_grad():
        want = plain.decode(z).sample
    with caplog.at_level(logging.WARNING, logger="vaepar"):
        assert all(torch.equal(got, want) for got in on_ranks(wan, z, 3, "spatial_shard_height"))
    warnings = [record.message for record in caplog.records if record.name.startswith("vaepar")]
    assert len(warnings) == 1
    assert "there are 2; using tile" in warnings[0]
    for family in ("kl", "flux2", "qwenimage"):
        _, distributed = plain_and_distributed(family, 8, 6)
        with pytest.raises(UnsupportedModeError, match="also has tile and auto"):
            on_ranks(distributed, latent(family, 2, 12), 3, "spatial_shard_height")
        with pytest.raises(UnsupportedModeError, match="needs all 3 ranks"):
            on_ranks(distributed, latent(family, 9, 12), 3, "spatial_shard_height", size=2)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_mixed_sequence_leaves_no_trace(family: str) -> None:
    """tile, auto, direct, height, width, a failing request, tile again: first and last equal, nothing kept."""
    _, distributed = plain_and_distributed(family, 8, 6)
    large, small = latent(family, 10, 13, frames=3), latent(family, 6, 8, frames=2)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    counts: list[int] = []

    def work(group: LoopbackGroup) -> tuple[bool, bool]:
        vae = copy.deepcopy(distributed)
        vae.init_distributed(group)

        def decode(mode: str, z: Tensor = large) -> Tensor:
            vae.set_parallel_size(2, mode=mode)
            with torch.no_grad():
                found: Tensor = vae.decode(z).sample
            return found

        def round_trip() -> tuple[bool, bool]:
            first, direct = decode("tile"), decode("auto", small)
            for mode in ("auto", "spatial_shard_height", "spatial_shard_width"):
                decode(mode)
            try:
                decode("spatial_shard_width", large.to(torch.float16))  # not the weights' dtype
            except Exception as error:
                failed = "failed" in str(error)
            else:
                failed = False
            return torch.equal(first, decode("tile")) and torch.equal(direct, decode("tile", small)), failed

        results = [round_trip()]  # caches of kernels and plans are filled by the first one
        group.gather_values(0)
        if group.rank == 0:
            counts.append(tensors())
        group.gather_values(0)
        results.append(round_trip())
        group.gather_values(0)
        if group.rank == 0:
            counts.append(tensors())
        group.gather_values(0)
        return all(same for same, _ in results), all(failed for _, failed in results)

    assert run_loopback(2, work) == [(True, True)] * 2
    assert counts[0] == counts[1]


def test_parameters_stay_the_same_objects_and_names() -> None:
    _, distributed = plain_and_distributed("wan21", 8, 6)
    before = {name: id(value) for name, value in distributed.state_dict(keep_vars=True).items()}
    z = latent("wan21", 9, 9)
    distributed.init_distributed()
    distributed.set_parallel_size(1, mode="spatial_shard_height")
    list(distributed.decode_chunks(z))
    after = {name: id(value) for name, value in distributed.state_dict(keep_vars=True).items()}
    assert before == after
    plain, _ = plain_and_distributed("wan21", 8, 6)
    assert not any(distributed.load_state_dict(plain.state_dict(), strict=True))
