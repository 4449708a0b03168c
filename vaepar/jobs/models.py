"""From ``--model`` to a loaded adapter: where the files are, what they are, and whether all weights are there."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vaepar.errors import ModelError, VaeparError
from vaepar.latents import VaeFacts
from vaepar.text import listed, shown

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_WEIGHTS = "diffusion_pytorch_model"
_MAX_JSON = 16 * 2**20

# Dtypes of weights by their names in safetensors.
_KINDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_COUNTERS = "num_batches_tracked"  # of batch norms, whole numbers by nature


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A VAE on this machine's disk.

    Args:
        spec: what was asked for.
        folder: holds config.json and the weights.
        facts: the VAE's numbers; ``facts.class_name`` is the diffusers class.
        weights: the weight files, all of them safetensors.
        variant: which weights of the folder they are, as diffusers names variants; None for the plain ones.
    """

    spec: str
    folder: Path
    facts: VaeFacts
    weights: tuple[Path, ...]
    variant: str | None = None

    @property
    def weight_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.weights)

    def digest(self) -> str:
        """SHA-256 over the weight files, so that a report can tell one model from another."""
        total = hashlib.sha256()
        for path in self.weights:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()


def locate_model(
    spec: str, *, variant: str | None = None, allow_download: bool = True, need_weights: bool = True
) -> ModelSource:
    """Find a model by ``demo``, the path of a pipeline or VAE folder, or a hub id ``owner/name[@revision]``.

    With ``need_weights`` false, a folder that has only its config.json is enough: for plans.

    Raises:
        ModelError: not found, not a VAE that is supported, no safetensors weights, or not to be had offline.
    """
    if spec == DEMO:
        from vaepar.demo import demo_vae_folder

        return _inspect(spec, demo_vae_folder(), variant, need_weights)
    path = Path(spec).expanduser()
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:  # a name too long, a null byte
        words = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"model {shown(spec)} cannot be looked at: {shown(words)}") from None
    if is_folder:
        return _inspect(spec, _vae_folder(path), variant, need_weights)
    if path.exists():
        raise ModelError(f"model {shown(spec)} is a file; a folder with config.json and its weights is needed")
    if not _HUB_ID.fullmatch(spec) or spec.startswith("."):
        guess = f"; did you mean {DEMO!r}?" if difflib.get_close_matches(spec, [DEMO]) else ""
        raise ModelError(f"model {shown(spec)}: no such folder, and not a hub id such as 'owner/name' or 'demo'{guess}")
    return _inspect(spec, _vae_folder(_from_hub(spec, variant, allow_download)), variant, need_weights)


def load_model(source: ModelSource, dtype: torch.dtype, device: torch.device, group: Any) -> Any:
    """The adapter with all its weights, in evaluation mode on ``device``, joined to ``group``.

    Raises:
        ModelError: when weights are missing, unexpected, of another shape or kind, unreadable, or not finite.
    """
    from vaepar.autoencoders import adapter_for
    from vaepar.parallel.agreement import is_out_of_memory

    check_weights(source)
    adapter = adapter_for(source.facts.class_name)
    unknown = sorted(source.facts.config.keys() - inspect.signature(adapter.__init__).parameters.keys())
    if unknown:
        logger.warning(
            "model %s: its config.json says %s, which %s does not know and ignores",
            shown(source.spec),
            listed(unknown, 6),
            source.facts.class_name,
        )
    with quiet_diffusers():
        try:
            model, info = adapter.from_pretrained(
                str(source.folder),
                output_loading_info=True,
                torch_dtype=dtype,
                variant=source.variant,
                use_safetensors=True,
                local_files_only=True,
                group=group,
            )
        except Exception as error:  # diffusers raises many kinds for unreadable or misshapen weights
            if isinstance(error, VaeparError) or is_out_of_memory(error):
                raise
            raise ModelError(
                f"model {shown(source.spec)} cannot be loaded: {shown(' '.join(str(error).split()))}"
            ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info.get(kind, ()))
        if names:
            raise ModelError(
                f"model {shown(source.spec)} has {len(names)} {kind.replace('_', ' ')} ({listed(names, 3)}); "
                f"its weights must be complete and belong to {source.facts.class_name}"
            )
    model.eval().requires_grad_(False)
    model.to(device)
    _check_finite(model, source)
    return model


