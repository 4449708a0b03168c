"""The spatial engine knows families by their adapters only: one that it has never seen runs on it as it is."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from vaepar.autoencoders import VaeCapability, spatial
from vaepar.autoencoders.image import ImageTileMixin
from vaepar.config import VaeParallelMode
from vaepar.errors import UsageError
from vaepar.parallel.group import SoloGroup
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import Axis


class FoldedKL(ImageTileMixin, AutoencoderKL):
    """A family that does not exist: AutoencoderKL over patches of 2 x 2 pixels, so 16x in space, clamped."""

    capability = VaeCapability(
        family="folded",
        base_class="FoldedKL",
        decode_modes=tuple(VaeParallelMode),
        encode_modes=tuple(VaeParallelMode),
        latent_rank=4,
    )

    @property
    def patch_size(self) -> int:
        return 2

    def patchify(self, pixels: Tensor) -> Tensor:
        return F.pixel_unshuffle(pixels, 2)

    def finish_untiled(self, decoded: Tensor) -> Tensor:
        return F.pixel_shuffle(decoded, 2).clamp(-1, 1)


def build(cls: Callable[..., Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(
            in_channels=12,
            out_channels=12,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(16, 16, 16, 16),
            norm_num_groups=4,
        ).eval()


@pytest.mark.parametrize("axis", ["height", "width"])
def test_a_family_that_the_engine_has_never_seen(axis: Axis) -> None:
    plain, vae = build(AutoencoderKL), build(FoldedKL)
    random = torch.Generator().manual_seed(0)
    z = torch.randn((2, 4, 5, 7), generator=random)
    x = torch.rand((2, 3, 82, 114), generator=random) * 2 - 1
    with torch.no_grad():
        picture = F.pixel_shuffle(plain.decode(z).sample, 2).clamp(-1, 1)
        expected = plain.encode(F.pixel_unshuffle(x, 2)).latent_dist.parameters
    models = [copy.deepcopy(vae) for _ in range(3)]

    def work(group: Any) -> tuple[list[Tensor | None], Tensor | None]:
        mine = models[group.rank]
        chunks = list(spatial.shard_decode_chunks(mine, z, group, axis))
        return chunks, spatial.shard_encode(mine, x, group, axis)

    owner, *others = run_loopback(3, work)
    # Sums in another order than on one device, of values of order 1.
    torch.testing.assert_close(owner[0][0], picture, atol=1e-5, rtol=0)
    assert all(chunks == [None] for chunks, _ in others)
    for _, moments in (owner, *others):
        torch.testing.assert_close(moments, expected, atol=1e-5, rtol=0)


def test_its_size_rule_is_its_own() -> None:
    with pytest.raises(UsageError, match="FoldedKL got pixels of 33x32; it needs 16 or more, multiples of 2, in"):
        spatial.shard_encode(build(FoldedKL), torch.zeros(1, 3, 33, 32), SoloGroup(), "height")


def test_the_engine_imports_nothing_of_diffusers() -> None:
    tree = ast.parse(Path(spatial.__file__).read_text(encoding="utf-8"))
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "torch" in modules
    assert not [name for name in modules if name.startswith("diffusers") or "autoencoder_kl" in name]
