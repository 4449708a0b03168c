from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.media.helpers import (
    EVERY_FORMAT,
    PNG,
    SEQUENCE,
    ffv1,
    format_id,
    from_bytes,
    mp4,
    names_in,
    random_bytes,
    write,
)
from vaepar.errors import NonFiniteError, OutputError, UsageError
from vaepar.media import FrameSink, OutputFormat, is_complete, open_sink

every_format = pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=format_id)


def open_at(path: Path, fmt: OutputFormat, **changes: Any) -> FrameSink:
    facts: dict[str, Any] = {"height": 16, "width": 16, "frames": 1, "metadata": {}, "overwrite": False}
    return open_sink(path, fmt, **(facts | changes))


@every_format
def test_nothing_has_the_final_name_before_close(tmp_path: Path, fmt: OutputFormat) -> None:
    path = tmp_path / f"x{fmt.suffix}"
    with open_at(path, fmt) as sink:
        assert not is_complete(path, fmt)
        sink.write(torch.zeros(3, 1, 16, 16))
        assert not path.exists()
        assert sink.close() == (path,)
        assert is_complete(path, fmt)
        assert sink.close() == (path,)  # again: the same answer
    assert names_in(tmp_path) == [path.name]
    with pytest.raises(OutputError, match="finished"):
        sink.write(torch.zeros(3, 1, 16, 16))
    sink.abort()
    assert is_complete(path, fmt)


@every_format
@pytest.mark.parametrize("frames_before", [0, 1])
def test_abort_leaves_nothing_and_may_be_repeated(tmp_path: Path, fmt: OutputFormat, frames_before: int) -> None:
    sink = open_at(tmp_path / f"x{fmt.suffix}", fmt)
    for _ in range(frames_before):
        sink.write(torch.zeros(3, 1, 16, 16))
    assert len(names_in(tmp_path)) == 1
    sink.abort()
    sink.abort()
    assert names_in(tmp_path) == []
    assert not sink.is_open
    with pytest.raises(OutputError, match="aborted"):
        sink.write(torch.zeros(3, 1, 16, 16))
    with pytest.raises(OutputError, match="aborted"):
        sink.close()


@every_format
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_aborts(tmp_path: Path, fmt: OutputFormat, error: type[BaseException]) -> None:
    def produce() -> None:
        with open_at(tmp_path / f"x{fmt.suffix}", fmt) as sink:
            sink.write(torch.zeros(3, 1, 16, 16))
            raise error

    with pytest.raises(error):
        produce()
    assert names_in(tmp_path) == []


@every_format
def test_leaving_normally_closes(tmp_path: Path, fmt: OutputFormat) -> None:
    path = tmp_path / f"x{fmt.suffix}"
    with open_at(path, fmt) as sink:
        sink.write(torch.zeros(3, 1, 16, 16))
    assert is_complete(path, fmt)
    with open_at(tmp_path / f"y{fmt.suffix}", fmt) as sink:
        sink.abort()
    assert names_in(tmp_path) == [path.name]


@every_format
def test_a_whole_output_is_replaced_only_when_asked(tmp_path: Path, fmt: OutputFormat) -> None:
    path = tmp_path / f"x{fmt.suffix}"
    write(path, fmt, random_bytes(1, 16, 16, seed=1))
    before = path.stat().st_ino
    with pytest.raises(OutputError, match="exists") as caught:
        open_at(path, fmt)
    assert str(path) in str(caught.value)
    assert path.stat().st_ino == before
    write(path, fmt, random_bytes(1, 16, 16, seed=2), overwrite=True)
    assert path.stat().st_ino != before
    assert names_in(tmp_path) == [path.name]


@every_format
def test_an_output_that_appeared_meanwhile_is_not_replaced(tmp_path: Path, fmt: OutputFormat) -> None:
    path = tmp_path / f"x{fmt.suffix}"
    late = open_at(path, fmt)
    late.write(torch.zeros(3, 1, 16, 16))
    write(path, fmt, random_bytes(1, 16, 16))
    with pytest.raises(OutputError, match="exists"):
        late.close()
    assert is_complete(path, fmt)
    assert names_in(tmp_path) == [path.name]


@every_format
def test_an_overwrite_that_fails_keeps_the_old_output(tmp_path: Path, fmt: OutputFormat) -> None:
    path = tmp_path / f"x{fmt.suffix}"
    write(path, fmt, random_bytes(1, 16, 16))
    before = path.stat().st_ino
    sink = open_at(path, fmt, overwrite=True)
    with pytest.raises(NonFiniteError):
        sink.write(torch.full((3, 1, 16, 16), float("nan")))
    assert path.stat().st_ino == before
    assert is_complete(path, fmt)
    assert names_in(tmp_path) == [path.name]


@pytest.mark.parametrize("fmt", [PNG, mp4(), ffv1()], ids=format_id)
def test_an_empty_file_is_incomplete_and_replaced(tmp_path: Path, fmt: OutputFormat) -> None:
    path = tmp_path / f"x{fmt.suffix}"
    path.touch()
    assert not is_complete(path, fmt)
    write(path, fmt, random_bytes(1, 16, 16))
    assert is_complete(path, fmt)


