"""What to compile for routed experts on Hopper. Imports cutlass."""

from __future__ import annotations

from typing import Any

from .arguments import arguments
from .config import Config
from .experts import Experts
from .rounding import ROUNDED


def trace(
    arch: str, *, dtype: str, index_dtype: str, format: str, activations: str, columns: int, experts: int,
    row_warps: tuple[int, int], scale_vectors: tuple[int, int],
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``experts``: room for so many; of both products ``row_warps`` as in ``Config``, and
    ``scale_vectors``, the bytes of scales that a load takes."""
    h_dtype = dtype if activations == "none" else "f32"
    up, down = (
        Config(format, warps, source, activations, columns, paired, vector)
        for source, paired, warps, vector in zip((dtype, h_dtype), (True, False), row_warps, scale_vectors, strict=True)
    )
    return Experts(up, down, experts, ROUNDED[activations]), arguments(dtype, index_dtype, h_dtype)
