"""Device side for rows of numbers: they are copied into slots, or out of slots and rounded to another dtype.

A warp has a row. The vectors of a turn are all on their way before one of them is stored.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from torch_attnkit.cuda import copies, fake

from . import rows
from .plan import LANES, Config


class _PlainRows:
    def __init__(self, gather: bool, head_dim: int, config: Config):
        self.gather, self.head_dim, self.c = gather, head_dim, config

    @cute.jit
    def __call__(
        self,
        mNumbers: cute.Tensor,  # (R, D)
        mCache: cute.Tensor,  # (Nc, D)
        mSlot: cute.Tensor,  # (R,)
        stream: cuda.CUstream,
    ):
        warps = self.c.warps
        self.kernel(mNumbers, mCache, mSlot).launch(
            grid=(rows.blocks(mSlot, warps), 1, 1), block=(LANES * warps, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mNumbers: cute.Tensor, mCache: cute.Tensor, mSlot: cute.Tensor):
        c, end = self.c, const_expr(self.head_dim)
        row, inside, slot, found = rows.of_warp(mSlot, mCache, c.warps)
        numbers = mNumbers.iterator + row * mNumbers.stride[0]
        cached = mCache.iterator + slot * mCache.stride[0]
        source, readable, target, writable = numbers, inside, cached, found
        dtype, out_dtype = mNumbers.element_type, mCache.element_type
        if const_expr(self.gather):
            source, readable, target, writable = cached, found, numbers, inside
            dtype, out_dtype = out_dtype, dtype
        step = const_expr(LANES * c.width)
        for first in cutlass.range(cute.arch.lane_idx() * c.width, end, step * c.vectors, unroll=1):
            rX = [rows.zeros(c.width, dtype) for _ in range(c.vectors)]
            for v in cutlass.range_constexpr(c.vectors):
                if readable and first + v * step < end:
                    copies.load(source + (first + v * step), rX[v])
            for v in cutlass.range_constexpr(c.vectors):
                if writable and first + v * step < end:
                    rO = cute.make_rmem_tensor(c.width, out_dtype)
                    rO.store(rX[v].load().to(out_dtype))
                    copies.store(rO, target + (first + v * step))


def trace(
    arch: str, gather: bool, row: tuple[str, int, int], dtypes: tuple[str, str, str], config: tuple[int, ...]
) -> tuple[Any, list[Any]]:
    """``row``: format, head_dim, rope_dim; ``dtypes`` of the numbers, of the cache and of the slots."""
    c, head_dim = Config(*config), row[1]
    tensors = [fake.tensor(d, (None, head_dim), align=min(16, c.width * fake.dtype(d).width // 8)) for d in dtypes[:2]]
    slot = fake.tensor(dtypes[2], (None,), align=4)
    return _PlainRows(gather, head_dim, c), [*tensors, slot, fake.stream()]
