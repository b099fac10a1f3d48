"""V of E4M3 transposed, (Dv, N) with a column's keys together: ahead of the kernel, or in its producer.

Products of bytes read both operands along the axis that they add up. Of every 32 keys four positions hold two pairs of
neighbours, 8 apart: the four probabilities that a lane of P has (``mainloop_fp8.py``). Keys at which no query looks
become zeros here, since 0 * nan is nan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda import copies, fake
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.ring import Fixed, Ring, rings

from ..key_blocks import MaskedKeys, Sequence, dense, masked_keys, packed
from ..types import Features, Inputs, Scalars
from .config import Config, GroupScalars, Layouts, transpose_arguments
from .load_tma import SharedMemory, SingleFill
from .mainloop import Mainloop, Stages
from .seqlen import WorkTile

_THREADS = 256
_LANES = 32
_KEYS, _COLUMNS = 16, 4  # of a lane at a time
_WORD = 4  # bytes


def trace(dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """The pass ahead of the kernel: what to compile, and stand-ins for its arguments."""
    config = Features(dtype=fake.dtype(dtype), **signature)
    return TransposePass(config), transpose_arguments(dtype, config)


def _transposed(words: list[Int32], pairs: tuple = (0x5140, 0x7362)) -> list[Int32]:
    """Four words of four bytes: byte j of word i becomes byte i of word j. ``pairs``: of which two bytes of each word
    the first two results are, and of which the others."""
    halves = [[permute_bytes(words[i], words[i + 1], order) for i in (0, 2)] for order in pairs]
    return [permute_bytes(*both, order) for both in halves for order in (0x5410, 0x7632)]


@dataclass
class StagedV(Fixed):
    """V as it comes: its stages, (N, Dv, stages), the same as words, and their ring."""

    ring: Ring
    stages: cute.Tensor
    words: cute.Tensor


class TransposeV(Fixed):
    """In the producer: the warps behind the first take blocks as they come, and leave them transposed.

        TMA -> (N, Dv) bytes -> 3 warps: words of 4 keys each, bytes exchanged, words of 4 columns each -> (Dv, N)

    Keys lie in the order of P's registers, so that the 4 words of a column's 16 positions are 16 keys that follow one
    another: a lane has 16 keys by 4 columns at a time, and writes 16 bytes of each column. Bank conflicts: lanes store
    rotated columns, and where a row is shorter than all banks, odd chunks of 16 keys swap the keys of a pair. Both
    rotations are in the selectors of the exchange and cost nothing; Dv 64, 128 and 256 have no conflict.
    """

    def __init__(self, config: Config, mainloop: Mainloop):
        self.c, self.mainloop = config, mainloop

    def staged_layout(self) -> cute.Layout:
        c = self.c
        return cute.make_ordered_layout((c.tile_n, c.dim_v, c.stages), order=(1, 0, 2))

    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts) -> SharedMemory:
        """With the stages of V as it comes behind those of K and of V transposed."""
        c = self.c
        consumers = 4 * c.consumers
        table = (
            ("k", c.stages, 1, consumers * c.ctas),
            ("staged", c.stages, 1, c.convert_warps * c.ctas),
            ("v", c.v_stages, c.convert_warps, consumers),
        )
        found = rings(memory, warp, table)
        k, ring = (Ring(found[name].full, found[name].empty, c.stages, c.pair) for name in ("k", "staged"))
        stages = Stages(SingleFill(), k, found["v"], *self.mainloop.operands(memory, layouts))
        staged = memory.allocate_tensor(c.dtype, self.staged_layout(), 1024)
        words = cute.make_ordered_layout((c.tile_n, c.dim_v // _WORD, c.stages), order=(1, 0, 2))
        return SharedMemory(
            stages, StagedV(ring, staged, cute.make_tensor(cute.recast_ptr(staged.iterator, dtype=Int32), words))
        )

    @cute.jit
    def run(self, scalars: GroupScalars, tile: WorkTile, smem: SharedMemory, fills: Int32):
        """All blocks of a work tile into sV (Dv, N, stages).

        ``fills`` of both rings were before.
        """
        c, source, target, sV = self.c, smem.staged.ring, smem.stages.ring_v, smem.stages.sV
        masked = masked_keys(c, tile.seq, scalars)
        for step in cutlass.range(tile.first, tile.stop, unroll=1):
            n = fills + step - tile.first
            first = tile.block(step) * c.tile_n
            target.await_empty(n)
            source.wait(n)
            words, sVt = smem.staged.words[None, None, source.slot(n)], sV[None, None, target.slot(n)]
            if masked.overlap(first, first + c.tile_n):
                self._block(words, sVt, first, masked)
            else:
                self._block(words, sVt, first, None)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            source.release(n)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(target.full + target.slot(n))

    @cute.jit
    def _block(self, words: cute.Tensor, sVt: cute.Tensor, first: Int32, masked: Any):
        """A block, (N, Dv / 4) words, into (Dv, N) bytes; its first key is ``first``. ``masked``: or None."""
        c = self.c
        quads = const_expr(c.dim_v // _COLUMNS)
        thread = cute.arch.thread_idx()[0] - _LANES
        for i in cutlass.range(thread, quads * (c.tile_n // _KEYS), _LANES * c.convert_warps, unroll=1):
            quad, chunk = i % quads, i // quads
            swap = chunk % 2 if const_expr(quads < _LANES) else 0
            rotation = quad // 2 % _COLUMNS
            # Nibbles of pairs of columns, (j, 4 + j) each, the first being column ``rotation``.
            pairs = permute_bytes(Int32(0x73625140), Int32(0x73625140), 0x3210 + 0x1111 * rotation)
            pairs ^= swap * 0x44444444
            columns = [cute.make_rmem_tensor(_KEYS, c.dtype) for _ in range(_COLUMNS)]
            of_words = [cute.recast_tensor(column, Int32) for column in columns]
            for quartet in cutlass.range_constexpr(_KEYS // _WORD):
                found = []
                for key in (0, 8):
                    for neighbour in (swap, swap ^ 1):
                        at = _KEYS * chunk + 2 * quartet + key + neighbour
                        word = words[at, quad]
                        if const_expr(masked is not None):
                            word = cutlass.select_(masked.hold(first + at), Int32(0), word)
                        found.append(word)
                for j, word in enumerate(_transposed(found, (pairs, pairs >> 16))):
                    of_words[j][quartet] = word
            for j in cutlass.range_constexpr(_COLUMNS):
                row = sVt[quad * _COLUMNS + (rotation + j) % _COLUMNS, None]
                cute.autovec_copy(columns[j], cute.local_tile(row, (_KEYS,), (chunk,)))


class TransposePass(Fixed):
    """Ahead of the kernel, from device memory to device memory: a sequence's keys begin at a multiple of a block of the
    kernel's, and end with zeros.

        a thread   4 keys x 4 columns: a word of each key -> bytes exchanged -> a word of each column -> shared memory
        a block    rows of a block's keys -> device memory
    """

    def __init__(self, config: Features):
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
        masked = masked_keys(c, seq, scalars)
        # A word more than a row has, so that lanes that store a column of them meet in fewer banks.
        pitch = const_expr(c.tile_n // 4 + 1)
        sWords = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout((pitch, c.dim_v)), 16)
        quads = const_expr(c.dim_v // 4)
        for i in cutlass.range(thread, quads * (c.tile_n // 4), _THREADS, unroll=4):
            column, quartet = i % quads, i // quads  # four columns, four positions of neighbouring keys
            # Positions 4 to 7 are the other half of a lane's keys of 32, see ``mainloop_fp8.py``.
            near = quartet // 8 * 32 + quartet // 4 % 2 * 16 + quartet % 4 * 2
            words = [self._word(ins, masked, (batch, head, column), k0, first + near + key) for key in (0, 1, 8, 9)]
            for j, word in enumerate(_transposed(words)):
                sWords[quartet, 4 * column + j] = word
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
    def _word(self, ins: Inputs, masked: MaskedKeys, at: tuple, k0: Int32, key: Int32):
        """Four columns of a key, or zeros."""
        batch, head, column = at
        bytes_of = cute.make_rmem_tensor(4, ins.v.element_type)
        bytes_of.fill(0)
        if not masked.hold(key):
            row = (k0 + key, head) if const_expr(self.c.varlen) else (batch, key, head)
            copies.load(ins.v[(*row, None)].iterator + 4 * column, bytes_of)
        return cute.recast_tensor(bytes_of, Int32)[0]
