"""The proof on code that is not ours: the Metal attention kernels that come in torch's wheel, run and compared."""

from __future__ import annotations

import re
import struct
from functools import cache

import pytest
import torch

from torch_attnkit.sim import metal
from torch_attnkit.sim.metal.compiler import embed

pytestmark = pytest.mark.simulator
PRELUDE = """#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
#include <c10/metal/common.h>
#include <c10/metal/utils.h>
"""
DTYPES = {
    torch.float32: ("float", "float32"),
    torch.float16: ("half", "float16"),
    torch.bfloat16: ("bfloat", "bfloat16"),
}
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=[d for d, _ in DTYPES.values()])
# Rows and columns of a tile, simdgroups: from PrefillAttention.h, by head dim.
PREFILL = {
    32: (32, 32, 4),
    64: (32, 32, 4),
    72: (32, 32, 4),
    80: (32, 32, 4),
    96: (32, 32, 4),
    128: (32, 16, 4),
    256: (16, 8, 2),
}
DECODE = (64, 96, 128, 256)
INT32 = dict.fromkeys(range(31), "int32")


@cache
def library(header: str) -> metal.Library:
    return metal.compile_shader(f"{PRELUDE}#include <ATen/native/mps/kernels/{header}>\n")


def inputs(dtype, B=1, H=4, KV=2, L=1, N=77, D=64):
    q, k, v = torch.randn(B, H, L, D), torch.randn(B, KV, N, D), torch.randn(B, KV, N, D)
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.full((B, H, L, D), float("nan"), dtype=dtype)


def decode(q, k, v, out, causal=False, mask=None, lib=None):
    (B, H, L, D), N = q.shape, k.shape[2]
    kind = DTYPES[q.dtype][0]
    suffix = "_maskbool" if mask is not None else "_masknone" + "_causal" * causal
    mask_strides = [0, 0, 0, 0] if mask is None else [mask.stride(-1), mask.stride(-2), 0, 0]
    heads, rows = ([t.stride(d) for t in (q, k, v)] + [0] for d in (1, 2))
    batches = [q.stride(0), k.stride(0), v.stride(0), H]
    getattr(lib or library("DecodeAttention.h"), f"sdpa_vector_{kind}_{D}_{D}{suffix}")(
        q, k, v, out, H // k.shape[1], N, heads, rows, D**-0.5, torch.zeros(1) if mask is None else mask, mask_strides,
        batches, threads=(B * H * 1024, L, 1), group_size=(1024, 1, 1), arg_casts={i: "int32" for i in INT32 if i != 8},
    )  # fmt: skip
    return out


def decode_in_two(q, k, v, out, lib=None):
    (B, H, L, D), N = q.shape, k.shape[2]
    kind, lib = DTYPES[q.dtype][0], lib or library("DecodeAttention.h")
    partial, sums, maxs = torch.zeros(B * H * L, 32, D, dtype=q.dtype), *torch.zeros(2, B * H * L, 32)
    heads, rows = ([t.stride(d) for t in (q, k, v)] + [0] for d in (1, 2))
    getattr(lib, f"sdpa_vector_2pass_1_{kind}_{D}_{D}_masknone")(
        q, k, v, partial, sums, maxs, H // k.shape[1], N, heads, rows, D**-0.5, torch.zeros(1), [0] * 4,
        [q.stride(0), k.stride(0), v.stride(0), H], threads=(B * H * 256, L, 32), group_size=(256, 1, 1),
        arg_casts={i: "int32" for i in INT32 if i != 10},
    )  # fmt: skip
    second = getattr(lib, f"sdpa_vector_2pass_2_{kind}_{D}")
    second(partial, sums, maxs, out, threads=(B * H * 1024, L, 1), group_size=(1024, 1, 1))
    return out


def prefill(q, k, v, out, causal=False, mask=None, lib=None):
    (B, H, L, D), N = q.shape, k.shape[2]
    bq, bk, wm = PREFILL[D]
    name = DTYPES[q.dtype][1]
    kind = "bool_" if mask is not None else name
    numbers = (B, H, D, L, N, H // k.shape[1], D**-0.5, 1.0, *(t.stride(d) for t in (q, k, v, out) for d in range(3)))
    params = torch.frombuffer(bytearray(struct.pack("6i2f12i", *numbers)), dtype=torch.uint8)
    mask_params = torch.tensor([0, 0, 0 if mask is None else mask.stride(-2), 1], dtype=torch.int32)
    shape = f"bq{bq}_bk{bk}_bd{D}_wm{wm}_wn1_hm{int(mask is not None)}_dc{int(causal)}"
    getattr(lib or library("PrefillAttention.h"), f"prefill_attention_{name}_{shape}_mask{kind}")(
        q, k, v, out, params, mask_params, torch.zeros(1, dtype=q.dtype) if mask is None else mask,
        threads=(-(-L // bq) * wm * 32, H, B), group_size=(wm * 32, 1, 1),
    )  # fmt: skip
    return out


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


@EVERY_DTYPE
@pytest.mark.parametrize("D", DECODE)
def test_decode(D: int, dtype: torch.dtype):
    q, k, v, out = inputs(dtype, D=D)
    with metal.settings(mode="checked", strict=True):
        agrees(decode(q, k, v, out), q, k, v)


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


@pytest.mark.parametrize(("header", "number"), [(h, n) for h, b in BARRIERS.items() for n in range(len(b))])
def test_a_deleted_barrier_is_noticed(header: str, number: int):
    """The mutation test: without any one of its barriers, a kernel fails in the checked mode."""
    text = embed(f"{PRELUDE}#include <ATen/native/mps/kernels/{header}>\n")
    text = text.encode("ascii", "replace").decode()  # torch's headers have other letters in comments
    places = list(re.finditer(r"threadgroup_barrier\(mem_flags::\w+\);", text))
    assert len(places) == len(BARRIERS[header])
    begin, end = places[number].span()
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
