"""``vaepar bench`` as a command: tables, JSON, plot, real ranks, and one line for what cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.cli.conftest import run_command
from vaepar.cli.main import run
from vaepar.launch import usable_cores

# Another order of float32 sums on values of order 1.
SHARD_TOLERANCE = 1e-5

_PATIENCE = 280  # seconds, on a machine that is busy with other things

TOP = {"vaepar", "schema", "operation", "machine", "model", "settings", "notes", "results"}
MACHINE = {"system", "cpu", "cores", "memory_bytes", "gpus", "python", "torch", "diffusers", "busy_before"}
SETTINGS = {"ranks", "local_ranks", "threads_per_rank", "device", "modes", "repeats", "warmup", "tiles"}
CASE = {"name", "strategy", "reason", "ranks", "threads"}
ROW = {"case", "latency", "speed_up", "efficiency", "stock_one_thread", "stock_same_threads", "peak_bytes"} | {
    *(
        "peak_to_one_rank",
        "estimated_bytes",
        "peak_to_stock",
        "sent_bytes",
        "messages",
        "rounds",
        "imbalance",
        "to_untiled",
        "to_tiled",
        "failed",
    ),
    *("samples", "notes"),
}
SAMPLE = {"repeat", "seconds", "rank_seconds", "rank_cpu_seconds", "peak_bytes", "sent_bytes", "messages", "rounds"}


def check_schema(data: dict[str, Any]) -> None:
    """Version 2 of the JSON: a change of keys needs another number."""
    assert data["schema"] == 2
    assert set(data) == TOP
    assert set(data["machine"]) == MACHINE
    assert set(data["model"]) == {"name", "class", "dtype", "parameters"}
    assert set(data["settings"]) == SETTINGS | {"frames_per_step"}
    for result in data["results"]:
        assert set(result) == {"shape", "cases"}
        for row in result["cases"]:
            assert set(row) == ROW
            assert set(row["case"]) == CASE
            assert set(row["latency"]) == {"median", "minimum", "maximum", "lower_quartile", "upper_quartile"}
            assert set(row["stock_one_thread"]) == {"value", "minimum", "maximum"}
            assert set(row["to_untiled"]) == set(row["to_tiled"]) == {"max_abs", "psnr_db"}
            assert len(row["samples"]) == data["settings"]["repeats"]
            assert all(set(sample) == SAMPLE for sample in row["samples"])


def by_label(data: dict[str, Any], result: int = 0) -> dict[tuple[str, int, int], dict[str, Any]]:
    rows = data["results"][result]["cases"]
    return {(row["case"]["name"], row["case"]["ranks"], row["case"]["threads"]): row for row in rows}


def test_one_rank_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, picture = tmp_path / "new" / "bench.json", tmp_path / "new" / "bench.png"
    command = ["bench", "--family", "wan", "--scale", "tiny", "--modes", "tile,spatial_shard_height", "--repeats", "2"]
    assert run([*command, "--frames-per-step", "1", "--json", str(target), "--plot", str(picture)]) == 0
    printed = capsys.readouterr()
    for word in ("vs one rank", "vs stock one thread", "efficiency", "max abs untiled", "PSNR tiled", "1x16x2x12x20"):
        assert word in printed.out
    assert "[1/14] reference: stock untiled" in printed.err
    data = json.loads(target.read_text())
    check_schema(data)
    assert data["settings"]["frames_per_step"] == 1
    rows = by_label(data)
    assert rows[("tile", 1, 1)]["to_tiled"] == {"max_abs": 0.0, "psnr_db": None}
    assert rows[("spatial_shard_height", 1, 1)]["to_untiled"]["max_abs"] <= SHARD_TOLERANCE
    with Image.open(picture) as opened:
        assert opened.format == "PNG"
        assert len(opened.convert("RGB").getcolors(1 << 24) or ()) > 10
    assert sorted(path.name for path in target.parent.iterdir()) == ["bench.json", "bench.png"]


def test_a_named_model(capsys: pytest.CaptureFixture[str], model_folders: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    command = ["bench", "--model", str(model_folders["qwenimage"]), "--shape", "2x6x9", "--tile-size", "32", "--quiet"]
    assert run([*command, "--repeats", "1", "--json", str(target)]) == 0
    data = json.loads(target.read_text())
    check_schema(data)
    assert data["results"][0]["shape"] == [1, 16, 2, 6, 9]
    assert data["model"]["class"] == "AutoencoderKLQwenImage"
    assert by_label(data)[("tile", 1, 1)]["to_tiled"]["max_abs"] == 0
    assert capsys.readouterr().err == ""


@pytest.mark.processes
def test_two_ranks(tmp_path: Path) -> None:
    arguments = ["--family", "qwenimage", "--scale", "tiny", "--ranks", "1,2", "--shape", "2x9x11"]
    modes = "tile,auto,spatial_shard_height,spatial_shard_width"
    done = run_command(
        ["vaepar", "bench", *arguments, "--modes", modes, "--repeats", "1", "--json", "b.json", "--plot", "b.png"],
        tmp_path,
        timeout=_PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "idle ranks used" in done.stdout
    assert (tmp_path / "b.png").stat().st_size > 0
    data = json.loads((tmp_path / "b.json").read_text())
    check_schema(data)
    assert data["results"][0]["shape"] == [1, 16, 2, 9, 11]
    rows = by_label(data)
    assert {key[1:] for key in rows if key[0] == "stock tiled"} == {(1, 1), (1, 2)}
    for mode in modes.split(","):
        check_shared_case(mode, rows[(mode, 2, 1)])
    assert rows[("auto", 2, 1)]["case"]["strategy"] == "spatial_shard_width"
    alone = rows[("tile", 1, 1)]["samples"][0]
    assert alone["rank_seconds"][1] == 0
    assert alone["messages"] == [0, 0]


def check_shared_case(mode: str, row: dict[str, Any]) -> None:
    assert row["speed_up"]["value"] > 0
    assert row["efficiency"] == row["speed_up"]["value"] / 2
    assert row["sent_bytes"] > 0
    assert row["messages"] > 0
    assert all(seconds > 0 for seconds in row["samples"][0]["rank_seconds"])
    if mode == "tile":
        assert row["to_tiled"]["max_abs"] == 0
        assert row["rounds"] == 0
        assert "tiles on 2 ranks: at most" in row["notes"][0]
    else:
        assert row["to_untiled"]["max_abs"] <= SHARD_TOLERANCE
        assert row["rounds"] > 0


@pytest.mark.processes
def test_more_ranks_than_cores_work_and_are_called_so(tmp_path: Path) -> None:
    threads = usable_cores()
    arguments = ["--family", "kl", "--scale", "tiny", "--ranks", "2", "--threads", str(threads), "--modes", "auto"]
    done = run_command(
        ["vaepar", "bench", *arguments, "--repeats", "1", "--json", "b.json"], tmp_path, timeout=_PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert f"oversubscribed: 2 ranks x {threads} thread(s) on {threads} core(s)" in done.stdout
    data = json.loads((tmp_path / "b.json").read_text())
    assert any(note.startswith("oversubscribed") for note in data["notes"])
    assert by_label(data)[("auto", 2, threads)]["to_untiled"]["max_abs"] <= SHARD_TOLERANCE


@pytest.mark.processes
def test_a_failure_of_the_whole_run_is_one_line_on_all_ranks(tmp_path: Path) -> None:
    command = ["vaepar", "bench", "--family", "kl", "--scale", "tiny", "--ranks", "2"]
    done = run_command([*command, "--shape", "9x1", "--modes", "spatial_shard_width"], tmp_path, timeout=_PATIENCE)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert "spatial_shard_width on 2 rank(s) does not fit the latent" in lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--family", "sdxl"], "--family is 'sdxl'"),
        (["--scale", "huge"], "--scale is 'huge'"),
        (["--modes", "tile,rows"], "'rows' does not exist"),
        (["--model", "demo", "--family", "kl"], "--model and --family were both given"),
        (["--shape", "1x5x8x8", "--family", "kl"], "has 5 channels"),
        (["--shape", "3x8x8", "--family", "kl"], "does not fit AutoencoderKL"),
        (["--shape", "8by8"], "--shape is '8by8'"),
        (["--ranks", "0"], "--ranks is '0'"),
        (["--ranks", "1,1"], "given once"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--operation", "train"], "--operation is 'train'"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--dtype", "int8"], "--dtype is 'int8'"),
        (["--plot", "bench.jpg"], "ends with .png"),
        (["--tile-stride", "8"], "without --tile-size"),
    ],
)
def test_usage_errors(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_plot_without_its_library(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as Python marks a module that cannot be imported
    assert run(["bench", "--plot", "b.png"]) == 2
    assert "pip install 'vaepar[plot]'" in capsys.readouterr().err


def test_a_report_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["bench", "--family", "kl", "--scale", "tiny", "--json", str(tmp_path)]) == 2
    assert "no regular file" in capsys.readouterr().err
