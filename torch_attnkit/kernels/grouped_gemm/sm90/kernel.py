"""What to compile for routed experts on Hopper."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from ..arguments import arguments
from ..quantize_act import FAKE_QUANTIZE
from .config import Config, WgmmaConfig
from .kernel_mma import MmaExperts
from .kernel_wgmma import WgmmaExperts


def trace(
    arch: str, *, dtype: str, index_dtype: str, format: str, activations: str, columns: int, experts: int,
    row_warps: int, scale_vectors: tuple[int, int], code_alignment: int, by_warp: bool,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``experts``: room for so many; ``row_warps`` and ``code_alignment`` as in ``Config``; ``scale_vectors``: of both
    products the bytes of scales that a load takes; ``by_warp``: whether slots are few enough for ``SortByWarp``."""
    up, down = (
        Config(format, row_warps, dtype, activations, columns, paired, vector, code_alignment)
        for paired, vector in zip((True, False), scale_vectors, strict=True)
    )
    tensors, scalars, prepare_blocks, blocks, stream = arguments(dtype, index_dtype, code_alignment)
    x = fake.tensor("bf16", (None, None), (fake.dim(8), 1))
    made = MmaExperts(up, down, experts, FAKE_QUANTIZE[activations], by_warp)
    return made, [tensors, x, scalars, prepare_blocks, blocks, stream]


def trace_wgmma(
    arch: str, *, dtype: str, index_dtype: str, format: str, activations: str, experts: int,
    scale_vectors: tuple[int, int], code_alignment: int, token_widths: tuple[int, ...], group: int, warps: int,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """The same for many tokens an expert; ``token_widths`` and ``group`` as in ``WgmmaConfig``, ``warps``
    those that multiply."""
    up, down = (
        WgmmaConfig(
            format, warps, dtype, activations, token_widths[-1], paired, vector, code_alignment, token_widths, group
        )
        for paired, vector in zip((True, False), scale_vectors, strict=True)
    )
    tensors, scalars, up_blocks, down_blocks, stream = arguments(dtype, index_dtype, code_alignment)
    x = fake.tensor("bf16", (None, None), (fake.dim(8), 1))
    return WgmmaExperts(up, down, experts, FAKE_QUANTIZE[activations]), [
        tensors, x, scalars, up_blocks, up_blocks, down_blocks, stream,
    ]  # fmt: skip
