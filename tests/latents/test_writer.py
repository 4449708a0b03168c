"""vaepar's own files: complete, whole, and read back without a flag."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.latents.files import FLUX1, FLUX2, KL, QWEN, WAN, noise, resolved, save
from vaepar.errors import DiskFullError, InputError, OutputError, UsageError
from vaepar.latents import (
    LatentLayout,
    LatentRecord,
    LatentState,
    VaeFacts,
    from_vae_output,
    read_header,
    read_latent,
    write_latent,
)

STILL = LatentRecord(vae=KL, layout=LatentLayout.BCHW, state=LatentState.RAW, height=48, width=80)


def record(vae: VaeFacts, layout: str, state: str, frames: int = 1, **more: Any) -> LatentRecord:
    return LatentRecord(
        vae=vae,
        layout=LatentLayout(layout),
        state=LatentState(state),
        height=48,
        width=80,
        num_frames=frames,
        **more,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


CASES = [
    (vae, layout, state)
    for vae, layouts in (
        (KL, ("bchw", "chw")),
        (FLUX1, ("bchw", "packed2x2")),
        (FLUX2, ("bchw", "grid128", "cgrid128", "tokens128")),
        (QWEN, ("bcfhw", "bchw", "packed2x2")),
        (WAN, ("bcfhw", "cfhw", "bchw")),
    )
    for layout in layouts
    for state in ("raw", "norm")
]


@pytest.mark.parametrize(
    ("vae", "layout", "state"), CASES, ids=[f"{v.family}-{layout}-{state}" for v, layout, state in CASES]
)
def test_what_is_written_needs_no_flag(tmp_path: Path, vae: VaeFacts, layout: str, state: str) -> None:
    frames = 3 if vae is WAN and layout in ("bcfhw", "cfhw") else 1
    axes = (frames,) if vae.takes_frames else ()
    raw = noise(1, vae.latent_channels, *axes, 6, 10, dtype=torch.bfloat16)
    stored = from_vae_output(raw, vae, layout=LatentLayout(layout), state=LatentState.RAW)
    path = tmp_path / "x.safetensors"
    write_latent(path, stored, record(vae, layout, state, (frames - 1) * vae.temporal_ratio + 1))
    facts = resolved(path, vae)
    assert (facts.layout, facts.state, facts.header.producer) == (layout, state, "vaepar")
    assert (facts.height, facts.width, facts.latent_shape) == (48, 80, tuple(raw.shape))
    assert facts.num_frames == (9 if frames == 3 else 1)
    assert torch.equal(read_latent(facts), stored)
    assert names(tmp_path) == ["x.safetensors"]


def test_the_metadata_is_complete(tmp_path: Path) -> None:
    whole = record(
        WAN,
        "bcfhw",
        "norm",
        9,
        fps=Fraction(24000, 1001),
        vae_id="org/model@1",
        vae_sha256="ab" * 32,
        posterior="sample",
        seed=7,
        source="in/\udcff.mp4",
        prompt="a fox\nin snow",
        original_size=(45, 77),
    )
    path = tmp_path / "x.safetensors"
    write_latent(path, noise(2, 16, 3, 6, 10), whole)
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    expected = {
        "vaepar.format": "1",
        "family": "wan",
        "vae_class": "AutoencoderKLWan",
        "layout": "bcfhw",
        "state": "norm",
        "height": "48",
        "width": "80",
        "num_frames": "9",
        "video_length": "9",
        "fps": "24000/1001",
        "posterior": "sample",
        "seed": "7",
        "source": "in/\\udcff.mp4",
    }
    assert {key: metadata[key] for key in expected} == expected
    assert metadata["producer"].startswith("vaepar/")
    assert json.loads(metadata["scaling"]) == WAN.constants()
    facts = resolved(path, WAN)
    assert (facts.fps, facts.seed, facts.prompt) == (Fraction(24000, 1001), "7", "a fox\nin snow")
    assert facts.original_size == (45, 77)
    json.dumps(facts.to_json())


def test_any_memory_format_is_written(tmp_path: Path) -> None:
    """safetensors itself refuses what is not contiguous."""
    base = noise(1, 4, 6, 10)
    ways = {
        "channels_last": base.to(memory_format=torch.channels_last),
        "transposed": base.transpose(2, 3).contiguous().transpose(2, 3),
        "strided": noise(1, 4, 6, 20)[..., ::2],
        "gradient": base.clone().requires_grad_(),
    }
    for name, tensor in ways.items():
        write_latent(tmp_path / name, tensor, STILL)
        assert torch.equal(read_latent(resolved(tmp_path / name, KL)), tensor.detach())


def test_one_item_of_a_batch_is_one_item_of_bytes(tmp_path: Path) -> None:
    batch = noise(8, 4, 6, 10)
    for i in range(8):
        path = tmp_path / f"{i}.safetensors"
        write_latent(path, batch[i : i + 1], STILL)
        assert path.stat().st_size < 4 * 6 * 10 * 4 + 2048  # the numbers, and a header of less than 2 KiB


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        (noise(1, 4, 6, 9), "that is [0, 4, 6, 10], any batch"),
        (noise(4, 6, 10), "is not bchw"),
        (noise(1, 3, 6, 10), "is not bchw"),
        (noise(0, 4, 6, 10), "is not bchw"),
        (noise(1, 4, 6, 10).int(), "torch.int32"),
        (noise(1, 4, 6, 10).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    ],
)
def test_a_tensor_that_is_not_the_records_is_refused(tmp_path: Path, tensor: torch.Tensor, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        write_latent(tmp_path / "x", tensor, STILL)
    assert part in str(caught.value)
    assert not names(tmp_path)


@pytest.mark.parametrize("wrong", [{"layout": "bcfhw"}, {"frames": 0}, {"posterior": "mean"}])
def test_a_record_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        record(**{"vae": KL, "layout": "bchw", "state": "raw", **wrong})


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot write .*Not a directory|cannot write .*File exists"):
        write_latent(tmp_path / "file" / "x", noise(1, 4, 6, 10), STILL)
    with pytest.raises(OutputError, match=r"cannot write .*no regular file"):
        write_latent(tmp_path / "folder", noise(1, 4, 6, 10), STILL)
    assert names(tmp_path) == ["file", "folder"]


@contextmanager
def small_files() -> Iterator[None]:
    """Files may grow to 4 KiB: the kernel's refusal of the rest is a real one.

    Around a single call only: whatever else this process writes meanwhile, such as the report of the tests into a
    file, would be refused too.
    """
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


def test_no_space_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_latent(path, noise(1, 4, 6, 10), STILL)
    before = path.read_bytes()
    large = LatentRecord(vae=KL, layout=LatentLayout.BCHW, state=LatentState.RAW, height=256, width=256)
    with pytest.raises(DiskFullError, match=r"no space left to write .*x\.safetensors"), small_files():
        write_latent(path, noise(1, 4, 32, 32), large)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["x.safetensors"]


def test_a_written_file_has_the_rights_of_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_latent(tmp_path / "x", noise(1, 4, 6, 10), STILL)
    finally:
        os.umask(old)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def altered(path: Path, **changes: str | None) -> Path:
    """A file of ours whose metadata was changed (None: taken out)."""
    write_latent(path, noise(1, 16, 3, 6, 10), record(WAN, "bcfhw", "norm", 9, fps=Fraction(16)))
    metadata = dict(read_header(path).metadata)
    for key, value in changes.items():
        if value is None:
            del metadata[key]
        else:
            metadata[key] = value
    return save(path, noise(1, 16, 3, 6, 10), **metadata)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"vaepar.format": "2"}, "format '2'; format 1 is known"),
        ({"state": None, "layout": None}, "lacks the metadata layout, state"),
        ({"state": "RAW"}, "state 'RAW'"),
        ({"layout": "bchw"}, "its own layout 'bchw'"),
        ({"layout": "tokens128"}, "its own layout 'tokens128'"),
        ({"family": "kl"}, "family 'kl'"),
        ({"height": "80"}, "the two must agree"),
        ({"width": "x\x1b"}, "metadata width is 'x\\x1b'"),
        ({"num_frames": "10"}, "holds 9 frames by its shape, 10 by its metadata"),
        ({"fps": "0"}, "metadata fps is '0'"),
    ],
)
def test_a_file_of_ours_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, str | None], part: str
) -> None:
    path = altered(tmp_path / "x", **changes)
    with pytest.raises(InputError) as caught:
        resolved(path, WAN)
    assert part in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("scaling", ["[", "7", "{}", '{"latents_std": [1.0]}', "[" * 100_000])
def test_other_constants_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture, scaling: str) -> None:
    resolved(altered(tmp_path / "x"), WAN)
    assert not caplog.records
    resolved(altered(tmp_path / "y", scaling=scaling), WAN)
    assert "normalisation constants differ" in caplog.text


def test_the_users_word_goes_before_a_file_of_ours_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = altered(tmp_path / "x")
    assert resolved(path, WAN, state="raw").state is LatentState.RAW
    assert "state raw: asked for, against norm (the file's metadata)" in caplog.text
