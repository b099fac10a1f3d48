"""The consumers of ``multi.py`` in persistent CTAs that draw their work tiles, for batches with many rows.

    scheduler warp  --draws a work tile and finds its rows-->  notes, which all others read
    loading warps   --K and V of one work tile after another-->  rings  -->  2 or 3 consumer warpgroups
    one more warp   --rows of Q of the next-->  ring

Which work tiles there are, and where their rows and keys lie, a ``Batch`` knows: in pages (``paged_dynamic.py``), or in
dense or packed tensors (``tensor_dynamic.py``).

Where a CTA has one tile, nothing hides its start: barriers, the search for the tile's sequence, its first keys and its
rows. Here all of that is on its way while the consumers are at the tile before. Work tiles differ as the lengths do, so
that no order known beforehand evens them out: a counter in device memory deals them, one ahead, and more of short ones.
The last draw of a launch leaves the counter at zero.

Rows of Q come as one box: all heads of a KV head, a number fixed at compile time, for as many queries as fill a tile. A
few rows of a tile stay empty where the heads do not divide it.
"""

from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda import copies, joining
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Ring, rings

from . import multi_combine
from .dynamic_types import Config, Draws
from .mainloop import Stages
from .multi import Multi, SharedMemory, launch_shape
from .multi_blocks import MaskRules, WorkTile
from .multi_persistent import Parts
from .multi_schedule import NOTE, Part
from .multi_types import Layouts, Outputs, Scalars

_PARTS = 4  # work tiles that are known: the consumers' and those ahead
_SHORT = 4  # blocks of keys, up to which a work tile is over before the next could be drawn and found
_QUERIES, _SCHEDULER = 2, 3  # warps behind those that load keys
# Registers per thread of the producer's and the consumers' warpgroups, by (consumers, CTAs on a multiprocessor).
_REGISTERS = {(2, 1): (40, 232), (3, 1): (32, 160)}


class WorkTiles(NamedTuple):
    """What a launch has to do."""

    counter: Any  # address of the number of work tiles that were drawn
    ctas: Int32  # that draw; each has had one without
    slots: Int32  # of tiles, times KV heads; some may be empty
    section: Int32  # as in Draws


class DynamicLoads(NamedTuple):
    """How keys come, and rows of Q."""

    keys: Any
    q_atom: cute.CopyAtom
    q: cute.Tensor  # as ``Batch.queries``


class Batch(Protocol):
    """Which work tiles there are, and where their rows and keys lie."""

    multi: Multi
    loader_warps: int

    def loads(self, ins: Any, layouts: Layouts) -> Any: ...
    def prefetch(self, keys: Any) -> None: ...
    def queries(self, ins: Any) -> cute.Tensor: ...  # with axes (group, T, D, Hkv), and B if there is one
    def queries_from(self, q: cute.Tensor, tile: WorkTile) -> cute.Tensor: ...  # of its KV head, (group, T, D)
    def slots(self, ins: Any) -> Int32: ...
    def tile(self, ins: Any, rules: MaskRules, section: Int32, index: Int32) -> tuple: ...
    # What slot ``index`` holds, a number by which ``produce`` finds its keys, and whether it holds any.
    def produce(
        self, keys: Any, ins: Any, tile: WorkTile, place: Int32, smem: SharedMemory, fills: Int32
    ) -> None: ...  # a tile's blocks of K and V, by every warp that loads; ``fills`` of either ring were before
    def rows(self, ins: Any, outs: Any, tile: WorkTile) -> tuple[Any, Outputs]: ...  # as multi_combine.py stores them


