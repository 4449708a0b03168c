"""``distribute`` and ``from_pretrained``: what they change about a model, and what they leave as diffusers has it."""

from __future__ import annotations

import copy
import gc
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny, DiffusionPipeline
from torch import Tensor

from tests.families import FAMILIES, latent, pixels, plain_and_distributed
from tests.library.pipelines import PIPELINES, pictures
from vaepar.autoencoders import DistributedAutoencoderKL, adapter_for, distribute
from vaepar.errors import ModelError, RankMismatchError, UsageError
from vaepar.parallel.loopback import LoopbackGroup, run_loopback


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Gives what was warned of since, by diffusers too, whose loggers pass nothing on."""

    def messages() -> list[str]:
        # Of the environment and of the call, not of the model or its name.
        beside = ("`accelerate` was not found", "`prompt_embeds_mask` is not provided", "'NoneType'> cannot be saved")
        return [r.getMessage() for r in caplog.records if not any(words in r.getMessage() for words in beside)]

    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.WARNING):
        yield messages
    logger.removeHandler(caplog.handler)


def plain(family: str) -> Any:
    """The plain model, with small tiles."""
    return plain_and_distributed(family, 8, 6)[0]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_object_stays_and_its_class_becomes_the_adapter(family: str) -> None:
    vae = plain(family)
    base, config, parts = type(vae), dict(vae.config), {k: id(v) for k, v in vae.state_dict(keep_vars=True).items()}
    calls: list[str] = []
    vae.decoder.register_forward_hook(lambda *_: calls.append("decoder"))
    tiles = {name: value for name, value in vars(vae).items() if name.startswith(("tile_", "use_"))}
    assert distribute(vae) is vae
    assert type(vae) is FAMILIES[family][1]
    assert isinstance(vae, base)
    assert vae.__class__.__qualname__ == f"Distributed{base.__name__}"
    assert dict(vae.config) == config
    assert {k: id(v) for k, v in vae.state_dict(keep_vars=True).items()} == parts
    assert {name: vars(vae)[name] for name in tiles} == tiles
    with torch.no_grad():
        vae.decode(latent(family, 3, 3))
    assert calls
    before = vars(vae).keys()
    assert distribute(distribute(vae)) is vae
    assert type(vae) is FAMILIES[family][1]
    assert vars(vae).keys() == before


@pytest.mark.parametrize("family", list(FAMILIES))
def test_copies_and_pickles_are_adapters(family: str) -> None:
    vae = distribute(plain(family))
    want = vae.decode(latent(family, 9, 10)).sample
    for again in (copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))):
        assert type(again) is FAMILIES[family][1]
        assert torch.equal(again.decode(latent(family, 9, 10)).sample, want)


class Changed(AutoencoderKL):  # type: ignore[misc]  # diffusers has no types
    """Somebody's own decode, which an adapter would lose."""


class AutoencoderKLWan(torch.nn.Module):
    """Only the name is that of diffusers."""


# torch's compiler warns of its own use of torch.jit when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Changed, "'Changed' is a subclass of AutoencoderKL"),
        (AutoencoderTiny, "'AutoencoderTiny' is not supported; the supported classes are AutoencoderKL,"),
        (AutoencoderKLWan, "test_distribute.AutoencoderKLWan is not the AutoencoderKLWan of diffusers"),
        (lambda: torch.compile(AutoencoderKL()), "distribute it before torch.compile"),
        (lambda: PIPELINES["FluxPipeline"]()[0], "'FluxPipeline' is not supported"),
        (lambda: None, "'NoneType' is not supported"),
    ],
    ids=["subclass", "unsupported", "namesake", "compiled", "pipeline", "none"],
)
def test_other_classes_are_refused_by_name(make: Any, words: str) -> None:
    thing = make()
    cls = type(thing)
    with pytest.raises(ModelError) as caught:
        distribute(thing)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert type(thing) is cls


@pytest.mark.parametrize("wrong", [{"mode": "rows"}, {"size": 0}, {"size": True}, {"size": 1.5}])
def test_a_refused_request_changes_nothing(wrong: dict[str, Any]) -> None:
    vae = plain("kl")
    before = dict(vars(vae))
    with pytest.raises(UsageError):
        distribute(vae, **wrong)
    assert type(vae) is AutoencoderKL
    assert vars(vae) == before


