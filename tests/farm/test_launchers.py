"""The real launchers around whole runs: ours, torchrun, and torchrun's agents on two machines that are one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.farm.conftest import make_latents
from tests.farm.ranks import contents, temporary, wait_for
from vaepar.launch import _cause

pytestmark = pytest.mark.processes

FILES = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that take long enough for something to happen meanwhile."""
    return make_latents(tmp_path_factory.mktemp("launch") / "in", FILES, frames=5, height=10, width=10)


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ({0: (1, 70), 1: (-9, 70)}, (1, -9)),  # both seen in one look: the second rank had lost the first
        ({0: (1, 70), 1: (-9, 71)}, (1, -9)),
        ({0: (-9, 70), 1: (1, 70)}, (0, -9)),
        ({2: (3, 71), 1: (5, 70)}, (1, 5)),
        ({3: (75, 70)}, (3, 75)),
    ],
)
def test_a_killed_rank_is_the_cause(failures: dict[int, tuple[int, int]], cause: tuple[int, int]) -> None:
    assert _cause(failures) == cause


@contextmanager
def running(arguments: Sequence[str], cwd: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A command in the background, with its standard error in ``cwd``; it and its ranks end with the block."""
    with (cwd / "stderr").open("a+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=cwd,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                for child in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
                    child.kill()
            process.wait()


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [p for p in psutil.Process(process.pid).children() if "vaepar" in p.cmdline()]


def decode(files: Path, wan: Path, out: str, *flags: str) -> list[str]:
    base = ["vaepar", "decode", str(files), "--model", str(wan), "--state", "norm", "--tile-size", "64"]
    return [*base, "--out", out, "--report", f"{out}.json", *flags]


def first_output(folder: Path) -> None:
    wait_for(lambda: any(not name.endswith(".tmp") for name in contents_names(folder)), "the first output")


def contents_names(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def want(files: Path, wan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("want")
    with running(decode(files, wan, "out"), root) as process:
        assert process.wait(280) == 0, (root / "stderr").read_text()
    return contents(root / "out")


def test_sigterm_to_our_launcher_and_a_second_run(
    tmp_path: Path, files: Path, wan: Path, want: dict[str, bytes]
) -> None:
    arguments = decode(files, wan, "out", "--ranks", "2", "--vae-parallel-size", "1", "--grace", "0")
    with running(arguments, tmp_path) as process:
        first_output(tmp_path / "out")
        ranks = ranks_of(process)
        assert len(ranks) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75, (tmp_path / "stderr").read_text()
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["interrupted"] is True
    assert report["exit_code"] == 75
    assert 0 < report["counts"]["ok"] < FILES
    assert temporary(tmp_path / "out") == []
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    with running(arguments, tmp_path) as process:
        assert process.wait(280) == 0
    second = json.loads((tmp_path / "out.json").read_text())
    assert second["counts"] == {"skipped": report["counts"]["ok"], "ok": FILES - report["counts"]["ok"]}
    assert contents(tmp_path / "out") == want


def test_a_killed_rank_is_started_again(tmp_path: Path, files: Path, wan: Path, want: dict[str, bytes]) -> None:
    arguments = decode(files, wan, "out", "--ranks", "2", "--overwrite", "--max-restarts", "1")
    with running(arguments, tmp_path) as process:
        first_output(tmp_path / "out")
        ranks_of(process)[1].kill()
        assert process.wait(240) == 0, (tmp_path / "stderr").read_text()
    errors = (tmp_path / "stderr").read_text()
    assert "was ended by SIGKILL" in errors
    assert "; starting the ranks again (1 of 1)" in errors
    # --overwrite asks to replace what was there before, not what this run has made.
    assert json.loads((tmp_path / "out.json").read_text())["counts"]["skipped"] > 0
    assert contents(tmp_path / "out") == want
    assert temporary(tmp_path / "out") == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_without_restarts_is_reported(victim: int, tmp_path: Path, files: Path, wan: Path) -> None:
    with running(decode(files, wan, "out", "--ranks", "2"), tmp_path) as process:
        first_output(tmp_path / "out")
        rank = next(p for p in ranks_of(process) if p.environ()["RANK"] == str(victim))
        rank.kill()
        assert process.wait(240) == 137, (tmp_path / "stderr").read_text()
    errors = (tmp_path / "stderr").read_text()
    assert f"rank {victim} of 2 was ended by SIGKILL" in errors
    assert "Traceback" not in errors
    assert ".cc:" not in errors  # a line of the backend's source code


def test_ranks_start_beside_a_folder_called_like_the_package(tmp_path: Path, files: Path, wan: Path) -> None:
    (tmp_path / "vaepar").mkdir()
    (tmp_path / "vaepar" / "__init__.py").write_text("raise SystemExit('not this one')")
    command = [str(Path(sys.executable).parent / "vaepar"), *decode(files, wan, "out", "--ranks", "2")[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert len(contents(tmp_path / "out")) == FILES


def test_files_under_way_when_a_rank_is_killed_are_told(tmp_path: Path, files: Path, wan: Path) -> None:
    with running(decode(files, wan, "out", "--ranks", "2", "--vae-parallel-size", "2"), tmp_path) as process:
        first_output(tmp_path / "out")
        next(p for p in ranks_of(process) if p.environ()["RANK"] == "1").kill()
        assert process.wait(240) == 137, (tmp_path / "stderr").read_text()
    rows = json.loads((tmp_path / "out.json").read_text())["files"]
    statuses = [row["status"] for row in rows]
    assert 1 <= statuses.count("dropped") <= 2  # the one that is worked on, and the one before it that is still written
    assert statuses == sorted(statuses, key=["ok", "dropped", "not tried"].index)
    assert all("vanished" in row["error"] and row["exit_code"] for row in rows if row["status"] == "dropped")


def test_a_killed_launcher_leaves_no_ranks_and_no_stack(tmp_path: Path, files: Path, wan: Path) -> None:
    """The ranks see that their launcher is gone, and stop as if they had been asked to."""
    with running(decode(files, wan, "out", "--ranks", "2", "--grace", "0"), tmp_path) as process:
        first_output(tmp_path / "out")
        ranks = ranks_of(process)
        process.kill()
        process.wait()
        wait_for(lambda: not any(rank.is_running() for rank in ranks), "the end of the ranks")
    assert temporary(tmp_path / "out") == []
    assert "Exception raised from" not in (tmp_path / "stderr").read_text()


def test_torchrun_hands_on_sigterm_and_restarts(tmp_path: Path, files: Path, wan: Path, want: dict[str, bytes]) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m"]
    arguments = [*launcher, *decode(files, wan, "out", "--vae-parallel-size", "1", "--grace", "1")]
    with running(arguments, tmp_path) as process:
        first_output(tmp_path / "out")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) != 0
    assert json.loads((tmp_path / "out.json").read_text())["interrupted"] is True
    assert temporary(tmp_path / "out") == []
    there = len(contents(tmp_path / "out"))
    with running(arguments, tmp_path) as process:
        wait_for(lambda: len(contents(tmp_path / "out")) > there, "the next output")
        victim = [rank for rank in ranks_of(process) if rank.environ()["RANK"] == "1"]
        victim[0].kill()
        assert process.wait(240) == 0, (tmp_path / "stderr").read_text()
    assert contents(tmp_path / "out") == want
    assert temporary(tmp_path / "out") == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def agent(port: int, name: str, nodes: str, files: Path, wan: Path, *flags: str) -> list[str]:
    """One machine's torchrun of two."""
    return [
        "torch.distributed.run",
        *("--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-id", name, "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", "--max-restarts", "3", "-m"),
        *decode(files, wan, "out", *flags),
    ]


def test_two_machines(tmp_path: Path, files: Path, wan: Path, want: dict[str, bytes]) -> None:
    """Groups stay within a machine, so two machines of one rank are two replicas."""
    arguments = agent(free_port(), "pair", "2", files, wan)
    with running(arguments, tmp_path) as one, running(arguments, tmp_path) as other:
        assert one.wait(240) == 0, (tmp_path / "stderr").read_text()
        assert other.wait(60) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert [group["ranks"] for group in report["groups"]] == [[0], [1]]
    assert report["counts"] == {"ok": FILES}
    assert contents(tmp_path / "out") == want


def test_a_machine_goes_away_and_comes_back(tmp_path: Path, files: Path, wan: Path, want: dict[str, bytes]) -> None:
    """Whoever is there does the work; what was whole is not done again."""
    arguments = agent(free_port(), "leaves", "1:2", files, wan, "--grace", "5")
    # torch's agents cannot take in a machine that comes later while they share one store over all rounds.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with running(arguments, tmp_path, **env) as one:
        first_output(tmp_path / "out")
        for _ in range(2):
            with running(arguments, tmp_path, **env) as other:
                wait_for(lambda other=other: one.poll() is not None or bool(ranks_of(other)), "the second machine")
                there = len(contents(tmp_path / "out"))
                wait_for(
                    lambda there=there: one.poll() is not None or len(contents(tmp_path / "out")) > there, "its output"
                )
                for rank in ranks_of(other) if other.poll() is None else []:
                    rank.kill()
                if other.poll() is None:
                    other.kill()
        assert one.wait(280) == 0, (tmp_path / "stderr").read_text()
    assert contents(tmp_path / "out") == want
    assert temporary(tmp_path / "out") == []
