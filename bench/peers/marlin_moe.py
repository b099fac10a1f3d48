"""Marlin as vLLM builds it: two products of FP4 weights with bf16 rows, from ``_moe_C`` (see ``vllm_ops``).

The second product multiplies by the routes' weights, ``moe_sum`` adds. SwiGLU is ours: vLLM's is in a library of
200 MB. The layouts are those that Marlin's kernels read (vLLM 0.26; Marlin: arXiv 2408.11743): packed once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from bench.peers.moe_layer import Layer, Weights, call_of

# vLLM's number of a type: bits of exponent, of mantissa, signed, and that every code is finite.
_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49
_BLOCKS = (8, 16, 32, 48, 64)  # rows of a tile


@dataclass(frozen=True)
class Packed:
    codes: torch.Tensor  # (E, K/16, 2 * rows) int32
    scale: torch.Tensor  # (E, K/block, rows) f8e4m3 or f8e8m0
    factor: torch.Tensor | None  # (E,) float32
    bias: torch.Tensor | None  # (E, rows)
    rows: int
    depth: int


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """(E, rows, K/2) bytes to (E, K/16, 2 * rows) words of 8 codes: what a thread of an m16n8k16 product holds.

    A row is 64 G + 16 j + 8 b + g, a place along K 16 T + 8 h + 2 c + odd; thread 4 g + c of the warp holds for each of
    four j a word whose codes are numbered 4 odd + 2 b + h.
    """
    E, rows, half = codes.shape
    parts = codes.view(E, rows // 64, 4, 2, 8, half // 8, 2, 4)  # (E, G, j, b, g, T, h, c)
    parts = torch.stack([parts & 15, parts >> 4])  # (odd, E, G, j, b, g, T, h, c)
    parts = parts.permute(1, 6, 2, 5, 8, 3, 0, 4, 7)  # (E, T, G, g, c, j, odd, b, h)
    packed = parts[..., 0] | parts[..., 1] << 4  # (E, T, G, g, c, j, odd, b)
    return packed.contiguous().view(E, half // 8, 8 * rows).view(torch.int32)


def pack_scale(scale: torch.Tensor) -> torch.Tensor:
    """(E, rows, K/block) to (E, K/block, rows), the rows of 64 in the order in which a thread reads them."""
    E, rows, blocks = scale.shape
    parts = scale.transpose(1, 2).reshape(E, blocks, rows // 64, 2, 2, 2, 8)  # row 64 G + 32 p + 16 q + 8 r + i
    return parts.permute(0, 1, 2, 6, 3, 5, 4).reshape(E, blocks, rows)


def pack_bias(bias: torch.Tensor) -> torch.Tensor:
    """(E, rows), the rows of 32 in the order in which a thread reads them."""
    E, rows = bias.shape
    return bias.reshape(E, rows // 32, 4, 4, 2).transpose(2, 3).reshape(E, rows)  # row 32 G + 8 j + 2 i + odd


def positive_scale(scale: torch.Tensor) -> tuple[torch.Tensor, float]:
    """E4M3 bytes to bytes of 5 bits exponent and 3 bits mantissa without a sign, and what they were multiplied by.

    A byte is the upper half of the scale times 2^7 in fp16, without its sign. All scales are first multiplied by the
    largest power of two under which none passes 448: only then has every one but 0 the exponent's highest bit.
    """
    values = scale.view(torch.float8_e4m3fn).float()
    raised = float(torch.exp2(torch.floor(torch.log2(448 / values.max()))))
    bits = (values * (raised * 2**7)).half().view(torch.int16)
    bits = torch.where(bits >= 2**14, bits, 0)  # below 2
    return ((bits >> 7) & 0xFF).to(torch.uint8), raised


def _pack(w: Weights, gates: int, rows: int, depth: int, format: str, block: int) -> Packed:
    """``gates``: parts of the rows (gates and ups) that are padded by themselves, to ``rows`` in all."""

    def padded(t: torch.Tensor, columns: int, value: int) -> torch.Tensor:
        t = t.unflatten(1, (gates, -1))
        t = pad(t, (0, columns - t.shape[3], 0, rows // gates - t.shape[2]), value=value)
        return t.flatten(1, 2)

    # A few experts at a time: unpacked, the codes take several times their room.
    codes = torch.cat([pack_codes(padded(c, depth // 2, 0)) for c in w.codes.split(16)])
    scale = padded(w.scale, depth // block, 127 if format == "mxfp4" else 0)  # 127 is 1 in E8M0
    factor, kind = w.factor, torch.float8_e8m0fnu
    if factor is not None:
        scale, raised = positive_scale(scale)
        factor, kind = factor * (2.0 ** (126 - 7) / raised), torch.float8_e4m3fn
    bias = None if w.bias is None else pack_bias(padded(w.bias[..., None], 1, 0)[..., 0])
    return Packed(codes, pack_scale(scale).view(kind), factor, bias, rows, depth)


@functools.lru_cache(maxsize=1)
def _packed(layer: Layer) -> tuple[Packed, Packed]:
    N, M = layer.down.rows, layer.down.depth
    if N % 256 or M % 128:  # as vLLM pads
        N, M = -(-N // 256) * 256, -(-M // 128) * 128
    up = _pack(layer.up, 2, 2 * M, N, layer.format, layer.block)
    return up, _pack(layer.down, 1, N, M, layer.format, layer.block)


def block_rows(routes: int, experts: int) -> int:
    """vLLM's choice: the smallest tile that the mean expert fills to less than nine tenths, or the largest."""
    return next((b for b in _BLOCKS if routes < 0.9 * b * experts), _BLOCKS[-1])


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    given = call_of(op, args, kwargs)
    if given is None:
        return None
    from bench.peers import moe_steps as steps
    from bench.peers import vllm_ops

    ops = vllm_ops.moe()
    x, weights, layer = given.x, given.weights, given.layer
    (Tq, N), K = x.shape, weights.shape[1]
    up, down = _packed(layer)
    block = block_rows(Tq * K, layer.experts)
    aligned = vllm_ops.Aligned(given.indices, layer.experts, block)
    wide = x if up.depth == N else x.new_zeros(Tq, up.depth)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    locks = torch.zeros(4 * processors, dtype=torch.int32, device=x.device)

    def product(rows: torch.Tensor, w: Packed, top_k: int, weighted: bool) -> torch.Tensor:
        out = rows.new_empty(Tq * K, w.rows)
        ops.moe_wna16_marlin_gemm(
            rows, out, w.codes, w.bias, w.scale, None, w.factor, None, None, None, locks,
            aligned.ids, aligned.experts, aligned.padded, weights, block, top_k, weighted, _E2M1,
            len(rows), w.rows, w.depth, True, False, True, False, -1, -1, -1,
        )  # fmt: skip
        return out

    def call() -> torch.Tensor:
        if wide is not x:
            wide[:, :N].copy_(x)
        aligned.sort()
        h = steps.swiglu(product(wide, up, K, False), given.act)  # (Tq * K, M)
        y = product(h, down, 1, True)  # (Tq * K, N)
        out = y.new_empty(Tq, down.rows)
        ops.moe_sum(y.view(Tq, K, down.rows), out, None, None)
        return out[:, :N]

    return call
