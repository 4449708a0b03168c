"""The pipelines of diffusers from tiny random components: two steps, prompts given as embeddings, no text encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from PIL import Image
from torch import Tensor

from tests import models

#: Not divisible into equal tiles, nor into equal shards; 12 x 10 latents, tiles of 8 with strides of 6.
HEIGHT, WIDTH, FRAMES = 96, 80, 5
TILE, STRIDE = 64, 48


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def random_module(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return build().eval()


def photograph(size: int) -> Image.Image:
    rng = np.random.default_rng(3)
    return Image.fromarray(rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)).resize((size, size))


def flow_scheduler() -> Any:
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def wan_transformer(channels: int) -> Any:
    return random_module(
        lambda: WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=channels,
            out_channels=16,
            text_dim=16,
            freq_dim=16,
            ffn_dim=16,
            num_layers=1,
            rope_max_seq_len=32,
        )
    )


def kl_vae() -> Any:
    vae = models.make_kl()
    vae.register_to_config(shift_factor=0.1)  # FLUX.1 and Z-Image have one
    return vae


def wan_parts() -> dict[str, Any]:
    return {
        "tokenizer": None,
        "text_encoder": None,
        "vae": models.make_wan21(),
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    }


def make_wan() -> tuple[Any, dict[str, Any]]:
    pipe = WanPipeline(**wan_parts(), transformer=wan_transformer(16))
    return pipe, {"num_frames": FRAMES, "guidance_scale": 1.0, "prompt_embeds": noise(1, 4, 16)}


def make_wan_i2v() -> tuple[Any, dict[str, Any]]:
    """The picture is encoded: 16 channels of it and 4 of a mask join the 16 of the noise."""
    pipe = WanImageToVideoPipeline(**wan_parts(), transformer=wan_transformer(36))
    call = {"num_frames": FRAMES, "guidance_scale": 1.0, "prompt_embeds": noise(1, 4, 16), "image": photograph(96)}
    return pipe, call


def make_flux() -> tuple[Any, dict[str, Any]]:
    transformer = random_module(
        lambda: FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 4, 8),
        )
    )
    pipe = FluxPipeline(flow_scheduler(), kl_vae(), None, None, None, None, transformer)
    return pipe, {"prompt_embeds": noise(1, 4, 16), "pooled_prompt_embeds": noise(1, 16)}


def make_flux2() -> tuple[Any, dict[str, Any]]:
    """With a reference picture, which is encoded."""
    transformer = random_module(
        lambda: Flux2Transformer2DModel(
            in_channels=128,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
        )
    )
    pipe = Flux2Pipeline(flow_scheduler(), models.make_flux2(), None, None, transformer)
    return pipe, {"prompt_embeds": noise(1, 4, 16), "image": photograph(96)}


def make_qwenimage() -> tuple[Any, dict[str, Any]]:
    transformer = random_module(
        lambda: QwenImageTransformer2DModel(
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 4, 8),
        )
    )
    pipe = QwenImagePipeline(flow_scheduler(), models.make_qwenimage(), None, None, transformer)
    return pipe, {"prompt_embeds": noise(1, 4, 16), "true_cfg_scale": 1.0}


def make_z_image() -> tuple[Any, dict[str, Any]]:
    transformer = random_module(
        lambda: ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[4, 6, 6],
            axes_lens=[64, 16, 16],
        )
    )
    pipe = ZImagePipeline(flow_scheduler(), kl_vae(), None, None, transformer)
    return pipe, {"prompt_embeds": [noise(4, 16)], "guidance_scale": 0.0}


PIPELINES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "WanPipeline": make_wan,
    "WanImageToVideoPipeline": make_wan_i2v,
    "FluxPipeline": make_flux,
    "Flux2Pipeline": make_flux2,
    "QwenImagePipeline": make_qwenimage,
    "ZImagePipeline": make_z_image,
}


def enable_tiling(vae: Any) -> None:
    """Tiles of 8 latents: the default of the tiny image VAEs, set for the video ones."""
    vae.enable_tiling(*([TILE, TILE, STRIDE, STRIDE] if hasattr(vae, "tile_sample_min_height") else []))


def pictures(pipe: Any, call: dict[str, Any], output_type: str = "pt", **more: Any) -> Any:
    """What the pipeline gives for seed 5: tensor [B, 3, H, W] or [B, T, 3, H, W] in [0, 1], or an array for "np"."""
    pipe.set_progress_bar_config(disable=True)
    settings = {"height": HEIGHT, "width": WIDTH, "num_inference_steps": 2, "generator": seeded(5), **call, **more}
    return pipe(output_type=output_type, return_dict=False, **settings)[0]
