"""A model that is moved to another device after it has joined its group, as a pipeline is after loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.families import latent, pixels, plain_and_distributed
from tests.processes import run_processes
from vaepar.autoencoders import distribute
from vaepar.errors import RankMismatchError, UsageError
from vaepar.parallel.group import RankGroup
from vaepar.parallel.loopback import LoopbackGroup, run_loopback

# "cpu:0" is another name of where everything is. A group on it stands for one that was joined before the model moved.
BEFORE = torch.device("cpu:0")


def test_a_group_given_does_not_follow_the_model() -> None:
    models = [plain_and_distributed("kl", 8, 6)[0] for _ in range(2)]

    def work(group: LoopbackGroup) -> int:
        group.device = BEFORE
        vae = distribute(models[group.rank], group=group)
        refused = 0
        for run, request in ((vae.decode, latent("kl", 9, 10)), (vae.encode, pixels("kl", 9, 10))):
            with pytest.raises(UsageError, match="the request is on cpu, the group of ranks given was made for cpu:0"):
                run(request)
            refused += 1
        return refused

    assert run_loopback(2, work) == [2, 2]


def moved(group: RankGroup) -> tuple[bool, bool, str]:
    """Decode after all ranks have moved, then try it with rank 1 alone moved, which must fail on both at once."""
    vae = distribute(plain_and_distributed("kl", 8, 6)[0])
    z = latent("kl", 9, 10)
    joined = vae.distributed_executor.group
    joined.device = BEFORE
    same = torch.equal(vae.decode(z).sample, plain_and_distributed("kl", 8, 6)[0].decode(z).sample)
    followed = vae.distributed_executor.group is not joined and vae.distributed_executor.parallel_size == 2
    if group.rank == 1:
        vae.distributed_executor.group.device = BEFORE
    try:
        vae.decode(z)
    except RankMismatchError as error:
        return same, followed, str(error)
    return same, followed, "nothing was said"


@pytest.mark.processes
def test_the_default_group_follows_a_model_that_was_moved(tmp_path: Path) -> None:
    for same, followed, words in run_processes(2, moved, tmp_path):
        assert same
        assert followed
        assert "the ranks hold different" in words
