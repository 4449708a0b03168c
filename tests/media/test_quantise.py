from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given, settings
from hypothesis import strategies as st

from vaepar.errors import NonFiniteError, UsageError
from vaepar.media import quantise

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def reference(frames: torch.Tensor) -> np.ndarray:
    """diffusers' own way from a float32 tensor to 8-bit pictures."""
    pictures = VaeImageProcessor().postprocess(frames.float().transpose(0, 1), output_type="pil")
    return np.stack([np.asarray(picture) for picture in pictures])


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.sampled_from([3, 4]), st.integers(1, 5), st.integers(1, 40), st.integers(1, 40)),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_equals_diffusers(
    device: str, shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int, spread: float
) -> None:
    frames = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)
    pixels = quantise(frames.to(device))
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    # Exactly: the same float32 operations in the same order.
    np.testing.assert_array_equal(pixels, reference(frames))


def test_views_give_the_same_bytes_as_copies() -> None:
    frames = torch.randn(2, 3, 6, 10, 8).transpose(3, 4)[1][:, 1:5]
    assert not frames.is_contiguous()
    np.testing.assert_array_equal(quantise(frames), quantise(frames.contiguous()))


def test_values_out_of_range_are_clamped_not_wrapped() -> None:
    # A plain cast would give 200 for -0.22 and 70 for 1.28 of the range 0 to 1.
    values = torch.tensor([-0.22, 1.28, 0.0, 1.0, -100.0, 100.0]) * 2 - 1
    assert quantise(values.reshape(1, 1, 1, 6).expand(3, 1, 1, 6))[0, 0, :, 0].tolist() == [0, 255, 0, 255, 0, 255]


def test_values_are_rounded_not_truncated() -> None:
    levels = torch.arange(256, dtype=torch.float64)
    for offset in (-0.49, 0.0, 0.49):
        frames = ((levels + offset) / 127.5 - 1).float().reshape(1, 1, 1, 256).expand(3, 1, 1, 256)
        assert quantise(frames)[0, 0, :, 2].tolist() == list(range(256))


def test_a_bfloat16_gradient_keeps_its_levels() -> None:
    # bfloat16 has 8 significant bits: near -1 and 1 it still tells 256 levels of the whole range apart.
    gradient = torch.linspace(-1, 1, 4096).to(torch.bfloat16).reshape(1, 1, 1, -1).expand(3, 1, 1, -1)
    assert len(np.unique(quantise(gradient))) > 200


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (2, 4, 12, 16), (1, 2, 7, 3)])
def test_one_bad_value_anywhere_is_found(
    device: str, dtype: torch.dtype, value: float, place: tuple[int, int, int, int]
) -> None:
    frames = torch.rand(3, 5, 13, 17, dtype=dtype, device=device)
    frames[place] = value
    with pytest.raises(NonFiniteError, match=f"1 of {5 * 13 * 17} pixels of 'x.png'"):
        quantise(frames, name="'x.png'")


def test_pixels_are_counted_once_and_infinities_do_not_cancel() -> None:
    frames = torch.zeros(3, 2, 4, 4)
    frames[:, 0, 0, 0] = float("inf")
    frames[0, 1, 2, 3] = -float("inf")
    with pytest.raises(NonFiniteError, match="2 of 32 pixels"):
        quantise(frames)


def test_allowed_nonfinite_values_become_0_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    frames = torch.ones(3, 1, 2, 2)
    frames[0, 0, 0, 0] = float("nan")
    frames[1, 0, 0, 0] = float("inf")
    frames[2, 0, 1, 1] = -float("inf")
    kept = frames.clone()
    with caplog.at_level(logging.WARNING):
        pixels = quantise(frames, allow_nonfinite=True)
    assert pixels[0, 0, 0].tolist() == [0, 0, 255]
    assert pixels[0, 1, 1].tolist() == [255, 255, 0]
    assert pixels[0, 0, 1].tolist() == [255, 255, 255]
    assert "2 of 4 pixels" in caplog.text
    torch.testing.assert_close(frames, kept, rtol=0, atol=0, equal_nan=True)  # the caller's frames stay as they were


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 3e38), (torch.float64, 1e300)])
def test_large_finite_values_are_no_alarm(dtype: torch.dtype, value: float) -> None:
    frames = torch.full((3, 1, 4, 4), value, dtype=dtype)
    assert (quantise(frames) == 255).all()
    assert (quantise(-frames) == 0).all()


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 3, 1, 4, 4), (1, 1, 4, 4), (2, 1, 4, 4), (5, 1, 4, 4), (3, 0, 4, 4),
                                   (3, 1, 0, 4), (3, 1, 4, 0)])  # fmt: skip
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"\[C, t, H, W\]"):
        quantise(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match=str(dtype)):
        quantise(torch.zeros(3, 1, 2, 2, dtype=dtype))


def test_gradients_neither_hinder_nor_flow() -> None:
    frames = torch.zeros(3, 1, 2, 2, requires_grad=True)
    assert (quantise(frames) == 128).all()  # 127.5 to the even neighbour
