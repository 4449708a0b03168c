"""A diffusers VAE that is already in memory, made to share its work among ranks."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from vaepar.autoencoders.mixin import DistributedVaeMixin
from vaepar.autoencoders.naming import take_module
from vaepar.autoencoders.registry import adapter_for
from vaepar.config import VaeParallelConfig, VaeParallelMode
from vaepar.errors import ModelError
from vaepar.parallel.group import RankGroup

logger = logging.getLogger(__name__)


def distribute(
    vae: Any,
    *,
    size: int | None = None,
    mode: VaeParallelMode | str = VaeParallelMode.TILE,
    group: RankGroup | None = None,
) -> Any:
    """Let the ranks of a group share the ``decode`` and ``encode`` of a diffusers VAE, which is changed in place.

    The object stays the same, with its parameters, buffers, hooks, config and tiling; only its class becomes the
    adapter of its family (``isinstance`` of the diffusers class still holds), so ``pipe.vae`` keeps working and
    ``save_pretrained`` writes what it wrote before. Doing it again only sets group, size and mode anew.

    Shared is what diffusers would tile: requests larger than one tile while tiling is on. So call
    ``vae.enable_tiling()``, best before this, which warns otherwise. Without ``torch.distributed``, or with a size of
    1, every call takes diffusers' own path.

    All ranks of the group call it, and then ``decode`` or ``encode``, with the same arguments. Shapes and dtypes are
    compared and a difference is an error on every rank; values are not compared: ranks whose latents differ give a
    picture that mixes them, so seed their generators alike.

    * ``vae.decode(z).sample``: latents [B, C, H, W] (AutoencoderKL, Flux2) or [B, C, T, H, W] (Qwen-Image, Wan), not
      normalised, in the VAE's dtype, to pixels [B, 3, rH, rW] or [B, 3, 1 + 4(T - 1), rH, rW] of the same dtype in
      [-1, 1] (as in diffusers, not every family clamps), r = 8 or 16. Never ``requires_grad`` when shared.
    * ``vae.encode(x).latent_dist``: pixels of these shapes in [-1, 1] to the posterior, on every rank.
    * ``vae.broadcast_result = False`` leaves the decoded pixels on rank 0; the other ranks get an empty tensor, which
      a pipeline cannot make pictures of.

    Args:
        vae: an ``AutoencoderKL``, ``AutoencoderKLFlux2``, ``AutoencoderKLQwenImage`` or ``AutoencoderKLWan``, or one
            that is distributed already.
        size: how many ranks compute, the first of the group; all of them when None. More than there are is all of
            them, with a warning.
        mode: ``tile`` (equal to diffusers' tiling), ``spatial_shard_height`` or ``spatial_shard_width`` (equal to
            diffusers without tiling), or ``auto``.
        group: the ranks. When None: the group that the model already shares with others, else all ranks of
            ``torch.distributed`` (wherever the model is moved later), else this process alone.

    Returns:
        ``vae`` itself.

    Raises:
        ModelError: the class is not one of those above (a subclass might do things that the adapter does not know).
        UsageError: a size below 1 or an unknown mode.
        UnsupportedModeError: a mode that the family does not have.

        After one of these errors nothing about ``vae`` has changed.
    """
    adapter = _adapter_of(vae)
    config = VaeParallelConfig(vae_patch_parallel_size=1 if size is None else size, vae_parallel_mode=mode)  # type: ignore[arg-type]  # parsed there
    adapter.capability.require_decode(config.vae_parallel_mode)
    if not isinstance(vae, DistributedVaeMixin):
        vae.__class__ = adapter
        take_module(vae)
    if group is not None or vae._executor is None or vae.distributed_executor.group.size == 1:
        vae.init_distributed(group)
    group = vae.distributed_executor.group
    vae.set_parallel_size(group.size if size is None else size, mode=config.vae_parallel_mode)
    if vae.distributed_executor.parallel_size > 1 and not vae.use_tiling and group.rank == 0:
        logger.warning(
            "tiling is off, so each of %d ranks would decode alone; call enable_tiling() to share", group.size
        )
    return vae


def _adapter_of(vae: Any) -> Any:
    """The adapter class of a model: its own, or the one that it can become. Raises :class:`ModelError`."""
    cls = type(vae)
    if isinstance(vae, DistributedVaeMixin):
        return cls
    if isinstance(getattr(vae, "_orig_mod", None), nn.Module):
        raise ModelError(f"a compiled model ({cls.__name__}) cannot be distributed; distribute it before torch.compile")
    for ancestor in cls.__mro__[1:]:
        if ancestor.__module__.startswith("diffusers.") and _is_supported(ancestor):
            raise ModelError(
                f"VAE class {cls.__name__!r} is a subclass of {ancestor.__name__}, whose changes would be lost; "
                f"only {ancestor.__name__} itself can be distributed"
            )
    adapter = adapter_for(cls.__name__)
    if not issubclass(adapter, cls):
        raise ModelError(f"VAE class {cls.__module__}.{cls.__name__} is not the {cls.__name__} of diffusers")
    return adapter


def _is_supported(cls: type) -> bool:
    try:
        return cls in adapter_for(cls.__name__).__bases__
    except ModelError:
        return False
