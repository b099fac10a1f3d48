"""Fake quantisation of activations, bit for bit as ``formats/`` defines it: each becomes what its code stands for.

Each function takes 32 float32 elements of a row, or 8 a lane of 4 neighbouring lanes, in place. bf16 holds the result:
E2M1 times E4M3 has six significant bits. NVFP4 is not divided by the global scale: the epilogue does that.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Float32

from torch_attnkit.cuda import e4m3, fp4


def _blocks(rX: cute.Tensor, block: int) -> list[tuple[range, Float32]]:
    """The blocks of ``block`` elements, or a lane's part of one, and the amax of each."""
    size = cute.size(rX)
    blocks = []
    for start in range(0, size, block):
        part = range(start, min(start + block, size))
        top = fp4.amax([rX[i] for i in part])
        for step in (1, 2):
            if step * size < block:
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, step))
        blocks.append((part, top))
    return blocks


def _nvfp4(rX: cute.Tensor, global_scale: Float32) -> None:
    for part, top in _blocks(rX, 16):
        _, scale = e4m3.nvfp4_scale(top, global_scale)
        factor = fp4.nvfp4_factor(scale, global_scale)
        for i in part:
            rX[i] = fp4.times(fp4.e2m1_round(fp4.times(rX[i], factor)), scale)


def _mxfp4(rX: cute.Tensor, global_scale: Float32) -> None:
    ((part, top),) = _blocks(rX, 32)
    byte, scale = fp4.mxfp4_scale(top)
    factor = fp4.ue8m0_reciprocal(byte)
    for i in part:
        rX[i] = fp4.times(fp4.e2m1_round(fp4.times(rX[i], factor)), scale)


def _mxfp8(rX: cute.Tensor, global_scale: Float32) -> None:
    ((part, top),) = _blocks(rX, 32)
    byte, scale = fp4.mxfp8_scale(top)
    factor = fp4.ue8m0_reciprocal(byte)
    for i in part[::2]:
        pair = e4m3.pair(fp4.times(rX[i], factor), fp4.times(rX[i + 1], factor))
        for j, x in enumerate(e4m3.values(pair)):
            rX[i + j] = fp4.times(x, scale)


FAKE_QUANTIZE: dict[str, Callable[[cute.Tensor, Float32], None] | None] = {
    "none": None,
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
}
