"""Tile encode against diffusers' own serial tiled encode: equal bit for bit, as for decode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import FAMILIES, pixels, plain_and_distributed
from vaepar.autoencoders.feed import ReaderFeed, TensorFeed
from vaepar.errors import InputError
from vaepar.parallel.loopback import LoopbackGroup, run_loopback


def moments_on(model: Any, x: Tensor, ranks: int, mode: str = "tile") -> list[Tensor]:
    def work(group: LoopbackGroup) -> Tensor:
        vae = copy.deepcopy(model)
        vae.init_distributed(group)
        vae.set_parallel_size(ranks, mode=mode)
        with torch.no_grad():
            found: Tensor = vae.encode(x).latent_dist.parameters
        return found

    return run_loopback(ranks, work)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(("height", "width"), [(13, 11), (7, 20)], ids=str)
def test_every_rank_count_equals_serial_tiling(family: str, height: int, width: int) -> None:
    plain, distributed = plain_and_distributed(family, 8, 6)
    x = pixels(family, height, width, frames=5, batch=2)
    with torch.no_grad():
        want = plain.encode(x).latent_dist.parameters
    for ranks in (1, 2, 3, 4):
        for got in moments_on(distributed, x, ranks):
            assert torch.equal(got, want), f"{ranks} ranks"


@pytest.mark.parametrize("family", ["kl", "flux2"])
def test_the_older_tiled_encode_of_image_families(family: str) -> None:
    plain, distributed = plain_and_distributed(family, 8, 6)
    x = pixels(family, 9, 10)
    with torch.no_grad(), pytest.warns(FutureWarning, match="tiled_encode"):
        want = plain.tiled_encode(x).latent_dist.parameters

    def work(group: LoopbackGroup) -> Tensor:
        vae = copy.deepcopy(distributed)
        vae.init_distributed(group)
        vae.set_parallel_size(2)
        with torch.no_grad():
            found: Tensor = vae.tiled_encode(x, return_dict=False)[0].parameters
        return found

    assert all(torch.equal(got, want) for got in run_loopback(2, work))


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("mode", ["tile", "spatial_shard_height", "spatial_shard_width", "auto"])
def test_chunks_from_a_reader_are_the_moments_of_encode(family: str, mode: str) -> None:
    plain, distributed = plain_and_distributed(family, 8, 6)
    if mode != "tile":
        plain.use_tiling = False
    for height, width in ((9, 12), (8, 6)):  # over the tile threshold and below
        x = pixels(family, height, width, frames=9)
        with torch.no_grad():
            want = plain.encode(x).latent_dist.parameters

        def work(group: LoopbackGroup, x: Tensor = x) -> list[Tensor | None]:
            vae = copy.deepcopy(distributed)
            vae.init_distributed(group)
            vae.set_parallel_size(2, mode=mode)
            film = x if x.dim() == 5 else x[:, :, None]
            left = [film[0]]

            def read(count: int) -> Tensor | None:
                piece, left[0] = left[0][:, :count], left[0][:, count:]
                return piece

            shape = tuple(film.shape)
            return list(vae.encode_chunks(ReaderFeed(read, shape, torch.float32, torch.device("cpu"))))

        owner, other = run_loopback(2, work)
        chunks = [chunk for chunk in owner if chunk is not None]
        got = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)
        # Shards add in another order than one device, and so may a convolution over fewer frames.
        assert torch.allclose(got, want, atol=1e-5, rtol=0), (got - want).abs().max()
        assert all(chunk is None for chunk in other)


def test_frames_that_fill_no_chunk_are_left_out_as_in_diffusers() -> None:
    plain, distributed = plain_and_distributed("wan21", 8, 6)
    x = pixels("wan21", 9, 9, frames=7)
    with torch.no_grad():
        want = plain.encode(x).latent_dist.parameters
    assert want.shape[2] == 2
    assert all(torch.equal(got, want) for got in moments_on(distributed, x, 2))


def test_encode_decode_encode_in_one_process() -> None:
    _, distributed = plain_and_distributed("wan21", 8, 6)
    x = pixels("wan21", 9, 10, frames=5)

    def work(group: LoopbackGroup) -> bool:
        vae = copy.deepcopy(distributed)
        vae.init_distributed(group)
        vae.set_parallel_size(2)
        with torch.no_grad():
            first = vae.encode(x).latent_dist.mode()
            vae.decode(first)
            return torch.equal(first, vae.encode(x).latent_dist.mode())

    assert run_loopback(2, work) == [True, True]


def test_a_reader_that_ends_early_fails_on_all_ranks() -> None:
    _, distributed = plain_and_distributed("wan21", 8, 6)
    film = pixels("wan21", 9, 9, frames=5)[0]

    def work(group: LoopbackGroup) -> str:
        vae = copy.deepcopy(distributed)
        vae.init_distributed(group)
        vae.set_parallel_size(2)
        calls = iter([film[:, :1], film[:, 1:3]])
        feed = ReaderFeed(lambda _: next(calls), (1, 3, 5, 72, 72), torch.float32, torch.device("cpu"))
        try:
            list(vae.encode_chunks(feed))
        except InputError as error:
            return str(error)
        return ""

    assert all("the frames end at 3; 5 were promised" in text for text in run_loopback(2, work))


def test_a_feed_holds_one_piece() -> None:
    film = torch.zeros(3, 9, 4, 4)
    feed = ReaderFeed(lambda n: film[:, :n], (1, 3, 9, 4, 4), torch.float32, torch.device("cpu"))
    first = feed.frames(0, 1)
    assert feed.frames(0, 1) is first
    assert feed.frames(1, 5).shape == (1, 3, 4, 4, 4)
    with pytest.raises(InputError, match="after frame 5"):
        feed.frames(0, 1)
    assert TensorFeed(film[None]).frames(2, 4).shape == (1, 3, 2, 4, 4)
