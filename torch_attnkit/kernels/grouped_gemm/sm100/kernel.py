"""What to compile for routed experts on Blackwell: sort and quantise, then two GEMMs."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from torch_attnkit.cuda import fake

from ..arguments import Scalars, Tensors, arguments
from .config import MOST_ROW_TILES, TOKENS, UNPACKED_ALIGNMENT, WEIGHT_ROWS, Config, DequantConfig, bf16_parts, by_scale
from .epilogue import StoreEpilogue, SwigluEpilogue
from .epilogue_swap_ab import DequantStore, DequantSwiglu, SwapAbStore, SwapAbSwiglu
from .kernel_block_scaled import BlockScaledGemm
from .kernel_dequant import DequantGemm
from .permute import SortAndPermute, SortAndQuantize
from .topk_reduce import TopkReduce


class Experts:
    """The launches of a call: one that sorts, and both GEMMs."""

    def __init__(self, begin: Any, up: Any, down: Any):
        self.begin, self.up, self.down = begin, up, down

    @cute.jit
    def __call__(
        self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, sort_blocks: Int32, up_blocks: Int32,
        down_blocks: Int32, stream: Any,
    ):  # fmt: skip
        """``x``: (slots, 16-bit elements), to be written, as ``Tensors.h`` is."""
        self.begin.launch(tensors, x, scalars, sort_blocks, stream)
        self.up.launch(tensors, scalars.up, tensors.up, x, scalars, up_blocks, stream)
        self.down.launch(tensors, scalars.down, tensors.down, tensors.h, scalars, down_blocks, stream)


def trace(
    arch: str, *, dtype: str, index_dtype: str, format: str, activations: str, columns: tuple[int, int, int],
    experts: int, row_warps: tuple[int, int], scale_vectors: tuple[int, int], code_alignment: int, by_warp: bool,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``columns``: tokens of a work tile, and in the first and the second GEMM of one or of two that are neighbours;
    ``experts``: at least so many; ``row_warps``: 16 rows each, of both GEMMs, of a work tile or of two that are
    neighbours; ``scale_vectors``: of both GEMMs the bytes of scales that a load takes; ``code_alignment``: whether
    TMA may make bytes of packed weights. The others are what ``plan.py`` always says."""
    each, *neighbours = columns
    row_tiles = min(16 * min(row_warps) // WEIGHT_ROWS, MOST_ROW_TILES)
    rows = row_tiles * WEIGHT_ROWS
    if by_scale(format, activations) and (activations != "mxfp8" or code_alignment == UNPACKED_ALIGNMENT):
        ctas, tokens = max(each // TOKENS, 1), min(each, TOKENS)
        up, down = (
            Config(
                format, paired, vector, activations, row_tiles, ctas, 16 * warps // rows * (count // each),
                "weights" if count > each else "tokens", tokens,
            )
            for paired, vector, warps, count in zip((True, False), scale_vectors, row_warps, neighbours, strict=True)
        )  # fmt: skip
        reduce = TopkReduce(rows, completed=False, any_warp=up.few)
        made = Experts(
            SortAndQuantize(activations, experts, reduce.rows, each),
            BlockScaledGemm(up, SwapAbSwiglu(activations) if up.few else SwigluEpilogue(activations)),
            BlockScaledGemm(down, SwapAbStore(reduce) if down.few else StoreEpilogue(reduce)),
        )
    else:
        count = bf16_parts(dtype, activations)
        up, down = (
            DequantConfig(format, paired, vector, activations, parts=count)
            for paired, vector in zip((True, False), scale_vectors, strict=True)
        )
        reduce = TopkReduce(rows, completed=True, any_warp=True)
        made = Experts(
            SortAndPermute(activations, experts, reduce.rows, count),
            DequantGemm(up, DequantSwiglu(up)),
            DequantGemm(down, DequantStore(reduce)),
        )
    tensors, scalars, up_blocks, down_blocks, stream = arguments(dtype, index_dtype, code_alignment)
    x = fake.tensor("bf16", (None, None), (fake.dim(8), 1))
    return made, [tensors, x, scalars, cutlass.Int32(0), up_blocks, down_blocks, stream]
