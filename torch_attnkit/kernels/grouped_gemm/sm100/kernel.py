"""What to compile for routed experts on Blackwell. Imports cutlass."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from torch_attnkit.cuda import fake

from ..sm90.arguments import Scalars, Tensors, arguments
from ..sm90.total import Total
from .config import Config
from .epilogue import Activation, Results
from .prepare import SortAndQuantise
from .product import Product


class Experts:
    """The launches of a call."""

    def __init__(self, up: Config, down: Config, experts: int, activations: str):
        self.begin = SortAndQuantise(activations, experts)
        self.up, self.down, self.total = Product(up, Activation(activations)), Product(down, Results()), Total()

    @cute.jit
    def __call__(
        self, tensors: Tensors, x: cute.Tensor, scalars: Scalars, sort_blocks: Int32, up_blocks: Int32,
        down_blocks: Int32, stream: Any,
    ):  # fmt: skip
        """``x``: (slots, bytes of ``Rows`` as 16-bit numbers), to be written, as ``Tensors.h`` is."""
        self.begin.launch(tensors, x, scalars, sort_blocks, stream)
        self.up.launch(tensors, scalars.up, tensors.up, x, scalars, up_blocks, stream)
        self.down.launch(tensors, scalars.down, tensors.down, tensors.h, scalars, down_blocks, stream)
        self.total.launch(tensors, stream)


def trace(
    arch: str, *, dtype: str, index_dtype: str, format: str, activations: str, columns: int, experts: int,
    row_warps: int, scale_vectors: tuple[int, int], code_alignment: int, by_warp: bool, one_launch: bool,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``experts``: room for so many; ``scale_vectors``: of both products the bytes of scales that a load takes. The
    others are what ``plan.py`` always says."""
    up, down = (Config(format, paired, vector) for paired, vector in zip((True, False), scale_vectors, strict=True))
    tensors, scalars, up_blocks, down_blocks, stream = arguments(dtype, index_dtype, code_alignment)
    x = fake.tensor("bf16", (None, None), (fake.dim(8), 1))
    return Experts(up, down, experts, activations), [
        tensors, x, scalars, cutlass.Int32(0), up_blocks, down_blocks, stream,
    ]  # fmt: skip
