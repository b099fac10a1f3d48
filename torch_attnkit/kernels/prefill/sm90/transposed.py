"""V of E4M3 as Hopper's products of bytes take it: (Dv, S'), a column's keys together.

Products of bytes read both operands along the axis that they add up. A sequence's keys begin at a multiple of a
block of the kernel's, and end with zeros; keys at which no query looks are zeros, too, since 0 * nan is nan. Of every
32 keys four places hold two pairs of neighbours, 8 apart: the four probabilities that a lane of the other operand has.

    a thread   4 keys x 4 columns: a word of each key -> bytes exchanged -> a word of each column -> shared memory
    a block    rows of a block's keys -> device memory
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.ring import Fixed

from ..blocks import Sequence, UnseenKeys, dense, packed, unseen_keys
from ..types import Features, Inputs, Scalars

_THREADS = 256


@dataclass(frozen=True, kw_only=True)
class Config(Features):
    """What is fixed at compile time."""


def transposed(words: list[Int32]) -> list[Int32]:
    """Four words of four bytes: byte j of word i becomes byte i of word j."""
    low = [permute_bytes(words[i], words[i + 1], 0x5140) for i in (0, 2)]  # bytes 0 and 1 of both
    high = [permute_bytes(words[i], words[i + 1], 0x7362) for i in (0, 2)]
    return [permute_bytes(*both, order) for both in (low, high) for order in (0x5410, 0x7632)]


class Transpose(Fixed):
    def __init__(self, config: Config):
        self.c = config

    @cute.jit
    def __call__(self, ins: Inputs, mVt: cute.Tensor, scalars: Scalars, stream: Any):
        """``ins`` are the inputs of attention, with V as it came; mVt is (B, Hkv, Dv, S'), packed (Hkv, Dv, S')."""
        c = self.c
        heads, batches = Int32(ins.v.shape[1 if c.varlen else 2]), Int32(1 if c.varlen else ins.v.shape[0])
        blocks = Int32(mVt.shape[2 if c.varlen else 3]) // c.tile_n
        self.kernel(ins, mVt, scalars).launch(grid=[blocks, heads, batches], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, ins: Inputs, mVt: cute.Tensor, scalars: Scalars):
        c = self.c
        block, head, batch = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        k0, first, seq = self._keys(ins, block, batch)
        unseen = unseen_keys(c, seq, scalars)
        # A word more than a row has, so that lanes that store a column of them meet in fewer banks.
        pitch = const_expr(c.tile_n // 4 + 1)
        sWords = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout((pitch, c.dim_v)), 16)
        quads = const_expr(c.dim_v // 4)
        for i in cutlass.range(thread, quads * (c.tile_n // 4), _THREADS, unroll=4):
            column, place = i % quads, i // quads  # four columns, four places of neighbouring keys
            # Places 4 to 7 are the other half of a lane's keys of 32, see the docstring of ``codes.py``.
            near = place // 8 * 32 + place // 4 % 2 * 16 + place % 4 * 2
            words = [self._word(ins, unseen, (batch, head, column), k0, first + near + key) for key in (0, 1, 8, 9)]
            for j, word in enumerate(transposed(words)):
                sWords[place, 4 * column + j] = word
        cute.arch.sync_threads()
        chunks = const_expr(c.tile_n // 16)
        for i in cutlass.range(thread, c.dim_v * chunks, _THREADS, unroll=4):
            row, chunk = i // chunks, i % chunks
            at = (head, row) if const_expr(c.varlen) else (batch, head, row)
            target = mVt[(*at, None)].iterator + (block * c.tile_n + chunk * 16)
            copies.store_words(target.toint(), [sWords[4 * chunk + j, row] for j in range(4)])

    @cute.jit
    def _keys(self, ins: Inputs, block: Int32, batch: Int32):
        """Of a block: where its sequence's keys begin in v, its first key among them, and the sequence."""
        c = self.c
        if const_expr(not c.varlen):
            return Int32(0), block * c.tile_n, dense(c, ins, batch)
        keys, queries = Int32(ins.v.shape[0]), Int32(ins.q.shape[0])
        # As if the keys were the queries that ``packed`` deals out.
        number, sequence, k0, of_keys = packed((ins.high, ins.high), keys, keys, block, c.tile_n)
        last = cutlass.min(sequence + 1, Int32(ins.low.shape[0]) - 1)
        low, high = (cutlass.max(cutlass.min(Int32(ins.low[i]), queries), Int32(0)) for i in (sequence, last))
        seq = Sequence(low, high - low, of_keys.end - (high - low), Int32(0), of_keys.end)
        return k0, number * c.tile_n, seq

    @cute.jit
    def _word(self, ins: Inputs, unseen: UnseenKeys, at: tuple, k0: Int32, key: Int32):
        """Four columns of a key, or zeros."""
        batch, head, column = at
        bytes_of = cute.make_rmem_tensor(4, ins.v.element_type)
        bytes_of.fill(0)
        if not unseen.hold(key):
            row = (k0 + key, head) if const_expr(self.c.varlen) else (batch, key, head)
            copies.load(ins.v[(*row, None)].iterator + 4 * column, bytes_of)
        return cute.recast_tensor(bytes_of, Int32)[0]
