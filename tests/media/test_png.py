from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.media.helpers import PNG, SEQUENCE, from_bytes, names_in, random_bytes, run_python, write
from vaepar.errors import DiskFullError, NonFiniteError, OutputError, UsageError
from vaepar.media import OutputFormat, is_complete, open_sink
from vaepar.media.png import MANIFEST, _save_png


def read_png(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("size", [(1, 1), (7, 13), (200, 328)])
def test_a_picture_comes_back_bit_for_bit(tmp_path: Path, channels: int, size: tuple[int, int]) -> None:
    pixels = random_bytes(1, *size, channels)
    path = tmp_path / "x.png"
    assert write(path, PNG, pixels) == (path,)
    np.testing.assert_array_equal(read_png(path), pixels[0])
    assert names_in(tmp_path) == ["x.png"]


def test_metadata_is_json_in_one_text_chunk(tmp_path: Path) -> None:
    metadata = {"source": "ä\x1b[31m\n.safetensors", "workflow": "w" * 300_000, "": "="}
    write(tmp_path / "x.png", PNG, random_bytes(1, 4, 4), metadata=metadata)
    with Image.open(tmp_path / "x.png") as picture:
        picture.load()
        assert json.loads(picture.text["vaepar"]) == metadata  # type: ignore[attr-defined]  # of PNG files only
        assert picture.text["vaepar"].isascii()  # type: ignore[attr-defined]  # of PNG files only


def test_no_metadata_no_chunk(tmp_path: Path) -> None:
    write(tmp_path / "x.png", PNG, random_bytes(1, 4, 4))
    with Image.open(tmp_path / "x.png") as picture:
        picture.load()
        assert picture.text == {}  # type: ignore[attr-defined]  # of PNG files only
    assert b"tEXt" not in (tmp_path / "x.png").read_bytes()


def test_the_level_is_used(tmp_path: Path) -> None:
    pixels = np.zeros((1, 64, 64, 3), np.uint8)
    write(tmp_path / "0.png", OutputFormat(kind="png", png_level=0), pixels)
    write(tmp_path / "9.png", OutputFormat(kind="png", png_level=9), pixels)
    assert (tmp_path / "9.png").stat().st_size * 10 < (tmp_path / "0.png").stat().st_size


def test_a_png_holds_one_frame(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="png-sequence"):
        open_sink(tmp_path / "x.png", PNG, height=4, width=4, frames=2, metadata={}, overwrite=False)
    with pytest.raises(OutputError, match="png-sequence"):
        write_promising_nothing(tmp_path / "x.png", chunks=[2])
    with pytest.raises(OutputError, match="png-sequence"):
        write_promising_nothing(tmp_path / "x.png", chunks=[1, 1])
    assert names_in(tmp_path) == []


def write_promising_nothing(path: Path, chunks: list[int]) -> None:
    with open_sink(path, PNG, height=4, width=4, frames=None, metadata={}, overwrite=False) as sink:
        for count in chunks:
            sink.write(from_bytes(random_bytes(count, 4, 4)))


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize(("frames", "chunk"), [(1, 1), (2, 1), (5, 4), (17, 4)])
def test_a_sequence_comes_back_bit_for_bit(tmp_path: Path, channels: int, frames: int, chunk: int) -> None:
    pixels = random_bytes(frames, 11, 6, channels)
    fmt = OutputFormat(kind="png-sequence", fps=Fraction(24000, 1001))
    folder = tmp_path / "clip.1"
    assert write(folder, fmt, pixels, chunk=chunk, metadata={"a": "ä"}) == (folder,)
    assert names_in(tmp_path) == ["clip.1"]
    assert names_in(folder) == [*(f"frame_{i:05d}.png" for i in range(1, frames + 1)), MANIFEST]
    for i in range(frames):
        np.testing.assert_array_equal(read_png(folder / f"frame_{i + 1:05d}.png"), pixels[i])
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["fps"], manifest["height"], manifest["width"]) == ("24000/1001", 11, 6)
    assert manifest["metadata"] == {"a": "ä"}
    assert is_complete(folder, fmt)


def test_channels_may_not_change_within_an_output(tmp_path: Path) -> None:
    sink = open_sink(tmp_path / "s", SEQUENCE, height=4, width=4, frames=None, metadata={}, overwrite=False)
    sink.write(from_bytes(random_bytes(1, 4, 4, 3)))
    with pytest.raises(UsageError, match="4 channels"):
        sink.write(from_bytes(random_bytes(1, 4, 4, 4)))
    assert names_in(tmp_path) == []


