"""Properties of flash_attention_paged: where keys lie, and with whom a sequence shares a call, changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit
from torch_attnkit.ops.flash_attention_paged.reference import reference
from torch_attnkit.ops.sdpa_decode_paged.reference import reference as decode
from torch_attnkit.ops.sdpa_multi.reference import reference as multi

op = torch.ops.attnkit.flash_attention_paged
Hq, Hkv, D, Dv = 4, 2, 6, 5


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def case(seed, len_q, kv_len, page, tail=0, dtype=torch.float64):
    """Pages in random order, two of them nobody's; the table has a column more than any sequence needs."""
    gen = torch.Generator().manual_seed(seed)
    used = [-(-n // page) for n in kv_len]
    order = torch.randperm(sum(used) + 2, generator=gen).int()
    table = torch.full((len(kv_len), max(used, default=0) + 1), -1, dtype=torch.int32)
    for b, n in enumerate(used):
        table[b, :n] = order[sum(used[:b]) :][:n]
    q = torch.randn(sum(len_q) + tail, Hq, D, generator=gen, dtype=dtype)
    k = torch.randn(len(order), page, Hkv, D, generator=gen, dtype=dtype)
    v = torch.randn(len(order), page, Hkv, Dv, generator=gen, dtype=dtype)
    lengths = torch.tensor(kv_len, dtype=torch.int32)
    return (q, k, v, offsets(len_q), table, lengths), torch.randn(Hq, generator=gen)


def same(got, want):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.integers(0, 999),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=4),
    st.sampled_from([1, 3, 4]),
    st.fixed_dictionaries(
        dict(
            causal=st.booleans(),
            window=st.sampled_from([-1, 0, 2, 50]),
            sink_tokens=st.integers(0, 2),
            softcap=st.sampled_from([0.0, 2.0]),
        )
    ),
    st.integers(0, 3),
)
def test_every_sequence_equals_a_block_at_the_end_of_its_own_cache(seed, lengths, page, kwargs, tail):
    len_q, kv_len = [t for t, _ in lengths], [n for _, n in lengths]
    (q, k, v, cu, table, n), sink = case(seed, len_q, kv_len, page, tail)
    got = reference(q, k, v, cu, table, n, sink, max_seqlen_q=6, max_seqlen_k=9, **kwargs)
    for b, keys in enumerate(kv_len):
        pages = table[b, : -(-keys // page)].long()
        rows = slice(cu[b], cu[b + 1])
        own = (t[pages].flatten(0, 1)[:keys].transpose(0, 1)[None] for t in (k, v))  # (1, Hkv, S, D)
        want = multi(q[None, rows], *own, n[b : b + 1], sink, **kwargs)
        same([g[rows] for g in got], [w[0] for w in want])
    rest = slice(int(cu[-1]), None)
    assert torch.equal(got[0][rest], q.new_zeros(tail, Hq, Dv)) and (got[1][rest] == -torch.inf).all()


def test_queries_of_one_token_are_a_decode_step():
    (q, k, v, cu, table, n), sink = case(3, [1, 1, 1], [5, 0, 9], 4)
    same(reference(q, k, v, cu, table, n, sink), decode(q, k, v, table, n, sink))


def test_a_prompt_in_chunks_is_the_prompt_at_once():
    (q, k, v, cu, table, n), _ = case(4, [9], [9], 4)
    whole = reference(q, k, v, cu, table, n)
    for first, last in ((0, 2), (2, 7), (7, 9)):
        part = reference(q[first:last], k, v, offsets([last - first]), table, torch.tensor([last]).int())
        same(part, [w[first:last] for w in whole])


def test_sequences_may_share_the_pages_of_a_prefix():
    (q, k, v, cu, table, n), sink = case(5, [2, 3], [9, 9], 4, dtype=torch.float32)
    shared = table.clone()
    shared[1, :2] = shared[0, :2]
    copied_k, copied_v = k.clone(), v.clone()
    for copied, cache in ((copied_k, k), (copied_v, v)):
        copied[table[1, :2].long()] = cache[table[0, :2].long()]
    got, want = op(q, k, v, cu, shared, n, sink), op(q, copied_k, copied_v, cu, table, n, sink)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_what_nobody_may_see_does_not_matter():
    """Tokens past the last offset, slots past a length, pages of nobody, and what the table holds behind."""
    (q, k, v, cu, table, n), sink = case(0, [3, 0, 2], [4, 2, 5], 4, tail=2, dtype=torch.float32)
    want = op(q, k, v, cu, table, n, sink)
    seen = torch.zeros(k.shape[:2], dtype=torch.bool)
    for b, keys in enumerate(n.tolist()):
        for key in range(keys):
            seen[table[b, key // 4], key % 4] = True
    k[~seen], v[~seen], q[5:] = torch.nan, torch.nan, torch.nan
    table[table < 0] = 2**31 - 1
    got = op(q, k, v, cu, table, n, sink)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)) and not got[0].isnan().any()


def test_hints_change_nothing():
    args, sink = case(1, [3, 1], [4, 8], 4, dtype=torch.float32)
    want = op(*args, sink)
    for hints in ((3, 8), (100, -1), (-1, 2**40)):
        got = op(*args, sink, max_seqlen_q=hints[0], max_seqlen_k=hints[1])
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_cache_as_vllm_holds_it():
    """(pages, heads, slots, 2 D), of which keys and values are halves: views, that are read where they lie."""
    (q, k, _, cu, table, n), sink = case(2, [3, 1], [4, 8], 4, dtype=torch.float32)
    v = torch.randn_like(k)
    both = torch.cat((k, v), -1).transpose(1, 2).contiguous()  # (Np, Hkv, Ps, 2 D)
    halves = both.transpose(1, 2).split(D, -1)
    before = both.clone()
    got, want = op(q, *halves, cu, table, n, sink), op(q, k, v, cu, table, n, sink)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)) and torch.equal(both, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cu_seqlens_q=torch.tensor([0, 4, 3]).int()), "cu_seqlens_q is [0, 4, 3], accepted: offsets that start"),
        (dict(cu_seqlens_q=torch.tensor([0, 3, 9]).int()), "cu_seqlens_q ends at 9, accepted: at most the 4 tokens"),
        (dict(kv_len=torch.tensor([4, 13]).int()), "kv_len[1] is 13, accepted: 0 to 12"),
        (dict(block_table=torch.tensor([[0, 0, 0], [1, 9, 0]]).int()), "block_table[1, 1] is 9, accepted: 0 to 4"),
        (dict(max_seqlen_q=2), "max_seqlen_q is 2, accepted: -1 or at least the longest sequence, 3"),
        (dict(max_seqlen_k=7), "max_seqlen_k is 7, accepted: -1 or at least the longest sequence, 8"),
        (dict(max_seqlen_k=-2), "max_seqlen_k must be -1 (unknown) or at least 0"),
        (dict(window=-2), "window must be -1 (off) or at least 0"),
        (dict(kv_len=torch.tensor([4]).int()), "B=1"),
        (dict(k_cache=torch.zeros(0, 4, Hkv, D), v_cache=torch.zeros(0, 4, Hkv, Dv)), "k_cache has no pages, accepted"),
        (dict(k_cache=torch.zeros(5, 0, Hkv, D), v_cache=torch.zeros(5, 0, Hkv, Dv)), "Ps must be at least 1"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(change, message):
    (q, k, v, cu, table, n), _ = case(1, [3, 1], [4, 8], 4, dtype=torch.float32)
    given = dict(q=q, k_cache=k, v_cache=v, cu_seqlens_q=cu, block_table=table, kv_len=n)
    with pytest.raises(ValueError) as caught:
        op(**(given | change))
    assert str(caught.value).startswith("flash_attention_paged: ") and message in str(caught.value)


def test_the_whole_graph_compiles():
    args, sink = case(1, [3, 1], [4, 8], 4, dtype=torch.float32)
    compiled = torch.compile(lambda *a: op(*a)[0] * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args, sink), op(*args, sink)[0] * 2)
