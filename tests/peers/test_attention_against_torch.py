"""The attention references against the attention of PyTorch itself, in float64.

Both sides compute in float64, so they may differ by its rounding only: 1e-10 leaves five digits of room and shows any
difference of meaning. PyTorch anchors ``is_causal`` at the top left when T != S; ours is anchored at the bottom right,
so there the mask is given in full (``causal_lower_right`` states the same alignment in PyTorch's words).
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit
from torch_attnkit.ops.flash_attention.reference import reference as flash
from torch_attnkit.ops.flash_attention_varlen.reference import reference as varlen
from torch_attnkit.ops.sdpa_decode.reference import reference as decode
from torch_attnkit.ops.sdpa_multi.reference import reference as multi

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
B, Hq, Hkv, D, Dv = 2, 4, 2, 16, 8
SHAPES = [(1, 1), (7, 7), (5, 12), (1, 9)]


def qkv(T: int, S: int, seed: int = 0):
    gen = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(B, n, h, d, generator=gen, dtype=torch.float64)
        for n, h, d in ((T, Hq, D), (S, Hkv, D), (S, Hkv, Dv))
    )


def sdpa(q, k, v, **kwargs):
    """PyTorch's plain attention in our layout."""
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True, **kwargs)
    return out.transpose(1, 2)


def flex(q, k, v, score_mod=None, allowed=None, **kwargs):
    """PyTorch's flex_attention, uncompiled, in our layout: out and lse."""
    T, S = q.shape[1], k.shape[1]
    block_mask = create_block_mask(allowed, B, None, T, S, device="cpu") if allowed else None
    out, aux = flex_attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        score_mod=score_mod,
        block_mask=block_mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        **kwargs,
    )
    return out.transpose(1, 2), aux.lse.transpose(1, 2)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("T", "S"), SHAPES)
def test_dense_equals_sdpa(T, S):
    q, k, v = qkv(T, S)
    close(flash(q, k, v)[0], sdpa(q, k, v))
    close(flash(q, k, v, scale=0.3)[0], sdpa(q, k, v, scale=0.3))


def test_causal_equals_sdpa_where_both_ends_meet():
    q, k, v = qkv(7, 7)
    close(flash(q, k, v, causal=True)[0], sdpa(q, k, v, is_causal=True))


@pytest.mark.parametrize(("T", "S"), SHAPES)
def test_causal_is_aligned_to_the_bottom_right(T, S):
    q, k, v = qkv(T, S)
    out = flash(q, k, v, causal=True)[0]
    close(out, sdpa(q, k, v, attn_mask=torch.ones(T, S, dtype=torch.bool).tril(S - T)))
    close(out, sdpa(q, k, v, attn_mask=causal_lower_right(T, S)))


def test_causal_differs_by_intent_from_the_top_left_rule_of_sdpa():
    q, k, v = qkv(5, 12)
    top_left = sdpa(q, k, v, is_causal=True)
    assert not torch.allclose(flash(q, k, v, causal=True)[0], top_left)
    close(sdpa(q, k, v, attn_mask=torch.ones(5, 12, dtype=torch.bool).tril()), top_left)


@pytest.mark.parametrize(("T", "S"), SHAPES)
@pytest.mark.parametrize("window", [1, 3, 50])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_equal_sdpa_with_the_mask_and_flex_attention(T, S, causal, window):
    q, k, v = qkv(T, S)
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)  # (T, S), positive for keys in the past
    mask = (distance < window) & ((distance >= 0) if causal else (distance > -window))

    def allowed(b, h, i, j):
        d = i + (S - T) - j
        return (d < window) & ((d >= 0) if causal else (d > -window))

    out, lse, _ = flash(q, k, v, causal=causal, window=window)
    close(out, sdpa(q, k, v, attn_mask=mask))
    flex_out, flex_lse = flex(q, k, v, allowed=allowed)
    close(out, flex_out)
    close(lse, flex_lse)


@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_softcap_equals_flex_attention(softcap):
    q, k, v = qkv(5, 12)
    out, lse, _ = flash(q, k, v, causal=True, softcap=softcap, scale=0.6)
    want = flex(
        q, k, v,
        score_mod=lambda s, b, h, i, j: softcap * torch.tanh(s / softcap),
        allowed=lambda b, h, i, j: j <= i + 7,
        scale=0.6,
    )  # fmt: skip
    close(out, want[0])
    close(lse, want[1])


def test_a_sink_equals_an_extra_key_column_in_sdpa():
    """The extra column has the sink as its score, through the mask, and value 0."""
    q, k, v = qkv(5, 12)
    sink = torch.randn(Hq, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bias = torch.zeros(B, Hq, 5, 13, dtype=torch.float64)
    bias[..., 12] = sink[:, None]
    bias[..., :12].masked_fill_(~torch.ones(5, 12, dtype=torch.bool).tril(7), -torch.inf)
    longer = [torch.cat([t, t.new_zeros(B, 1, *t.shape[2:])], 1) for t in (k, v)]
    close(flash(q, k, v, sink, causal=True)[0], sdpa(q, *longer, attn_mask=bias))


def test_a_sink_equals_flex_attention_scaled_by_its_lse():
    q, k, v = qkv(5, 12)
    sink = torch.randn(Hq, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out, lse = flex(q, k, v)
    got, got_lse, _ = flash(q, k, v, sink)
    close(got, out * (lse - sink).sigmoid()[..., None])
    close(got_lse, lse)


def test_padding_and_empty_sequences_equal_flex_attention():
    q, k, v = qkv(6, 10)
    n, start = torch.tensor([8, 0]), torch.tensor([3, 0])
    out, lse, _ = flash(q, k, v, None, n, start)
    want, want_lse = flex(q, k, v, allowed=lambda b, h, i, j: (j >= start[b]) & (j < n[b]))
    close(out, want)  # flex_attention also answers 0 and -inf where there is nothing to attend
    close(lse, want_lse)
    assert (lse[1] == -torch.inf).all() and (out[1] == 0).all()


def test_decode_and_multi_equal_sdpa_over_the_valid_part_of_the_cache():
    q, k, v = qkv(4, 12)
    cache = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    for length in (4, 9, 12):
        n = torch.full((B,), length, dtype=torch.int32)
        part = k[:, :length], v[:, :length]
        mask = torch.ones(4, length, dtype=torch.bool).tril(length - 4)
        close(decode(q[:, 0], *cache, n)[0], sdpa(q[:, :1], *part)[:, 0])
        close(multi(q, *cache, n)[0], sdpa(q, *part, attn_mask=mask))
        close(multi(q, *cache, n, causal=False)[0], sdpa(q, *part))


def test_packed_sequences_equal_sdpa_one_by_one():
    alone = [[t[0] for t in qkv(n, n, seed=n)] for n in (3, 6, 1)]
    packed = [torch.cat(t) for t in zip(*alone, strict=True)]
    offsets = torch.tensor([0, 3, 9, 10], dtype=torch.int32)
    want = torch.cat([sdpa(*(t[None] for t in one), is_causal=True)[0] for one in alone])
    close(varlen(*packed, offsets, offsets, causal=True)[0], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_the_op_errs_no_more_than_four_times_sdpa_in_the_same_dtype(dtype, causal):
    q, k, v = qkv(40, 40)
    low = [t.to(dtype) for t in (q, k, v)]
    exact = sdpa(*(t.double() for t in low), is_causal=causal)
    error = (torch.ops.attnkit.flash_attention(*low, causal=causal)[0] - exact).abs().max()
    assert error <= 4 * (sdpa(*low, is_causal=causal) - exact).abs().max()