def test_one_process_says_when_more_ranks_were_asked_for(said: Callable[[], list[str]]) -> None:
    vae = plain("wan21")
    want = vae.decode(latent("wan21", 9, 10)).sample
    assert torch.equal(distribute(vae, size=2).decode(latent("wan21", 9, 10)).sample, want)
    assert said() == ["parallel size 2 is more than the 1 ranks there are; using 1"]


def test_the_first_rank_says_that_tiling_is_off(said: Callable[[], list[str]]) -> None:
    def work(group: LoopbackGroup) -> bool:
        vae = models[group.rank]
        vae.disable_tiling()
        distribute(vae, group=group)
        vae.enable_tiling()
        distribute(vae)  # the group is kept
        return bool(vae.is_distributed_enabled() and vae.distributed_executor.group is group)

    models = [plain("kl") for _ in range(3)]
    assert run_loopback(3, work) == [True] * 3
    assert ["tiling is off" in words for words in said()] == [True]


def test_size_and_mode_are_set_anew() -> None:
    models = [plain("kl") for _ in range(3)]
    z = latent("kl", 9, 13)
    tiled = plain("kl").decode(z).sample
    untiled_vae = plain("kl")
    untiled_vae.disable_tiling()
    untiled = untiled_vae.decode(z).sample

    def work(group: LoopbackGroup) -> list[Tensor]:
        vae = distribute(models[group.rank], size=2, group=group)
        first = vae.decode(z).sample
        second = distribute(vae, mode="spatial_shard_width").decode(z).sample
        return [first, second, distribute(vae, size=3).decode(z).sample]

    for first, second, third in run_loopback(3, work):
        assert torch.equal(first, tiled)
        assert torch.equal(third, tiled)
        assert torch.allclose(second, untiled, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("mode", ["tile", "spatial_shard_height", "spatial_shard_width"])
def test_shared_work_keeps_no_gradients(family: str, mode: str) -> None:
    """The caller has forgotten ``no_grad``, and even the latents want a gradient."""
    models = [plain(family) for _ in range(2)]

    def work(group: LoopbackGroup) -> tuple[bool, bool]:
        vae = distribute(models[group.rank], mode=mode, group=group)
        z, x = latent(family, 9, 10).requires_grad_(), pixels(family, 9, 10).requires_grad_()
        return vae.decode(z).sample.requires_grad, vae.encode(x).latent_dist.parameters.requires_grad

    assert run_loopback(2, work) == [(False, False)] * 2


def test_fifty_decodes_leave_the_memory_flat() -> None:
    """Kept gradients of one decode of this size are more than 10 MiB; fifty of them would be 500."""
    models = [plain("kl") for _ in range(2)]
    z = latent("kl", 9, 10)
    resident: list[int] = []

    def work(group: LoopbackGroup) -> None:
        vae = distribute(models[group.rank], group=group)
        kept = []
        for turn in range(60):
            kept.append(vae.decode(z).sample.mean())  # a graph would hang on this number
            group.gather_values(0)
            if group.rank == 0 and turn in (9, 59):
                gc.collect()
                resident.append(psutil.Process().memory_info().rss)
            group.gather_values(0)

    run_loopback(2, work)
    assert resident[1] - resident[0] < 32 * 2**20


def close(got: Tensor, want: Tensor, atol: float = 1e-5) -> bool:
    """Equal but for rounding: loaded weights lie at other addresses, where other kernels may multiply them."""
    return torch.allclose(got, want, atol=atol, rtol=0)


def saved_class(folder: Path) -> str:
    name: str = json.loads((folder / "config.json").read_text())["_class_name"]
    return name


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_saved_model_is_a_plain_one_for_everybody(family: str, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    vae = plain(family)
    base = type(vae)
    z = latent(family, 5, 6)
    want = vae.decode(z).sample
    vae.save_pretrained(tmp_path / "plain")
    distribute(vae).save_pretrained(tmp_path / "distributed")
    loaded = FAMILIES[family][1].from_pretrained(tmp_path / "plain")
    loaded.save_pretrained(tmp_path / "loaded")
    for name in ("distributed", "loaded"):
        assert saved_class(tmp_path / name) == base.__name__
        assert close(base.from_pretrained(tmp_path / name).decode(z).sample, want)
        again = FAMILIES[family][1].from_pretrained(tmp_path / name)
        assert type(again) is FAMILIES[family][1]
        assert close(again.decode(z).sample, want)
    assert not said()


@pytest.mark.parametrize("name", list(PIPELINES))
def test_a_saved_pipeline_is_a_plain_one_for_everybody(
    name: str, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    pipe, call = PIPELINES[name]()
    base = type(pipe.vae)
    want = pictures(pipe, call)
    pipe.vae.save_pretrained(tmp_path / "vae")
    pipe.vae = adapter_for(base.__name__).from_pretrained(tmp_path / "vae")
    pipe.save_pretrained(tmp_path / "assigned")
    constructed = type(pipe)(**pipe.components | {"transformer": pipe.transformer})
    constructed.save_pretrained(tmp_path / "constructed")
    other, _ = PIPELINES[name]()
    distribute(other.vae)
    other.save_pretrained(tmp_path / "distributed")
    for folder in ("assigned", "constructed", "distributed"):
        index = json.loads((tmp_path / folder / "model_index.json").read_text())
        assert index["vae"] == ["diffusers", base.__name__]
        assert saved_class(tmp_path / folder / "vae") == base.__name__
    others = {name: None for name, part in pipe.components.items() if part is None}  # text encoders and the like
    if name.startswith("Wan"):  # diffusers loads its transformer only where accelerate is installed
        index = json.loads((tmp_path / "assigned" / "model_index.json").read_text())
        (tmp_path / "assigned" / "model_index.json").write_text(json.dumps(index | {"transformer": [None, None]}))
    again = DiffusionPipeline.from_pretrained(tmp_path / "assigned", **others)
    again.transformer = pipe.transformer
    assert type(again.vae) is base
    assert close(pictures(again, call), want)
    given = DiffusionPipeline.from_pretrained(tmp_path / "assigned", **others, vae=distribute(again.vae))
    given.transformer = pipe.transformer
    assert given.vae is again.vae
    assert close(pictures(given, call), want)
    assert not said()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_from_pretrained_takes_what_diffusers_takes(family: str, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    factory, adapter, _, _ = FAMILIES[family]
    vae, z = factory(), latent(family, 5, 6)
    vae.save_pretrained(tmp_path / "pipe" / "vae")
    vae.half().save_pretrained(tmp_path / "half", variant="fp16")
    inside = adapter.from_pretrained(tmp_path / "pipe", subfolder="vae")
    assert close(inside.decode(z).sample, factory().decode(z).sample)
    half = adapter.from_pretrained(str(tmp_path / "half"), variant="fp16", torch_dtype=torch.float16)
    assert half.dtype == torch.float16
    assert close(half.decode(z.half()).sample, vae.decode(z.half()).sample, atol=4e-3)  # a few units of float16 at 1
    brief, facts = adapter.from_pretrained(
        tmp_path / "pipe" / "vae", torch_dtype=torch.bfloat16, output_loading_info=True, use_safetensors=True
    )
    assert type(brief) is adapter
    assert brief.dtype == torch.bfloat16
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    assert isinstance(adapter.from_config(vae.config), adapter)
    assert not said()


def test_a_folder_that_names_the_adapter_is_read_too(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    plain("kl").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"_class_name": "DistributedAutoencoderKL"}))
    vae = DistributedAutoencoderKL.from_pretrained(tmp_path)
    vae.save_pretrained(tmp_path / "again")
    assert saved_class(tmp_path / "again") == "AutoencoderKL"
    assert not said()


def test_a_missing_folder_is_diffusers_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"config\.json"):
        DistributedAutoencoderKL.from_pretrained(tmp_path)


def test_requests_that_differ_fail_on_every_rank() -> None:
    models = [plain("kl") for _ in range(2)]

    def work(group: LoopbackGroup) -> list[str]:
        vae = distribute(models[group.rank], group=group)
        words = []
        for mine in (latent("kl", 9, 10 + group.rank), latent("kl", 9, 10).to([torch.float32, torch.half][group.rank])):
            try:
                vae.decode(mine)
            except RankMismatchError as error:
                words.append(str(error))
        assert vae.decode(latent("kl", 9, 10)).sample.shape[-1] == 80  # the group is well again
        return words

    for words in run_loopback(2, work):
        assert len(words) == 2
        assert all("the ranks hold different latents" in word for word in words)
