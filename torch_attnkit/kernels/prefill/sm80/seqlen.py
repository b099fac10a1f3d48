"""Where the tiles of the kernel by ``mma.sync`` lie: ``sm90/seqlen.py``'s, one for each CTA, and their rows of Q."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..sm90 import seqlen
from ..sm90.config import Config, RowInputs
from ..sm90.mask import MaskRules
from ..sm90.seqlen import CacheSequences, DenseSequences, PackedSequences, PagedSequences, quotient, row_tile


class MmaCache(CacheSequences):
    def max_tiles(self, ins: Any) -> Int32:
        return self.clusters(ins)

    @cute.jit
    def tile(self, ins: Any, scalars: Any, index: Int32):
        """Later rows come first."""
        row_tiles, heads = self._row_tiles(ins), self.kv_heads(ins)
        others = quotient(index, row_tiles)
        batch = quotient(others, heads)
        head = others - batch * heads
        begin = (row_tiles - 1 - (index - others * row_tiles)) * self.c.tile_rows
        seq = self.sequence(ins, scalars, batch)
        at, rules = (batch, head), MaskRules.of(scalars)
        return row_tile(self.c, seq, at, self.group(ins), begin, self.c.tile_rows, rules), batch, True


class MmaPaged(PagedSequences):
    @cute.jit
    def tile(self, ins: Any, scalars: Any, index: Int32):
        return self.nth_tile(ins, MaskRules.of(scalars), None, index)


class MmaDense(DenseSequences):
    @cute.jit
    def tile(self, ins: Any, scalars: Any, index: Int32):
        return self.nth_tile(ins, MaskRules.of(scalars), scalars.section, index)


class MmaPacked(PackedSequences):
    @cute.jit
    def tile(self, ins: Any, scalars: Any, index: Int32):
        return self.nth_tile(ins, MaskRules.of(scalars), None, index)

    def rows(self, ins: Any, outs: Any, tile: Any, kv_index: Int32) -> tuple[Any, Any]:
        """A tile's sequence as a dense batch of one."""
        _, results = super().rows(ins, outs, tile, kv_index)
        return RowInputs(seqlen._rows_from(ins.q, tile.seq.q0), ins.sink, None), results


MMA_SEQUENCES = {"dense": MmaDense, "packed": MmaPacked, "cache": MmaCache, "paged": MmaPaged}


def sequences_of(config: Config) -> Any:
    """``tile(ins, scalars, index)`` is the index-th work tile, what its keys are found by, and whether there is one."""
    return MMA_SEQUENCES[config.kv](config)


def keys_of(sequences: Any, cache: cute.Tensor, tile: Any, kv_index: Int32) -> cute.Tensor:
    """The keys or values (S, D) of a tile's KV head, which its blocks count from."""
    layout = cute.select(cache.layout, mode=list(sequences.key_modes))
    return sequences.keys(cute.make_tensor(cache.iterator, layout), tile, kv_index)


def clipped(row: Int32, tile: Any) -> Int32:
    """A row that there is: of those behind the last, the last."""
    return cutlass.max(cutlass.min(row, tile.rows - 1), 0)
