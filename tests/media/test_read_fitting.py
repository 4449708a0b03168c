"""Sizes, frame counts and ranges, against NumPy, Pillow and diffusers' own processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vaepar.errors import InputError, UsageError
from vaepar.media import PictureRules
from vaepar.media.fitting import plan_frames, plan_size

from .reading import as_bytes, one_line, opened, random_pixels, read_all, read_path


def save(path: Path, pixels: Any) -> Path:
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize(
    "values",
    [
        {"alpha": "pink"}, {"fit": "stretch"}, {"frames_fit": "loop"}, {"multiple": (8,)}, {"multiple": 8},
        {"multiple": (0, 8)}, {"multiple": (8, 8.0)}, {"frames_step": 0}, {"frames_step": True}, {"channels": 1},
        {"channels": 3, "alpha": "keep"}, {"max_pixels": 0},
    ],
)  # fmt: skip
def test_rules_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        PictureRules(**values)
    one_line(caught.value)


def test_the_range_is_that_of_diffusers_bit_for_bit(tmp_path: Path) -> None:
    # All 256 values, so every rounding of x / 255 * 2 - 1 is compared.
    pixels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    path = save(tmp_path / "a.png", pixels)
    wanted = VaeImageProcessor(vae_scale_factor=8).preprocess(Image.open(path))
    assert torch.equal(read_path(path)[:, 0], wanted[0])


def test_grey_128_is_about_0(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", np.full((16, 16, 3), 128, np.uint8))
    assert abs(float(read_path(path).mean())) < 0.005  # 128 / 255 * 2 - 1 is 0.0039


def test_101x77_is_refused_with_both_neighbours(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", random_pixels(77, 101))
    with pytest.raises(InputError) as caught:
        opened(path, multiple=(8, 8))
    one_line(caught.value, "a.png", "101x77", "96x72", "104x80", "--fit crop", "--fit pad", "--fit resize")


@pytest.mark.parametrize("fit", ["error", "crop"])
def test_1x1_has_nothing_below(tmp_path: Path, fit: str) -> None:
    path = save(tmp_path / "a.png", random_pixels(1, 1))
    with pytest.raises(InputError) as caught:
        opened(path, multiple=(8, 16), fit=fit)
    one_line(caught.value, "1x1", "nothing below", "16x8 above")


@pytest.mark.parametrize("fit", ["pad", "resize"])
def test_1x1_grows_where_asked(tmp_path: Path, fit: str) -> None:
    path = save(tmp_path / "a.png", random_pixels(1, 1))
    x = read_path(path, multiple=(8, 16), fit=fit)
    assert x.shape == (3, 1, 8, 16)
    assert (as_bytes(x) == np.asarray(Image.open(path))[None]).all()


@pytest.mark.parametrize("fit", ["error", "crop", "pad", "resize"])
def test_a_size_that_fits_is_untouched(tmp_path: Path, fit: str) -> None:
    pixels = random_pixels(16, 24)
    source = opened(save(tmp_path / "a.png", pixels), multiple=(8, 8), fit=fit)
    assert (source.fitted, source.original_size, source.notes) == ("none", (16, 24), ())
    assert np.array_equal(as_bytes(read_all(source))[0], pixels)


@pytest.mark.parametrize(("h", "w", "m"), [(77, 101, (8, 8)), (17, 31, (16, 8)), (33, 15, (2, 7)), (9, 8, (8, 8))])
def test_crop_is_centred_and_pad_repeats_the_edge(tmp_path: Path, h: int, w: int, m: tuple[int, int]) -> None:
    pixels = random_pixels(h, w, seed=h)
    path = save(tmp_path / "a.png", pixels)
    crop = opened(path, multiple=m, fit="crop")
    ch, cw = h // m[0] * m[0], w // m[1] * m[1]
    top, left = (h - ch) // 2, (w - cw) // 2
    assert np.array_equal(as_bytes(read_all(crop))[0], pixels[top : top + ch, left : left + cw])
    assert (crop.fitted, crop.original_size) == ("crop", (h, w))
    pad = opened(path, multiple=m, fit="pad")
    out = as_bytes(read_all(pad))[0]
    assert np.array_equal(out[:h, :w], pixels)
    assert (out[h:] == out[h - 1]).all()
    assert (out[:, w:] == out[:, w - 1 : w]).all()
    assert (pad.fitted, pad.original_size) == ("pad", (h, w))
    assert any("padded" in note for note in pad.notes)


@pytest.mark.parametrize(
    ("h", "w", "to"), [(77, 101, (80, 104)), (75, 99, (72, 96)), (4, 4, (8, 8)), (20, 12, (24, 16))]
)
def test_resize_is_that_of_diffusers(tmp_path: Path, h: int, w: int, to: tuple[int, int]) -> None:
    pixels = random_pixels(h, w)
    path = save(tmp_path / "a.png", pixels)
    x = read_path(path, multiple=(8, 8), fit="resize")
    processor = VaeImageProcessor(vae_scale_factor=8, resample="lanczos")
    wanted = processor.preprocess(Image.open(path), height=to[0], width=to[1])
    assert torch.equal(x[:, 0], wanted[0])


def test_resize_of_16_bits_keeps_them(tmp_path: Path) -> None:
    ramp = np.linspace(1000, 60000, 20 * 20).astype(np.uint16).reshape(20, 20)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    x = read_path(tmp_path / "a.png", multiple=(8, 8), fit="resize")
    assert x.shape == (3, 1, 24, 24)
    plane = np.asarray(Image.fromarray(ramp.astype(np.float32)).resize((24, 24), Image.Resampling.LANCZOS))
    wanted = np.rint(plane.clip(0, 65535)) / 65535 * 2 - 1
    assert np.abs(x[0, 0].numpy() - wanted).max() < 1e-6  # float32 against float64
    assert len(torch.unique(x)) > 300


def test_resize_of_rgba_lets_no_hidden_colour_bleed(tmp_path: Path) -> None:
    # A grey square in transparent pure red; weighted by alpha, every visible pixel stays grey.
    pixels = np.zeros((20, 20, 4), np.uint8)
    pixels[..., 0] = 255
    pixels[5:15, 5:15] = (100, 100, 100, 255)
    path = save(tmp_path / "a.png", pixels)
    out = as_bytes(read_path(path, multiple=(8, 8), fit="resize", channels=4))[0].astype(int)
    seen = out[out[..., 3] > 40]
    assert len(seen) > 50
    assert np.abs(seen[:, 0] - seen[:, 1]).max() <= 2


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 32), st.integers(1, 32))
def test_planned_sizes_always_fit(h: int, w: int, mh: int, mw: int) -> None:
    for fit in ("crop", "pad", "resize"):
        rules = PictureRules(multiple=(mh, mw), fit=fit)
        if fit == "crop" and (h < mh or w < mw):
            with pytest.raises(InputError):
                plan_size("'x'", h, w, rules)
            continue
        plan = plan_size("'x'", h, w, rules)
        assert plan.height % mh == plan.width % mw == 0
        assert abs(plan.height - h) < mh
        assert abs(plan.width - w) < mw
        assert min(plan.height, plan.width) >= 1


@given(st.integers(1, 500), st.integers(1, 9))
def test_planned_frame_counts_always_fit(n: int, step: int) -> None:
    trim = plan_frames("'x'", n, PictureRules(frames_step=step, frames_fit="trim"))
    pad = plan_frames("'x'", n, PictureRules(frames_step=step, frames_fit="pad"))
    assert (trim.total - 1) % step == (pad.total - 1) % step == 0
    assert n - step < trim.total <= n <= pad.total < n + step
    assert trim.read == trim.total
    assert pad.read == n


def sequence(folder: Path, count: int) -> Path:
    folder.mkdir()
    for i in range(count):
        save(folder / f"{i + 1}.png", np.full((8, 8, 3), 10 * i, np.uint8))
    return folder


def test_16_frames_are_refused_with_both_neighbours(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        opened(sequence(tmp_path / "s", 16), frames_step=4)
    one_line(caught.value, "16 frames", "4k+1", "13", "17", "--frames-fit trim", "--frames-fit pad")


@pytest.mark.parametrize("count", [2, 3, 5, 6])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_trim_and_pad_of_frames(tmp_path: Path, count: int, chunk: int) -> None:
    folder = sequence(tmp_path / "s", count)
    for how in ("trim", "pad"):
        source = opened(folder, frames_step=4, frames_fit=how)
        assert source.original_frames == count
        total = {2: (1, 5), 3: (1, 5), 5: (5, 5), 6: (5, 9)}[count][how == "pad"]
        out = as_bytes(read_all(source, chunk))
        assert [int(v) for v in out[:, 0, 0, 0]] == [10 * min(i, count - 1) for i in range(total)]
        assert bool(source.notes) == (total != count)


def test_chunks_are_the_whole(tmp_path: Path) -> None:
    folder = sequence(tmp_path / "s", 7)
    whole = read_all(opened(folder), 100)
    for chunk in (1, 2, 3, 7):
        assert torch.equal(read_all(opened(folder), chunk), whole)


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_read_of_no_frames(tmp_path: Path, count: Any) -> None:
    with opened(save(tmp_path / "a.png", random_pixels(8, 8))) as source, pytest.raises(UsageError):
        source.read(count)


def test_a_closed_source_gives_nothing(tmp_path: Path) -> None:
    source = opened(save(tmp_path / "a.png", random_pixels(8, 8)))
    source.close()
    source.close()
    with pytest.raises(UsageError):
        source.read(1)


def test_pad_beyond_the_pixel_limit_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", random_pixels(9, 9))
    assert read_path(path, max_pixels=81).shape == (3, 1, 9, 9)
    with pytest.raises(InputError) as caught:
        opened(path, max_pixels=81, multiple=(8, 8), fit="pad")
    one_line(caught.value, "--max-pixels")
