"""The shard's picture and moments against diffusers' untiled ones: every family, both axes, one to eight ranks.

Tolerances: float32 1e-5, float64 1e-12 (sums in another order; the models keep pictures within 1, and diffusers' own
float32 result is 1e-6 to 5e-6 from its float64 one); bfloat16 is compared by the noise that its 8 bits make.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.autoencoders.shards import (
    AXES,
    close,
    joined,
    plain_decode,
    plain_moments,
    shard_decode,
    shard_moments,
)
from tests.families import ADAPTERS, MAKERS, VIDEO, latent
from tests.layers.shard import small_bands
from tests.processes import run_processes
from vaepar.autoencoders.spatial import shard_decode_chunks, shard_encode
from vaepar.layers.bands import convolve_in_bands
from vaepar.parallel.group import RankGroup
from vaepar.parallel.shards import Axis


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("family", MAKERS)
def test_every_family_at_every_rank_count(family: str, size: int, axis: Axis) -> None:
    plain, vae, z = MAKERS[family](), ADAPTERS[family](), latent(family, 5, 7, frames=2)
    picture = plain_decode(plain, z)
    close(shard_decode(vae, z, size, axis)[0], picture)
    x = picture.clamp(-1, 1)
    expected = plain_moments(plain, x)
    for moments in shard_moments(vae, x, size, axis):
        close(moments, expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", MAKERS)
def test_float64(family: str, size: int) -> None:
    plain, vae = MAKERS[family](dtype=torch.float64), ADAPTERS[family](dtype=torch.float64)
    z = latent(family, 4, 5, frames=3, batch=2).double()
    picture = plain_decode(plain, z)
    for axis in AXES:
        close(shard_decode(vae, z, size, axis)[0], picture)
        close(shard_moments(vae, picture.clamp(-1, 1), size, axis)[0], plain_moments(plain, picture.clamp(-1, 1)))


@pytest.mark.parametrize(("family", "axis"), [(f, AXES[i % 2]) for i, f in enumerate(MAKERS)])
def test_real_topology(family: str, axis: Axis) -> None:
    plain, vae = MAKERS[family](real_topology=True), ADAPTERS[family](real_topology=True)
    z = latent(family, 5, 6, frames=3)
    if family == "kl":
        z = torch.cat([z, latent(family, 5, 6, seed=1), latent(family, 5, 6, seed=2), latent(family, 5, 6, seed=3)], 1)
    picture = plain_decode(plain, z)
    close(shard_decode(vae, z, 2, axis)[0], picture)
    close(shard_moments(vae, picture.clamp(-1, 1), 2, axis)[0], plain_moments(plain, picture.clamp(-1, 1)))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", ["kl", "flux2"])
def test_pictures_in_bands(family: str, size: int, axis: Axis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pictures go through their blocks in bands of rows; here bands are as small as these pictures."""
    small_bands(monkeypatch, 10_000)
    banded: list[torch.Size] = []

    def counted(context: Any, norm: Any, conv: Any, x: Tensor) -> Tensor:
        banded.append(x.shape)
        return convolve_in_bands(context, norm, conv, x)

    monkeypatch.setattr("vaepar.layers.blocks.convolve_in_bands", counted)
    plain, vae = MAKERS[family](), ADAPTERS[family]()
    z = latent(family, 7, 8, batch=2)
    picture = plain_decode(plain, z)
    close(shard_decode(vae, z, size, axis)[0], picture)
    assert len(banded) >= 4 * size
    banded.clear()
    close(shard_moments(vae, picture.clamp(-1, 1), size, axis)[0], plain_moments(plain, picture.clamp(-1, 1)))
    assert len(banded) >= 4 * size


@pytest.mark.parametrize("frames", [1, 2, 5])
@pytest.mark.parametrize("frames_per_step", [1, 3, 4])
@pytest.mark.parametrize("family", VIDEO)
def test_frames_and_steps(family: str, frames_per_step: int, frames: int) -> None:
    plain, vae, z = MAKERS[family](), ADAPTERS[family](), latent(family, 4, 3, frames=frames)
    picture = plain_decode(plain, z)
    close(shard_decode(vae, z, 2, "height", frames_per_step=frames_per_step)[0], picture)
    # Frames that do not fill a group of four are left out, as in diffusers.
    x = torch.cat([picture, picture[:, :, -1:].repeat(1, 1, 2, 1, 1)], 2).clamp(-1, 1)
    close(shard_moments(vae, x, 2, "width", frames_per_step=frames_per_step)[1], plain_moments(plain, x))


