"""Many queries of E4M3 over keys and values of E4M3 on Metal: E4M3 is converted to its values; what crosses the bus."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.kernels.metal_calls import compare, ints, normal, offsets, run, shifted
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
E4M3 = torch.float8_e4m3fn
ALL = torch.arange(256, dtype=torch.uint8)
VALUES = torch.where(ALL & 0x7F == 0x7F, 0, ALL)  # NaN left out, which all sums would be
OPS = ("flash_attention", "flash_attention_varlen", "sdpa_multi")


def arguments(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int = 0) -> tuple[Any, ...]:
    """Those of an op for q (B, T, Hq, D), k (B, S, Hkv, D), v, up to lengths; tensors begin ``offset`` elements in."""
    (B, T), S = q.shape[:2], k.shape[1]
    if op == "sdpa_multi":
        return (shifted(q, offset), *(shifted(t.transpose(1, 2), offset) for t in (k, v)), ints(*[S] * B))
    if op == "flash_attention_varlen":
        packed = (shifted(t.flatten(0, 1), offset) for t in (q, k, v))
        return (*packed, offsets((T,) * B), offsets((S,) * B))
    return tuple(shifted(t, offset) for t in (q, k, v))


@pytest.mark.sample(5)
@pytest.mark.parametrize(("columns", "offset"), [(256, 0), (256, 1), (240, 0), (240, 2)])
@pytest.mark.parametrize("heads", [2, 80])
@pytest.mark.parametrize("op", OPS)
def test_every_code_of_v_is_its_number(op: str, heads: int, columns: int, offset: int):
    """With a single key the result is its value. 240 columns are read in pairs, others from odd bytes on."""
    v = torch.stack((ALL[:columns], ALL.flip(0)[:columns]))[:, None, None].view(E4M3)  # (2, 1, 1, columns)
    q, k = normal(0, 2, 1, heads, 32, dtype=E4M3), normal(1, 2, 1, 1, 32, dtype=E4M3)
    out = run(op, arguments(op, q, k, v, offset))[0].view(2, heads, columns)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.nan_to_num(500.0).float(), v[:, 0].float().nan_to_num(500.0).expand_as(out))


@pytest.mark.sample(5)
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("op", OPS)
def test_every_code_of_q_and_k_is_its_number(op: str, repeats: int, offset: int):
    """32 of them in each sequence: of a single key, whose score is its LSE, then of as many heads."""
    codes, v = VALUES.view(8, 1, 1, 32), normal(2, 8, 1, 1, 16, dtype=E4M3)
    eye, ones = torch.eye(32)[None, None].expand(8, 1, 32, 32), torch.ones(8, 1, 1, 32)
    for q, k in ((eye.to(E4M3), codes.view(E4M3)), ((codes * eye.to(torch.uint8)).view(E4M3), ones.to(E4M3))):
        q = torch.cat([q] * repeats, 2)  # (8, 1, repeats * 32, 32)
        lse = run(op, arguments(op, q, k, v, offset), scale=1.0)[1].view(8, repeats, 32)
        assert torch.equal(lse, codes.view(8, 1, 32).view(E4M3).float().expand_as(lse))


@pytest.mark.sample(2)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("op", OPS)
def test_a_nan_of_q_or_k_is_one(op: str, code: int):
    zeros, v = torch.zeros(1, 3, 1, 32, dtype=torch.uint8), normal(1, 1, 3, 1, 16, dtype=E4M3)
    spoiled = zeros.clone()
    spoiled[0, 1, 0, 5] = code
    for q, k, rows in ((zeros, spoiled, [True] * 3), (spoiled, zeros, [False, True, False])):
        out, lse, *_ = run(op, arguments(op, q.view(E4M3), k.view(E4M3), v), causal=False)
        assert out.isnan().all(-1).flatten().tolist() == lse.isnan().flatten().tolist() == rows


@pytest.mark.sample(9)
@pytest.mark.parametrize("dims", [(64, 80), (128, 128), (256, 64)])
@pytest.mark.parametrize("queries", [5, 150])
@pytest.mark.parametrize("op", OPS)
def test_fp8_gives_what_bf16_of_its_values_gives(op: str, queries: int, dims: tuple[int, int]):
    """To the bit: half and bf16 hold every number, factors of 256 round nothing, and probabilities stay in float."""
    shapes = ((queries, 4, dims[0]), (170, 2, dims[0]), (170, 2, dims[1]))
    codes = [normal(i, 2, *shape, dtype=E4M3) for i, shape in enumerate(shapes)]
    for kwargs in (dict(causal=True), dict(causal=False, window=40, sink_tokens=3, softcap=8.0)):
        got, want = (run(op, arguments(op, *qkv), **kwargs) for qkv in (codes, [t.bfloat16() for t in codes]))
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype and torch.equal(g, w)


@pytest.mark.sample(9)
@pytest.mark.parametrize("given", [g for g in itertools.product((False, True), repeat=3) if any(g)])
@pytest.mark.parametrize("queries", [9, 70])
@pytest.mark.parametrize("op", OPS)
def test_scales_belong_to_a_sequence_and_a_head(op: str, queries: int, given: tuple[bool, ...]):
    """Each alone and together, of rows that lie apart; with row sums where an op has them."""
    all_scales = torch.exp2(normal(7, 3, 2, 5, dtype=torch.float32))
    scales = [all_scales[i, :, :2] if on else None for i, on in enumerate(given)]
    shapes = ((queries, 4, 64), (90, 2, 64), (90, 2, 48))
    args = arguments(op, *(normal(i, 2, *shape, dtype=E4M3) for i, shape in enumerate(shapes)))
    absent = (None,) * {"flash_attention": 3, "flash_attention_varlen": 1, "sdpa_multi": 2}[op]  # sink, ...
    partial = {} if op == "sdpa_multi" else dict(normalize=False)
    for kwargs in (dict(), dict(softcap=5.0, scale=0.4, causal=True) | partial):
        compare(op, (*args, *absent, *scales), **kwargs)


@pytest.mark.sample(5)
@pytest.mark.parametrize("queries", [40, 200])
@pytest.mark.parametrize("op", OPS)
def test_keys_are_read_as_often_in_half_the_bytes(op: str, queries: int):
    """For at most 3.1 operations on integers a code that is read; nothing else is more but by what decodes q."""
    qkv = [normal(i, 1, n, h, 128) for i, (n, h) in enumerate(((queries, 4), (300, 2), (300, 2)))]
    with metal.counting() as reports:
        run(op, arguments(op, *qkv), causal=False)
        run(op, arguments(op, *(t.to(E4M3) for t in qkv)), causal=False)
    halfs, codes = reports
    for tensor in "qkv":
        assert 2 * codes.buffers[tensor][0] == halfs.buffers[tensor][0] > 0 == codes.buffers[tensor][1]
    read = sum(codes.buffers[tensor][0] for tensor in "qkv")
    assert codes.integer - halfs.integer <= 3.1 * read
    for count in ("matrix_flops", "collectives", "barriers"):
        assert getattr(codes, count) == getattr(halfs, count), count


def test_offsets_that_lie_stay_inside():
    """Tokens of no sequence have no scales, either; without a sequence there are none at all."""
    q, k = normal(0, 20, 4, 64, dtype=E4M3), normal(1, 30, 2, 64, dtype=E4M3)
    scale = torch.exp2(normal(2, 2, 2, dtype=torch.float32))
    with metal.settings(mode="checked", strict=True):
        args = (q, k, k, ints(0, 9, 99), ints(0, 40, 9), None, scale, scale, scale)
        out, *_ = run("flash_attention_varlen", args)
        assert out.isfinite().all()
        args = (q, k, k, ints(0, 9, 12), ints(0, 20, 25), None, scale, scale, scale)
        out, lse, _ = run("flash_attention_varlen", args)
        assert out[:12].count_nonzero() and lse[12:].eq(-torch.inf).all() and out[12:].eq(0).all()
        out, lse, _ = run("flash_attention_varlen", (q, k, k, ints(0), ints(0), None, *[scale[:0]] * 3))
        assert lse.eq(-torch.inf).all() and out.eq(0).all()
