"""The parts of the demo VAE's training: shortcuts change nothing, draws repeat, the optimiser optimises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import train_demo_vae
from demo_data import BatchSampler, TrainingSet, load_picture, moving_crop, to_signed
from demo_optimizer import MuonWithAdam, orthogonalized
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import nn
from train_demo_vae import EasedEnds, TrainOptions, build_model, last_tap_forward, reconstruct


@pytest.fixture
def training_set() -> TrainingSet:
    generator = torch.Generator().manual_seed(5)
    stills = tuple(
        torch.randint(256, size, generator=generator, dtype=torch.uint8) for size in ((3, 180, 200), (3, 60, 50))
    )
    videos = (torch.randint(256, (3, 12, 64, 80), generator=generator, dtype=torch.uint8),)
    return TrainingSet(stills, torch.tensor([1.0, 2.0]), videos)


@pytest.mark.parametrize(("channels", "size"), [((3, 5), (7, 9)), ((8, 4), (1, 6))])
def test_last_tap_is_all_that_a_first_frame_sees(channels: tuple[int, int], size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    convolution = WanCausalConv3d(*channels, 3, padding=1)
    x = torch.randn(2, channels[0], 1, *size)
    # float32 sums in another order
    torch.testing.assert_close(last_tap_forward(convolution, x), convolution(x), atol=1e-5, rtol=1e-5)
    cache = torch.randn(2, channels[0], 2, *size)
    assert torch.equal(last_tap_forward(convolution, x, cache), convolution(x, cache))


def test_fresh_model_takes_every_frame_by_itself() -> None:
    torch.manual_seed(0)
    model = build_model()
    with torch.no_grad():
        model.quant_conv.bias[16:] = -20.0
    still = torch.rand(1, 3, 1, 32, 48) * 2 - 1
    with torch.no_grad():
        y, mean, _ = reconstruct(model, still.expand(-1, -1, 9, -1, -1))
        alone, _, _ = reconstruct(model, still)
    assert mean.shape == (1, 16, 3, 4, 6)
    # the posterior's noise, exp(-10), on top of float32
    torch.testing.assert_close(y, alone.expand_as(y), atol=2e-3, rtol=0)


def test_training_forward_is_the_models_own_and_eased_ends_vanish_at_full_strength() -> None:
    torch.manual_seed(1)
    model = build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        model.quant_conv.weight[16:] = 0.0
        model.quant_conv.bias[16:] = -20.0
        model.decoder.conv_out.weight.mul_(0.1)
        model.decoder.conv_out.bias.zero_()
    x = torch.rand(1, 3, 5, 32, 32) * 2 - 1
    with torch.no_grad():
        wanted = model.decode(model.encode(x).latent_dist.mode()).sample
        assert float(wanted.abs().max()) < 1.0, "the clamp of decode must not act in this comparison"
        ends = EasedEnds(model)
        eased, _, _ = reconstruct(model, x)
        ends.strength = 1.0
        complete, _, _ = reconstruct(model, x)
    torch.testing.assert_close(complete, wanted, atol=2e-3, rtol=0)
    assert not torch.allclose(eased, wanted, atol=2e-2)


@pytest.mark.parametrize("shape", [(8, 30), (30, 8), (16, 16)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    matrix = torch.randn(shape)
    left, values, right = torch.linalg.svd(orthogonalized(matrix), full_matrices=False)
    # The quintic trades exactness for speed: its fixed band is about 0.7 to 1.2.
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert float(((left @ right) - (u @ v)).abs().max()) < 0.5


def test_vectors_follow_adam_exactly() -> None:
    torch.manual_seed(3)
    ours, theirs = nn.Linear(6, 5), nn.Linear(6, 5)
    theirs.load_state_dict(ours.state_dict())
    optimizers = MuonWithAdam(ours, 1e-2), torch.optim.Adam(theirs.parameters(), 1e-2, betas=(0.9, 0.98))
    x = torch.randn(7, 6)
    for _ in range(5):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(model(x).square().mean())
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.bias, theirs.bias, atol=1e-6, rtol=1e-5)


def test_batches_repeat_with_the_seed_and_stay_in_range(training_set: TrainingSet) -> None:
    first, again, other = (BatchSampler(training_set, seed) for seed in (7, 7, 8))
    for _ in range(4):
        stills, clips = first.stills(3, 48), first.clips(2, 5, 40)
        assert stills.shape == (3, 3, 1, 48, 48)
        assert clips.shape == (2, 3, 5, 40, 40)
        assert max(float(stills.abs().max()), float(clips.abs().max())) <= 1.0
        assert torch.equal(stills, again.stills(3, 48))
        assert torch.equal(clips, again.clips(2, 5, 40))
        assert not torch.equal(stills, other.stills(3, 48))


def test_a_resting_camera_shows_the_picture_itself() -> None:
    picture = to_signed(load_picture("skimage", "data/chelsea.png"))
    clip = moving_crop(picture, [(50.0, 100.0, 1.0), (51.0, 102.0, 1.0)], (20, 30))
    assert clip.shape == (3, 2, 20, 30)
    # Whole-pixel positions need no interpolation; the grid's coordinates are float32.
    torch.testing.assert_close(clip[:, 0], picture[:, 40:60, 85:115], atol=2e-3, rtol=0)
    torch.testing.assert_close(clip[:, 1], picture[:, 41:61, 87:117], atol=2e-3, rtol=0)


def test_missing_packages_and_files_are_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_picture("no_such_package", "a.png")
    with pytest.raises(FileNotFoundError, match="no_such_picture"):
        load_picture("skimage", "data/no_such_picture.png")


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    training_set: TrainingSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_demo_vae, "load_training_set", lambda: training_set)
    options = TrainOptions(steps=6, minutes=1e6, seed=0, still_size=32, still_batch=1, clip_size=32, clip_batch=1)
    whole = train_demo_vae.Trainer(options, tmp_path / "whole.ckpt")
    for _ in range(6):
        whole.train_step()
    stopped = train_demo_vae.Trainer(options, tmp_path / "stopped.ckpt")
    for _ in range(3):
        stopped.train_step()
    stopped.save()
    resumed = train_demo_vae.Trainer(options, tmp_path / "stopped.ckpt")
    resumed.resume()
    for _ in range(3):
        resumed.train_step()
    assert resumed.step == 6
    for ours, theirs in zip(resumed.average.parameters(), whole.average.parameters(), strict=True):
        assert torch.equal(ours, theirs)