@every_format
def test_another_kind_of_thing_with_that_name_is_not_touched(tmp_path: Path, fmt: OutputFormat) -> None:
    path = tmp_path / f"x{fmt.suffix}"
    if fmt.kind == "png-sequence":
        path.write_bytes(b"mine")
    else:
        path.mkdir()
    assert not is_complete(path, fmt)
    with pytest.raises(OutputError, match="folder"):
        open_at(path, fmt, overwrite=True)
    assert names_in(tmp_path) == [path.name]


def test_a_link_to_a_folder_is_not_replaced_by_a_sequence(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OutputError, match="plain folder"):
        open_at(tmp_path / "link", SEQUENCE, overwrite=True)


@every_format
@pytest.mark.parametrize("parent", ["missing", "missing/deeper", "file", "/proc"])
def test_a_folder_that_takes_no_files_is_found_before_decoding(tmp_path: Path, fmt: OutputFormat, parent: str) -> None:
    # /proc refuses new files even to root, whom a folder's mode would not stop.
    (tmp_path / "file").touch()
    path = tmp_path / parent / f"x{fmt.suffix}"
    with pytest.raises(OutputError, match="cannot write") as caught:
        open_at(path, fmt)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert names_in(tmp_path) == ["file"]


@every_format
def test_a_name_that_is_too_long_is_found_before_decoding(tmp_path: Path, fmt: OutputFormat) -> None:
    with pytest.raises(OutputError, match="too long"):
        open_at(tmp_path / f"{'n' * 256}{fmt.suffix}", fmt)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "fmt", "word"),
    [
        ("x.mp4", PNG, ".png"), ("x", PNG, ".png"), ("x.png", mp4(), ".mp4"), ("x.mp4", ffv1(), ".mkv"),
        ("x\0.png", PNG, "name"), ("..", SEQUENCE, "name"),
    ],
)  # fmt: skip
def test_names_that_do_not_fit_the_format_are_refused(tmp_path: Path, name: str, fmt: OutputFormat, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        open_at(tmp_path / name, fmt)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"height": 0}, {"width": -16}, {"height": 16.0}, {"width": True}, {"frames": 0}, {"frames": 1.5},
        {"metadata": {"a": 1}}, {"metadata": {1: "a"}},
    ],
)  # fmt: skip
def test_facts_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        open_at(tmp_path / "x.png", PNG, **changes)
    assert next(iter(changes)) in str(caught.value)
    assert names_in(tmp_path) == []


@every_format
@pytest.mark.parametrize("shape", [(3, 1, 16, 15), (3, 1, 15, 16), (3, 16, 16), (1, 1, 16, 16), (3, 0, 16, 16)])
def test_frames_of_another_shape_are_refused_never_resized(
    tmp_path: Path, fmt: OutputFormat, shape: tuple[int, ...]
) -> None:
    sink = open_at(tmp_path / f"x{fmt.suffix}", fmt)
    with pytest.raises(UsageError, match="frames"):
        sink.write(torch.zeros(shape))
    assert names_in(tmp_path) == []


@every_format
def test_nan_leaves_no_file_and_inf_is_written_when_allowed(tmp_path: Path, fmt: OutputFormat) -> None:
    frames = torch.zeros(3, 1, 16, 16)
    frames[0, 0, 15, 15] = float("nan")
    path = tmp_path / f"\x1b[31mx{fmt.suffix}"
    sink = open_at(path, fmt)
    with pytest.raises(NonFiniteError, match="1 of 256 pixels") as caught:
        sink.write(frames)
    assert str(caught.value).isprintable()
    assert names_in(tmp_path) == []
    settings = {name: getattr(fmt, name) for name in ("kind", "fps", "codec", "png_level")}
    with open_at(path, OutputFormat(**settings, allow_nonfinite=True)) as sink:
        sink.write(frames)
    assert names_in(tmp_path) == [path.name]


@every_format
def test_pixels_must_be_bytes(tmp_path: Path, fmt: OutputFormat) -> None:
    sink = open_at(tmp_path / f"x{fmt.suffix}", fmt)
    with pytest.raises(UsageError, match="uint8"):
        sink.write_pixels(np.zeros((1, 16, 16, 3), np.float32))
    assert names_in(tmp_path) == []


@every_format
def test_frames_of_any_floating_dtype_and_layout(tmp_path: Path, fmt: OutputFormat) -> None:
    pixels = random_bytes(1, 16, 16)
    frames = from_bytes(pixels)
    assert not frames.is_contiguous()
    for dtype in (torch.float32, torch.float64):
        path = tmp_path / f"{dtype}{fmt.suffix}"
        with open_at(path, fmt) as sink:
            np.testing.assert_array_equal(sink.quantise(frames.to(dtype)), pixels)
            sink.write(frames.to(dtype))
        assert is_complete(path, fmt)