def _check_finite(model: Any, source: ModelSource) -> None:
    """Raise :class:`ModelError` for weights with NaN or infinity: a damaged file, or one too large for the dtype."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(
                f"model {shown(source.spec)}: {shown(name)} holds NaN or infinity in {kind}; the file is damaged, or "
                f"its numbers are too large for that dtype"
            )


def batch_norm_of(model: Any) -> Any:
    """(mean, variance, epsilon) of a FLUX.2 VAE's batch norm; None for other families."""
    bn = getattr(model, "bn", None)
    return None if bn is None else (bn.running_mean, bn.running_var, float(model.config.batch_norm_eps))


def _vae_folder(path: Path) -> Path:
    """The VAE's own folder in a pipeline folder, or the folder itself."""
    if (path / "model_index.json").is_file():
        index = _json(path / "model_index.json")
        if (path / "vae" / "config.json").is_file():
            return path / "vae"
        names = sorted(key for key, value in index.items() if isinstance(value, list))
        raise ModelError(
            f"pipeline folder {shown(path)} has no vae/config.json; the parts that model_index.json names are "
            f"{listed(names)}"
        )
    if (path / "config.json").is_file():
        return path
    if (path / "vae" / "config.json").is_file():
        return path / "vae"
    raise ModelError(f"model folder {shown(path)} has neither config.json nor model_index.json")


def _inspect(spec: str, folder: Path, variant: str | None, need_weights: bool) -> ModelSource:
    config = _json(folder / "config.json")
    class_name = config.get("_class_name")
    if not isinstance(class_name, str):
        raise ModelError(f"{shown(folder / 'config.json')} names no class (_class_name); it is not a diffusers VAE")
    facts = VaeFacts.from_config(class_name, {key: value for key, value in config.items() if key[:1] != "_"})
    try:
        found, weights = _weights(spec, folder, variant)
    except ModelError:
        if need_weights:
            raise
        found, weights = variant, ()
    return ModelSource(spec=spec, folder=folder, facts=facts, weights=weights, variant=found)


def _weights(spec: str, folder: Path, variant: str | None) -> tuple[str | None, tuple[Path, ...]]:
    """A variant and its weight files: one, or all shards that an index names; fp16 where there are no plain ones."""
    for name in [variant] if variant else [None, "fp16"]:
        tag = f".{name}" if name else ""
        single = folder / f"{_WEIGHTS}{tag}.safetensors"
        if single.is_file():
            return name, (single,)
        index = folder / f"{_WEIGHTS}.safetensors.index{tag}.json"
        if index.is_file():
            named = _json(index).get("weight_map", {})
            shards = sorted({str(shard) for shard in named.values()}) if isinstance(named, dict) else []
            missing = [shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file()]
            if missing or not shards:
                raise ModelError(f"model {shown(spec)}: weight shards are missing: {listed(missing or ['all'])}")
            return name, tuple(folder / shard for shard in shards)
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".safetensors"))
    wanted = f"{_WEIGHTS}{'.' + variant if variant else ''}.safetensors"
    raise ModelError(
        f"model folder {shown(folder)} has no {wanted}; found {listed(others) if others else 'no weights'} "
        f"(only safetensors is read, pickle never)"
    )


