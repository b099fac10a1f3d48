"""``multi.py`` over E4M3: blocks of queries over a cache on Hopper, both products by FP8 ``wgmma``.

    producer's warp 0       --K, and V as it is, a ring each, by TMA-->  shared memory
    producer's other warps  --V turned around (turned_values.py), a ring-->  shared memory
    1 or 2 consumer warpgroups of 64 rows, with the mainloop of codes.py

Rows of a tile are ``Multi``'s. The cache crosses memory once, half as many
bytes as of 16 bits. Scales are numbers of a work tile: q's and k's go into that of its scores, v's into its output.

Tile letters: M rows, N keys.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Ring, rings
from torch_attnkit.cuda.sm90 import softmax

from . import multi, scales
from .codes import Mainloop
from .mainloop import Consumer, Stages
from .multi import Multi, Once
from .multi_blocks import WorkTile
from .multi_codes_types import Config, Place
from .multi_types import Inputs, Layouts, Loads, Scalars
from .turned_values import TurnedValues, staged_layout

# Registers per thread of the producer's and the consumers' warpgroups, by (consumers, CTAs on a multiprocessor): more
# for the producer than in ``multi.py``, whose warps but one are idle.
_REGISTERS = {(1, 1): (56, 256), (1, 2): (40, 216), (2, 1): (40, 232)}


@dataclass
class SharedMemory(multi.SharedMemory):
    """With V as it comes behind K and V turned around."""

    values: TurnedValues


class MultiCodes:
    """The ``Collective`` of a dense batch of E4M3: a warp that loads, some that turn V around, and consumers."""

    def __init__(self, config: Config):
        self.c, self.multi = config, Multi(config)
        self.mainloop = self.multi.mainloop = Mainloop(config)
        self.registers = _REGISTERS[config.consumers, config.per_sm]
        self.prefetch, self.rows = self.multi.prefetch, self.multi.rows

    def numbers(self, t: cute.Tensor) -> cute.Tensor:
        """E4M3 that came as bytes."""
        return cute.make_tensor(cute.recast_ptr(t.iterator, dtype=self.c.dtype), t.layout)

    def layouts(self) -> Layouts:
        c = self.c
        shapes = (c.tile_m, c.dim, 1), (c.tile_n, c.dim, c.stages), (c.dim_v, c.tile_n, c.turned)
        return Layouts(*(self.mainloop.layout(shape) for shape in shapes))

    def loads(self, ins: Inputs, layouts: Layouts) -> Loads:
        as_numbers = ins._replace(k=self.numbers(ins.k), v=self.numbers(ins.v))
        return self.multi.loads(as_numbers, layouts._replace(v=staged_layout(self.c)))

    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts) -> SharedMemory:
        c = self.c
        consumers = 4 * c.consumers
        table = (
            ("k", c.stages, 1, consumers * c.ctas),
            ("staged", c.stages, 1, c.turning_warps * c.ctas),
            ("v", c.turned, c.turning_warps, consumers),
        )
        found = rings(memory, warp, table)
        k, staged = (Ring(found[name].full, found[name].empty, c.stages, c.pair) for name in ("k", "staged"))
        stages = Stages(Once(), k, found["v"], *self.mainloop.operands(memory, layouts))
        return SharedMemory(stages, TurnedValues(c, memory, staged))

    def turn(self, scalars: Scalars, tile: WorkTile, smem: SharedMemory, fills: Int32) -> None:
        """The other warps of the producer's warpgroup."""
        smem.values.turn(smem.stages.ring_v, smem.stages.sV, tile, scalars, fills)

    @cute.jit
    def produce(
        self, loads: Loads, ins: Inputs, tile: WorkTile, sequence: Int32, smem: SharedMemory, fills: Int32
    ):  # fmt: skip
        """One warp: the blocks of K and of V as it is."""
        c, stages = self.c, smem.stages
        ring_k, ring_v = stages.ring_k, smem.values.ring
        rank = cute.arch.block_in_cluster_idx()[0] if c.pair else Int32(0)
        mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        k_head, v_head = (t[None, None, tile.kv_head, tile.batch] for t in (loads.k, loads.v))
        gK = cute.local_tile(k_head, (c.tile_n, c.dim), (None, 0))  # (N, D, blocks)
        gV = cute.local_tile(v_head, (c.tile_n, c.dim_v), (None, 0))
        tKsK, tKgK = copies.tma_partition(loads.k_atom, rank, c.ctas, stages.sK, gK)  # (box, stages), (box, blocks)
        tVsV, tVgV = copies.tma_partition(loads.v_atom, rank, c.ctas, smem.values.stages, gV)
        for step in cutlass.range(tile.first, tile.stop, unroll=1):
            n, block = fills + step - tile.first, tile.block(step)
            full = ring_k.acquire(n, self.multi.bytes_k)
            cute.copy(loads.k_atom, tKgK[None, block], tKsK[None, ring_k.slot(n)], tma_bar_ptr=full, **mask)
            full = ring_v.acquire(n, self.multi.bytes_v)
            cute.copy(loads.v_atom, tVgV[None, block], tVsV[None, ring_v.slot(n)], tma_bar_ptr=full, **mask)

    def attend(
        self, w: Consumer, rows: Any, scalars: Scalars, tile: WorkTile, smem: SharedMemory, fills: Int32
    ) -> tuple[Consumer, list[Float32]]:
        """``Multi.attend`` with the scales of the work tile, which the consumer that is returned has as well."""
        c, at = self.c, Place(tile.batch, tile.kv_head * tile.group)
        here = dataclasses.replace(w, scalars=scales.scaled(c, rows, scalars, at))
        _, sums = self.multi.attend(here, rows._replace(q=self.numbers(rows.q)), scalars, tile, smem, fills)
        lowered = Float32(2.0**-c.lift)
        factor = scales.factor(c, rows, at, scales.V) * lowered
        # Of a sequence without keys the scale may be nan.
        softmax.rescale(here.rO, [cutlass.select_(x == 0.0, lowered, factor) for x in sums])
        return here, [x * lowered for x in sums]
