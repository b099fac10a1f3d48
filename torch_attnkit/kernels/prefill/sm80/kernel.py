"""Softmax attention of many queries per sequence by ``mma.sync``: sm_80, sm_89 and sm_120.

    all threads   cp.async ring of K and V blocks, Q ahead of them -> shared memory
    each warp     16 rows (or 32): S = Q K' -> mask -> online softmax -> O += P V, all in registers

A CTA has one work tile: the query heads of a KV head for as many queries as its rows hold (PackGQA), with all keys that
these see. A block of keys is waited for by cp.async.wait_group and one CTA barrier, behind which the block before it is
free; the copy of the next goes out there. K and V of E4M3 beside queries of 16 bits are widened there, from their stage
to a block that all warps read, behind a second barrier. What Hopper's kernel has of ``wgmma`` it has not, the rest is
shared:

    work tiles, rows            seqlen.py, from sm90/seqlen.py
    copies                      load.py
    products and softmax        mainloop.py, cuda/sm90/softmax.py
    masks, results              sm90/mask.py, epilogue.py and sm90/epilogue.py

Sizes are in tiles.py. Constraints: 16-bit elements; D a multiple of 16, Dv of 32; rows of 16 bytes' multiples.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda import fake
from torch_attnkit.cuda import warp_ops as op

from ..key_blocks import masked_keys
from ..sm90.epilogue import with_descales
from ..sm90.mask import BitMask, MaskRules, row_bounds
from ..widen import widen_rows
from .config import MmaConfig, mma_arguments
from .epilogue import store_rows
from .load import AsyncLoader
from .mainloop import MmaMainloop
from .seqlen import sequences_of


def trace(arch: str, *, dtype: str, kv: str, **signature: Any) -> tuple[Any, list[Any]]:
    """The kernel for an ``MmaConfig``, and stand-ins for its arguments."""
    config = MmaConfig(dtype=fake.dtype(dtype), kv=kv, varlen=kv == "packed", **signature)
    return PrefillMma(config), mma_arguments(dtype, config)


class PrefillMma:
    def __init__(self, config: MmaConfig):
        self.c, self.sequences, self.mainloop = config, sequences_of(config), MmaMainloop(config)
        self.loader = AsyncLoader(config, self.sequences)

    @cute.jit
    def __call__(self, ins: Any, outs: Any, scalars: Any, stream: Any):
        c = self.c
        self.kernel(ins, outs, scalars).launch(
            grid=[self.sequences.max_tiles(ins), 1, 1], block=[c.threads, 1, 1], smem=c.shared.nbytes, stream=stream,
            min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, ins: Any, outs: Any, scalars: Any):
        index = cute.arch.block_idx()[0]
        tile, kv_index, valid = self.sequences.tile(ins, scalars, index)
        if valid:
            rows = self.attend(ins, outs, scalars, tile, kv_index)
            # Found again: registers are scarce between.
            tile, kv_index, _ = self.sequences.tile(ins, scalars, op.fresh(index))
            self.store(ins, outs, tile, kv_index, rows)

    @cute.jit
    def attend(self, ins: Any, outs: Any, scalars: Any, tile: Any, kv_index: Int32):
        c, loader = self.c, self.loader
        ring = cutlass.memory.SmemAllocator().allocate(c.shared.nbytes, 16).toint()
        rows_in, _ = self.sequences.rows(ins, outs, tile, kv_index)
        masked, sources = masked_keys(c, tile.seq, scalars), loader.sources(ins, tile, kv_index)
        rPages, stages, steps = loader.pages(), const_expr(c.stages), tile.stop

        sQ = c.shared.query.at(ring)
        loader.load_query(rows_in.q, tile, sQ)
        cute.arch.cp_async_commit_group()
        loader.look_up(ins, kv_index, masked, tile.block(Int32(0)), rPages)
        for s in cutlass.range_constexpr(stages - 1):
            if s < steps:
                loader.load(sources, masked, tile.block(Int32(s)), rPages, ring + s * c.stage_bytes)
                loader.look_up(ins, kv_index, masked, tile.block(Int32(s + 1)), rPages)
            cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(stages - 1)
        cute.arch.barrier()
        rows = self.mainloop.rows(sQ, with_descales(c, rows_in, scalars, tile.batch, tile.kv_head * tile.group))
        positions = [tuple(tile.position(w.row + 8 * r) for r in range(2)) for w in rows]
        rules = MaskRules.of(scalars)
        masks = [
            BitMask(w, c, tile.seq, row_bounds(tile.seq, at, rules)) for w, at in zip(rows, positions, strict=True)
        ]
        plain = cutlass.min(tile.masked, steps)
        for edge in (True, False):
            for i in cutlass.range(0 if edge else plain, plain if edge else steps, unroll=1):
                cute.arch.cp_async_wait_group(stages - 2)
                cute.arch.barrier()  # this block is there for all, and nobody reads the one before, or Q, any more
                ahead = i + (stages - 1)
                if ahead < steps:
                    loader.load(sources, masked, tile.block(ahead), rPages, ring + ahead % stages * c.stage_bytes)
                    loader.look_up(ins, kv_index, masked, tile.block(ahead + 1), rPages)
                cute.arch.cp_async_commit_group()
                stage = ring + i % stages * c.stage_bytes
                if const_expr(c.fp8_kv):
                    stage = self.widened(stage, c.shared.block.at(ring))
                self.mainloop.block(rows, masks, stage, tile.block(i), edge=edge)
        return rows

    def widened(self, stage: Int32, block: Int32) -> Int32:
        """A stage of E4M3 in the elements of Q, by all threads: where it is then. Nobody reads the block before."""
        c, thread, to = self.c, cute.arch.thread_idx()[0], block
        for dim, pitches in zip((c.dim, c.dim_v), zip(c.staged_pitches, c.pitches, strict=True), strict=True):
            widen_rows(stage, to, c.tile_n, dim, pitches, c.dtype, thread, c.threads)
            stage, to = stage + c.tile_n * pitches[0], to + c.tile_n * pitches[1]
        cute.arch.barrier()
        return block

    @cute.jit
    def store(self, ins: Any, outs: Any, tile: Any, kv_index: Int32, rows: list):
        c = self.c
        rows_in, results = self.sequences.rows(ins, outs, tile, kv_index)
        sums_out = None
        if const_expr(not c.normalize):
            sums_out = self.sequences.rows(ins, outs._replace(lse=outs.row_sum), tile, kv_index)[1].lse
        for w in rows:
            self.mainloop.elements.sort_columns(w.rO)
            at = tuple(tile.position(w.row + 8 * r) for r in range(2))
            store_rows(c, w, rows_in, results, sums_out, tile, at)
