"""Device side of rope_kv_cache_write: RMSNorm and RoPE of heads of q, RoPE of keys and their write to a cache, one
launch.

    warps of q     8 channels a lane and vector -> sum of squares over the warp -> norm -> rotation -> out
    warps of keys  cells of channels -> rotation, rounded -> codes, RoPE channels, scales (``kernel.RowEncoder``)

Keys' CTAs come first, since they take longest. All loads of a warp are in flight before the first use; cos and sin of a
token are loaded once for a warp's heads. A RoPE pair lies in one lane.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake, pdl, reduce, rope
from torch_attnkit.kernels.fp4.rows import load as load_whole
from torch_attnkit.kernels.fp4.rows import pieces, quotient, store_byte

from .kernel import RowEncoder, ctas, load_part, row_of_warp, store_part, zeros
from .plan import CELL, LANES, RopeConfig, head_vectors
from .problem import VECTOR, Row

_WARP_CHANNELS = LANES * VECTOR  # channels of a vector of all lanes


class _RopeWriter:
    def __init__(self, row: Row, pairs: int, config: RopeConfig):
        self.row, self.c = row, config
        self.pairs, self.first_rotated = pairs, row.head_dim - 2 * pairs
        self.encoder = None if row.plain else RowEncoder(row, config)
        self.vectors = head_vectors(row.head_dim)
        self.even = row.head_dim % _WARP_CHANNELS == 0  # every lane has channels in every vector

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
        where: tuple,  # groups of heads of a token; its reciprocal
        eps: Float32,
        stream: cuda.CUstream,
    ):
        warps = self.c.warps
        heads = (Int32(mQ.shape[0]) * where[0] + (warps - 1)) // warps
        self.kernel(mQ, mKv, mCache, mSlot, mCos, mSin, mGlobal, mOut, where, eps).launch(
            grid=(ctas(mSlot, warps) + heads, 1, 1), block=(LANES * warps, 1, 1), stream=stream, use_pdl=pdl.use()
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
        pdl.launch_dependents()
        pdl.wait()
        block, _, _ = cute.arch.block_idx()
        keys = Int32(ctas(mSlot, self.c.warps))
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
        """This warp's heads, from ``first`` on."""
        c, dim, heads = self.c, self.row.head_dim, Int32(mQ.shape[1])
        vectors, each = const_expr(self.vectors), const_expr(c.heads)
        col = [v * _WARP_CHANNELS + cute.arch.lane_idx() * VECTOR for v in range(vectors)]
        rX = [copies.fragments(vectors, VECTOR, mQ.element_type) for _ in range(each)]
        angles = [self.angles(mCos, mSin, token, col[v], VECTOR, v * _WARP_CHANNELS) for v in range(vectors)]
        source = mQ.iterator + Int64(token) * mQ.stride[0]
        for h in cutlass.range_constexpr(each):
            # Past the end the last head again, so that loads need no predicate.
            head = source + Int64(cutlass.min(first + h, heads - 1)) * mQ.stride[1]
            for v in cutlass.range_constexpr(vectors):
                if const_expr(self.even):
                    load_whole(head + col[v], pieces(rX[h][v], c.q))
                else:
                    rX[h][v].fill(0)
                    load_part(head, rX[h][v], c.q, col[v], dim)
        total = reduce.RowSum(LANES, LANES)
        factors = []
        for h in cutlass.range_constexpr(each):
            square = Float32(0)
            for v in cutlass.range_constexpr(vectors):
                x = rX[h][v].load().to(Float32)
                square += (x * x).reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)
            factors.append(cute.math.rsqrt(total(square) * (1.0 / dim) + eps, fastmath=True))
        target = mOut.iterator + (Int64(token) * heads + first) * dim
        for h in cutlass.range_constexpr(each):
            for v in cutlass.range_constexpr(vectors):
                rY = cute.make_rmem_tensor(VECTOR, Float32)
                rY.store(rX[h][v].load().to(Float32) * factors[h])
                self.rotate(rY, col[v], angles[v])
                rO = cute.make_rmem_tensor(VECTOR, mOut.element_type)
                rO.store(rY.load().to(mOut.element_type))
                if first + h < heads and (self.even or col[v] < dim):
                    copies.store(rO, target + (h * dim + col[v]))

    @cute.jit
    def copy_key(self, mKv: cute.Tensor, mCache: cute.Tensor, mSlot: cute.Tensor, mCos: cute.Tensor, mSin: cute.Tensor):
        """This warp's key, dense."""
        c, dim = self.c, const_expr(self.row.head_dim)
        row, inside, slot, found = row_of_warp(mSlot, mCache, c.warps)
        source, target = mKv.iterator + row * mKv.stride[0], mCache.iterator + slot * mCache.stride[0]
        rX = [zeros(VECTOR, mKv.element_type) for _ in range(self.vectors)]
        if inside:
            for v in cutlass.range_constexpr(self.vectors):
                col = v * _WARP_CHANNELS + cute.arch.lane_idx() * VECTOR
                load_part(source, rX[v], c.kv, col, dim)
                angles = self.angles(mCos, mSin, row, col, VECTOR, v * _WARP_CHANNELS)
                self.rotate(rX[v], col, angles)
                if found:
                    store_part(rX[v], target, c.dense, col, dim)

    @cute.jit
    def encode_key(
        self, mKv: cute.Tensor, mCache: cute.Tensor, mSlot: cute.Tensor, mCos: cute.Tensor, mSin: cute.Tensor,
        mGlobal: cute.Tensor | None,
    ):  # fmt: skip
        """This warp's key, encoded."""
        c, dim, nope, layout = self.c, self.row.head_dim, self.row.nope_dim, self.row.layout
        lane = cute.arch.lane_idx()
        row, inside, slot, found = row_of_warp(mSlot, mCache, c.warps)
        source, target = mKv.iterator + row * mKv.stride[0], mCache.iterator + slot * mCache.stride[0]
        gs = None
        if const_expr(mGlobal is not None):
            gs = copies.scalar(mGlobal.iterator)
        for iteration in cutlass.range_constexpr(-(-dim // (LANES * CELL))):
            first = (iteration * LANES + lane) * CELL
            rX = zeros(CELL, mKv.element_type)
            if inside:
                load_part(source, rX, c.kv, first, dim)
                self.rotate(rX, first, self.angles(mCos, mSin, row, first, CELL, iteration * LANES * CELL))
            if const_expr(iteration * LANES * CELL < nope):
                codes, byte = self.encoder.encoded(rX, gs)
                if found and first < nope:
                    store_part(codes, target, c.codes, first * self.encoder.bits // 8, layout.rope)
                    if (first // CELL) % self.encoder.lanes == 0:
                        store_byte(byte, target + (layout.scales + first // self.row.block))
            if const_expr(self.rotated(iteration * LANES * CELL, CELL)):
                if found and first >= nope:
                    store_part(
                        self.encoder.rounded(rX), target + layout.rope, c.rope, 2 * (first - nope), 4 * self.pairs
                    )
        if found and lane < layout.size - layout.end:
            store_byte(Int32(0), target + (layout.end + lane))

    def rotated(self, start: int, width: int) -> bool:
        """Whether some lane has rotated channels, if the warp has those from ``start`` on, ``width`` a lane."""
        return self.pairs > 0 and start + LANES * width > self.first_rotated

    def angles(self, mCos: Any, mSin: Any, token: Any, col: Any, width: int, start: int) -> Any:
        """cos and sin of ``width`` channels from ``col`` on; None if no lane has rotated ones."""
        if not self.rotated(start, width):
            return None
        rAngles = [zeros(width // 2, m.element_type) for m in (mCos, mSin)]
        for mAngle, rAngle in zip((mCos, mSin), rAngles, strict=True):
            self.load_angles(mAngle.iterator + Int64(token) * mAngle.stride[0], rAngle, col)
        return rAngles

    @cute.jit
    def load_angles(self, pointer: Any, fragment: Any, col: Int32):
        if col >= self.first_rotated:
            load_part(pointer, fragment, self.c.angles, (col - self.first_rotated) // 2, self.pairs)

    @cute.jit
    def rotate(self, fragment: Any, col: Int32, angles: Any):
        """Rotate the channels of a fragment, from ``col`` on, in place: back by the negative angle."""
        if const_expr(angles is not None):
            if col >= self.first_rotated:
                cos, sin = ([r[i].to(Float32) for i in range(cute.size(r))] for r in angles)
                rope.rotate_back(fragment, cos, [-s for s in sin], 0)


def trace(
    arch: str,
    row: tuple[str, int, int],
    pairs: int,
    dtypes: tuple[str, str, str, str],
    global_scale: bool,
    align: int,
    config: tuple[int, ...],
) -> tuple[Any, list[Any]]:
    """``row``: format, head_dim, rope_dim; ``dtypes`` of q and kv, cache, slots and angles; cache rows are aligned to
    ``align`` bytes."""
    c, r, tokens = RopeConfig(*config), Row(*row), fake.dim()
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
