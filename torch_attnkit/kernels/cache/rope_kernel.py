"""Device side of rope_kv_cache_write: heads normed and rotated, and keys rotated into rows of a cache, in one launch.

    warp of a token's heads   8 channels a lane and vector -> sum of squares over the warp -> norm -> rotation -> out
    warp of a key             cells of channels -> rotation, rounded -> codes, RoPE channels, scales (write_kernel.py)

Warps of keys come first, since they take longest. All loads of a warp are on their way before the first use, and the
cosines and sines of a token are loaded once for its heads. The pairs of a rotation lie in one lane.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake, reduce, rope
from torch_attnkit.kernels.fp4.rows import load as load_whole
from torch_attnkit.kernels.fp4.rows import pieces, quotient, store_byte

from . import rows
from .plan import CELL, LANES
from .problem import Row
from .rope_plan import Config, vectors
from .rope_problem import VECTOR
from .write_kernel import _Writer

_TURN = LANES * VECTOR  # channels of a vector of all lanes


class _RopeWriter:
    def __init__(self, row: Row, pairs: int, config: Config):
        self.row, self.c = row, config
        self.pairs, self.still = pairs, row.head_dim - 2 * pairs  # channels before the rotated ones
        self.encoder = None if row.plain else _Writer(row, config)
        self.vectors = vectors(row.head_dim)
        self.even = row.head_dim % _TURN == 0  # every lane has channels in every vector

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (T, H, D)
        mKv: cute.Tensor,  # (T, D)
        mCache: cute.Tensor,  # (Nc, Rb)
        mSlot: cute.Tensor,  # (T,)
        mCos: cute.Tensor,  # (T, R2)
        mSin: cute.Tensor,  # (T, R2)
        mGlobal: cute.Tensor | None,  # ()
        mOut: cute.Tensor,  # (T, H, D), contiguous
        where: tuple,  # groups of heads that share a warp, in a token; the reciprocal of that number
        eps: Float32,
        stream: cuda.CUstream,
    ):
        warps = self.c.warps
        heads = (Int32(mQ.shape[0]) * where[0] + (warps - 1)) // warps
        self.kernel(mQ, mKv, mCache, mSlot, mCos, mSin, mGlobal, mOut, where, eps).launch(
            grid=(rows.blocks(mSlot, warps) + heads, 1, 1), block=(LANES * warps, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mKv: cute.Tensor,
        mCache: cute.Tensor,
        mSlot: cute.Tensor,
        mCos: cute.Tensor,
        mSin: cute.Tensor,
        mGlobal: cute.Tensor | None,
        mOut: cute.Tensor,
        where: tuple,
        eps: Float32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        keys = Int32(rows.blocks(mSlot, self.c.warps))
        if block < keys:
            if const_expr(self.row.plain):
                self.copy_key(mKv, mCache, mSlot, mCos, mSin)
            else:
                self.encode_key(mKv, mCache, mSlot, mCos, mSin, mGlobal)
        else:
            groups, reciprocal = where
            item = (block - keys) * self.c.warps + cute.arch.warp_idx()
            if item < Int32(mQ.shape[0]) * groups:
                token = quotient(item, reciprocal)
                self.norm_heads(mQ, mCos, mSin, mOut, token, (item - token * groups) * self.c.heads, eps)

    @cute.jit
    def norm_heads(
        self, mQ: cute.Tensor, mCos: cute.Tensor, mSin: cute.Tensor, mOut: cute.Tensor, token: Int32, first: Int32,
        eps: Float32,
    ):  # fmt: skip
        """The heads from ``first`` on that are this warp's."""
        c, dim, heads = self.c, self.row.head_dim, Int32(mQ.shape[1])
        turns, each = const_expr(self.vectors), const_expr(c.heads)
        col = [v * _TURN + cute.arch.lane_idx() * VECTOR for v in range(turns)]
        rX = [copies.fragments(turns, VECTOR, mQ.element_type) for _ in range(each)]
        angles = [self.angles(mCos, mSin, token, col[v], VECTOR, v * _TURN) for v in range(turns)]
        source = mQ.iterator + Int64(token) * mQ.stride[0]
        for h in cutlass.range_constexpr(each):
            # A head beyond the last one is the last one once more, which no load has to ask for.
            head = source + Int64(cutlass.min(first + h, heads - 1)) * mQ.stride[1]
            for v in cutlass.range_constexpr(turns):
                if const_expr(self.even):
                    load_whole(head + col[v], pieces(rX[h][v], c.q))
                else:
                    rX[h][v].fill(0)
                    rows.load(head, rX[h][v], c.q, col[v], dim)
        total = reduce.RowSum(LANES, LANES)
        factors = []
        for h in cutlass.range_constexpr(each):
            square = Float32(0)
            for v in cutlass.range_constexpr(turns):
                x = rX[h][v].load().to(Float32)
                square += (x * x).reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)
            factors.append(cute.math.rsqrt(total(square) * (1.0 / dim) + eps, fastmath=True))
        target = mOut.iterator + (Int64(token) * heads + first) * dim
        for h in cutlass.range_constexpr(each):
            for v in cutlass.range_constexpr(turns):
                rY = cute.make_rmem_tensor(VECTOR, Float32)
                rY.store(rX[h][v].load().to(Float32) * factors[h])
                self.turn(rY, col[v], angles[v])
                rO = cute.make_rmem_tensor(VECTOR, mOut.element_type)
                rO.store(rY.load().to(mOut.element_type))
                if first + h < heads and (self.even or col[v] < dim):
                    copies.store(rO, target + (h * dim + col[v]))

    @cute.jit
    def copy_key(self, mKv: cute.Tensor, mCache: cute.Tensor, mSlot: cute.Tensor, mCos: cute.Tensor, mSin: cute.Tensor):
        """This warp's row of numbers."""
        c, dim = self.c, const_expr(self.row.head_dim)
        row, inside, slot, found = rows.of_warp(mSlot, mCache, c.warps)
        source, target = mKv.iterator + row * mKv.stride[0], mCache.iterator + slot * mCache.stride[0]
        rX = [rows.zeros(VECTOR, mKv.element_type) for _ in range(self.vectors)]
        if inside:
            for v in cutlass.range_constexpr(self.vectors):
                col = v * _TURN + cute.arch.lane_idx() * VECTOR
                rows.load(source, rX[v], c.kv, col, dim)
                angles = self.angles(mCos, mSin, row, col, VECTOR, v * _TURN)
                self.turn(rX[v], col, angles)
                if found:
                    rows.store(rX[v], target, c.numbers, col, dim)

    @cute.jit
    def encode_key(
        self, mKv: cute.Tensor, mCache: cute.Tensor, mSlot: cute.Tensor, mCos: cute.Tensor, mSin: cute.Tensor,
        mGlobal: cute.Tensor | None,
    ):  # fmt: skip
        """This warp's row, as the bytes of the format."""
        c, dim, nope, layout = self.c, self.row.head_dim, self.row.nope_dim, self.row.layout
        lane = cute.arch.lane_idx()
        row, inside, slot, found = rows.of_warp(mSlot, mCache, c.warps)
        source, target = mKv.iterator + row * mKv.stride[0], mCache.iterator + slot * mCache.stride[0]
        gs = None
        if const_expr(mGlobal is not None):
            gs = copies.scalar(mGlobal.iterator)
        for turn in cutlass.range_constexpr(-(-dim // (LANES * CELL))):
            first = (turn * LANES + lane) * CELL
            rX = rows.zeros(CELL, mKv.element_type)
            if inside:
                rows.load(source, rX, c.kv, first, dim)
                self.turn(rX, first, self.angles(mCos, mSin, row, first, CELL, turn * LANES * CELL))
            if const_expr(turn * LANES * CELL < nope):
                codes, byte = self.encoder.encoded(rX, gs)
                if found and first < nope:
                    rows.store(codes, target, c.codes, first * self.encoder.bits // 8, layout.rope)
                    if (first // CELL) % self.encoder.lanes == 0:
                        store_byte(byte, target + (layout.scales + first // self.row.block))
            if const_expr(self.rotated(turn * LANES * CELL, CELL)):
                if found and first >= nope:
                    rows.store(
                        self.encoder.rounded(rX), target + layout.rope, c.rope, 2 * (first - nope), 4 * self.pairs
                    )
        if found and lane < layout.size - layout.end:
            store_byte(Int32(0), target + (layout.end + lane))

    def rotated(self, start: int, width: int) -> bool:
        """Whether a lane has rotated channels where all together have those from ``start`` on, ``width`` each."""
        return self.pairs > 0 and start + LANES * width > self.still

    def angles(self, mCos: Any, mSin: Any, token: Any, col: Any, width: int, start: int) -> Any:
        """The cosines and sines of ``width`` channels from ``col`` on, where these are rotated; None if none can be."""
        if not self.rotated(start, width):
            return None
        rAngles = [rows.zeros(width // 2, m.element_type) for m in (mCos, mSin)]
        for mAngle, rAngle in zip((mCos, mSin), rAngles, strict=True):
            self.load_angles(mAngle.iterator + Int64(token) * mAngle.stride[0], rAngle, col)
        return rAngles

    @cute.jit
    def load_angles(self, pointer: Any, fragment: Any, col: Int32):
        if col >= self.still:
            rows.load(pointer, fragment, self.c.angles, (col - self.still) // 2, self.pairs)

    @cute.jit
    def turn(self, fragment: Any, col: Int32, angles: Any):
        """Rotate the channels of a fragment, from ``col`` on, in place: back by the negative angle."""
        if const_expr(angles is not None):
            if col >= self.still:
                cos, sin = ([r[i].to(Float32) for i in range(cute.size(r))] for r in angles)
                rope.turn_back(fragment, cos, [-s for s in sin], 0)


def trace(
    arch: str,
    row: tuple[str, int, int],
    pairs: int,
    dtypes: tuple[str, str, str, str],
    global_scale: bool,
    align: int,
    config: tuple[int, ...],
) -> tuple[Any, list[Any]]:
    """``row``: format, head_dim, rope_dim; ``dtypes`` of q and kv, of the cache, of the slots and of the angles; the
    cache's rows start at multiples of ``align`` bytes."""
    c, r, tokens = Config(*config), Row(*row), fake.dim()
    size = fake.dtype(dtypes[0]).width // 8
    angle_align = c.angles * fake.dtype(dtypes[3]).width // 8
    arguments = [
        fake.tensor(dtypes[0], (tokens, None, r.head_dim), align=c.q * size),
        fake.tensor(dtypes[0], (tokens, r.head_dim), align=c.kv * size),
        fake.tensor(dtypes[1], (None, r.size), align=align),
        fake.tensor(dtypes[2], (tokens,), align=4),
        *(fake.tensor(dtypes[3], (tokens, None), align=angle_align) for _ in range(2)),
        fake.tensor("f32", (), align=4) if global_scale else None,
        fake.tensor(dtypes[0], (tokens, None, r.head_dim), align=16),
        (Int32(0), (Int64(0), Int32(0))),
        Float32(0),
        fake.stream(),
    ]
    return _RopeWriter(r, pairs, c), arguments
