"""Decode over caches of E4M3 on Metal, by queries of any dtype: codes become their numbers; what crosses the bus."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.metal_calls import compare, ints, normal, run, shifted
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
E4M3 = torch.float8_e4m3fn
ALL = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize(("columns", "offset"), [(256, 0), (256, 1), (240, 0), (240, 2)])
def test_every_code_of_v_is_its_number(columns: int, offset: int):
    """With a single key the result is its value. 240 columns are read in pairs, others from odd bytes on."""
    v = torch.stack((ALL[:columns], ALL.flip(0)[:columns]))[:, None, None].view(E4M3)  # (2, 1, 1, columns)
    q, k = normal(0, 2, 1, 32, dtype=torch.float32), normal(1, 2, 1, 1, 32).to(E4M3)
    out, _ = run("sdpa_decode", (q, k, shifted(v, offset), ints(1, 1)))
    assert torch.equal(out.nan_to_num(500.0), v[:, 0].float().nan_to_num(500.0))


@pytest.mark.parametrize("offset", [0, 3])
def test_every_code_of_k_is_its_number(offset: int):
    """A head for each column: the score of a single key is its LSE. NaN alone is left out, which all sums would be."""
    k = torch.where(ALL & 0x7F == 0x7F, 0, ALL).view(1, 1, 1, 256).view(E4M3)
    q = torch.eye(256)[None]  # (1, 256, 256)
    _, lse = run("sdpa_decode", (q, shifted(k, offset), normal(1, 1, 1, 1, 16).to(E4M3), ints(1)), scale=1.0)
    assert torch.equal(lse[0], k.float().flatten())


@pytest.mark.parametrize("offset", [0, 3])
def test_every_code_of_q_is_its_number(offset: int):
    """A head for each code of 32, whose key is all ones: the score of a single key is its LSE."""
    codes = torch.where(ALL & 0x7F == 0x7F, 0, ALL).view(8, 1, 32)
    q = (codes * torch.eye(32, dtype=torch.uint8)).view(E4M3)  # (8, 32, 32)
    ones = torch.ones(8, 1, 1, 32).to(E4M3)
    _, lse = run("sdpa_decode", (shifted(q, offset), ones, normal(1, 8, 1, 1, 16).to(E4M3), ints(*[1] * 8)), scale=1.0)
    assert torch.equal(lse, codes[:, 0].view(E4M3).float())


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_of_k_or_q_is_one(code: int):
    k, v = torch.zeros(1, 1, 3, 32, dtype=torch.uint8), normal(1, 1, 1, 3, 16).to(E4M3)
    k[0, 0, 1, 5] = code
    out, lse = run("sdpa_decode", (normal(0, 1, 2, 32), k.view(E4M3), v, ints(3)))
    assert out.isnan().all() and lse.isnan().all()
    out, lse = run("sdpa_decode", (k[:, 0, :2].view(E4M3), (k * 0).view(E4M3), v, ints(3)))
    assert out.isnan().all(-1).tolist() == lse.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("keys", [70, 600])
def test_queries_of_codes_give_what_their_numbers_give(keys: int):
    """To the bit but for the rounding of out, which is bf16 then: nothing else is rounded. One split, and several."""
    q, (k, v) = normal(0, 2, 8, 64).to(E4M3), (normal(i, 2, 2, keys, 64).to(E4M3) for i in (1, 2))
    out, lse = run("sdpa_decode", (q, k, v, ints(keys, 33)))
    wide, wide_lse = run("sdpa_decode", (q.float(), k, v, ints(keys, 33)))
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16()) and torch.equal(lse, wide_lse)


@pytest.mark.sample(4)
@pytest.mark.parametrize("given", [g for g in itertools.product((False, True), repeat=3) if any(g)])
def test_scales_belong_to_a_sequence_and_a_head(given: tuple[bool, ...]):
    """Each alone and together, of rows that lie apart."""
    padded = torch.exp2(normal(7, 3, 2, 5, dtype=torch.float32))
    scales = [padded[i, :, :2] if on else None for i, on in enumerate(given)]
    caches = (normal(i, 2, 2, 70, 64).to(E4M3) for i in (1, 2))
    keys = (*caches, ints(70, 33), None, None, *scales)
    queries = (normal(0, 2, 8, 64, dtype=dtype) for dtype in (torch.bfloat16, E4M3))
    for q, kwargs in itertools.product(queries, (dict(), dict(softcap=5.0, scale=0.4))):
        compare("sdpa_decode", (q, *keys), **kwargs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shared", [4, 16])
def test_a_key_is_read_once_in_half_the_bytes(shared: int):
    """For at most 3.1 operations on integers a code more, for all heads that share it."""
    q, k, v = normal(0, 1, 2 * shared, 128), normal(1, 1, 2, 600, 128), normal(2, 1, 2, 600, 128)
    table = torch.arange(38).int()[None]
    pages = (t.transpose(1, 2).reshape(600, 2, 128) for t in (k, v))
    pages = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 8)).view(38, 16, 2, 128) for t in pages]
    for name, caches, rest in (("sdpa_decode", (k, v), ()), ("sdpa_decode_paged", pages, (table,))):
        with metal.counting() as reports:
            run(name, (q, *caches, *rest, ints(600)))
            run(name, (q, *(t.to(E4M3) for t in caches), *rest, ints(600)))
        halfs, _, codes, _ = reports
        for tensor in ("k", "v"):
            assert codes.buffers[tensor] == (k.numel(), 0)
            assert halfs.buffers[tensor] == (2 * k.numel(), 0)
        assert codes.integer - halfs.integer <= 3.1 * 2 * k.numel()
        assert codes.matrix_flops == halfs.matrix_flops and codes.collectives == halfs.collectives


def test_lengths_and_pages_that_lie_stay_inside():
    q, pages = normal(0, 3, 4, 64), normal(1, 5, 16, 2, 64).to(E4M3)
    table = ints(*(7, -3, 2, 1, 0, 1000, 2, 3, 4)).reshape(3, 3)
    with metal.settings(mode="checked", strict=True):
        out, lse = run("sdpa_decode_paged", (q, pages, pages, table, ints(48, 1000, -5)))
    assert out.isfinite().all() and lse[2].eq(-torch.inf).all() and out[2].eq(0).all()
