"""Replicas x VAE groups: the mesh as arithmetic, and whole runs on every mesh of four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.farm.conftest import decode_request, make_latents
from tests.farm.ranks import contents, decode_on, temporary
from vaepar.errors import UsageError
from vaepar.jobs.farming import Farming, parse_parallel_size, parse_shard
from vaepar.jobs.groups import Grouping, allowed_sizes, check_size, choose_grouping, join_group
from vaepar.parallel.loopback import run_loopback


@given(nodes=st.integers(1, 5), local=st.integers(1, 12), across=st.booleans())
def test_groups_cover_every_rank_once_and_never_cross_machines_unasked(nodes: int, local: int, across: bool) -> None:
    world = nodes * local
    for size in allowed_sizes(world, local, across):
        grouping = Grouping(size=size, count=world // size, reason="")
        ranks = [rank for group in range(grouping.count) for rank in grouping.ranks(group)]
        assert ranks == list(range(world))
        assert all(rank in grouping.ranks(grouping.of(rank)) for rank in ranks)
        if not across:
            assert all(len({rank // local for rank in grouping.ranks(group)}) == 1 for group in range(grouping.count))


@pytest.mark.parametrize(
    ("world", "local", "files", "needs", "size"),
    [
        (4, 4, 40, 1, 1),  # as many replicas as there are ranks
        (4, 4, 40, 2, 2),  # half of them, where one rank has not the memory
        (4, 4, 40, 4, 4),
        (4, 4, 40, 99, 4),  # nothing fits: the largest group has the best chance
        (4, 4, 1, 1, 4),  # one file: all ranks on it
        (4, 4, 2, 1, 2),  # no group without a file
        (4, 4, 3, 1, 2),
        (8, 4, 100, 99, 4),  # never across machines unasked
        (8, 4, 1, 1, 4),
        (3, 3, 3, 1, 1),
        (1, 1, 5, 99, 1),
    ],
)
def test_auto_plans_from_files_and_memory(world: int, local: int, files: int, needs: int, size: int) -> None:
    found = choose_grouping(Farming(), world, local, files, fits=lambda size: size >= needs)
    assert (found.size, found.count) == (size, world // size)
    assert found.reason


def test_a_mode_that_shares_keeps_the_ranks_together() -> None:
    assert choose_grouping(Farming(), 4, 4, 40, fits=lambda size: True, shares=True).size == 4
    assert choose_grouping(Farming(across_nodes=True), 8, 4, 40, fits=lambda size: True, shares=True).size == 8


@pytest.mark.parametrize(("size", "words"), [(3, "1, 2, 4"), (8, "--across-nodes"), (5, "does not divide")])
def test_sizes_that_do_not_divide_are_refused(size: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_size(Farming(vae_parallel_size=size), 8, 4)


def test_settings_are_checked() -> None:
    for bad in (
        {"vae_parallel_size": 0},
        {"grace": -1.0},
        {"grace": float("nan")},
        {"shard": (3, 3, 3)},
        {"shard": (2, 1, 3)},
    ):
        with pytest.raises(UsageError):
            Farming(**bad)  # type: ignore[arg-type]
    assert parse_parallel_size("auto") == "auto"
    assert parse_shard("2/7") == (2, 2, 7)
    assert parse_shard("2-4/7") == (2, 4, 7)
    for text in ("two", "-1", "1.5", ""):
        with pytest.raises(UsageError):
            parse_parallel_size(text)
        with pytest.raises(UsageError):
            parse_shard(text)


def test_threads_cannot_be_divided_into_groups() -> None:
    grouping = Grouping(size=1, count=2, reason="")
    with pytest.raises(UsageError, match="processes of their own"):
        run_loopback(2, lambda group: join_group(group, grouping))


@pytest.mark.processes
def test_every_mesh_gives_the_same_outputs_and_one_report(tmp_path: Path, wan: Path) -> None:
    """40 files on four ranks: 4 replicas, 2 groups of 2, and all ranks on each latent."""
    files = make_latents(tmp_path / "in", 40)
    (tmp_path / "in" / "broken.safetensors").write_bytes(b"\x00" * 20)
    found = {}
    for size in (1, 2, 4):
        out = tmp_path / f"of{size}"
        reports = decode_on(decode_request(files, wan, out, vae_parallel_size=size), 4, tmp_path / f"store{size}")
        found[size] = contents(out)
        assert temporary(out) == []
        first = reports[0]
        assert [row.path for row in first.rows] == sorted(row.path for row in first.rows)
        assert first.counts == {"ok": 40, "failed": 1}
        for report in reports:
            assert report.exit_code == 3
            assert [(row.status, row.outputs, row.group) for row in report.rows] == [
                (row.status, row.outputs, row.group) for row in first.rows
            ]
        assert [group.ranks for group in first.groups] == [
            list(range(start, start + size)) for start in range(0, 4, size)
        ]
        assert sum(group.files for group in first.groups) == 40
        worked = [row for row in first.rows if row.status == "ok"]
        assert all(len(row.peak_bytes) == size for row in worked)
        assert all(group.busy_seconds > 0 for group in first.groups if group.files)
    assert len(found[1]) == 40
    assert found[1] == found[2] == found[4]
