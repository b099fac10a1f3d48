"""PyTorch's own attention kernels for Apple GPUs, in the simulator: the baseline that ours are counted beside.

Their sources come with every wheel, as headers that ``compile_shader`` can include. The launches here are those of
PyTorch's MPS backend for contiguous tensors: q and out (B, H, L, D), k and v (B, KV, N, D).
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import torch

from .library import Library, compile_shader

_PRELUDE = """#include <metal_stdlib>
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


def source(header: str) -> str:
    return f"{_PRELUDE}#include <ATen/native/mps/kernels/{header}>\n"


@cache
def library(header: str) -> Library:
    return compile_shader(source(header))


def _steps(*tensors: torch.Tensor) -> tuple[list[int], list[int]]:
    """Strides of the head and of the row axis, as the kernels take them."""
    heads, rows = ([*(int(t.stride(d)) for t in tensors), 0] for d in (1, 2))
    return heads, rows


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, causal: bool = False,
    mask: torch.Tensor | None = None, lib: Library | None = None,
) -> torch.Tensor:  # fmt: skip
    """One threadgroup a query head and row."""
    (B, H, L, D), N = q.shape, k.shape[2]
    suffix = "_maskbool" if mask is not None else "_masknone" + "_causal" * causal
    mask_strides = [0, 0, 0, 0] if mask is None else [mask.stride(-1), mask.stride(-2), 0, 0]
    heads, rows = _steps(q, k, v)
    batches = [q.stride(0), k.stride(0), v.stride(0), H]
    getattr(lib or library("DecodeAttention.h"), f"sdpa_vector_{DTYPES[q.dtype][0]}_{D}_{D}{suffix}")(
        q, k, v, out, H // k.shape[1], N, heads, rows, D**-0.5, torch.zeros(1) if mask is None else mask, mask_strides,
        batches, threads=(B * H * 1024, L, 1), group_size=(1024, 1, 1),
        arg_casts={i: "int32" for i in range(31) if i != 8},
    )  # fmt: skip
    return out


def decode_in_two(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lib: Library | None = None
) -> torch.Tensor:
    """32 threadgroups a query head, and a second launch that joins them: what PyTorch takes for long caches."""
    (B, H, L, D), N = q.shape, k.shape[2]
    kind, lib = DTYPES[q.dtype][0], lib or library("DecodeAttention.h")
    partial, sums, maxs = torch.zeros(B * H * L, 32, D, dtype=q.dtype), *torch.zeros(2, B * H * L, 32)
    heads, rows = _steps(q, k, v)
    getattr(lib, f"sdpa_vector_2pass_1_{kind}_{D}_{D}_masknone")(
        q, k, v, partial, sums, maxs, H // k.shape[1], N, heads, rows, D**-0.5, torch.zeros(1), [0] * 4,
        [q.stride(0), k.stride(0), v.stride(0), H], threads=(B * H * 256, L, 32), group_size=(256, 1, 1),
        arg_casts={i: "int32" for i in range(31) if i != 10},
    )  # fmt: skip
    second = getattr(lib, f"sdpa_vector_2pass_2_{kind}_{D}")
    second(partial, sums, maxs, out, threads=(B * H * 1024, L, 1), group_size=(1024, 1, 1))
    return out


def prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, causal: bool = False,
    mask: torch.Tensor | None = None, lib: Library | None = None,
) -> torch.Tensor:  # fmt: skip
    """One threadgroup a query head and tile of rows; ``causal`` has its diagonal at the upper left."""
    (B, H, L, D), N = q.shape, k.shape[2]
    bq, bk, wm = PREFILL[D]
    name = DTYPES[q.dtype][1]
    kind = "bool_" if mask is not None else name
    steps: list[Any] = [t.stride(d) for t in (q, k, v, out) for d in range(3)]
    numbers = (B, H, D, L, N, H // k.shape[1], D**-0.5, 1.0, *steps)
    params = torch.frombuffer(bytearray(struct.pack("6i2f12i", *numbers)), dtype=torch.uint8)
    mask_params = torch.tensor([0, 0, 0 if mask is None else mask.stride(-2), 1], dtype=torch.int32)
    shape = f"bq{bq}_bk{bk}_bd{D}_wm{wm}_wn1_hm{int(mask is not None)}_dc{int(causal)}"
    getattr(lib or library("PrefillAttention.h"), f"prefill_attention_{name}_{shape}_mask{kind}")(
        q, k, v, out, params, mask_params, torch.zeros(1, dtype=q.dtype) if mask is None else mask,
        threads=(-(-L // bq) * wm * 32, H, B), group_size=(wm * 32, 1, 1),
    )  # fmt: skip
    return out
