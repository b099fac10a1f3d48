"""What a chunk of tokens is but for the state: the Gram warp's part of gated_delta_rule.

With G the sum of g over the chunk up to a token, nk = 1 / |k|, nq = scale / |q|, and D_ij = e^(G_i - G_j):

    L_ij = beta_i nk_i nk_j (k_i k_j) D_ij for i > j    A = (I + L)^-1 diag(beta)
    P_ij = nq_i nk_j (q_i k_j) D_ij for i >= j

A and P go to shared memory in float16, and three factors a token in float32. Keys and queries are operands as they
come, in the model dtype; their norms are factors of the results: no rounding of k'. The squares of the norms are the
diagonals of K K' and Q Q'. I + L is inverted by substitution in float32, a column a lane: products of L's powers would
overflow where keys repeat.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.smem import CHUNK

from .config import TOKENS, Config
from .products import add, columns, elements, load_floats, load_tile, tile_address, zeros

_LEAST = -128.0  # whose power is 0 in float32; sums of a chunk stay exact to 2^-11
_BLOCK = 16  # rows that are inverted by substitution
_BLOCK_PITCH = 2 * _BLOCK + CHUNK  # bytes of a row of such an inverse
_TERMS = 2  # of float16 that a number is split into
_TILES = ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3))  # of 16 rows and 8 columns that are not above the diagonal


def running_sums(x: Float32) -> tuple[Float32, Float32]:
    """Over the lanes up to this one, and over those behind it: a difference of the former would have the digits of a
    large sum."""
    lane = cute.arch.lane_idx()
    up, down = x, x
    for step in (1, 2, 4, 8, 16):
        before, behind = cute.arch.shuffle_sync_up(up, step), cute.arch.shuffle_sync_down(down, step)
        up += cutlass.select_(lane >= step, before, Float32(0.0))
        down += cutlass.select_(lane + step < TOKENS, behind, Float32(0.0))
    following = cute.arch.shuffle_sync_down(down, 1)
    return up, cutlass.select_(lane + 1 < TOKENS, following, Float32(0.0))


class Gram(Fixed):
    def __init__(self, config: Config, dtype: Any):
        self.c, self.dtype = config, dtype

    @cute.jit
    def load(self, mK: cute.Tensor, mQ: cute.Tensor, first: Int32, count: Int32, head: Int32, stage: Int32):
        """Start the copies of a chunk's keys and queries, tokens from ``first`` on; zeros behind ``count`` tokens."""
        c, lane = self.c, cute.arch.lane_idx()
        chunks = const_expr(2 * c.dims[0] // CHUNK)  # of a row
        for source, region in ((mK, c.key), (mQ, c.query)):
            step = const_expr(32 // chunks if 32 % chunks == 0 else 0)  # rows from one of a lane's copies to the next
            row, chunk = lane // chunks, lane % chunks
            begin = source.iterator.toint() + 2 * (Int64(first) * source.stride[0] + Int64(head) * source.stride[1])
            at, further = begin + 2 * Int64(row) * source.stride[0] + chunk * CHUNK, 2 * Int64(step) * source.stride[0]
            for n in cutlass.range_constexpr(TOKENS * chunks // 32):
                if const_expr(step == 0):
                    row, chunk = (lane + 32 * n) // chunks, (lane + 32 * n) % chunks
                    at = begin + 2 * Int64(row) * source.stride[0] + chunk * CHUNK
                valid = row < count
                nbytes = cutlass.select_(valid, Int32(CHUNK), Int32(0))
                to = region.at(stage) + (row * c.key_pitch + chunk * CHUNK)
                op.copy_16_async(to, cutlass.select_(valid, at, begin), nbytes)
                row, at = row + step, at + further
        cute.arch.cp_async_commit_group()

    def finish(
        self, rKK: cute.Tensor, rQK: cute.Tensor, stage: Int32, scratch: Int32, g: Float32, beta: Float32,
        scale: Float32, eps: Float32,
    ) -> None:  # fmt: skip
        """A, P and the factors of the chunk in ``stage`` from its ``products``; g and beta are this lane's token's, 0
        behind the last one."""
        c, lane = self.c, cute.arch.lane_idx()
        at = self.vectors(scratch)
        cute.arch.sync_warp()
        norm_k, norm_q = Float32(1.0), scale
        if c.normalized:
            norm_k = cute.math.rsqrt(elements(Float32, at[0] + 4 * lane, 1)[0] + eps, fastmath=True)
            norm_q = scale * cute.math.rsqrt(elements(Float32, at[1] + 4 * lane, 1)[0] + eps, fastmath=True)
        decay, rest = (
            x * Float32(op.LOG2_E) for x in running_sums(cutlass.select_(g < Float32(_LEAST), Float32(_LEAST), g))
        )
        cute.arch.sync_warp()
        for address, value in zip(at, (norm_k, norm_q, decay, beta), strict=True):
            elements(Float32, address + 4 * lane, 1)[0] = value
        cute.arch.sync_warp()
        quarter = self.scale_products(rKK, rQK, stage, scratch, at)
        cute.arch.sync_warp()
        self.invert(stage, scratch, beta, quarter)
        last = cute.arch.shuffle_sync(decay, TOKENS - 1)
        power = op.exp2(decay)
        factors = c.factors.at(stage)
        for i, value in enumerate((power * norm_k, power * norm_q, op.exp2(rest) * norm_k, op.exp2(last))):
            elements(Float32, factors + 4 * (i * TOKENS + lane), 1)[0] = value

    def vectors(self, scratch: Int32) -> list[Int32]:
        """Addresses of four numbers a token, behind L: |k|^2 and |q|^2, then nk and nq; G log2(e); beta."""
        behind = TOKENS * self.c.scratch_pitch
        return [scratch + behind + 4 * TOKENS * i for i in range(4)]

    @cute.jit
    def products(self, stage: Int32, scratch: Int32):
        """K K' and Q K' on and below the diagonal, in registers; the diagonals of K K' and Q Q' go to shared memory."""
        c, lane = self.c, cute.arch.lane_idx()
        rKK, rQK, rQQ = zeros(len(_TILES)), zeros(len(_TILES)), zeros(4)
        by_rows, by_columns = (tile_address(c.key_pitch, paired) for paired in (False, True))
        for step in cutlass.range_constexpr(c.dims[0] // 16):
            keys, queries, key_columns, query_columns = (
                [load_tile(region.at(stage) + at + half * 16 * c.key_pitch + step * 32) for half in range(2)]
                for at in (by_rows, by_columns)
                for region in (c.key, c.query)
            )
            for i, (m, n) in enumerate(_TILES):
                other = columns(key_columns[n // 2], n % 2)
                add(self.dtype, rKK, i, keys[m], other)
                add(self.dtype, rQK, i, queries[m], other)
            if const_expr(c.normalized):
                for n in cutlass.range_constexpr(4):
                    add(self.dtype, rQQ, n, queries[n // 2], columns(query_columns[n // 2], n % 2))
        if const_expr(c.normalized):
            squares = self.vectors(scratch)
            odd = (lane // 4) % 2 == 1
            if lane // 8 == lane % 4:  # two neighbouring columns, one of which is this lane's row
                for n in cutlass.range_constexpr(4):
                    i, r = _TILES.index((n // 2, n)), n % 2 * 2
                    row = 4 * (8 * n + lane // 4)
                    elements(Float32, squares[0] + row, 1)[0] = cutlass.select_(odd, rKK[r + 1, i], rKK[r, i])
                    elements(Float32, squares[1] + row, 1)[0] = cutlass.select_(odd, rQQ[r + 1, n], rQQ[r, n])
        return rKK, rQK

    def scale_products(self, rKK: cute.Tensor, rQK: cute.Tensor, stage: Int32, scratch: Int32, at: list) -> list:
        """P to the stage; L to ``scratch`` but for its lower left quarter, which is returned in terms of float16."""
        c, lane = self.c, cute.arch.lane_idx()
        of_rows = [
            [elements(Float32, address + 4 * (lane // 4 + 8 * half), 1)[0] for address in at] for half in range(4)
        ]
        of_columns = [
            [load_floats(address + 4 * (8 * n + lane % 4 * 2), 2) for address in (at[0], at[2])] for n in range(4)
        ]
        quarter = []
        for i, (m, n) in enumerate(_TILES):
            norms, sums = of_columns[n]
            for half in range(2):
                norm_k, norm_q, decay, beta = of_rows[2 * m + half]
                row = 16 * m + 8 * half + lane // 4
                lower, product = [], []
                for j in range(2):
                    r, column = 2 * half + j, 8 * n + lane % 4 * 2 + j
                    power = cutlass.select_(row >= column, op.exp2(decay - sums[j]), Float32(0.0)) * norms[j]
                    product.append(power * norm_q * rQK[r, i])
                    lower.append(cutlass.select_(row > column, power * norm_k * beta * rKK[r, i], Float32(0.0)))
                word = elements(Int32, c.products.at(stage) + row * c.square_pitch + 2 * (8 * n + lane % 4 * 2), 1)
                word[0] = op.pack(Float16, *product)
                if n // 2 == m:
                    for j in range(2):
                        column = _BLOCK * m + 8 * (n % 2) + lane % 4 * 2 + j
                        target = scratch + column * c.scratch_pitch + 4 * (row - _BLOCK * m)
                        elements(Float32, target, 1)[0] = lower[j]
                elif half == 0:
                    quarter.append(lower)
                else:
                    quarter[-1] += lower
        return self.terms(quarter)

    def invert(self, stage: Int32, scratch: Int32, beta: Float32, quarter: list) -> None:
        """(I + L)^-1 diag(beta) in float16, by columns.

        Its two diagonal blocks of 16 x 16 by substitution in float32, a column a lane: a number that is known is taken
        from all below it. What is left of the diagonal is -A22 L21 A11, of operands in two terms of float16."""
        c, lane = self.c, cute.arch.lane_idx()
        block, column = lane // _BLOCK, lane % _BLOCK
        columns_of = scratch + block * (_BLOCK * c.scratch_pitch)
        x = [cutlass.select_(column == i, Float32(1.0), Float32(0.0)) for i in range(_BLOCK)]
        for j in range(_BLOCK - 1):
            for i in range(j // 4 * 4, _BLOCK, 4):
                below = load_floats(columns_of + j * c.scratch_pitch + 4 * i, 4)
                for n in range(4):
                    if i + n > j:
                        x[i + n] = op.fma(-below[n], x[j], x[i + n])
        self.store_column(c.inverse.at(stage) + lane * c.square_pitch + block * (2 * _BLOCK), [n * beta for n in x])
        cute.arch.sync_warp()  # nobody reads L any more
        inverses = x
        for term in range(_TERMS):
            self.store_column(self.blocks(scratch, term) + lane * _BLOCK_PITCH, inverses)
            inverses = [Float32(n) - Float32(n).to(Float16).to(Float32) for n in inverses]
        cute.arch.sync_warp()
        at = tile_address(_BLOCK_PITCH, paired=True)
        begins = [self.blocks(scratch, term) + at for term in range(_TERMS)]
        first = [load_tile(begin) for begin in begins]
        # Columns lie one after another: rows 0 of columns 0 and 8 come before rows 8.
        second = [load_tile(begin + _BLOCK * _BLOCK_PITCH, transposed=True) for begin in begins]
        sums = zeros(2)
        for n in range(2):  # A22 L21, the latter's 8 x 8 tiles transposed to be operand B
            tiles = [[op.transpose_8x8(term[2 * n + half]) for half in range(2)] for term in quarter]
            self.add_terms(sums, n, second, tiles)
        left = self.terms([[sums[r, n] for r in range(4)] for n in range(2)])
        products = zeros(2)
        for n in range(2):
            self.add_terms(products, n, left, [columns(term, n) for term in first])
            by = load_floats(self.vectors(scratch)[3] + 4 * (8 * n + lane % 4 * 2), 2)
            for half in range(2):
                pair = op.pack(Float16, *(-products[2 * half + j, n] * by[j] for j in range(2)))
                target = (8 * n + lane // 4) * c.square_pitch + 2 * (_BLOCK + 8 * half + lane % 4 * 2)
                elements(Int32, c.inverse.at(stage) + target, 1)[0] = op.transpose_8x8(pair)

    def terms(self, tiles: list) -> list:
        """Tiles of 16 x 8, four numbers a lane, as pairs in float16 and what those leave, in the order of operand A."""
        found = []
        for _ in range(_TERMS):
            found.append([op.pack(Float16, *tile[2 * half : 2 * half + 2]) for tile in tiles for half in range(2)])
            tiles = [[Float32(n) - Float32(n).to(Float16).to(Float32) for n in tile] for tile in tiles]
        return found

    def add_terms(self, sums: cute.Tensor, i: int, a: list, b: list) -> None:
        """The product of two sums of terms but for that of the last ones."""
        for x, y in ((0, 0), (0, 1), (1, 0)):
            add(Float16, sums, i, a[x], b[y])

    def store_column(self, address: Int32, column: list) -> None:
        """16 numbers as float16."""
        for i in range(0, _BLOCK, 8):
            words = [op.pack(Float16, column[i + j], column[i + j + 1]) for j in range(0, 8, 2)]
            copies.store_words(address + 2 * i, words, cute.AddressSpace.smem)

    def blocks(self, scratch: Int32, term: int) -> Int32:
        """Address of a term of the blocks' inverses: the first over L, the second behind the numbers of tokens."""
        return scratch + term * (TOKENS * self.c.scratch_pitch + 4 * TOKENS * 4)
