"""Streams that go away while a run is under way, and signals that come before it has begun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
import torch

from tests.cli.conftest import save_latent

pytestmark = pytest.mark.processes


def vaepar(*arguments: str, stdout: int | IO[bytes], stderr: int | IO[bytes]) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "vaepar", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=stderr, check=False, timeout=120)


def decode(folder: Path, model: Path) -> list[str]:
    for name in ("a", "b"):
        save_latent(folder / "in" / f"{name}.safetensors", torch.randn(1, 4, 2, 2))
    return ["decode", str(folder / "in"), "--model", str(model), "--state", "raw", "--out", str(folder / "out")]


def test_messages_that_nobody_reads_do_not_stop_the_work(tmp_path: Path, model_folders: dict[str, Path]) -> None:
    command = decode(tmp_path, model_folders["kl"])
    with Path("/dev/full").open("wb") as full:
        assert vaepar(*command, stdout=subprocess.DEVNULL, stderr=full).returncode == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.png", "b.png"]


def test_data_that_cannot_be_written_is_one_line(tmp_path: Path, model_folders: dict[str, Path]) -> None:
    command = decode(tmp_path, model_folders["kl"])
    with Path("/dev/full").open("wb") as full:
        shown = vaepar("inspect", str(tmp_path / "in" / "a.safetensors"), stdout=full, stderr=subprocess.PIPE)
        rows = vaepar(*command, "--json", "--progress", "none", stdout=full, stderr=subprocess.PIPE)
    assert shown.returncode == 3
    assert shown.stderr.count(b"\n") == 1
    assert b"standard output cannot be written: No space left on device" in shown.stderr
    assert rows.returncode == 0  # the pictures are what the run is for
    assert rows.stderr.count(b"nothing more is printed there") == 1
    assert b"Traceback" not in shown.stderr + rows.stderr
    assert len(list((tmp_path / "out").iterdir())) == 2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_before_the_work_has_begun_is_a_clean_stop(name: str, tmp_path: Path) -> None:
    """While the libraries are still being loaded, which takes seconds."""
    command = [sys.executable, "-c", _STOPPED_AT_ONCE, name, "inspect", str(tmp_path / "a.safetensors")]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert ended.returncode == 75
    assert ended.stderr.decode().splitlines() == [f"vaepar: stopped by {name}; the same command again does the work"]


_STOPPED_AT_ONCE = """
import signal, sys
import vaepar.cli.main as main
real = main.World.from_environment


def once():
    main.World.from_environment = real
    signal.raise_signal(getattr(signal, sys.argv[1]))


main.World.from_environment = once
sys.exit(main.run(sys.argv[2:]))
"""
