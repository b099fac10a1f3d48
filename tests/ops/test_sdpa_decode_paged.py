"""Properties of sdpa_decode_paged: pages are a way to store a cache and change nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit
from torch_attnkit.ops.sdpa_decode.reference import reference as contiguous
from torch_attnkit.ops.sdpa_decode_paged.reference import reference

op = torch.ops.attnkit.sdpa_decode_paged
B, Hq, Hkv, Ps, Mp, D, Dv = 3, 4, 2, 4, 3, 6, 5


def case(seed: int, dtype=torch.float64):
    """The same sequences twice: contiguous, and in shuffled pages where everything unused is nan or a wild id."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(B, Hq, D, generator=gen, dtype=dtype)
    k = torch.randn(B, Hkv, Mp * Ps, D, generator=gen, dtype=dtype)
    v = torch.randn(B, Hkv, Mp * Ps, Dv, generator=gen, dtype=dtype)
    n = torch.randint(0, Mp * Ps + 1, (B,), generator=gen, dtype=torch.int32)
    order = torch.randperm(B * Mp + 2, generator=gen).tolist()
    pk = torch.full((B * Mp + 2, Ps, Hkv, D), torch.nan, dtype=dtype)
    pv = torch.full((B * Mp + 2, Ps, Hkv, Dv), torch.nan, dtype=dtype)
    table = torch.full((B, Mp), -7, dtype=torch.int32)
    for b in range(B):
        for j in range(int(n[b])):
            if j % Ps == 0:
                table[b, j // Ps] = order.pop()
            pk[table[b, j // Ps], j % Ps], pv[table[b, j // Ps], j % Ps] = k[b, :, j], v[b, :, j]
        table[b, -(-int(n[b]) // Ps) :] = 10**6
    return (q, k, v, n), (q, pk, pv, table, n)


def same(got, want):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.integers(0, 999), st.booleans(), st.sampled_from([-1, 0, 1, 5, 100]), st.integers(0, 3))
def test_pages_in_any_order_with_garbage_in_unused_slots_equal_a_contiguous_cache(seed, extras, window, sink_tokens):
    flat, paged = case(seed)
    gen = torch.Generator().manual_seed(seed + 1)
    sink = torch.randn(Hq, generator=gen) if extras else None
    start = (torch.rand(B, generator=gen) * flat[3]).int() if extras else None
    more = dict(window=window, sink_tokens=sink_tokens, softcap=3.0 * extras, scale=0.4)
    same(reference(*paged, sink, start, **more), contiguous(*flat, sink, start, **more))


def test_the_op_in_float32_equals_the_contiguous_op():
    flat, paged = case(5, torch.float32)
    got, want = op(*paged), torch.ops.attnkit.sdpa_decode(*flat)
    eps = torch.finfo(torch.float32).eps
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g.isinf(), w.isinf())
        assert (g - w).masked_fill(w.isinf(), 0).abs().max() <= 8 * eps * w[w.isfinite()].abs().max()


def test_sequences_may_share_pages():
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(1, Hq, D, generator=gen).expand(2, -1, -1)
    k, v = torch.randn(2, Ps, Hkv, D, generator=gen), torch.randn(2, Ps, Hkv, Dv, generator=gen)
    out, lse = op(q, k, v, torch.tensor([[1, 0], [1, 0]], dtype=torch.int32), torch.tensor([7, 7], dtype=torch.int32))
    assert torch.equal(out[0], out[1]) and torch.equal(lse[0], lse[1]) and out.abs().max() > 0


def test_no_pages_at_all_serves_empty_sequences():
    q, table = torch.randn(2, Hq, D), torch.full((2, 3), 9, dtype=torch.int32)
    out, lse = op(q, torch.empty(0, Ps, Hkv, D), torch.empty(0, Ps, Hkv, Dv), table, torch.zeros(2, dtype=torch.int32))
    assert torch.equal(out, torch.zeros(2, Hq, Dv)) and torch.equal(lse, torch.full((2, Hq), -torch.inf))


def test_strides_do_not_matter_and_inputs_stay_as_they_are():
    _, (q, k, v, table, n) = case(4)
    k, v = k.nan_to_num(), v.nan_to_num()
    want = reference(q, k, v, table, n)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    before = [t.clone() for t in (*strided, table)]
    got = reference(q, *strided, table, n)
    same(got, want)
    assert all(torch.equal(a, b) for a, b in zip((*strided, table), before, strict=True))


def bad(change):
    _, paged = case(0, torch.float32)
    args = dict(zip(("q", "k_cache", "v_cache", "block_table", "kv_len"), paged, strict=True))
    return op(**{**args, "kv_len": torch.tensor([12, 5, 1], dtype=torch.int32), **change})


TABLE = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]], dtype=torch.int32)
NEGATIVE, BEYOND = TABLE.clone(), TABLE.clone()
NEGATIVE[1, 1], BEYOND[0, 2] = -1, 11
BAD = {
    "negative page": (dict(block_table=NEGATIVE), ValueError, "block_table[1, 1] is -1, accepted: 0 to 10"),
    "page beyond the cache": (dict(block_table=BEYOND), ValueError, "block_table[0, 2] is 11, accepted: 0 to 10"),
    "length beyond the table": (
        dict(block_table=TABLE[:, :2].contiguous()),
        ValueError,
        "kv_len[0] is 12, accepted: 0 to 8",
    ),
    "negative length": (
        dict(block_table=TABLE, kv_len=torch.tensor([1, 1, -1], dtype=torch.int32)),
        ValueError,
        "kv_len[2] is -1",
    ),
    "no pages": (
        dict(block_table=TABLE, k_cache=torch.empty(0, Ps, Hkv, D), v_cache=torch.empty(0, Ps, Hkv, Dv)),
        ValueError,
        "k_cache has no pages",
    ),
    "empty pages": (
        dict(block_table=TABLE, k_cache=torch.empty(3, 0, Hkv, D), v_cache=torch.empty(3, 0, Hkv, Dv)),
        ValueError,
        "Ps must be at least 1",
    ),
    "table in float": (dict(block_table=TABLE.float()), TypeError, "block_table is f32, accepted: i32, i64"),
    "table of another batch": (dict(block_table=TABLE[:2]), ValueError, "B=2, but q has B=3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    change, error, message = BAD[name]
    with pytest.raises(error) as caught:
        bad(change)
    assert str(caught.value).startswith("sdpa_decode_paged: ") and message in str(caught.value)


def test_entries_past_the_length_are_never_looked_at():
    table = TABLE.clone()
    table[1, 2], table[2, 1:] = -(2**31), 2**31 - 1
    out, lse = bad(dict(block_table=table, k_cache=torch.zeros(11, Ps, Hkv, D), v_cache=torch.ones(11, Ps, Hkv, Dv)))
    torch.testing.assert_close(lse, torch.tensor([12.0, 5.0, 1.0]).log()[:, None].expand(3, Hq))
    torch.testing.assert_close(out, torch.ones(3, Hq, Dv))
