"""What becomes of 16 rows when their last key is through: normalised as Hopper's are, or numerators and row sums."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.sm90 import softmax

from ..sm90.epilogue import V, descale, has_scale, lse_and_factor, row_sums, row_words, store
from .mainloop import WarpRows


@cute.jit
def store_rows(
    c: cutlass.Constexpr, w: WarpRows, ins: Any, results: Any, sums_out: Any, tile: Any, positions: tuple
):  # fmt: skip
    """``sums_out`` is like the LSE, for kernels that do not normalise; else None."""
    sums = row_sums(c, w, positions)
    if const_expr(has_scale(c, V)):
        scale = descale(c, ins, tile.batch, tile.kv_head * tile.group, V)
        # Of a sequence without keys it may be nan.
        softmax.rescale(w.rO, [cutlass.select_(x == 0.0, Float32(1.0), scale) for x in sums])
    if const_expr(c.normalize):
        store(c, w, ins, results, tile, sums)
    else:
        _store_numerators(c, w, ins, results, sums_out, tile, sums)


@cute.jit
def _store_numerators(
    c: cutlass.Constexpr, w: WarpRows, ins: Any, results: Any, sums_out: Any, tile: Any, sums: list
):  # fmt: skip
    nbytes = const_expr(c.out_dtype.width // 8)
    for r in cutlass.range_constexpr(2):
        row = w.row + 8 * r
        token, head = tile.token_and_head(cutlass.max(cutlass.min(row, tile.rows - 1), 0))
        lse, _ = lse_and_factor(ins, w.scalars, head, w.row_max[r] * w.scalars.scale_log2, sums[r])
        if (w.lane % 4 == 0) & (row < tile.rows):
            results.lse[tile.batch, token, head] = lse
            sums_out[tile.batch, token, head] = sums[r]
        address = results.out[tile.batch, token, head, None].iterator.toint() + w.lane % 4 * (8 * nbytes)
        for g in cutlass.range_constexpr(c.dim_v // 32):
            words = row_words(c, w, g, r, Float32(1.0))
            if row < tile.rows:
                copies.store_words(address + 32 * nbytes * g, words)
