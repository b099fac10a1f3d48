"""Hash router: the experts that a table lists for a token, weighted by sqrt(softplus(logit)).

A group of ``lanes`` threads has a row, a power of two that holds K, at most a warp; with more experts it iterates.
"""

from __future__ import annotations

import operator
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake

from . import score
from .plan import LANES

_THREADS = 128


class _Table:
    def __init__(self, topk: int, renormalize: bool):
        self.topk, self.renormalize = topk, renormalize
        self.lanes = min(LANES, 1 << (topk - 1).bit_length())

    @cute.jit
    def __call__(
        self,
        mLogits: cute.Tensor,  # (R, E)
        mIds: cute.Tensor,  # (R,)
        mTable: cute.Tensor,  # (V, K)
        mWeights: cute.Tensor,  # (R, K), contiguous
        mIndices: cute.Tensor,  # (R, K), contiguous
        scale: Float32,
        stream: cuda.CUstream,
    ):
        rows = const_expr(_THREADS // self.lanes)  # of a block
        self.kernel(mLogits, mIds, mTable, mWeights, mIndices, scale).launch(
            grid=((mLogits.shape[0] + (rows - 1)) // rows, 1, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mLogits: cute.Tensor,
        mIds: cute.Tensor,
        mTable: cute.Tensor,
        mWeights: cute.Tensor,
        mIndices: cute.Tensor,
        scale: Float32,
    ):
        topk, lanes = self.topk, self.lanes
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = tid % lanes
        row = Int64(block) * (_THREADS // lanes) + tid // lanes
        token = Int64(-1)  # past the last row none
        if row < mLogits.shape[0]:
            token = Int64(copies.scalar(mIds.iterator + row * mIds.stride[0]))
        known = (token >= 0) & (token < mTable.shape[0])
        expert, weight = self.one(mLogits, mTable, row, token, known, lane)
        total = weight
        for k in cutlass.range(lane + lanes, topk, lanes):
            total += self.one(mLogits, mTable, row, token, known, k)[1]
        total = cute.arch.warp_reduction(total, operator.add, threads_in_group=lanes)
        if row < mLogits.shape[0]:
            if lane < topk:
                mWeights[row, lane] = self.scaled(weight, total, scale)
                mIndices[row, lane] = Int32(expert)
            for k in cutlass.range(lane + lanes, topk, lanes):
                expert, weight = self.one(mLogits, mTable, row, token, known, k)
                mWeights[row, k] = self.scaled(weight, total, scale)
                mIndices[row, k] = Int32(expert)

    @cute.jit
    def one(self, mLogits: Any, mTable: Any, row: Any, token: Any, known: Any, k: Any):
        """Expert k of a token and its score; both are 0 for an id or an expert that does not exist."""
        experts = mLogits.shape[1]
        expert, weight = Int64(0), Float32(0)
        if known and k < self.topk:
            named = Int64(copies.scalar(mTable.iterator + (token * mTable.stride[0] + k)))
            if named >= 0 and named < experts:
                expert = named
                x = copies.scalar(mLogits.iterator + (row * mLogits.stride[0] + expert))
                weight = score.sqrt_softplus(x.to(Float32))
        return expert, weight

    def scaled(self, weight: Any, total: Any, scale: Any) -> Any:
        return (weight / (total + score.TINY) if self.renormalize else weight) * scale


def trace(arch: str, dtypes: tuple[str, str, str], topk: int, renormalize: bool) -> tuple[Any, list[Any]]:
    """``dtypes`` of the logits, of the token ids and of the table."""
    rows = fake.dim()
    logits, ids, table = (fake.dtype(d).width // 8 for d in dtypes)
    arguments = [
        fake.tensor(dtypes[0], (rows, None), align=logits),
        fake.tensor(dtypes[1], (rows,), (None,), align=ids),
        fake.tensor(dtypes[2], (None, topk), align=table),
        fake.tensor("f32", (rows, topk), (topk, 1), align=4),
        fake.tensor("i32", (rows, topk), (topk, 1), align=4),
        Float32(0),
        fake.stream(),
    ]
    return _Table(topk, renormalize), arguments
