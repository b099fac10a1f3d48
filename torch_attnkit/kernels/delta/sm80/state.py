"""The state's part of a chunk of gated_delta_rule: 16 rows of S a warp, in registers from the first token to the last.

With A and the factors that a Gram warp left, S (rows, K) in float32 as mma.m16n8k16 leaves it, all transposed so that
rows of S are rows of every product:

    R  = v' - e^G nk (S k')            S rounded to the model dtype, as operand A from registers
    V' = R A'                          float16
    S  = e^(G of the last) S + (V' e^(G of the last - G) nk) k    operand A in two terms of the model dtype

An output warp gets S as it was multiplied, and V', through shared memory: each lane's registers as they are.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4 import floats
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.smem import CHUNK

from .config import TOKENS, Config
from .products import (
    GROUPS,
    add,
    add_lower,
    columns,
    load_floats,
    load_tile,
    operand,
    scale_tokens,
    tile_address,
    times_tokens,
    zeros,
)

_CONCURRENT = 2  # tiles of 16 columns of S that are multiplied with one term of V'


class State(Fixed):
    def __init__(self, config: Config, dtype: Any):
        self.c, self.dtype = config, dtype
        self.tiles = config.dims[0] // 8  # columns of S, by eight

    @cute.jit
    def read(self, mState: cute.Tensor, slot: Int32, head: Int32, row: Int32, begin: Int32) -> cute.Tensor:
        """This lane's numbers of S, rows ``row`` and 8 further; zeros where ``begin`` is 0."""
        rS = zeros(self.tiles)
        for half in cutlass.range_constexpr(2):
            if (begin != 0) & (row + 8 * half < self.c.dims[1]):
                source = self.row(mState, slot, head, row + 8 * half)
                for t in cutlass.range_constexpr(self.tiles):
                    for j in cutlass.range_constexpr(2):
                        rS[2 * half + j, t] = copies.scalar(source + (8 * t + j))
        return rS

    @cute.jit
    def write(self, rS: cute.Tensor, mState: cute.Tensor, slot: Int32, head: Int32, row: Int32):
        for half in cutlass.range_constexpr(2):
            if row + 8 * half < self.c.dims[1]:
                target = self.row(mState, slot, head, row + 8 * half)
                for t in cutlass.range_constexpr(self.tiles):
                    for j in cutlass.range_constexpr(2):
                        cute.make_tensor(target + (8 * t + j), cute.make_layout(1))[0] = rS[2 * half + j, t]

    def row(self, mState: cute.Tensor, slot: Int32, head: Int32, row: Int32) -> Any:
        at = Int64(slot) * mState.stride[0] + Int64(head) * mState.stride[1] + Int64(row) * mState.stride[2]
        return mState.iterator + (at + cute.arch.lane_idx() % 4 * 2)

    def load_values(self, mV: cute.Tensor, first: Int32, count: Int32, head: Int32, row: Int32, target: Int32) -> None:
        """Start the copy of this warp's 16 channels of a chunk's values; zeros behind ``count`` tokens, which may be
        none, and behind V. Without a branch, so that products go on meanwhile."""
        c, lane = self.c, cute.arch.lane_idx()
        token, chunk = lane // 2, lane % 2
        channel = row + 8 * chunk
        begin = mV.iterator.toint() + 2 * Int64(head) * mV.stride[1]
        for n in range(TOKENS // 16):
            valid = (channel < c.dims[1]) & (token + 16 * n < count)
            at = 2 * (Int64(first + (token + 16 * n)) * mV.stride[0] + channel)
            source = begin + cutlass.select_(valid, at, Int64(0))
            nbytes = cutlass.select_(valid, Int32(CHUNK), Int32(0))
            op.copy_16_async(target + (token + 16 * n) * c.value_pitch + chunk * CHUNK, source, nbytes)
        cute.arch.cp_async_commit_group()

    def correct(self, rS: cute.Tensor, stage: Int32, value: Int32, copy: Int32) -> cute.Tensor:
        """V' = (v - e^G nk S k') A'; what the output warp needs goes to ``copy``."""
        c = self.c
        operands = operand(rS, self.dtype)
        self.send(operands, copy, 0)
        rFound = times_tokens(c, self.dtype, operands, c.key.at(stage))
        scale_tokens(c, rFound, stage, 0)
        at = value + tile_address(c.value_pitch)
        for m in range(2):
            # Tiles of 8 x 8 are tokens 0 and 8 of channels 0, then of channels 8.
            tile = load_tile(at + m * 16 * c.value_pitch, transposed=True)
            for half in range(2):
                for channels in range(2):
                    pair = floats(self.dtype, tile[2 * channels + half])
                    for j in range(2):
                        at_rows = 2 * channels + j, 2 * m + half
                        rFound[at_rows] = pair[j] - rFound[at_rows]
        rV = zeros()
        add_lower(c, rV, operand(rFound, Float16), c.inverse.at(stage), by_columns=True)
        self.send(operand(rV, Float16), copy, len(operands))
        return rV

    def send(self, operands: list, copy: Int32, first: int) -> None:
        """This lane's registers of operands A, ``first`` of which are there."""
        for i, words in enumerate(operands):
            copies.store_words(copy + 512 * (first + i) + 16 * cute.arch.lane_idx(), words, cute.AddressSpace.smem)

    def update(self, rS: cute.Tensor, rV: cute.Tensor, stage: Int32) -> None:
        c = self.c
        scale_tokens(c, rV, stage, 2)
        decay = load_floats(c.factors.at(stage) + 4 * 3 * TOKENS, 2)[0]
        for t in range(self.tiles):
            for r in range(4):
                rS[r, t] *= decay
        high = operand(rV, self.dtype)
        low = operand(self.rest(rV, high), self.dtype)
        at = c.key.at(stage) + tile_address(c.key_pitch)
        steps = c.dims[0] // 16
        # Products that add to the same sums stand far apart: each would wait for the one before.
        for m in range(TOKENS // 16):
            for first in range(0, steps, _CONCURRENT):
                some = range(first, min(first + _CONCURRENT, steps))
                tiles = [load_tile(at + m * 16 * c.key_pitch + step * 32, transposed=True) for step in some]
                for terms in (high, low):
                    for step, tile in zip(some, tiles, strict=True):
                        for half in range(2):
                            add(self.dtype, rS, 2 * step + half, terms[m], columns(tile, half))

    def rest(self, sums: cute.Tensor, operands: list) -> cute.Tensor:
        """What ``sums`` have beyond ``operands``, their rounded values."""
        found = cute.make_rmem_tensor((4, GROUPS), Float32)
        for m, words in enumerate(operands):
            for i, word in enumerate(words):
                for j, value in enumerate(floats(self.dtype, word)):
                    at = i % 2 * 2 + j, 2 * m + i // 2
                    found[at] = sums[at] - value
        return found
