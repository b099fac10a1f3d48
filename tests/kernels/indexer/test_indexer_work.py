"""The indexer's kernels on simulated GPUs: what no caller should pass, negative scales, who sees what."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.formats import mxfp4
from torch_attnkit.ops.indexer_scores.reference import reference
from torch_attnkit.oracle import compare
from torch_attnkit.oracle.attention import narrow_products
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]

op = torch.ops.attnkit.indexer_scores
I32 = torch.iinfo(torch.int32)


ARCHS = pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "sm100", "sm120"])


def simulated(*args, seed=0, arch="sm90", **kwargs):
    with torch_attnkit.simulate(arch), ptx.settings(check=True, seed=seed), ptx.counting() as launches:
        return op(*args, **kwargs), launches


def right(got, args, **kwargs):
    wide = [*args[:2], args[2].double(), *args[3:]]
    with narrow_products():
        ref = reference(*args, **kwargs)
    compare.check("scores", got, ref, reference(*wide, **kwargs))


def inputs(T=5, R=2, S=300, H=6, D=128, seed=0):
    """q, k and weights, and lengths of which one ends in the second block of 256 keys, one is 0, and one is all."""
    gen = torch.Generator().manual_seed(seed)
    q, k, weights = (torch.randn(*shape, generator=gen) for shape in ((T, H, D), (R, S, D), (T, H)))
    return q, k, weights, torch.tensor([270, 0, 10, S, 1][:T], dtype=torch.int32)


@ARCHS
def test_lengths_requests_and_pages_that_are_refused_on_the_cpu_lead_nowhere(arch):
    q, k, weights, _ = inputs()
    q, pool = q.bfloat16(), torch.full((20, 30, 128), torch.nan).bfloat16()
    k_len = torch.tensor([I32.max, I32.min, -1, 301, 300], dtype=torch.int32)
    ids = torch.tensor([I32.max, 1, I32.min, -1, 1], dtype=torch.int32)
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    pool[table.long()] = k.unflatten(1, (10, 30)).bfloat16()
    table[0, 3], table[0, 7], table[1, 0], table[1, 9] = -1, 20, I32.max, I32.min
    for seed in (0, 1):
        got, launches = simulated(q, pool, weights, k_len, ids, table, seed=seed, arch=arch)
        assert len(launches) == 1
        # Out of range means the nearest; a page that is not there holds zeros.
        keys = k.bfloat16()
        for r, page in ((0, 3), (0, 7), (1, 0), (1, 9)):
            keys[r, 30 * page : 30 * page + 30] = 0
        right(got, (q, keys, weights, k_len.clamp(0, 300), ids.clamp(0, 1)))


@ARCHS
@pytest.mark.parametrize(("T", "seed"), [(4, 0), (4, 3), (12, 0), (12, 3)])
def test_scales_may_be_negative(T, seed, arch):
    """relu(s x) is not s relu(x). Six tokens of a request go past keys in registers, which have the signs of their
    scales; past two of them stream the keys, and products are scaled before they are rectified."""
    q, k, weights, k_len = inputs(T=T)
    k_len = k_len.repeat(3)[:T]
    gen = torch.Generator().manual_seed(1)
    scale_q, scale_k = (torch.randn(*t.shape[:-1], 1, generator=gen) for t in (q, k))
    args = (*(t.to(torch.float8_e4m3fn) for t in (q, k)), weights.bfloat16(), k_len, None, None, scale_q, scale_k)
    right(simulated(*args, format="fp8", seed=seed, arch=arch)[0], args, format="fp8")


@ARCHS
def test_every_number_of_mxfp4_is_decoded(arch):
    """All codes under all scales, a key for each scale; token t looks at one code, or at minus it."""
    codes = torch.arange(16, dtype=torch.uint8)
    k = torch.zeros(1, 256, 64, dtype=torch.uint8)
    k[0, :, :8] = codes[::2] | codes[1::2] << 4
    scale = torch.full((1, 256, 4), 127, dtype=torch.uint8)
    scale[0, :, 0] = torch.arange(256)
    unit = torch.zeros(32, 1, 128)
    unit[torch.arange(16), 0, codes.long()] = 1.0
    unit[16:] = -unit[:16]
    q, q_scale = mxfp4.quantize(unit)
    args = (q, k, torch.ones(32, 1), torch.full((32,), 256, dtype=torch.int32), None, None, q_scale, scale)
    got, want = simulated(*args, format="mxfp4", arch=arch)[0], reference(*args, format="mxfp4")
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@ARCHS
def test_keys_that_no_token_of_the_block_sees_are_not_looked_at(arch):
    """Tokens see 270 keys at most; those behind them would lie in a page that is not there."""
    q, k, weights, k_len = inputs(T=3, R=1, S=300)
    table = torch.full((1, 10), I32.max, dtype=torch.int32)
    table[0, :9] = torch.arange(9)
    k = k[0, :270].unflatten(0, (9, 30)).bfloat16().contiguous()
    args = (q.bfloat16(), k, weights, k_len, None, table)
    right(simulated(*args, arch=arch)[0], args)


def pages(k, page, gen, spare=3):
    """Keys (R, S, D) in pages of a pool in random order, and the table."""
    R, S, D = k.shape
    table = torch.randperm(R * S // page + spare, generator=gen)[: R * S // page].view(R, -1).int()
    nowhere = torch.nan if k.is_floating_point() else 0xFF
    pool = torch.full((R * S // page + spare, page, D), nowhere, dtype=k.dtype)
    pool[table.long()] = k.unflatten(1, (-1, page))
    return pool, table


@pytest.mark.parametrize(("tokens", "page", "seed"), [(1, 64, 0), (2, 192, 1), (4, 64, 2)])
def test_keys_stream_past_few_tokens(tokens, page, seed):
    """Requests of very different lengths, one of none: blocks begin and end in the middle of them, and what nobody sees
    is shared out, too."""
    R, S = 7, 1152
    gen = torch.Generator().manual_seed(seed)
    q, k, weights, _ = inputs(T=R * tokens, R=R, S=S)
    pool, table = pages(k.bfloat16(), page, gen)
    k_len = torch.tensor([S, 1, 0, 700, 128, 129, 1000], dtype=torch.int32).repeat_interleave(tokens)
    k_len[1::tokens] = (k_len[1::tokens] - 70).clamp(0)
    args = (q.bfloat16(), pool, weights, k_len, None, table)
    got, launches = simulated(*args, seed=seed)
    assert len(launches) == 1
    right(got, args)


@pytest.mark.parametrize(("tokens", "page", "seed"), [(1, 64, 0), (3, 128, 1)])
def test_keys_of_mxfp4_are_decoded_as_they_stream(tokens, page, seed):
    """q by a launch of its own, before."""
    R, S = 5, 640
    gen = torch.Generator().manual_seed(seed)
    q, k, weights, _ = inputs(T=R * tokens, R=R, S=S)
    k_len = torch.tensor([S, 1, 0, 300, 129], dtype=torch.int32).repeat_interleave(tokens)
    (q, q_scale), (k, k_scale) = mxfp4.quantize(q), mxfp4.quantize(k)
    codes, table = pages(k, page, gen)
    scales = torch.full((*codes.shape[:2], 4), 0xFF, dtype=torch.uint8)  # NaN
    scales[table.long()] = k_scale.unflatten(1, (-1, page))
    args = (q, codes, weights, k_len, None, table, q_scale, scales)
    got, launches = simulated(*args, format="mxfp4", seed=seed)
    assert len(launches) == 2
    right(got, args, format="mxfp4")


def test_scales_that_are_not_copied_by_four_do_not_stream():
    """At an odd address, or with odd steps."""
    q, k, weights, k_len = inputs(T=2)
    (q, q_scale), (k, k_scale) = mxfp4.quantize(q), mxfp4.quantize(k)
    storage = torch.zeros(k_scale.numel() + 1, dtype=torch.uint8)
    wide, names = torch.nn.functional.pad(k_scale, (0, 1))[..., :4], []
    for scale in (k_scale, storage[1:].view_as(k_scale).copy_(k_scale), wide):
        args = (q, k, weights, k_len, None, None, q_scale, scale)
        got, launches = simulated(*args, format="mxfp4")
        names.append(launches[-1].kernel)
        right(got, args, format="mxfp4")
    assert names[0] != names[1] == names[2]


def test_pages_and_lengths_that_are_refused_on_the_cpu_lead_nowhere_where_keys_stream():
    gen = torch.Generator().manual_seed(0)
    q, k, weights, _ = inputs(T=2, S=512)
    pool, table = pages(k.bfloat16(), 64, gen)
    k_len = torch.tensor([I32.max, I32.min], dtype=torch.int32)
    table[0, 2], table[0, 5], table[1] = -1, I32.max, I32.min
    got, _ = simulated(q.bfloat16(), pool, weights, k_len, None, table)
    keys = k.bfloat16()
    for page in (2, 5):
        keys[0, 64 * page : 64 * page + 64] = 0
    right(got, (q.bfloat16(), keys, weights, k_len.clamp(0, 512)))


def test_keys_that_tma_cannot_read_do_not_stream():
    """The same signature with keys at an address that is no multiple of 16 bytes."""
    q, k, weights, k_len = inputs(T=2)
    storage = torch.zeros(k.numel() + 1, dtype=torch.bfloat16)
    odd = storage[1:].view_as(k).copy_(k)
    args = (q.bfloat16(), k.bfloat16(), weights, k_len)
    names = []
    for keys in (args[1], odd):
        got, (launch,) = simulated(args[0], keys, *args[2:])
        names.append(launch.kernel)
        right(got, args)
    assert names[0] != names[1]


def test_a_token_takes_few_instructions():
    """64 heads of 128 against 256 keys, a block's start divided by 8 tokens. Seen: 2,442 of PTX."""
    q, k, weights, _ = inputs(T=8, R=1, S=256, H=64)
    lengths = torch.full((8,), 256, dtype=torch.int32)
    _, launches = simulated(q.bfloat16(), k.bfloat16(), weights, lengths)
    assert launches[0].counters["instructions"] <= 8 * 2_550
