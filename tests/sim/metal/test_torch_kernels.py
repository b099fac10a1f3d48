"""The proof on code that is not ours: the Metal attention kernels that come in torch's wheel, run and compared."""

from __future__ import annotations

import re

import pytest
import torch

from torch_attnkit.sim import metal
from torch_attnkit.sim.metal.compiler import embed
from torch_attnkit.sim.metal.torch_kernels import DECODE, DTYPES, PREFILL, decode, decode_in_two, prefill, source

pytestmark = pytest.mark.simulator
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=[d for d, _ in DTYPES.values()])


def inputs(dtype, B=1, H=4, KV=2, L=1, N=77, D=64):
    q, k, v = torch.randn(B, H, L, D), torch.randn(B, KV, N, D), torch.randn(B, KV, N, D)
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.full((B, H, L, D), float("nan"), dtype=dtype)


def agrees(out, q, k, v, causal=False, mask=None):
    """Within twice the error that torch's own attention makes in this dtype, plus a few of its roundings."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    exact = attention(q.double(), k.double(), v.double(), attn_mask=mask, is_causal=causal)
    eps = torch.finfo(q.dtype).eps
    # These kernels scale Q in the storage dtype: each of D products moves by eps, and the scores with them.
    moved = (q.double().abs() @ k.double().abs().mT).amax() * q.shape[-1] ** -0.5 * eps
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=float(4 * eps * exact.abs().max() + moved))


@pytest.mark.sample(4)
@EVERY_DTYPE
@pytest.mark.parametrize("D", DECODE)
def test_decode(D: int, dtype: torch.dtype):
    q, k, v, out = inputs(dtype, D=D)
    with metal.settings(mode="checked", strict=True):
        agrees(decode(q, k, v, out), q, k, v)


@pytest.mark.sample(5)
@EVERY_DTYPE
@pytest.mark.parametrize("D", DECODE)
def test_decode_in_two_passes(D: int, dtype: torch.dtype):
    q, k, v, out = inputs(dtype, D=D, N=300, H=2)
    with metal.settings(mode="checked"):  # not strict: all lanes store one sum to the same place
        agrees(decode_in_two(q, k, v, out), q, k, v)


@EVERY_DTYPE
def test_decode_with_masks(dtype: torch.dtype):
    q, k, v, out = inputs(dtype, L=3, N=50)
    agrees(decode(q, k, v, out, causal=True), q, k, v, causal=True)
    mask = torch.rand(3, 50) < 0.5
    agrees(decode(q, k, v, out, mask=mask), q, k, v, mask=mask)


@EVERY_DTYPE
@pytest.mark.sample(12)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("D", PREFILL)
def test_prefill(D: int, causal: bool, dtype: torch.dtype):
    q, k, v, out = inputs(dtype, H=2, KV=1, L=45, N=70, D=D)
    with metal.settings(mode="checked" if D in (64, 128) else "fast", strict=True):
        agrees(prefill(q, k, v, out, causal), q, k, v, causal)


@EVERY_DTYPE
def test_prefill_with_a_mask(dtype: torch.dtype):
    q, k, v, out = inputs(dtype, H=2, KV=2, L=33, N=40)
    mask = torch.rand(33, 40) < 0.7
    agrees(prefill(q, k, v, out, mask=mask), q, k, v, mask=mask)


def test_decode_reads_keys_once_per_query_head():
    """8 query heads on 2 KV heads: what the kernel moves is known, and so what counting must find."""
    q, k, v, out = inputs(torch.float16, H=8, KV=2, N=96, D=128)
    with metal.counting() as reports:
        decode(q, k, v, out)
    (r,) = reports
    assert r.kernel == "sdpa_vector_half_128_128_masknone"
    assert r.buffers["keys"] == r.buffers["values"] == (8 * 96 * 128 * 2, 0)
    assert r.buffers["queries"] == (8 * 32 * 128 * 2, 0)  # by every one of 32 simdgroups
    assert r.buffers["out"] == (0, 8 * 128 * 2)
    assert (r.matrix_flops, r.divergent, r.atomics) == (0, 0, 0)
    assert r.barriers == 8 * (1 + 2 * 4)
    with metal.counting() as again:
        decode(q, k, v, out)
    assert again == reports


def test_prefill_counts_its_matrix_products():
    q, k, v, out = inputs(torch.float16, H=1, KV=1, L=64, N=64)
    with metal.counting() as (reports):
        prefill(q, k, v, out)
    assert reports[0].matrix_flops == 2 * 2 * 64 * 64 * 64
    assert reports[0].buffers["Q"] == (64 * 64 * 2, 0) and reports[0].buffers["O"] == (0, 64 * 64 * 2)
    assert reports[0].buffers["K"] == reports[0].buffers["V"] == (2 * 64 * 64 * 2, 0)  # by both blocks of queries


# Every threadgroup_barrier of the two headers in order: who runs it, and why its loss would do no harm, if so.
BARRIERS = {
    "DecodeAttention.h": [(decode, "")] * 3 + [(decode_in_two, "")] * 5,
    "PrefillAttention.h": [
        (prefill, "nothing has been written yet when it is reached"),
        *[(prefill, "")] * 4,
        (prefill, "it orders no memory"),
    ],
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("header", "number"), [(h, n) for h, b in BARRIERS.items() for n in range(len(b))])
def test_a_deleted_barrier_is_noticed(header: str, number: int):
    """The mutation test: without any one of its barriers, a kernel fails in the checked mode."""
    text = embed(source(header))
    text = text.encode("ascii", "replace").decode()  # torch's headers have other letters in comments
    matches = list(re.finditer(r"threadgroup_barrier\(mem_flags::\w+\);", text))
    assert len(matches) == len(BARRIERS[header])
    begin, end = matches[number].span()
    lib = metal.compile_shader(text[:begin] + text[end:])
    run, harmless = BARRIERS[header][number]
    q, k, v, out = inputs(torch.float32, H=1, KV=1, L=40 if run is prefill else 1, N=70)
    with metal.settings(mode="checked"):
        if harmless:
            agrees(run(q, k, v, out, lib=lib), q, k, v)
            return
        with pytest.raises(
            metal.SimulationError, match="data race in threadgroup variable|no thread of this threadgroup"
        ):
            run(q, k, v, out, lib=lib)
