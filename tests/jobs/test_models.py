"""Finding and loading models: which weights are taken, and what a failure on one rank does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def load_on_rank(group: RankGroup, folders: list[str]) -> str:
    try:
        with agreed(group, "model"):
            source = locate_model(folders[group.rank])
            load_model(source, torch.float32, torch.device("cpu"), group)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_a_model_that_one_rank_cannot_load_fails_on_all(tmp_path: Path) -> None:
    good, cut = tmp_path / "good", tmp_path / "cut"
    save(good, 1.0)
    shutil.copytree(good, cut)
    weights = cut / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    first, second = run_processes(2, load_on_rank, tmp_path, [str(good), str(cut)])
    assert "rank 1" in first
    assert "cannot be read" in second


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


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused_by_name(kind: torch.dtype, tmp_path: Path) -> None:
    """Cast without the scales that belong to them they would decode to noise."""
    save(tmp_path, 1.0)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["decoder.conv_in.weight"] = weights["decoder.conv_in.weight"].to(kind)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"decoder\.conv_in\.weight is stored as (I8|F8_E4M3); .* float32, float16"):
        bias_of(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    vae = models.make_flux2()
    vae.bn.running_mean[3] = value
    vae.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"bn\.running_mean holds NaN or infinity in float32"):
        bias_of(tmp_path)


def test_weights_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 1e6)
    with pytest.raises(ModelError, match=r"decoder\.conv_out\.bias holds NaN or infinity in float16"):
        load_model(locate_model(str(tmp_path)), torch.float16, torch.device("cpu"), SoloGroup())


_HUB_ANSWERS = {"missing": (404, "RepoNotFound"), "gated": (403, "GatedRepo"), "other": (404, "RevisionNotFound")}


class _Hub(BaseHTTPRequestHandler):
    """A hub that refuses, as the real one does: by status and by a header."""

    def do_GET(self) -> None:
        status, code = next(answer for owner, answer in _HUB_ANSWERS.items() if owner in self.path)
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815  # as the server calls it

    def log_message(self, *args: object) -> None:
        return None


_ASK = """
import sys
from vaepar.errors import ModelError
from vaepar.jobs.models import locate_model
for name in sys.argv[1:]:
    try:
        locate_model(name)
    except ModelError as error:
        print(error)
"""


def asked(endpoint: str, cache: Path, *names: str) -> list[str]:
    """What is said of models of a hub at that address. The client reads its address once, so in a new process."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", _ASK, *names]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


def test_why_the_hub_gives_no_model(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        missing, gated, other = asked(here, tmp_path, "missing/name", "gated/name", "other/name@main2")
        server.shutdown()
    (lost,) = asked(here, tmp_path, "missing/name")
    assert missing.startswith("model missing/name cannot be had from the hub: there is no such repository")
    assert "a licence" in gated
    assert "it has no such revision" in other
    assert "it cannot be reached, and the model is not in the local cache (" in lost