def _json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ModelError(f"{shown(path)} is larger than {_MAX_JSON} bytes; it is not a model's configuration")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{shown(path)} cannot be read as JSON: {shown(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{shown(path)} holds a {type(value).__name__}; a JSON object is needed")
    return value


def _from_hub(spec: str, variant: str | None, allow_download: bool) -> Path:
    """A folder with the VAE's files of a hub repository: from the local cache, else downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    repo, _, revision = spec.partition("@")
    names = ("config.json", f"{_WEIGHTS}*.safetensors", f"{_WEIGHTS}*.json")
    patterns = ["model_index.json", *names, *(f"vae/{name}" for name in names)]
    offline = HF_HUB_OFFLINE or not allow_download
    try:
        return Path(
            snapshot_download(repo, revision=revision or None, allow_patterns=patterns, local_files_only=offline)
        )
    except Exception as error:  # the client's own errors and those of three network layers below it
        if offline:
            how = "downloads are off (HF_HUB_OFFLINE or --no-download)"
            raise ModelError(f"model {shown(spec)} is not in the local cache, and {how}") from error
        raise ModelError(f"model {shown(spec)} cannot be had from the hub: {_hub_words(error)}") from error


def _hub_words(error: BaseException) -> str:
    """Why the hub did not give a model; the client's own words where there is no better one."""
    words = f"{type(error).__name__}: {shown(' '.join(str(error).split()))}"
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return "it asks for a licence to be accepted and a token (HF_TOKEN)"
    if "RevisionNotFoundError" in kinds:
        return "it has no such revision"
    if "RepositoryNotFoundError" in kinds:
        return "there is no such repository, or it is private and no token (HF_TOKEN) opens it"
    if kinds & {"LocalEntryNotFoundError", "ConnectionError", "ConnectError", "ConnectTimeout", "OfflineModeIsEnabled"}:
        return f"it cannot be reached, and the model is not in the local cache ({words})"
    return words


@contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Keep diffusers from writing progress bars and warnings about what is said or raised here anyway."""
    from diffusers.utils import logging as diffusers_logging

    level = diffusers_logging.get_verbosity()
    bars = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS")
    diffusers_logging.set_verbosity(diffusers_logging.CRITICAL)
    diffusers_logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(level)
        if bars is None:
            diffusers_logging.enable_progress_bar()


def settle_dtype(asked: str, source: ModelSource, device: torch.device) -> tuple[torch.dtype, str | None]:
    """The dtype to decode in, and one line when it is not the one that was asked for.

    ``auto`` is float32 on CPUs, and on GPUs the dtype of the weights. Weights whose configuration demands an upcast
    overflow in float16, so float16 becomes float32 for them; so it does on CPUs, which have no fast half.
    """
    import torch

    name = asked
    if asked == "auto":
        name = "float32" if device.type == "cpu" or not source.weights else stored_dtype(source)
    dtype: torch.dtype = getattr(torch, name)
    if dtype == torch.float16:
        said = None if asked == "auto" else asked
        if source.facts.upcasts:
            return torch.float32, f"{said or 'float16 weights'}: the model's force_upcast asks for float32; using it"
        if device.type == "cpu":
            return torch.float32, "float16 on a CPU: using float32"
    return dtype, None


def stored_dtype(source: ModelSource) -> str:
    """The dtype that most of the weights are stored in. Raises :class:`ModelError` as :func:`check_weights` does."""
    counts = Counter(kind for _, kind in _stored_kinds(source, source.weights[:1]))
    return _KINDS.get(max(counts, key=lambda kind: counts[kind], default="F32"), "float32")


def check_weights(source: ModelSource) -> None:
    """Raise :class:`ModelError` for weights of a dtype that diffusers would convert without their scales.

    Quantised files keep the factors that make numbers of their integers elsewhere; cast as they are, they decode to
    noise without a word.
    """
    for name, kind in _stored_kinds(source, source.weights):
        if kind not in _KINDS and not name.endswith(_COUNTERS):
            raise ModelError(
                f"model {shown(source.spec)}: weight {shown(name)} is stored as {kind}; "
                f"the dtypes that are read are {', '.join(_KINDS.values())}"
            )


def _stored_kinds(source: ModelSource, weights: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Name and safetensors dtype of the stored tensors, from the files' headers."""
    from safetensors import SafetensorError, safe_open

    for path in weights:
        try:
            with safe_open(str(path), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  # not a mapping
                    yield key, str(file.get_slice(key).get_dtype())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model {shown(source.spec)}: {shown(path.name)} cannot be read: {shown(error)}") from None
