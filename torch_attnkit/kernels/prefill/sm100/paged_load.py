"""The loading warp of Blackwell's prefill over pages: keys by TMA, in boxes that lie in one page each. Imports cutlass.

It takes the place of ``load.py``'s; all other warps are those of packed sequences, which know no pages: stages of K and
V hold blocks of keys, runs of columns one after another, as if they had come at once.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.kernels.decode import pages

from ..blocks import TileScheduler, packed, tile_of_round
from ..sm90.page_loads import Boxes
from ..types import Inputs, Outputs, Scalars
from .load import Load
from .paged_types import PagedCta, Pages
from .scheduler import Scheduler
from .types import ROWS, Layouts, Loads, Mmas, SharedMemory, WorkTile


class PagedLoad(Fixed):
    def __init__(self, config: PagedCta, scheduler: Scheduler, load: Load):
        self.c, self.scheduler = config, scheduler
        self.queries = load  # of packed sequences: Q's rows
        self.keys = Boxes(config)

    def atoms(self, ins: Inputs, layouts: Layouts, mmas: Mmas) -> Loads:
        """TMA of a tile of Q, and of a box of K's and V's pages: (Ps, D, Hkv, Np)."""
        rows = cute.make_tensor(ins.q.iterator, cute.select(ins.q.layout, mode=[0, 2, 1]))  # (T, D, Hq)
        layout = cute.select(layouts.q, mode=[0, 1, 2])
        tiler, load = self.c.tilers[0], cpasync.CopyBulkTensorTileG2SOp(self.c.cta_group)
        q = cute.nvgpu.make_tiled_tma_atom_A(load, self.queries._grouped(rows), layout, tiler, mmas.qk)
        return Loads(*q, *self.keys.loads(ins))

    @cute.jit
    def run(
        self,
        loads: Loads,
        ins: Inputs,
        outs: Outputs,
        scalars: Scalars,
        tiles: TileScheduler,
        mmas: Mmas,
        smem: SharedMemory,
    ):
        """One warp: of every work tile the note, the queries and all blocks of K and V."""
        c = self.c
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        number, fills, n = Int32(0), Int32(0), Int32(0)  # rounds, tiles loaded, and blocks of keys loaded so far
        at = tile_of_round(Int32(0), cta, ctas)
        while at < tiles.num_tiles():
            tile = self.work_tile(ins, tiles, at)
            if (tile.row >= 0) & (tile.row * c.rows < tile.tokens):
                self.scheduler.leave(smem.rings.tile, smem.sTile, fills, tile)
                steps = self.scheduler.key_blocks(tile, scalars).steps
                self._tile(loads, ins, scalars, mmas, smem, tile, fills, n)
                n += steps
                fills += 1
            number += 1
            at = tile_of_round(number, cta, ctas)
        none = Int32(0)
        last = WorkTile(Int32(-1), *[none] * (len(WorkTile._fields) - 1))
        self.scheduler.leave(smem.rings.tile, smem.sTile, fills, last)

    @cute.jit
    def work_tile(self, ins: Inputs, tiles: TileScheduler, n: Int32):
        """The n-th work tile, with row -1 if there is none. A whole warp calls this.

        The offsets of the queries say where it is, as if keys were packed alike, and the length how many keys there
        are, cut off at what a row of the table has room for. What lies behind the last sequence has none.
        """
        c = self.c
        slot, head = n // tiles.heads, n % tiles.heads
        if cutlass.const_expr(c.causal):
            slot = tiles.rows - 1 - slot
        tokens, sequences = Int32(ins.q.shape[0]), Int32(ins.high.kv_len.shape[0])
        row, b, _, seq = packed((ins.low, ins.low), tokens, tokens, slot, c.rows)
        most = Int32(ins.high.table.shape[1]) * c.page
        end = cutlass.max(cutlass.min(Int32(ins.high.kv_len[cutlass.min(b, sequences - 1)]), most), Int32(0))
        end = cutlass.select_(b < sequences, end, Int32(0))
        return WorkTile(row, head, b, seq.q0, seq.tokens, end - seq.tokens, Int32(0), end, Int32(0), Int32(1))

    @cute.jit
    def _tile(
        self,
        loads: Loads,
        ins: Inputs,
        scalars: Scalars,
        mmas: Mmas,
        smem: SharedMemory,
        tile: WorkTile,
        fills: Int32,
        n: Int32,
    ):
        """The queries of a work tile, then K and V of its blocks, V one behind K, pages looked up a block ahead."""
        c, rings = self.c, smem.rings
        visit = self.scheduler.key_blocks(tile, scalars)
        group = Int32(ins.q.shape[1]) // Int32(ins.k.shape[2]) // c.group
        kv_head = tile.head // group
        q_first = (tile.q0 if c.group == 1 else (0, tile.q0), 0)
        heads = cute.domain_offset(q_first, loads.q[None, None, tile.head])
        gQ = mmas.qk.get_slice(0).partition_A(cute.local_tile(heads, (ROWS, c.dim), (None, 0)))
        tQsQ, tQgQ = copies.tma_partition(loads.q_atom, 0, 1, smem.sQ, gQ, 3)
        places = self._places(ins, tile, visit.block(Int32(0)))
        for t in cutlass.range_constexpr(c.tiles):
            cute.arch.mbarrier_wait(rings.q.empty + t, (fills & 1) ^ 1)
            full = rings.q.full + t
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, c.nbytes(ROWS, c.dim))
            cute.copy(loads.q_atom, tQgQ[None, tile.row * c.tiles + t], tQsQ[None, t], tma_bar_ptr=full)
        before = places
        for i in cutlass.range(0, visit.steps + 1, unroll=1):
            following = self._places(ins, tile, visit.block(i + 1))
            if i < visit.steps:
                self._block((loads.k_atom, loads.k), rings.k, smem.sK, c.dim, kv_head, places, visit.block(i), n + i)
            if i > 0:
                block = visit.block(i - 1)
                self._block((loads.v_atom, loads.v), rings.v, smem.sV, c.dim_v, kv_head, before, block, n + i - 1)
            before, places = places, following

    @cute.jit
    def _places(self, ins: Inputs, tile: WorkTile, block: Int32):
        """Lane l: the page of the l-th box of a block."""
        c, found = self.c, Pages(ins.k, ins.high.table)
        return pages.of_boxes(found, tile.batch, block * c.tile_n, tile.start, tile.end, c.box, c.boxes, c.page)

    @cute.jit
    def _block(
        self, source: tuple, ring: Ring, stage: cute.Tensor, dim: cutlass.Constexpr, kv_head: Int32, places: Int32,
        block: Int32, n: Int32,
    ):  # fmt: skip
        """Block ``block`` as fill n of a ring; ``source`` is the atom and the tensor of K or of V."""
        c, (atom, rows) = self.c, source
        runs = cutlass.const_expr(dim // c.box_columns)
        full = ring.acquire(n, c.nbytes(c.tile_n, dim))
        sBoxes = self._boxes(stage, runs)
        for i in cutlass.range_constexpr(c.boxes):
            row = (block * c.tile_n + i * c.box) % c.page // c.box
            page = cute.arch.shuffle_sync(places, i)
            for run in cutlass.range_constexpr(runs):
                gBox = cute.local_tile(rows[None, None, kv_head, page], (c.box, c.box_columns), (row, run))
                sBox = sBoxes[None, None, (ring.slot(n) * runs + run) * c.boxes + i]
                to, source_of = copies.tma_partition(atom, 0, 1, sBox, gBox)
                cute.copy(atom, source_of, to, tma_bar_ptr=full)

    def _boxes(self, stage: cute.Tensor, runs: int) -> cute.Tensor:
        """The stages of K or V as boxes: (keys, columns, boxes), those of a run of columns together."""
        c = self.c
        atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, c.dtype, c.box_columns)
        shape = (c.box, c.box_columns, c.boxes * runs * c.stages)
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, c.dtype), shape, order=(0, 1, 2))
        pointer = cute.make_ptr(c.dtype, stage.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=c.dtype), layout.outer)
