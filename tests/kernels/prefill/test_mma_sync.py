"""Prefill by ``mma.sync``: maxima that are kept a while, and tiles that begin and end amid a query's heads."""

from __future__ import annotations

import pytest
import torch

from tests.targets import needs
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.kernels.prefill.sm80 import tiles
from torch_attnkit.parity.judge import judge
from torch_attnkit.sim import ptx

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore")]
NAME = "flash_attention"


def agrees(*args: torch.Tensor, **options) -> None:
    """The simulated sm80, checked for races, with the reference."""
    needs("sm80")
    with ptx.settings(check=True):
        judge(NAME, OPS[NAME], "sm80", args, args, options)


@pytest.mark.parametrize("step", [3.0, 20.0])
def test_scores_that_grow_from_block_to_block(step):
    """In powers of two: 3 a block are kept for two blocks and then followed, 20 at once. Relative to the first block's
    maximum float16's probabilities would be infinite in either case."""
    keys, rows, dim, block = 512, 70, 64, tiles.mma_tile(tiles.MMA_TILES, 64, 64, 70).tile_n
    gen = torch.Generator().manual_seed(0)
    q = torch.zeros(1, rows, 1, dim)
    q[..., 0] = 1
    k = torch.randn(1, keys, 1, dim, generator=gen) / 8
    k[0, :, 0, 0] -= torch.arange(keys) // block * step  # blocks are visited from the last to the first
    v = torch.randn(1, keys, 1, dim, generator=gen)
    assert step * (keys // block - 1) > 16
    agrees(q.half(), k.half(), v.half(), scale=torch.log(torch.tensor(2.0)).item())


@pytest.mark.parametrize("group", [3, 5, 71])
def test_groups_that_divide_no_tile(group):
    gen = torch.Generator().manual_seed(group)
    q = torch.randn(2, 9, 2 * group, 32, generator=gen).bfloat16()
    k, v = (torch.randn(2, 40, 2, 32, generator=gen).bfloat16() for _ in range(2))
    assert 9 * group % tiles.mma_tile(tiles.MMA_TILES, 32, 32, 9 * group).tile_m
    agrees(q, k, v, causal=True, window=20)
