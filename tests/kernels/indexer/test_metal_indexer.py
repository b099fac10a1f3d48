"""The indexer on Metal: what no caller should pass, negative scales, every number of a format, what is read."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.kernels.indexer import metal as indexer
from torch_attnkit.ops.indexer_scores.reference import reference
from torch_attnkit.oracle import compare
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
op = torch.ops.attnkit.indexer_scores
I32 = torch.iinfo(torch.int32)


def simulated(*args, **kwargs) -> torch.Tensor:
    with torch_attnkit.simulate("metal"), metal.settings(mode="checked", strict=True):
        return op(*args, **kwargs)


def right(got: torch.Tensor, args, **kwargs) -> None:
    wide = [*args[:2], args[2].double(), *args[3:]]
    compare.check("scores", got, reference(*args, **kwargs), reference(*wide, **kwargs))


def inputs(T: int = 5, R: int = 2, S: int = 300, H: int = 6, D: int = 64):
    """q, k and weights, and lengths of which one ends in the second block of 256 keys, one is 0, and one is all."""
    gen = torch.Generator().manual_seed(0)
    q, k, weights = (torch.randn(*shape, generator=gen) for shape in ((T, H, D), (R, S, D), (T, H)))
    return q, k, weights, torch.tensor([270, 0, 10, S, 1][:T], dtype=torch.int32)


@pytest.mark.proof
def test_lengths_requests_and_pages_that_are_refused_on_the_cpu_lead_nowhere():
    q, k, weights, _ = inputs()
    q, pool = q.bfloat16(), torch.full((20, 30, 64), torch.nan).bfloat16()
    k_len = torch.tensor([I32.max, I32.min, -1, 301, 300], dtype=torch.int32)
    ids = torch.tensor([I32.max, 1, I32.min, -1, 1], dtype=torch.int32)
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    pool[table.long()] = k.unflatten(1, (10, 30)).bfloat16()
    table[0, 3], table[0, 7], table[1, 0], table[1, 9] = -1, 20, I32.max, I32.min
    got = simulated(q, pool, weights, k_len, ids, table)
    # Out of range means the nearest; a page that is not there holds zeros.
    keys = k.bfloat16()
    for r, page in ((0, 3), (0, 7), (1, 0), (1, 9)):
        keys[r, 30 * page : 30 * page + 30] = 0
    right(got, (q, keys, weights, k_len.clamp(0, 300), ids.clamp(0, 1)))


@pytest.mark.proof
def test_scales_may_be_negative():
    """relu(s x) is not s relu(x)."""
    q, k, weights, k_len = inputs(T=4)
    gen = torch.Generator().manual_seed(1)
    scale_q, scale_k = (torch.randn(*t.shape[:-1], 1, generator=gen) for t in (q, k))
    codes = (t.to(torch.float8_e4m3fn) for t in (q, k))
    args = (*codes, weights.bfloat16(), k_len, None, None, scale_q, scale_k)
    right(simulated(*args, format="fp8"), args, format="fp8")


@pytest.mark.proof
def test_every_number_of_e4m3_is_read():
    """A key for each byte, and a query that looks at one number of it and at minus that."""
    k = torch.zeros(1, 256, 64, dtype=torch.uint8)
    k[0, :, 5] = torch.arange(256)
    q = torch.zeros(2, 1, 64)
    q[0, 0, 5], q[1, 0, 5] = 1.0, -1.0
    args = (
        q.to(torch.float8_e4m3fn), k.view(torch.float8_e4m3fn), torch.ones(2, 1), torch.tensor([256, 256]).int(), None,
        None, None, torch.ones(1, 256, 1),
    )  # fmt: skip
    got, want = simulated(*args, format="fp8"), k.view(torch.float8_e4m3fn)[0, :, 5].float()
    assert torch.equal(got.nan_to_num(-1), torch.stack((want, -want)).relu().nan_to_num(-1))


@pytest.mark.proof
def test_every_number_of_mxfp4_is_decoded():
    """All codes under all scales, a key for each scale; a token looks at one code, or at minus it. What is below the
    smallest number of bfloat with all its bits, or above the largest, is left out."""
    k = torch.full((1, 256, 64), 0x22, dtype=torch.uint8)
    k[:, :, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]).to(torch.uint8)  # all codes, in order
    scale = torch.arange(256).to(torch.uint8)[None, :, None].expand(1, 256, 4).contiguous()
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    q = torch.zeros(16, 1, 64, dtype=torch.uint8)
    for number in range(16):
        q[number, 0, number // 2] = (2 if number < 8 else 10) << (4 * (number % 2))  # 1 or -1
    ones = torch.full((16, 1, 4), 127, dtype=torch.uint8)
    args = (q, k, torch.ones(16, 1), torch.full((16,), 256).int(), None, None, ones, scale)
    got = simulated(*args, format="mxfp4")
    powers = torch.exp2(torch.arange(256.0, dtype=torch.float64) - 127)
    for number in range(16):
        want = (values[number % 8] * powers).float()
        assert torch.equal(got[number, 2:252], want[2:252]) and got[number, 255].isnan()


@pytest.mark.proof
def test_a_key_is_read_once_for_all_tokens_and_a_query_once_for_a_block_of_keys():
    T, S, H, D = 9, 500, 40, 128
    q, k, weights, _ = (t.bfloat16() for t in inputs(T, 1, S, H, D))
    with torch_attnkit.simulate("metal"), metal.counting() as reports:
        op(q, k, weights.float(), torch.full((T,), S, dtype=torch.int32))
    (report,) = reports
    shares = -(-T // indexer.share_of(T, 4))
    assert report.buffers["k"] == (shares * k.nbytes, 0) and report.buffers["q"] == (4 * q.nbytes, 0)
    # Keys and heads are padded to 512 and 64.
    assert report.matrix_flops == 2 * T * 512 * 64 * D


def test_tiles_fit_in_threadgroup_memory_and_shares_have_all_tokens():
    assert max(indexer.threadgroup_bytes(d) for d in (64, 128)) <= 32768
    for tokens in (1, 2, 255, 256, 257, 4096):
        for groups in (1, 100, 512, 100000):
            share = indexer.share_of(tokens, groups)
            assert 1 <= share <= 256 and (tokens <= 256 or share > 1 or groups < 512)
    assert indexer.share_of(4096, 1) == 8 and indexer.share_of(4096, 512) == 256
