"""``paged_multi.py`` over E4M3: blocks of queries of any length over a cache of bytes in pages on Hopper.

Where rows and keys lie is ``PagedMulti``'s, what is done with them ``MultiCodes``'s: one warp loads boxes of pages, K's
swizzled as products read them and V's as they come, and the others of its warpgroup turn V around.

Tile letters: M rows, N keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed, Ring

from .multi_blocks import WorkTile
from .multi_codes import MultiCodes, SharedMemory
from .multi_types import Layouts
from .page_loads import Boxes, Loads
from .paged_codes_types import Config
from .paged_multi import rows_of
from .paged_types import Inputs


class Values(Fixed):
    """V in boxes of keys with all columns, as it comes: (N, Dv) bytes."""

    def __init__(self, config: Config):
        self.c = config

    def atom(self, cache: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """For a cache (Np, Ps, Hkv, Dv), and its tensor of coordinates (Ps, Dv, Hkv, Np)."""
        c = self.c
        copy = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.pair else cpasync.CopyBulkTensorTileG2SOp()
        rows = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
        box = cute.make_ordered_layout((c.box, c.dim_v), order=(1, 0))
        return cpasync.make_tiled_tma_atom(copy, rows, box, (c.box, c.dim_v))

    @cute.jit
    def load(
        self, source: tuple, ring: Ring, stage: cute.Tensor, tile: WorkTile, places: Int32, block: Int32, n: Int32
    ):  # fmt: skip
        """Block ``block`` as fill n of a ring over stage (N, Dv, stages); lane l of places has the l-th box's page."""
        c, (atom, rows) = self.c, source
        full = ring.acquire(n, c.tile_n * c.dim_v)
        each, first = const_expr(c.boxes // c.ctas), Int32(0)
        if const_expr(c.pair):
            first = cute.arch.block_in_cluster_idx()[0] * each
        mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        for i in cutlass.range(each, unroll=1):
            box = first + i
            row = (block * c.tile_n + box * c.box) % c.page // c.box
            page = cute.arch.shuffle_sync(places, box)
            gBox = cute.local_tile(rows[None, None, tile.kv_head, page], (c.box, c.dim_v), (row, 0))  # (box, Dv)
            sBox = cute.local_tile(stage[None, None, ring.slot(n)], (c.box, c.dim_v), (box, 0))
            to, source_of = copies.tma_partition(atom, 0, 1, sBox, gBox)
            cute.copy(atom, source_of, to, tma_bar_ptr=full, **mask)


class PagedMultiCodes:
    """The ``Collective`` of a packed batch over pages of E4M3."""

    def __init__(self, config: Config):
        codes = self.codes = MultiCodes(config)
        self.c, self.multi, self.mainloop, self.rows = config, codes.multi, codes.mainloop, rows_of
        self.keys, self.values = Boxes(config), Values(config)
        self.layouts, self.prefetch, self.shared_memory = codes.layouts, self.keys.prefetch, codes.shared_memory
        self.turn, self.attend, self.registers = codes.turn, codes.attend, codes.registers

    def loads(self, ins: Inputs, layouts: Layouts) -> Loads:
        as_numbers = ins._replace(k=self.codes.numbers(ins.k), v=self.codes.numbers(ins.v))
        keys = self.keys.key_atom(as_numbers.k)
        return Loads(*keys, *self.values.atom(as_numbers.v))

    @cute.jit
    def produce(
        self, loads: Loads, ins: Inputs, tile: WorkTile, sequence: Int32, smem: SharedMemory, fills: Int32
    ):  # fmt: skip
        """One warp: the blocks of K and of V as it is, pages looked up a block ahead."""
        c, stages, keys = self.c, smem.stages, self.keys
        k, v = (loads.k_atom, loads.k), (loads.v_atom, loads.v)
        places = keys.places(ins, tile, sequence, tile.block(tile.first))
        for step in cutlass.range(tile.first, tile.stop, unroll=1):
            n, block = fills + step - tile.first, tile.block(step)
            following = keys.places(ins, tile, sequence, tile.block(step + 1))
            keys.load(k, stages.ring_k, stages.sK, c.dim, tile, places, block, n)
            self.values.load(v, smem.values.ring, smem.values.stages, tile, places, block, n)
            places = following
