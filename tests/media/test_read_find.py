"""From names to items: ranges, sequences, folders, patterns, odd names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vaepar.errors import InputError, UsageError
from vaepar.media import FrameRange, PictureRules, find_media, open_source, parse_frames
from vaepar.media.find import natural_key

from .reading import one_line, opened, read_path


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        Image.new("RGB", (8, 8), (i, i, i)).save(folder / name)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("7", [7]),
        ("1-4", [1, 2, 3, 4]),
        ("1-10x3", [1, 4, 7, 10]),
        ("1-9x3", [1, 4, 7]),
        ("1-3, 5,8-9", [1, 2, 3, 5, 8, 9]),
        ("0-0", [0]),
    ],
)
def test_frame_ranges(text: str, numbers: list[int]) -> None:
    frames = parse_frames(text)
    assert list(frames) == numbers
    assert len(frames) == len(numbers)
    assert frames.last == numbers[-1]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20, unique=True))
def test_a_range_survives_its_own_text(numbers: list[int]) -> None:
    frames = FrameRange(tuple(range(n, n + 1) for n in sorted(numbers)))
    assert parse_frames(str(frames)) == frames
    assert list(frames) == sorted(numbers)


@pytest.mark.parametrize(
    ("text", "step"), [("5", 1), ("1-9", 1), ("1-9x2", 2), ("1,4,7", 3), ("1,4,8", None), ("1-4,5-9", 1)]
)
def test_the_step_of_a_range(text: str, step: int | None) -> None:
    assert parse_frames(text).step == step


@pytest.mark.parametrize(
    "text",
    ["", ",", "a", "1-", "-5", "5-1", "1-5x0", "1-5x", "1,1", "5,1", "1-5,3-9", "1-5y2", "1.5", "1\x1b[31m", "١"],
)
def test_other_ranges_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_frames(text)
    one_line(caught.value, "1-100x2")


def test_the_colon_of_other_tools_gets_a_hint() -> None:
    with pytest.raises(UsageError) as caught:
        parse_frames("1-100:2")
    one_line(caught.value, "write 1-100x2")


def test_numbers_inside_names_sort_by_value() -> None:
    names = ["a10.png", "a9.png", "a1b20.png", "a1b3.png", "b.png", "2", "10"]
    assert sorted(names, key=natural_key) == ["2", "10", "a1b3.png", "a1b20.png", "a9.png", "a10.png", "b.png"]


@pytest.mark.parametrize("name", ["frame_", "Frames-", "frame.", ""])
def test_a_sequence_whose_name_says_nothing_is_called_after_its_folder(tmp_path: Path, name: str) -> None:
    touch(tmp_path / "walk", *(f"{name}{i:04d}.png" for i in range(3)))
    (item,) = find_media([str(tmp_path / "walk" / f"{name}####.png")])
    assert (item.kind, item.stem, len(item.files)) == ("sequence", "walk", 3)


def test_links_to_nothing_in_a_folder_are_told(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    (tmp_path / "b.png").symlink_to("nowhere.png")
    (tmp_path / "c.mp4").symlink_to("c.mp4")
    (tmp_path / "d.txt").symlink_to("nowhere")
    items = find_media([tmp_path])
    assert [item.path.name for item in items] == ["a.png", "b.png", "c.mp4"]
    for item in items[1:]:
        with pytest.raises(InputError, match=item.path.name):
            open_source(item, PictureRules())


@pytest.mark.parametrize("pattern", ["shot.%04d.png", "shot.####.png", "shot.#.png"])
def test_a_pattern_is_a_sequence(tmp_path: Path, pattern: str) -> None:
    touch(tmp_path, *(f"shot.{i:04d}.png" for i in range(8, 13)), "other.0001.png", "shot.0001.jpg", "shot.x.png")
    (item,) = find_media([str(tmp_path / pattern)])
    assert (item.kind, item.stem, item.problem) == ("sequence", "shot", None)
    assert [file.name for file in item.files] == [f"shot.{i:04d}.png" for i in range(8, 13)]


@pytest.mark.parametrize("pattern", ["shot.%d.png", "shot.##.png", "shot.%03d.png", "shot.#####.png"])
def test_another_number_of_digits_is_another_sequence(tmp_path: Path, pattern: str) -> None:
    touch(tmp_path, "shot.0001.png", "shot.0002.png")
    (item,) = find_media([str(tmp_path / pattern)])
    assert "no picture has such a name" in str(item.problem)


def test_a_free_number_takes_plain_numbers(tmp_path: Path) -> None:
    touch(tmp_path, *(f"f{i}.png" for i in (9, 10, 11)))
    for pattern in ("f%d.png", "f#.png"):
        (item,) = find_media([str(tmp_path / pattern)])
        assert [file.name for file in item.files] == ["f9.png", "f10.png", "f11.png"]


def test_a_padded_number_may_grow(tmp_path: Path) -> None:
    touch(tmp_path, "f.99.png", "f.100.png", "f.0101.png")
    (item,) = find_media([str(tmp_path / "f.%02d.png")])
    assert [file.name for file in item.files] == ["f.99.png", "f.100.png"]


def test_frames_choose_from_a_sequence(tmp_path: Path) -> None:
    touch(tmp_path, *(f"a_{i:04d}.png" for i in range(1, 8)))
    x = read_path(tmp_path / "a_%04d.png", "1-5x2,7")
    assert [round(float(f.mean() + 1) * 127.5) for f in x.unbind(1)] == [0, 2, 4, 6]


@pytest.mark.parametrize("how", ["a.####.png", "."])
def test_a_missing_frame_is_named(tmp_path: Path, how: str) -> None:
    touch(tmp_path, "a.0001.png", "a.0002.png", "a.0004.png", "a.0007.png")
    with pytest.raises(InputError) as caught:
        opened(tmp_path / how)
    one_line(caught.value, "3, 5, 6", "missing")


def test_missing_frames_of_a_range_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "a.0001.png", "a.0002.png")
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "a.####.png", "2-999999999")
    one_line(caught.value, "3, 4, 5, 6, 7, 8 and more", "from 1 to 2")


def test_a_folder_of_numbered_pictures_is_one_sequence(tmp_path: Path) -> None:
    touch(tmp_path / "walk", "0002.png", "0010.png", *(f"{i:04d}.png" for i in range(3, 10)))
    (tmp_path / "walk" / "notes.txt").write_text("x")
    (item,) = find_media([tmp_path / "walk"])
    assert (item.kind, item.stem, len(item.files)) == ("sequence", "walk", 9)
    assert item.files[-1].name == "0010.png"
    stills = find_media([tmp_path / "walk"], sequences=False)
    assert [still.stem for still in stills] == [f"{i:04d}" for i in range(2, 11)]
    assert {still.kind for still in stills} == {"still"}


def test_a_folder_of_other_names_is_stills_in_natural_order(tmp_path: Path) -> None:
    touch(tmp_path, "cat10.png", "cat9.png", "dog1.png", ".hidden.png", "plain.webp")
    items = find_media([tmp_path])
    assert [item.path.name for item in items] == ["cat9.png", "cat10.png", "dog1.png", "plain.webp"]
    assert {item.kind for item in items} == {"still"}


def test_the_same_number_twice(tmp_path: Path) -> None:
    touch(tmp_path, "1.png", "01.png", "2.png")
    (item,) = find_media([tmp_path])
    assert "frame 1 is there twice" in str(item.problem)


def test_recursive_search_keeps_the_folders(tmp_path: Path) -> None:
    touch(tmp_path / "a", "x.png")
    touch(tmp_path / "a" / "b", "1.png", "2.png")
    touch(tmp_path / "a" / "c", "x.png")
    (tmp_path / "a" / "b" / "clip.mp4").write_bytes(b"?")
    (tmp_path / "a" / "c" / "loop").symlink_to(tmp_path / "a")
    assert [item.path.name for item in find_media([tmp_path / "a"])] == ["x.png"]
    items = find_media([tmp_path / "a"], recursive=True)
    assert [(item.kind, item.stem, str(item.below)) for item in items] == [
        ("still", "x", "."),
        ("sequence", "b", "b"),
        ("video", "clip", "b"),
        ("still", "x", "c"),
    ]


def test_patterns_of_the_shell_and_doubles(tmp_path: Path) -> None:
    touch(tmp_path, "a10.png", "a2.png", "b.png")
    (tmp_path / "a.txt").write_text("x")
    items = find_media([str(tmp_path / "a*"), str(tmp_path / "a2.png"), str(tmp_path / "b.png")])
    assert [item.path.name for item in items] == ["a2.png", "a10.png", "b.png"]


@pytest.mark.parametrize(
    "name",
    [
        "café 日本.png", "-x.png", "--help.png", "100%.png", "a%04d.png", "b.####.png", "[1] *.png", "a'b\"c.png",
        "a:b.png", "file:x.png", "pipe:0.png", " .png", "http:x.png", "line\nbreak.png", "\x1b[31mred.png",
    ],
)  # fmt: skip
def test_odd_names_are_plain_names(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    (item,) = find_media([name])
    assert (item.kind, item.problem) == ("still", None)
    assert open_source(item, PictureRules()).name.isprintable()
    assert read_path(name).shape == (3, 1, 8, 8)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing.png", "no such file"),
        ("empty", "holds no picture"),
        ("*.nope", "no picture"),
        ("notes.txt", "'.txt' is no picture"),
        ("%04d_%04d.png", "one place for its number"),
        ("%04d.mp4", "'.mp4' is no picture"),
        ("gone/%04d.png", "does not exist"),
        ("none.%04d.png", "no picture has such a name"),
        ("nul\0.png", "no such file"),
    ],
)
def test_what_is_not_there_becomes_a_problem(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    touch(tmp_path, "good.png")
    bad, good = find_media([str(tmp_path / name), str(tmp_path / "good.png")])
    assert good.problem is None
    with pytest.raises(InputError) as caught:
        open_source(bad, PictureRules())
    one_line(caught.value, words)


def test_frames_of_a_single_picture_are_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "a.png", "1-5")
    one_line(caught.value, "frames 1-5", "a.png")
