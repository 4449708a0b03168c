"""Requests one after another: nothing is left behind, nothing travels in vain, one rank's failure ends all at once."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.autoencoders.shards import AXES, close, joined, plain_decode, shard_decode, shard_moments
from tests.families import ADAPTERS, MAKERS, latent
from vaepar.autoencoders.spatial import prepare_shards, shard_decode_chunks, shard_encode
from vaepar.errors import StageFailedError, UsageError
from vaepar.layers.context import active_shard
from vaepar.parallel.agreement import agreed
from vaepar.parallel.group import RankGroup, SoloGroup
from vaepar.parallel.loopback import LoopbackGroup, run_loopback
from vaepar.parallel.shards import Axis


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def chunks_of(vae: Any, z: Tensor, group: RankGroup, axis: Axis) -> list[Tensor | None]:
    return list(shard_decode_chunks(vae, z, group, axis))


def break_once(layer: nn.Module) -> None:
    """Let ``layer`` fail at its next call, once."""

    def fail(*_: Any) -> None:
        handle.remove()
        raise ValueError("it broke")

    handle = layer.register_forward_pre_hook(fail)


@pytest.mark.parametrize("family", ["wan21", "kl"])
def test_mixed_requests_on_one_model(family: str) -> None:
    """Tile, direct, height, width, a failing request, tile again, on the same models and the same group."""
    large, small = latent(family, 10, 12, frames=2), latent(family, 3, 3, frames=2)
    plain = MAKERS[family]()
    expected = plain_decode(plain, large)
    direct = plain_decode(plain, small)
    models = [ADAPTERS[family]() for _ in range(2)]
    kept: dict[tuple[int, str], Any] = {}

    def tile(vae: Any) -> Tensor:
        vae.use_tiling = True
        if family == "wan21":
            vae.enable_tiling(64, 64, 48, 48)
        result = plain_decode(vae, large)
        vae.use_tiling = False
        return result

    def work(group: RankGroup) -> None:
        vae = models[group.rank]
        first = tile(vae)
        assert torch.equal(plain_decode(vae, small), direct)
        for turn in range(2):
            for axis in AXES:
                with agreed(group, "decode"):
                    chunks = chunks_of(vae, large, group, axis)
                kept[group.rank, f"{axis}{turn}"] = chunks
            if group.rank == 1:
                break_once(vae.decoder.conv_out)
            with pytest.raises(StageFailedError, match="it broke"), agreed(group, "decode"):
                chunks_of(vae, large, group, "height")
        assert torch.equal(plain_decode(vae, small), direct)
        assert torch.equal(tile(vae), first)

    run_loopback(2, work)
    for axis in AXES:
        results = [kept[0, f"{axis}{turn}"] for turn in range(2)]
        for chunks in results:
            close(joined(chunks) if family == "wan21" else chunks[0], expected)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    kept.clear()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("family", ["wan21", "qwenimage", "kl"])
def test_no_tensor_is_left(family: str, fails: bool) -> None:
    models = [ADAPTERS[family]() for _ in range(3)]
    z = latent(family, 6, 5, frames=6)
    groups = LoopbackGroup.create(3)

    def request() -> None:
        run_on(groups, models, z, fails)

    request()
    before = live_tensors()
    request()
    assert live_tensors() == before


def run_on(groups: list[LoopbackGroup], models: list[Any], z: Tensor, fails: bool) -> None:
    """One request on groups that stay; when it fails, rank 1 fails at the last layer of its second step."""
    outcomes: list[str] = []

    def body(group: LoopbackGroup) -> None:
        vae = models[group.rank]
        hooked = vae.decoder.conv_out if group.rank == 1 and fails else None
        calls = [0]

        def hook(*_: Any) -> None:
            calls[0] += 1
            if calls[0] == (2 if z.ndim == 5 else 1):
                raise ValueError("it broke")

        handle = hooked.register_forward_pre_hook(hook) if hooked is not None else None
        try:
            with agreed(group, "decode"):
                for chunk in shard_decode_chunks(vae, z, group, "height"):
                    del chunk
            outcomes.append("fine")
        except StageFailedError as error:
            outcomes.append(str(error).split(":")[-1].strip())
        finally:
            if handle is not None:
                handle.remove()

    threads = [threading.Thread(target=body, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == (["it broke"] if fails else ["fine"]) * 3


def test_a_stream_that_is_dropped_half_way_leaves_nothing() -> None:
    vae, z = ADAPTERS["wan21"](), latent("wan21", 5, 5, frames=9)
    picture = plain_decode(MAKERS["wan21"](), z)
    prepare_shards(vae)
    before = live_tensors()
    stream = shard_decode_chunks(vae, z, SoloGroup(), "height")
    next(stream)
    assert active_shard() is None  # who takes the chunks does not see the shard
    assert torch.equal(plain_decode(vae, z), picture)
    next(stream)
    assert live_tensors() > before
    stream.close()
    del stream
    assert live_tensors() == before


def test_two_streams_of_one_model_may_run_in_turn() -> None:
    plain, vae = MAKERS["wan21"](), ADAPTERS["wan21"]()
    first, second = latent("wan21", 5, 5, frames=6), latent("wan21", 4, 6, frames=6, seed=1)
    pairs = zip(
        shard_decode_chunks(vae, first, SoloGroup(), "height"),
        shard_decode_chunks(vae, second, SoloGroup(), "width"),
        strict=True,
    )
    ours, others = zip(*pairs, strict=True)
    close(joined(list(ours)), plain_decode(plain, first))
    close(joined(list(others)), plain_decode(plain, second))


def test_encode_between_decodes_changes_nothing() -> None:
    vae, z = ADAPTERS["wan21"](), latent("wan21", 4, 4, frames=2)
    x = plain_decode(MAKERS["wan21"](), z)
    first = shard_moments(vae, x, 2, "height")[0]
    shard_decode(vae, z, 2, "width")
    again = shard_moments(vae, x, 2, "height")[0]
    assert first is not None
    assert again is not None
    assert torch.equal(first, again)


def test_shapes_and_failures_one_after_another_give_what_a_fresh_model_gives() -> None:
    vae = ADAPTERS["wan21"]()
    for frames, height in ((3, 8), (1, 12), (2, 8)):
        z = latent("wan21", height, 4, frames=frames)
        assert joined(chunks_of(vae, z, SoloGroup(), "height")).shape[2] == 4 * frames - 3
    with pytest.raises(RuntimeError):
        chunks_of(vae, z.double(), SoloGroup(), "height")
    fresh = joined(chunks_of(ADAPTERS["wan21"](), z, SoloGroup(), "height"))
    assert torch.equal(joined(chunks_of(vae, z, SoloGroup(), "height")), fresh)


def test_tiling_of_the_model_does_not_reach_into_a_shard() -> None:
    vae, z = ADAPTERS["wan21"](), latent("wan21", 10, 12, frames=2)
    picture = plain_decode(MAKERS["wan21"](), z)
    vae.enable_tiling(64, 64, 48, 48)
    close(shard_decode(vae, z, 2, "height")[0], picture)


@pytest.mark.parametrize(("owner", "extent", "size"), [(1, 5, 2), (2, 5, 3), (3, 2, 4)])
def test_the_owner_gets_the_picture_also_without_rows_of_its_own(owner: int, extent: int, size: int) -> None:
    for family in ("wan21", "kl"):
        z = latent(family, extent, 4, frames=6)
        results = shard_decode(ADAPTERS[family](), z, size, "height", owner=owner)
        close(results[owner], plain_decode(MAKERS[family](), z))
        assert all(result is None for rank, result in enumerate(results) if rank != owner)


def test_moments_may_go_to_one_rank() -> None:
    vae = ADAPTERS["kl"]()
    x = torch.rand((1, 3, 40, 32), generator=torch.Generator().manual_seed(0))
    results = shard_moments(vae, x, 3, "height", owner=2)
    assert results[:2] == [None, None]
    assert results[2] is not None


def test_chunks_are_one_frame_then_four_for_each_latent_frame() -> None:
    vae, z = ADAPTERS["wan21"](), latent("wan21", 3, 3, frames=8)
    frames = [
        chunk.shape[2]
        for chunk in shard_decode_chunks(vae, z, SoloGroup(), "height", frames_per_step=3)
        if chunk is not None
    ]
    assert frames == [1, 12, 12, 4]


def test_ranks_that_do_not_need_rows_get_none() -> None:
    vae, z = ADAPTERS["kl"](), latent("kl", 4, 3)
    models = [copy.deepcopy(vae) for _ in range(4)]
    sent: list[tuple[int, int]] = []

    def work(group: RankGroup) -> None:
        exchange = group.exchange

        def noted(sends: Any, receives: Any) -> Any:
            if any(message.tensor.ndim == 4 for message in sends):  # halo rows; norms and attention go to all
                sent.extend((group.rank, message.peer) for message in sends)
            return exchange(sends, receives)

        group.exchange = noted  # type: ignore[method-assign]  # a spy
        chunks_of(models[group.rank], z, group, "height")

    run_loopback(4, work)
    assert {abs(rank - peer) for rank, peer in sent} == {1}


# What is refused.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"axis": "depth"}, "shard axis is 'depth'"),
        ({"owner": 2}, "owner is rank 2"),
        ({"owner": -1}, "owner is rank -1"),
        ({"frames_per_step": 0}, "frames_per_step is 0"),
        ({"z": torch.zeros(1, 16, 4, 4)}, "5 axes"),
        ({"z": torch.zeros(1, 16, 0, 4, 4)}, "none empty"),
    ],
)
def test_requests_that_cannot_be(options: dict[str, Any], words: str) -> None:
    request = {"z": latent("wan21", 4, 4), "axis": "height", **options}

    def work(group: RankGroup) -> None:
        with pytest.raises(UsageError, match=words):
            shard_decode_chunks(ADAPTERS["wan21"](), request.pop("z"), group, request.pop("axis"), **request)

    run_loopback(1, work)


@pytest.mark.parametrize(
    ("family", "shape", "words"),
    [
        ("wan22", (1, 3, 1, 32, 40), "multiples of 16"),
        ("wan22", (1, 3, 1, 33, 32), "multiples of 16"),
        ("kl", (1, 3, 7, 32), "needs 8 or more"),
        ("kl", (1, 3, 32, 7), "needs 8 or more"),
    ],
)
def test_pixels_that_cannot_be(family: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        shard_encode(ADAPTERS[family](), torch.zeros(shape), SoloGroup(), "height")


@pytest.mark.parametrize("family", ["kl", "wan21", "wan22"])
def test_autocast(family: str) -> None:
    """As plain decode under autocast: some layers in bfloat16, so compared by the noise of its 8 bits."""
    plain, vae, z = MAKERS[family](real_topology=True), ADAPTERS[family](real_topology=True), latent(family, 4, 5)
    if family == "kl":
        z = torch.cat([z] * 4, 1)
    exact = plain_decode(plain, z)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = plain_decode(plain, z)
        (chunk,) = shard_decode_chunks(vae, z, SoloGroup(), "width")
    assert chunk is not None
    assert (chunk - exact).abs().mean() <= 2 * (wanted - exact).abs().mean()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_request_may_leave_inference_mode(steps: int, ranks: int) -> None:
    models, z = [ADAPTERS["wan21"]() for _ in range(ranks)], latent("wan21", 4, 4, frames=5)

    def work(group: RankGroup) -> Tensor | None:
        chunks = shard_decode_chunks(models[group.rank], z, group, "width", frames_per_step=1)
        with torch.inference_mode():
            made = [next(chunks) for _ in range(steps)]
        made.extend(chunks)
        return joined([chunk for chunk in made if chunk is not None]) if group.rank == 0 else None

    whole = run_loopback(ranks, work)[0]
    assert whole is not None
    close(whole, plain_decode(MAKERS["wan21"](), z))
