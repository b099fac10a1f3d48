"""Work tiles of queries over keys in tensors, dense or packed, for persistent CTAs that draw them (``dynamic.py``)."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed

from ..blocks import Sequence, dense
from ..types import Inputs
from ..types import Outputs as GivenOutputs
from . import paged_blocks
from .dynamic import group_of, queries_by_head
from .dynamic_types import TensorConfig
from .multi import Multi, SharedMemory
from .multi_blocks import MaskRules, WorkTile, quotient, row_tile
from .multi_types import Layouts, Loads, Outputs


def _by_tiles(ins: Inputs, layouts: Layouts, modes: list[int]) -> Loads:
    """K and V, a block at once; ``modes`` are those of their axes that become (S, D, Hkv), and B if there is one."""
    atoms = []
    for tensor, layout in ((ins.k, layouts.k), (ins.v, layouts.v)):
        atoms += copies.tma_atom(cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes)), layout)
    return Loads(*atoms)


def _from_window(c: TensorConfig, seq: Sequence, begin: Int32, rules: MaskRules) -> tuple[Int32, Sequence]:
    """The key from which the blocks of the tile at row ``begin`` count, and the sequence as seen from there.

    That is the first in a window, so that few blocks hold all that the tile sees. Sink tokens are in blocks of their
    own, which count from the first key.
    """
    if not c.window or c.sink_tokens:
        return Int32(0), seq
    origin = cutlass.max(seq.start, seq.shift + begin // c.group - rules.window + 1)
    return origin, seq._replace(shift=seq.shift - origin, start=Int32(0), end=seq.end - origin)


class DenseBatch(Fixed):
    """(B, T, Hq, D) and (B, S, Hkv, D); a tile's place is the key that its blocks count from.

    Tiles of heads whose keys share the L2 are drawn together, from the last rows, which a causal mask leaves most keys,
    to the first.
    """

    loader_warps = 1

    def __init__(self, config: TensorConfig):
        self.c, self.multi = config, Multi(config)
        self.prefetch = self.multi.prefetch

    def loads(self, ins: Inputs, layouts: Layouts) -> Loads:
        return _by_tiles(ins, layouts, [1, 3, 2, 0])

    def queries(self, ins: Inputs) -> cute.Tensor:
        return queries_by_head(ins.q, self.c.group)

    def queries_from(self, q: cute.Tensor, tile: WorkTile) -> cute.Tensor:
        return cute.domain_offset((0, tile.token, 0), q[None, None, None, tile.kv_head, tile.batch])

    def _row_tiles(self, ins: Inputs) -> Int32:
        return (Int32(ins.q.shape[1]) * self.c.group + (self.c.span - 1)) // self.c.span

    def slots(self, ins: Inputs) -> Int32:
        return self._row_tiles(ins) * Int32(ins.k.shape[2]) * Int32(ins.k.shape[0])

    def tile(self, ins: Inputs, rules: MaskRules, section: Int32, index: Int32) -> tuple:
        heads, row_tiles = Int32(ins.k.shape[2]), self._row_tiles(ins)
        together = row_tiles * section
        before = quotient(index, together)
        inside = index - before * together
        width = cutlass.min(section, heads * Int32(ins.k.shape[0]) - before * section)
        rank = quotient(inside, width)
        pair = before * section + inside - rank * width
        batch = quotient(pair, heads)
        begin = (row_tiles - 1 - rank) * self.c.span
        origin, seq = _from_window(self.c, dense(self.c, ins, batch), begin, rules)
        tile = row_tile(self.c, seq, (batch, pair - batch * heads), group_of(self.c), begin, self.c.span, rules)
        return tile, origin, tile.rows > 0

    def produce(
        self, keys: Loads, ins: Inputs, tile: WorkTile, place: Int32, smem: SharedMemory, fills: Int32
    ) -> None:  # fmt: skip
        k, v = (cute.domain_offset((place, 0), t[None, None, tile.kv_head, tile.batch]) for t in (keys.k, keys.v))
        self.multi.produce_from(keys, k, v, tile, smem, fills)

    def rows(self, ins: Inputs, outs: GivenOutputs, tile: WorkTile) -> tuple[Any, Outputs]:
        return ins, Outputs(outs.out, outs.lse)


class PackedBatch(Fixed):
    """(T, Hq, D) and (S, Hkv, D), found by offsets; a tile's place is the row of k from which its blocks count."""

    loader_warps = 1

    def __init__(self, config: TensorConfig):
        self.c, self.multi = config, Multi(config)
        self.prefetch = self.multi.prefetch

    def loads(self, ins: Inputs, layouts: Layouts) -> Loads:
        return _by_tiles(ins, layouts, [0, 2, 1])

    def queries(self, ins: Inputs) -> cute.Tensor:
        return queries_by_head(ins.q, self.c.group)

    def queries_from(self, q: cute.Tensor, tile: WorkTile) -> cute.Tensor:
        return cute.domain_offset((0, tile.seq.q0 + tile.token, 0), q[None, None, None, tile.kv_head])

    def slots(self, ins: Inputs) -> Int32:
        tokens, offsets = Int32(ins.q.shape[0]), Int32(ins.low.shape[0])
        return paged_blocks.slots(tokens, Int32(self.c.group), offsets, self.c.span) * Int32(ins.k.shape[1])

    def tile(self, ins: Inputs, rules: MaskRules, section: Int32, index: Int32) -> tuple:
        heads, group = Int32(ins.k.shape[1]), group_of(self.c)
        slot = quotient(index, heads)
        b, number = paged_blocks.sequence_of(ins.low, group[0], slot, self.c.span)
        first, seq = self._sequence(ins, b)
        begin, there = paged_blocks.first_row(seq, group[0], number, self.c.span)
        origin, seq = _from_window(self.c, seq, begin, rules)
        place = Int32(0), index - slot * heads
        return row_tile(self.c, seq, place, group, begin, self.c.span, rules), first + origin, there

    def _sequence(self, ins: Inputs, b: Int32) -> tuple[Int32, Sequence]:
        """The first key of sequence ``b``, and the sequence; what lies behind the last is one without keys. Offsets
        outside of the tensors are cut off."""
        all_rows, all_keys = Int32(ins.q.shape[0]), Int32(ins.k.shape[0])
        last = Int32(ins.low.shape[0]) - 1
        clip = lambda x, most: cutlass.max(cutlass.min(Int32(x), most), Int32(0))
        behind = cutlass.min(b + 1, last)
        q0, k0 = clip(ins.low[b], all_rows), clip(ins.high[b], all_keys)
        q1 = cutlass.select_(b < last, clip(ins.low[behind], all_rows), all_rows)
        tokens, keys = q1 - q0, cutlass.max(clip(ins.high[behind], all_keys) - k0, Int32(0))
        return k0, Sequence(q0, tokens, keys - tokens, Int32(0), keys)

    def produce(
        self, keys: Loads, ins: Inputs, tile: WorkTile, place: Int32, smem: SharedMemory, fills: Int32
    ) -> None:  # fmt: skip
        k, v = (cute.domain_offset((place, 0), t[None, None, tile.kv_head]) for t in (keys.k, keys.v))
        self.multi.produce_from(keys, k, v, tile, smem, fills)

    def rows(self, ins: Inputs, outs: GivenOutputs, tile: WorkTile) -> tuple[Any, Outputs]:
        return ins, Outputs(*(paged_blocks.rows_from(t, tile.seq.q0) for t in (outs.out, outs.lse)))