def break_sequence(folder: Path, damage: str) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    changed: dict[str, Any] = {
        "other format": manifest | {"format": "else"},
        "no frames": manifest | {"frames": []},
        "frames are text": manifest | {"frames": "frame_00001.png"},
        "climbing name": manifest | {"frames": [{"name": "../seq/frame_00001.png", "bytes": 1}]},
        "a list": [],
    }
    if damage in changed:
        (folder / MANIFEST).write_text(json.dumps(changed[damage]))
    elif damage == "no manifest":
        (folder / MANIFEST).unlink()
    elif damage == "cut manifest":
        (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:-20])
    elif damage == "deep manifest":
        (folder / MANIFEST).write_text("[" * 100_000)
    elif damage == "missing frame":
        (folder / "frame_00002.png").unlink()
    elif damage == "cut frame":
        frame = folder / "frame_00002.png"
        frame.write_bytes(frame.read_bytes()[:-1])


DAMAGES = ["other format", "no frames", "frames are text", "climbing name", "a list", "no manifest", "cut manifest",
           "deep manifest", "missing frame", "cut frame"]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_sequence_is_incomplete_and_replaced_without_being_asked(tmp_path: Path, damage: str) -> None:
    pixels = random_bytes(3, 8, 8)
    folder = tmp_path / "seq"
    write(folder, SEQUENCE, pixels)
    assert is_complete(folder, SEQUENCE)
    break_sequence(folder, damage)
    assert not is_complete(folder, SEQUENCE)
    write(folder, SEQUENCE, pixels[:2])
    assert is_complete(folder, SEQUENCE)
    assert names_in(folder) == ["frame_00001.png", "frame_00002.png", MANIFEST]
    assert names_in(tmp_path) == ["seq"]


def test_overwriting_a_longer_sequence_leaves_no_old_frames(tmp_path: Path) -> None:
    write(tmp_path / "seq", SEQUENCE, random_bytes(5, 8, 8))
    with pytest.raises(OutputError, match="exists"):
        write(tmp_path / "seq", SEQUENCE, random_bytes(2, 8, 8))
    assert len(names_in(tmp_path / "seq")) == 6
    write(tmp_path / "seq", SEQUENCE, random_bytes(2, 8, 8), overwrite=True)
    assert len(names_in(tmp_path / "seq")) == 3
    assert names_in(tmp_path) == ["seq"]


@pytest.mark.parametrize("content", ["notes.txt", "frame_1.png", "frame_00001.png/", ".hidden"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_folder_with_somebodys_files_is_never_replaced(tmp_path: Path, content: str, when: str) -> None:
    folder = tmp_path / "seq"

    def fill() -> None:
        folder.mkdir()
        (folder / content).mkdir() if content.endswith("/") else (folder / content).touch()

    if when == "before":
        fill()
        with pytest.raises(OutputError, match="not a frame of ours"):
            open_sink(folder, SEQUENCE, height=4, width=4, frames=1, metadata={}, overwrite=True)
    else:
        sink = open_sink(folder, SEQUENCE, height=4, width=4, frames=1, metadata={}, overwrite=True)
        sink.write(from_bytes(random_bytes(1, 4, 4)))
        fill()
        with pytest.raises(OutputError, match="not a frame of ours"):
            sink.close()
    assert names_in(folder) == [content.rstrip("/")]
    assert names_in(tmp_path) == ["seq"]


def test_nan_in_a_late_frame_leaves_nothing_and_names_the_file(tmp_path: Path) -> None:
    frames = from_bytes(random_bytes(5, 8, 8))
    sink = open_sink(tmp_path / "seq", SEQUENCE, height=8, width=8, frames=10, metadata={}, overwrite=False)
    sink.write(frames)
    frames[1, 4, 7, 7] = float("nan")
    with pytest.raises(NonFiniteError, match="seq"):
        sink.write(frames)
    assert names_in(tmp_path) == []
    with pytest.raises(NonFiniteError):
        sink.close()


def test_a_full_device_is_told_as_no_space() -> None:
    with pytest.raises(OSError, match="No space left"):
        _save_png(Path("/dev/full"), random_bytes(1, 64, 64)[0], 1, {})


LIMITED = """
import json, os, resource, sys
from pathlib import Path
from tests.media.helpers import PNG, SEQUENCE, random_bytes, write
path, kind = Path(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write(path, {"png": PNG, "sequence": SEQUENCE}[kind], random_bytes(1, 64, 64))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error), error.exit_code, os.listdir(path.parent)]))
"""


@pytest.mark.parametrize(("kind", "name"), [("png", "x.png"), ("sequence", "x")])
def test_a_file_size_limit_leaves_nothing(tmp_path: Path, kind: str, name: str) -> None:
    error, message, code, left = run_python(LIMITED, tmp_path / name, kind)
    assert error == DiskFullError.__name__
    assert "no space" in message
    assert name in message
    assert code == 3
    assert left == []