@pytest.mark.parametrize("seed", range(6))
def test_random_sizes(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    family = list(MAKERS)[seed % 5]
    height, width, size, batch = (int(torch.randint(1, high, (), generator=draw)) for high in (14, 14, 7, 3))
    z = latent(family, height, width, frames=2, batch=batch, seed=seed)
    axis = AXES[seed % 2]
    close(shard_decode(ADAPTERS[family](), z, size, axis)[0], plain_decode(MAKERS[family](), z))


@pytest.mark.parametrize(("height", "size"), [(1, 2), (2, 3), (3, 4), (5, 4), (7, 2), (12, 8)])
def test_any_height_on_any_ranks(height: int, size: int) -> None:
    z = latent("wan21", height, 4, frames=2)
    close(shard_decode(ADAPTERS["wan21"](), z, size, "height")[0], plain_decode(MAKERS["wan21"](), z))


@pytest.mark.parametrize(("height", "width"), [(13, 11), (24, 9)])
@pytest.mark.parametrize("axis", AXES)
def test_indivisible_latents_on_four_ranks(axis: Axis, height: int, width: int) -> None:
    z = latent("kl", height, width)
    close(shard_decode(ADAPTERS["kl"](), z, 4, axis)[0], plain_decode(MAKERS["kl"](), z))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("family", ["kl", "qwenimage"])
def test_pictures_that_do_not_fill_their_last_latent_row(family: str, axis: Axis) -> None:
    shape = (2, 3, 45, 39) if family == "kl" else (2, 3, 5, 45, 39)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = plain_moments(MAKERS[family](), x)
    assert expected.shape[-2:] == (5, 4)
    for moments in shard_moments(ADAPTERS[family](), x, 3, axis):
        close(moments, expected)


def test_patches_of_wan22_are_not_transposed() -> None:
    # A swap of the two patch axes shows between neighbouring pixels only, and not on a square or an even picture.
    z = latent("wan22", 6, 10)
    picture = plain_decode(MAKERS["wan22"](), z)
    assert picture.shape == (1, 3, 1, 96, 160)
    assert (picture[..., ::2, 1::2] - picture[..., 1::2, ::2]).abs().max() > 0.05
    for axis in AXES:
        close(shard_decode(ADAPTERS["wan22"](), z, 2, axis)[0], picture)


def test_a_change_in_the_last_latent_frame_leaves_earlier_frames_alone() -> None:
    vae, z = ADAPTERS["wan21"](), latent("wan21", 4, 4, frames=5)
    changed = z.clone()
    changed[:, :, 4] += 1
    first, second = (shard_decode(vae, each, 2, "height")[0] for each in (z, changed))
    assert first is not None
    assert second is not None
    assert torch.equal(first[:, :, :13], second[:, :, :13])
    assert not torch.equal(first[:, :, 13], second[:, :, 13])


@pytest.mark.parametrize("family", MAKERS)
def test_bfloat16_is_as_good_as_diffusers_own(family: str, record_property: Any) -> None:
    exact = plain_decode(MAKERS[family](), latent(family, 6, 5, frames=2))
    z = latent(family, 6, 5, frames=2).bfloat16()
    sharded = shard_decode(ADAPTERS[family](dtype=torch.bfloat16), z, 2, "height")[0]
    assert sharded is not None
    assert sharded.dtype == torch.bfloat16
    plain = plain_decode(MAKERS[family](dtype=torch.bfloat16), z)
    own, ours = ((picture.float() - exact).square().mean().sqrt() for picture in (plain, sharded))
    record_property("psnr_against_float32", float(20 * torch.log10(2 / ours)))
    record_property("max_against_float32", float((sharded.float() - exact).abs().max()))
    assert ours <= 1.1 * own


PROCESS_CASES: tuple[tuple[str, Axis], ...] = (("wan21", "height"), ("kl", "width"))


def pixels(family: str) -> Tensor:
    shape = (1, 3, *([5] if family in VIDEO else []), 48, 40)
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


def run_on_a_process(group: RankGroup) -> list[tuple[Tensor | None, Tensor | None]]:
    results = []
    for family, axis in PROCESS_CASES:
        vae, z = ADAPTERS[family](), latent(family, 7, 5, frames=6)
        chunks = list(shard_decode_chunks(vae, z, group, axis))
        picture = chunks[0] if family not in VIDEO or group.rank else joined(chunks)
        results.append((picture, shard_encode(vae, pixels(family), group, axis)))
    return results


@pytest.mark.processes
def test_two_real_processes(tmp_path: Path) -> None:
    owner, other = run_processes(2, run_on_a_process, tmp_path)
    for (family, _), (picture, moments), (nothing, same_moments) in zip(PROCESS_CASES, owner, other, strict=True):
        vae = MAKERS[family]()
        close(picture, plain_decode(vae, latent(family, 7, 5, frames=6)))
        close(moments, plain_moments(vae, pixels(family)))
        assert nothing is None
        assert torch.equal(same_moments, moments)
