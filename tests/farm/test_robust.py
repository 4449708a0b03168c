"""Many files: a thousand broken ones through the real command, and five hundred good ones in one run."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save

from tests import models
from tests.cli.conftest import save_latent
from tests.farm.ranks import apart
from vaepar.cli.main import run
from vaepar.jobs.report import RunReport, Silent
from vaepar.jobs.request import DecodeRequest, VideoSettings
from vaepar.latents import LatentRequest, LatentState

BROKEN = 1050
DOCUMENTED = {3, 4}


def header_and_body(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: Any, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def mutate(data: bytes, random_: random.Random) -> bytes:
    """One way in which a latent file can be broken."""
    header, body = header_and_body(data)
    name = next(key for key in header if key != "__metadata__")
    entry = header[name]
    huge = random_.choice([-1, 0, 2**31, 2**63, 2**64, 10**400, 1.5, "4", None, True, [4]])
    kind = random_.randrange(14)
    if kind == 0:
        return data[: random_.randrange(len(data))]
    if kind == 1:
        place = random_.randrange(min(len(data), 200))
        return data[:place] + bytes([data[place] ^ (1 << random_.randrange(8))]) + data[place + 1 :]
    if kind == 2:
        return struct.pack("<Q", random_.choice([0, 1, 7, 10**8, 2**40, 2**63, 2**64 - 1])) + data[8:]
    if kind == 3:
        entry["shape"][random_.randrange(4)] = huge
    elif kind == 4:
        entry["dtype"] = random_.choice(["I64", "U8", "F8_E4M3", "BOOL", "F32\x1b[31m", "", 7, None])
    elif kind == 5:
        entry["data_offsets"] = random_.choice([[0, huge], [huge, 0], [0], [8, 4], "0", None, [0, len(body) + 8]])
    elif kind == 6:
        del entry[random_.choice(["shape", "dtype", "data_offsets"])]
    elif kind == 7:
        header["__metadata__"] = random_.choice([{"a": 1}, [], "x", {"vaepar": "{"}, {"size": "\x1b]0;x\x07\n" * 99}])
        entry["shape"] = [1, 5, 2, 2]
    elif kind == 8:
        header = {f"{name}{n}": entry for n in range(random_.choice([2, 300]))}
    elif kind == 9:
        return struct.pack("<Q", 4000) + b"[" * 4000 + body
    elif kind == 10:
        return random_.randbytes(random_.randrange(400))
    elif kind == 11:
        header = random_.choice([[], 3, "x", None, {}, {"__metadata__": {}}])
    elif kind == 12:
        entry["shape"] = random_.choice([[], [1], [4, 4], [1, 4, 2, 2, 1, 1], [0, 4, 2, 2], [1, 4, 0, 2]])
    else:
        return joined(header, body).replace(b'"shape"', b'"shape": [1], "shape"', 1)
    return joined(header, body)


def test_a_thousand_broken_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and a documented code each, and no memory for sizes that only a header claims."""
    models.make_kl().save_pretrained(tmp_path / "kl")
    whole = save({"latents": torch.zeros(1, 4, 2, 2)})
    random_ = random.Random(7)
    (tmp_path / "in").mkdir()
    for number in range(BROKEN):
        (tmp_path / "in" / f"broken{number:04d}.safetensors").write_bytes(mutate(whole, random_))
    before = psutil.Process().memory_info().rss
    flags = ["--state", "raw", "--report", str(tmp_path / "r.json"), "--progress", "plain", "--json"]
    code = run(
        ["decode", str(tmp_path / "in"), "--model", str(tmp_path / "kl"), "--out", str(tmp_path / "out"), *flags]
    )
    assert psutil.Process().memory_info().rss - before < 300 * 2**20
    printed = capsys.readouterr()
    report = json.loads((tmp_path / "r.json").read_text())
    failed = [row for row in report["files"] if row["status"] == "failed"]
    assert len(report["files"]) == BROKEN
    assert len(failed) > 900  # a flipped bit may hit a number of the picture
    assert {row["status"] for row in report["files"]} <= {"failed", "ok"}
    assert {row["exit_code"] for row in failed} <= DOCUMENTED
    assert code == report["exit_code"] == 3
    for row in failed:
        assert row["error"].isprintable()
        assert Path(row["path"]).name in row["error"]
        assert len(row["error"]) < 2000
    assert sum("] failed: " in line for line in printed.err.splitlines()) == len(failed)
    assert "Traceback" not in printed.err
    assert "\x1b" not in printed.err
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["event"] for row in rows] == ["file"] * BROKEN + ["run"]
    assert not list((tmp_path / "out").glob("*.tmp"))


class _Meter(Silent):
    """Memory and open files of this process after each file."""

    def __init__(self) -> None:
        self.memory: list[int] = []
        self.files: list[int] = []

    def finished(self, row: object) -> None:
        process = psutil.Process()
        self.memory.append(process.memory_info().rss)
        self.files.append(process.num_fds())


def decode_metered(request: DecodeRequest, few: DecodeRequest) -> tuple[RunReport, _Meter, int, int]:
    """Decode `few`, then `request`, in one process; the report and the readings of the second, and the open files
    after each."""
    from vaepar import launch
    from vaepar.jobs.decode import run_decode

    meter = _Meter()
    with launch.joined(launch.World(), "cpu") as group:
        torch.set_num_threads(1)
        run_decode(few, group, Silent())
        after_few = psutil.Process().num_fds()
        report = run_decode(request, group, meter)
        after_all = psutil.Process().num_fds()
    return report, meter, after_few, after_all


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "shape", "format_"), [("kl", (1, 4, 8, 8), "png"), ("wan", (1, 16, 2, 2, 2), "mp4")]
)
def test_many_files_take_no_more_memory_than_a_few(
    family: str, shape: tuple[int, ...], format_: str, tmp_path: Path
) -> None:
    count = 500 if family == "kl" else 60  # each film starts an encoder of its own
    (models.make_kl if family == "kl" else models.make_wan21)().save_pretrained(tmp_path / "model")
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        save_latent(tmp_path / "in" / f"{number:04d}.safetensors", torch.randn(shape, generator=generator))
    request = DecodeRequest(
        inputs=(str(tmp_path / "in"),),
        model=str(tmp_path / "model"),
        out=tmp_path / "out",
        latent=LatentRequest(state=LatentState.NORM),
        video=VideoSettings(format=format_),
    )
    few = replace(request, inputs=(str(tmp_path / "in" / "0000.safetensors"),), out=tmp_path / "few")
    report, meter, after_few, after_all = apart(decode_metered, request, few)
    assert report.counts == {"ok": count}
    assert len(list((tmp_path / "out").iterdir())) == count
    assert meter.memory[-1] <= 1.05 * meter.memory[20], (meter.memory[20], meter.memory[-1])
    assert after_all == after_few
    # While one encoder starts, the pipes of the last one may still be open: ten more or less. A descriptor lost with
    # each file would make it forty.
    assert max(meter.files[20:]) <= max(meter.files[:20]) + 10, meter.files
