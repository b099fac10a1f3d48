"""Properties of flash_attention_varlen: packing changes where sequences lie and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit
from torch_attnkit.ops.flash_attention.reference import reference as flash
from torch_attnkit.ops.flash_attention_varlen.reference import reference

op = torch.ops.attnkit.flash_attention_varlen
Hq, Hkv, D, Dv = 4, 2, 6, 5


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def case(seed: int, len_q: list[int], len_k: list[int], tail: int = 0, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(len_q) + tail, Hq, D, generator=gen, dtype=dtype)
    k = torch.randn(sum(len_k) + tail, Hkv, D, generator=gen, dtype=dtype)
    v = torch.randn(sum(len_k) + tail, Hkv, Dv, generator=gen, dtype=dtype)
    return (q, k, v, offsets(len_q), offsets(len_k)), torch.randn(Hq, generator=gen)


def same(got, want):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.integers(0, 999),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4),
    st.fixed_dictionaries(
        dict(
            causal=st.booleans(),
            window=st.sampled_from([-1, 0, 2, 50]),
            sink_tokens=st.integers(0, 2),
            softcap=st.sampled_from([0.0, 2.0]),
            normalize=st.booleans(),
        )
    ),
    st.integers(0, 3),
)
def test_every_sequence_equals_flash_attention_on_its_own(seed, lengths, kwargs, tail):
    len_q, len_k = [a for a, _ in lengths], [b for _, b in lengths]
    (q, k, v, cq, ck), sink = case(seed, len_q, len_k, tail)
    sink = sink if kwargs["normalize"] else None
    got = reference(q, k, v, cq, ck, sink, max_seqlen_q=6, max_seqlen_k=6, **kwargs)
    for b in range(len(lengths)):
        rows, keys = slice(cq[b], cq[b + 1]), slice(ck[b], ck[b + 1])
        want = flash(q[None, rows], k[None, keys], v[None, keys], sink, **kwargs)
        for g, w in zip(got, want, strict=True):
            if w.dim() > 1:
                same([g[rows]], [w[0]])
    rest = slice(int(cq[-1]), None)
    assert torch.equal(got[0][rest], q.new_zeros(tail, Hq, Dv)) and (got[1][rest] == -torch.inf).all()
    assert got[2].shape == (0,) if kwargs["normalize"] else torch.equal(got[2][rest], q.new_zeros(tail, Hq))


def test_tokens_past_the_last_offset_do_not_matter():
    (q, k, v, cq, ck), sink = case(0, [3, 0, 2], [4, 2, 5], tail=2, dtype=torch.float32)
    want = op(q, k, v, cq, ck, sink)
    q[5:], k[11:], v[11:] = torch.nan, torch.nan, torch.nan
    got = op(q, k, v, cq, ck, sink)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)) and not got[0].isnan().any()


def test_hints_change_nothing():
    args, sink = case(1, [3, 1], [2, 4], dtype=torch.float32)
    want = op(*args, sink, causal=True)
    for hints in ((3, 4), (100, -1), (-1, 2**40)):
        got = op(*args, sink, causal=True, max_seqlen_q=hints[0], max_seqlen_k=hints[1])
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_strides_do_not_matter_and_inputs_stay_as_they_are():
    args, sink = case(2, [5, 2], [3, 6])
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in args[:3]]
    before = [t.clone() for t in (*strided, *args[3:])]
    same(reference(*strided, *args[3:], sink), reference(*args, sink))
    assert all(torch.equal(a, b) for a, b in zip((*strided, *args[3:]), before, strict=True))


def cu(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD = {
    "offsets that do not start at 0": (
        dict(cu_seqlens_q=cu(1, 3, 5)),
        ValueError,
        "cu_seqlens_q is [1, 3, 5], accepted: offsets that start at 0",
    ),
    "offsets that fall": (dict(cu_seqlens_k=cu(0, 5, 4)), ValueError, "cu_seqlens_k is [0, 5, 4]"),
    "offsets beyond the tokens": (
        dict(cu_seqlens_k=cu(0, 5, 12)),
        ValueError,
        "cu_seqlens_k ends at 12, accepted: at most the 6 tokens",
    ),
    "offsets in float": (dict(cu_seqlens_q=cu(0, 3, 5).float()), TypeError, "cu_seqlens_q is f32, accepted: i32, i64"),
    "different batches": (
        dict(cu_seqlens_k=cu(0, 5)),
        ValueError,
        "cu_seqlens_k must be (B+1), got shape (2,): B=1, but cu_seqlens_q has B=2",
    ),
    "no offsets": (dict(cu_seqlens_q=cu()), ValueError, "cu_seqlens_q must be (B+1), got shape (0,)"),
    "hint below the longest query": (
        dict(max_seqlen_q=2),
        ValueError,
        "max_seqlen_q is 2, accepted: -1 or at least the longest sequence of cu_seqlens_q, 3",
    ),
    "hint below the longest keys": (dict(max_seqlen_k=0), ValueError, "max_seqlen_k is 0"),
    "hint that is neither": (dict(max_seqlen_q=-2), ValueError, "max_seqlen_q must be -1 (unknown) or at least 0"),
    "a sink for a numerator": (
        dict(sink=torch.zeros(4), normalize=False),
        ValueError,
        "sink is accepted with normalize=True only",
    ),
    "heads that do not divide": (dict(q=torch.zeros(5, 3, 6)), ValueError, "Hq must be a multiple of Hkv"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad):
    change, error, message = BAD[bad]
    args, _ = case(0, [3, 2], [2, 4], dtype=torch.float32)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    with pytest.raises(error) as caught:
        op(**{**dict(zip(names, args, strict=True)), **change})
    assert str(caught.value).startswith("flash_attention_varlen: ") and message in str(caught.value)
