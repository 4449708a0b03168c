"""Finding and loading models: which weights are taken, and what a failure on one rank does."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from tests import models
from tests.processes import run_processes
from vaepar.errors import DeviceMemoryError, ModelError
from vaepar.jobs.models import load_model, locate_model
from vaepar.parallel.agreement import agreed
from vaepar.parallel.group import RankGroup, SoloGroup


def bias_of(folder: Path, variant: str | None = None) -> float:
    source = locate_model(str(folder), variant=variant)
    model = load_model(source, torch.float32, torch.device("cpu"), SoloGroup())
    return float(model.decoder.conv_out.bias[0])


def save(folder: Path, bias: float, **how: object) -> None:
    vae = models.make_kl()
    vae.decoder.conv_out.bias.data.fill_(bias)
    vae.save_pretrained(folder, **how)


def test_the_variant_that_was_asked_for_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    save(tmp_path, 2.0, variant="ema")
    assert (bias_of(tmp_path), bias_of(tmp_path, "ema")) == (1.0, 2.0)
    assert locate_model(str(tmp_path), variant="ema").digest() != locate_model(str(tmp_path)).digest()
    with pytest.raises(ModelError, match=r"no diffusion_pytorch_model\.bf16\.safetensors"):
        locate_model(str(tmp_path), variant="bf16")


@pytest.mark.parametrize("variant", [None, "fp16", "bf16"])
def test_shards_of_a_variant(tmp_path: Path, variant: str | None) -> None:
    save(tmp_path, 3.0, variant=variant, max_shard_size="40KB")
    assert len(locate_model(str(tmp_path), variant=variant).weights) > 1
    assert bias_of(tmp_path, variant) == 3.0
    if variant == "fp16":  # the only weights there are
        assert bias_of(tmp_path) == 3.0
    next(tmp_path.glob("*-00002-of-*")).unlink()
    with pytest.raises(ModelError, match="shards are missing"):
        locate_model(str(tmp_path), variant=variant)


def load_on_rank(group: RankGroup, folders: list[str]) -> tuple[str, float]:
    started = time.monotonic()
    try:
        with agreed(group, "model"):
            source = locate_model(folders[group.rank])
            load_model(source, torch.float32, torch.device("cpu"), group)
    except ModelError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


@pytest.mark.processes
def test_a_model_that_one_rank_cannot_load_fails_on_all(tmp_path: Path) -> None:
    good, cut = tmp_path / "good", tmp_path / "cut"
    save(good, 1.0)
    shutil.copytree(good, cut)
    weights = cut / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (first, first_seconds), (second, second_seconds) = run_processes(2, load_on_rank, tmp_path, [str(good), str(cut)])
    assert "rank 1" in first
    assert "cannot be loaded" in second
    assert max(first_seconds, second_seconds) < 30  # far below any limit of the ranks' waits


def test_memory_that_runs_out_while_loading_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vaepar.autoencoders import DistributedAutoencoderKL

    save(tmp_path, 1.0)

    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DistributedAutoencoderKL, "from_pretrained", full)
    group = SoloGroup()
    with pytest.raises(DeviceMemoryError), agreed(group, "model"):
        load_model(locate_model(str(tmp_path)), torch.float32, torch.device("cpu"), group)