class Dynamic:
    """The kernel: a scheduler, producers of keys and of queries, and the consumers of ``Multi``."""

    def __init__(self, config: Config, batch: Batch):
        self.c, self.batch = config, batch
        self.multi, self.mainloop = batch.multi, batch.multi.mainloop
        self.regs_load, self.regs_mma = _REGISTERS[config.consumers, config.per_sm]
        assert batch.loader_warps <= _QUERIES, config

    def layouts(self) -> Layouts:
        c = self.c
        return self.multi.layouts()._replace(q=self.mainloop.layout((c.tile_m, c.dim, c.q_stages)))

    def loads(self, ins: Any, layouts: Layouts) -> DynamicLoads:
        layout = cute.select(self._box_layout(1), mode=[0, 1, 2])
        copy, rows = cpasync.CopyBulkTensorTileG2SOp(), self.batch.queries(ins)
        return DynamicLoads(self.batch.loads(ins, layouts), *cpasync.make_tiled_tma_atom(copy, rows, layout, self._box))

    def work_tiles(self, ins: Any, draws: Draws, ctas: Int32) -> WorkTiles:
        return WorkTiles(draws.count.iterator.toint(), ctas, self.batch.slots(ins), draws.section)

    @cute.jit
    def __call__(self, ins: Any, outs: Any, scalars: Scalars, draws: Draws, stream: Any):
        layouts = self.layouts()
        ctas = cutlass.min(draws.ctas, self.batch.slots(ins))
        mmas = self.mainloop.mmas()
        self.kernel(self.loads(ins, layouts), ins, outs, scalars, draws, layouts, *mmas).launch(
            grid=[ctas, 1, 1], stream=stream, **launch_shape(self.c)
        )

    @cute.kernel
    def kernel(
        self, loads: DynamicLoads, ins: Any, outs: Any, scalars: Scalars, draws: Draws, layouts: Layouts,
        qk_mma: cute.TiledMma, pv_mma: cute.TiledMma,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        smem, ring = self.shared_memory(memory, warp, layouts)
        parts = Parts(ring, memory.allocate_tensor(Int32, cute.make_layout((NOTE, _PARTS)), 16))
        if warp == 0:
            self.batch.prefetch(loads.keys)
            cpasync.prefetch_descriptor(loads.q_atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.regs_load)
            if warp < self.batch.loader_warps:
                self.load_keys(loads, ins, smem, parts)
            elif warp == _QUERIES:
                self.load_queries(loads, ins, smem, parts)
            elif warp == _SCHEDULER:
                self.schedule(ins, scalars, self.work_tiles(ins, draws, cute.arch.grid_dim()[0]), parts)
        else:
            cute.arch.setmaxregister_increase(self.regs_mma)
            self.consume(ins, outs, scalars, smem, parts, qk_mma, pv_mma)

    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts) -> tuple[SharedMemory, Ring]:
        """Rings and stages, and the ring of the notes."""
        c = self.c
        consumers = 4 * c.consumers
        table = (
            ("q", c.q_stages, 1, consumers),
            ("k", c.stages, 1, consumers),
            ("v", c.stages, 1, consumers),
            ("parts", _PARTS, 1, consumers + self.batch.loader_warps + 1),
        )
        found = rings(memory, warp, table)
        stages = Stages(found["q"], found["k"], found["v"], *self.mainloop.operands(memory, layouts))
        return SharedMemory(stages), found["parts"]

    @cute.jit
    def schedule(self, ins: Any, scalars: Scalars, tiles: WorkTiles, parts: Parts):
        """One warp: a work tile when there is room for its note, -1 behind the last."""
        rules = MaskRules(scalars.causal, scalars.window, scalars.sink_tokens)
        n, index = Int32(0), cute.arch.block_idx()[0]
        while index < tiles.slots:
            tile, place, there = self.batch.tile(ins, rules, tiles.section, index)
            if there:
                rows = cutlass.min(tile.rows, self.c.span)
                parts.tell(n, Part(tile._replace(rows=rows), place, Int32(0), Int32(1), Int32(0), Int32(0)).note())
                if (tile.stop > _SHORT) & (n > 0):
                    parts.ring.await_empty(n - 1 + _PARTS)  # it is begun: others may be free before this CTA
                n += 1
            index = self._draw(tiles)
        parts.tell(n, [Int32(-1)])
        if (index == tiles.slots + tiles.ctas - 1) & (cute.arch.lane_idx() == 0):
            joining.store_relaxed(tiles.counter, Int32(0))  # all CTAs have drawn for the last time

    @cute.jit
    def _draw(self, tiles: WorkTiles):
        """The next slot and KV head, for a whole warp."""
        drawn = Int32(0)
        if cute.arch.lane_idx() == 0:
            drawn = op.add_acq_rel(tiles.counter, Int32(1))
        return tiles.ctas + cute.arch.shuffle_sync(drawn, 0)

    @cute.jit
    def load_keys(self, loads: DynamicLoads, ins: Any, smem: SharedMemory, parts: Parts):
        """Every warp that loads keys."""
        n, fills = Int32(0), Int32(0)
        while parts.wait(n) >= 0:
            part = self._read(parts, n)
            self._done_with(parts, n)
            self.batch.produce(loads.keys, ins, part.tile, part.sequence, smem, fills)
            fills += part.tile.stop - part.tile.first
            n += 1

    @cute.jit
    def load_queries(self, loads: DynamicLoads, ins: Any, smem: SharedMemory, parts: Parts):
        """One warp: the rows of each work tile. Behind a sequence's last are others', which nobody stores."""
        c, n, ring = self.c, Int32(0), smem.stages.ring_q
        sBoxes = self._rows_of(smem.stages.sQ)
        runs = const_expr(c.dim // c.box_columns)
        while parts.wait(n) >= 0:
            tile = self._read(parts, n).tile
            self._done_with(parts, n)
            full = ring.acquire(n, c.span * c.dim * c.dtype.width // 8)
            rows = self.batch.queries_from(loads.q, tile)
            for run in cutlass.range_constexpr(runs):
                gBox = cute.local_tile(rows, self._box, (0, 0, run))  # (group, tokens, columns)
                sBox = sBoxes[None, None, None, ring.slot(n) * runs + run]
                to, source = copies.tma_partition(loads.q_atom, 0, 1, sBox, gBox, modes=3)
                cute.copy(loads.q_atom, source, to, tma_bar_ptr=full)
            n += 1

    @property
    def _box(self) -> tuple[int, int, int]:
        """Of rows: query heads of a KV head, queries, columns."""
        c = self.c
        return c.group, c.tile_m // c.group, c.box_columns

    def _box_layout(self, boxes: int) -> cute.ComposedLayout:
        """Boxes of rows in shared memory, (group, tokens, columns, boxes): those of a query one after another."""
        c = self.c
        atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, c.dtype, c.box_columns)
        swizzle = warpgroup.make_smem_layout_atom(atom, c.dtype).inner
        strides = c.box_columns, c.group * c.box_columns, 1, c.tile_m * c.box_columns
        return cute.make_composed_layout(swizzle, 0, cute.make_layout((*self._box, boxes), stride=strides))

    def _rows_of(self, sQ: cute.Tensor) -> cute.Tensor:
        """The stages of Q as boxes, those of a stage one after another."""
        c = self.c
        layout = self._box_layout(c.dim // c.box_columns * c.q_stages)
        pointer = cute.make_ptr(c.dtype, sQ.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=c.dtype), layout.outer)

    @cute.jit
    def consume(
        self, ins: Any, outs: Any, scalars: Scalars, smem: SharedMemory, parts: Parts, qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
    ):  # fmt: skip
        """One warpgroup: 64 rows of one work tile after another."""
        w = self.multi.consumer(scalars, smem, qk_mma, pv_mma)
        self.mainloop.begin_turns(w)
        n, fills = Int32(0), Int32(0)
        while parts.wait(n) >= 0:
            tile = self._read(parts, n).tile
            smem.stages.ring_q.wait(n)
            sums = self.multi.attend_loaded(w, scalars, tile, n, fills)
            tile = self._read(parts, n).tile  # again: registers are scarce between
            rows, results = self.batch.rows(ins, outs, tile)
            multi_combine.store(self.c, w, rows, results, tile, sums)
            fills += tile.stop - tile.first
            self._done_with(parts, n)
            n += 1

    def _read(self, parts: Parts, n: Int32) -> Part:
        return Part.of(parts.read(n), group_of(self.c))

    def _done_with(self, parts: Parts, n: Int32) -> None:
        """All lanes have read the note, for which one of them arrives."""
        cute.arch.sync_warp()
        parts.ring.release(n)


def group_of(c: Config) -> tuple[Int32, Float32]:
    """Query heads that share a KV head, and 1 over that."""
    return Int32(c.group), Float32(1 / c.group)


def queries_by_head(q: cute.Tensor, group: int) -> cute.Tensor:
    """q (B, T, Hq, D) as (group, T, D, Hkv, B), or packed without B."""
    *batch, tokens, heads, dim = range(cute.rank(q))
    shape = (group, q.shape[tokens], q.shape[dim], q.shape[heads] // group, *(q.shape[b] for b in batch))
    per_head = q.stride[heads]
    strides = (per_head, q.stride[tokens], 1, per_head * group, *(q.stride[b] for b in batch))
    return cute.make_tensor(q.iterator, cute.make_layout(shape, stride=strides))
