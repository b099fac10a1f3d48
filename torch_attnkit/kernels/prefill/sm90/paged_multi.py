"""Softmax attention of blocks of queries of any length over a cache in pages on Hopper.

    producer  --K and V, a ring each, from pages-->  shared memory  -->  1 or 2 consumer warpgroups, 64 rows each

The consumers are ``multi.py``'s: the rows of a tile are all query heads of a KV head for as many queries as fit, so
that a single token reads its keys once, and a long prompt fills tiles. What is different is where a tile's rows are,
which a CTA finds by the offsets (``PackedSequences``), and where its keys are (``page_loads.py``). How long a sequence
is only the device knows: where a CTA has one work tile, the order in which CTAs begin evens out what they have to do.

Tile letters: M rows, N keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from torch_attnkit.cuda.ring import Ring, rings

from .mainloop import Stages
from .multi import Multi, Once, SharedMemory
from .multi_blocks import WorkTile
from .multi_types import Layouts, Outputs
from .page_loads import Boxes, CopiedRing, CopiedRows, Loads
from .paged_blocks import rows_from
from .paged_types import Config, Inputs, Rows

# Registers per thread of the producer's and the consumers' warpgroups, by (consumers, CTAs on a multiprocessor), where
# threads copy rows: addresses need more than TMA.
_REGISTERS_OF_ROWS = {(1, 1): (56, 256), (1, 2): (40, 216), (2, 1): (40, 232)}


def rows_of(ins: Inputs, outs: Outputs, tile: WorkTile, sequence: Int32 | None = None) -> tuple[Rows, Outputs]:
    """A tile's sequence as a dense batch of one; its scales, if there are any, are found by its number. What lies
    behind the last has that one's."""
    q0, scales = tile.seq.q0, None
    if ins.scales is not None:
        known = cutlass.min(sequence, Int32(ins.kv_len.shape[0]) - 1)
        scales = tuple(cute.domain_offset((known, 0), scale) for scale in ins.scales)
    return Rows(rows_from(ins.q, q0), ins.sink, scales), Outputs(*(rows_from(t, q0) for t in outs))


class PagedMulti:
    """The ``Collective`` of a packed batch over pages: warps that load, and the consumers of ``Multi``."""

    def __init__(self, config: Config):
        multi = self.multi = Multi(config)
        self.c, self.mainloop, self.rows = config, multi.mainloop, rows_of
        self.keys = Boxes(config) if config.box else CopiedRows(config)
        self.layouts, self.prefetch = multi.layouts, self.keys.prefetch
        self.turn, self.attend, self.registers = multi.turn, multi.attend, multi.registers
        if not config.box:
            self.registers = _REGISTERS_OF_ROWS[config.consumers, config.per_sm]

    def loads(self, ins: Inputs, layouts: Layouts) -> Loads:
        return self.keys.loads(ins)

    def shared_memory(self, memory, warp: Int32, layouts: Layouts) -> SharedMemory:
        c = self.c
        arrivals = 4 * c.consumers * c.ctas
        full = 1 if c.box else 32 * c.loader_warps
        found = rings(memory, warp, (("k", c.stages, full, arrivals), ("v", c.stages, full, arrivals)))
        kind = Ring if c.box else CopiedRing
        both = (kind(r.full, r.empty, c.stages, c.pair) for r in found.values())
        return SharedMemory(Stages(Once(), *both, *self.mainloop.operands(memory, layouts)))

    @cute.jit
    def produce(
        self, loads: Loads, ins: Inputs, tile: WorkTile, sequence: Int32, smem: SharedMemory, fills: Int32
    ):  # fmt: skip
        """Every warp that loads: the blocks of K and of V, V one behind K, pages looked up a block ahead."""
        c, stages, keys = self.c, smem.stages, self.keys
        k, v = (loads.k_atom, loads.k), (loads.v_atom, loads.v)
        places = keys.places(ins, tile, sequence, tile.block(tile.first))
        before = places
        for step in cutlass.range(tile.first, tile.stop + 1, unroll=1):
            n = fills + step - tile.first
            following = keys.places(ins, tile, sequence, tile.block(step + 1))
            if step < tile.stop:
                keys.load(k, stages.ring_k, stages.sK, c.dim, tile, places, tile.block(step), n)
            if step > tile.first:
                keys.load(v, stages.ring_v, stages.sV, c.dim_v, tile, before, tile.block(step - 1), n - 1)
            before, places = places, following
