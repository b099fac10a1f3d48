"""How TMA brings K, V and rows of Q from tensors (dense, packed, caches) to shared memory, K and V in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed, Ring

from .config import Config, Layouts
from .mainloop import Mainloop, Stages
from .seqlen import Sequences, WorkTile


class KVLoads(NamedTuple):
    """The two TMA atoms and the tensors of coordinates that go with them; where threads copy rows of pages, those."""

    k_atom: Any
    k: Any  # (S, D, Hkv, B); packed: (S, D, Hkv); pages: (Ps, D, Hkv, Np)
    v_atom: Any
    v: Any  # the same with Dv; of E4M3 that was transposed, Dv before S

    def prefetch(self) -> None:
        for atom in (self.k_atom, self.v_atom):
            cpasync.prefetch_descriptor(atom)


class QLoads(NamedTuple):
    atom: cute.CopyAtom
    q: cute.Tensor  # (T, D, Hq, B); packed: (T, D, Hq); rows of all heads of a KV head: (group, T, D, Hkv, B)


@dataclass
class SharedMemory(Fixed):
    """Mbarriers, then Q, K and V; and once these have been read, a split's partial result over all three."""

    stages: Stages
    staged: Any = None  # K or V as they come, and their rings (``transpose_v.StagedV``, ``widen.StagedKV``)

    @property
    def partial(self) -> Int32:
        """The address of the partial result: M rows of ``Config.pitch`` floats, then (maximum, sum) of each."""
        return self.stages.sQ.iterator.toint()


class SingleFill(Ring):
    """The stage of rows of Q that a CTA loads once."""

    def __init__(self) -> None:
        super().__init__(None, None, 1)

    def release(self, n: Int32) -> None:
        """Nobody waits for it."""


def elements(c: Config, t: cute.Tensor) -> cute.Tensor:
    """E4M3 comes as bytes."""
    return cute.make_tensor(cute.recast_ptr(t.iterator, dtype=c.dtype), t.layout) if c.fp8 else t


def select(t: cute.Tensor, modes: tuple[int, ...]) -> cute.Tensor:
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=list(modes)))


class TileCopies(Fixed):
    """The copies of one head's blocks of K and V into the stages of two rings; of a pair each CTA loads half of them,
    for both."""

    def __init__(self, c: Config, loads: KVLoads, gK: cute.Tensor, gV: cute.Tensor, rank: Int32, stages: tuple):
        self.c, self.loads = c, loads
        (self.ring_k, sK), (self.ring_v, sV) = stages
        self.mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        self.tKsK, self.tKgK = copies.tma_partition(loads.k_atom, rank, c.ctas, sK, gK)  # (box, stages), (box, blocks)
        self.tVsV, self.tVgV = copies.tma_partition(loads.v_atom, rank, c.ctas, sV, gV)

    def load_k(self, n: Int32, block_of: Callable[[Int32], Int32], step: Int32 | int) -> None:
        """Block ``block_of(step)`` as fill n; which one it is is computed when there is room for it."""
        c, ring = self.c, self.ring_k
        full, at = ring.acquire(n, c.tile_n * c.dim * c.dtype.width // 8), block_of(step)
        cute.copy(self.loads.k_atom, self.tKgK[None, at], self.tKsK[None, ring.slot(n)], tma_bar_ptr=full, **self.mask)

    def load_v(self, n: Int32, block_of: Callable[[Int32], Int32], step: Int32 | int) -> None:
        c, ring = self.c, self.ring_v
        full, at = ring.acquire(n, c.tile_n * c.dim_v * c.dtype.width // 8), block_of(step)
        cute.copy(self.loads.v_atom, self.tVgV[None, at], self.tVsV[None, ring.slot(n)], tma_bar_ptr=full, **self.mask)


class TmaLoader(Fixed):
    """Loads the blocks of a work tile whose rows a KV head's query heads share. V is one block behind K, as the
    consumers need it; of E4M3, which is transposed first, beside K.

    ``converter`` is what transposes V of E4M3, or widens K and V (``TransposeV``, ``WidenKV``), else None.
    """

    def __init__(self, config: Config, mainloop: Mainloop, sequences: Sequences, converter: Any):
        self.c, self.mainloop, self.sequences, self.converter = config, mainloop, sequences, converter

    def layouts(self) -> Layouts:
        c = self.c
        shape_v = (c.dim_v, c.tile_n, c.v_stages) if c.fp8 else (c.tile_n, c.dim_v, c.v_stages)
        shapes = (c.tile_m, c.dim, c.q_stages), (c.tile_n, c.dim, c.k_stages), shape_v
        return Layouts(*(self.mainloop.layout(shape) for shape in shapes))

    def loads(self, ins: Any, layouts: Layouts) -> KVLoads:
        c, atoms = self.c, []
        layout_v = self.converter.staged_layout() if c.fp8 else layouts.v
        for tensor, layout in ((ins.k, layouts.k), (ins.v, layout_v)):
            atoms += copies.tma_atom(select(elements(c, tensor), self.sequences.key_modes), layout, c.ctas)
        return KVLoads(*atoms)

    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts) -> SharedMemory:
        c = self.c
        if c.fp8:
            return self.converter.shared_memory(memory, warp, layouts)
        rings = self.mainloop.rings(memory, warp, ((c.stages, c.pair), (c.stages, c.pair)))
        return SharedMemory(Stages(SingleFill(), *rings, *self.mainloop.operands(memory, layouts)))

    def prefetch(self, loads: KVLoads) -> None:
        loads.prefetch()

    @cute.jit
    def produce(self, loads: KVLoads, ins: Any, tile: WorkTile, kv_index: Int32, smem: SharedMemory, fills: Int32):
        """One warp: the blocks of K and V; ``fills`` of every ring were before."""
        c, stages = self.c, smem.stages
        rank = cute.arch.block_in_cluster_idx()[0] if c.pair else Int32(0)
        k_head, v_head = (self.sequences.keys(t, tile, kv_index) for t in (loads.k, loads.v))
        gK = cute.local_tile(k_head, (c.tile_n, c.dim), (None, 0))  # (N, D, blocks)
        gV = cute.local_tile(v_head, (c.tile_n, c.dim_v), (None, 0))
        target_v = (smem.staged.ring, smem.staged.stages) if c.fp8 else (stages.ring_v, stages.sV)
        copy = TileCopies(c, loads, gK, gV, rank, ((stages.ring_k, stages.sK), target_v))
        if const_expr(c.fp8):
            known = lambda block: block
            for step in cutlass.range(tile.first, tile.stop, unroll=1):
                n, block = fills + step - tile.first, tile.block(step)
                copy.load_k(n, known, block)
                copy.load_v(n, known, block)
        else:
            for step in cutlass.range(tile.first, tile.stop + 1, unroll=1):
                n = fills + step - tile.first
                if step < tile.stop:
                    copy.load_k(n, tile.block, step)
                if step > tile.first:
                    copy.load_v(n - 1, tile.block, step - 1)


class RowBoxes(Fixed):
    """Rows of Q by TMA, where a KV head's query heads are a number fixed at compile time: as many queries as fill a
    tile, with all their heads. A few rows of a tile stay empty where the heads do not divide it."""

    def __init__(self, config: Config):
        c = self.c = config
        self.box = c.group, c.tile_m // c.group, c.box_columns  # query heads of a KV head, queries, columns

    def source(self, q: cute.Tensor) -> tuple[cute.Tensor, cute.ComposedLayout]:
        """q (B, T, Hq, D), or packed without B, as ``loads`` takes it, and a box in shared memory."""
        layout = cute.select(self._layout(1), mode=[0, 1, 2])
        return self._by_head(q), layout

    def loads(self, rows: cute.Tensor, layout: cute.ComposedLayout) -> QLoads:
        return QLoads(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, layout, self.box))

    def _by_head(self, q: cute.Tensor) -> cute.Tensor:
        """q as (group, T, D, Hkv, B), or packed without B."""
        group = self.c.group
        *batch, tokens, heads, dim = range(cute.rank(q))
        shape = (group, q.shape[tokens], q.shape[dim], q.shape[heads] // group, *(q.shape[b] for b in batch))
        per_head = q.stride[heads]
        strides = (per_head, q.stride[tokens], 1, per_head * group, *(q.stride[b] for b in batch))
        return cute.make_tensor(q.iterator, cute.make_layout(shape, stride=strides))

    def _layout(self, boxes: int) -> cute.ComposedLayout:
        """Boxes of rows in shared memory, (group, tokens, columns, boxes): those of a query one after another."""
        c = self.c
        atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, c.dtype, c.box_columns)
        swizzle = warpgroup.make_smem_layout_atom(atom, c.dtype).inner
        strides = c.box_columns, c.group * c.box_columns, 1, c.tile_m * c.box_columns
        return cute.make_composed_layout(swizzle, 0, cute.make_layout((*self.box, boxes), stride=strides))

    def stages(self, sQ: cute.Tensor) -> cute.Tensor:
        """The stages of Q as boxes, those of a stage one after another."""
        c = self.c
        layout = self._layout(c.dim // c.box_columns * c.q_stages)
        pointer = cute.make_ptr(c.dtype, sQ.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=c.dtype), layout.outer)

    def acquire(self, ring: Ring, n: Int32) -> cute.Pointer:
        c = self.c
        return ring.acquire(n, c.tile_rows * c.dim * c.dtype.width // 8)

    def load(self, loads: QLoads, rows: cute.Tensor, sBoxes: cute.Tensor, slot: Int32, full: cute.Pointer) -> None:
        """``rows`` (group, T, D) from the tile's first query on, into a stage."""
        runs = self.c.dim // self.c.box_columns
        for run in range(runs):
            gBox = cute.local_tile(rows, self.box, (0, 0, run))  # (group, tokens, columns)
            to, source = copies.tma_partition(
                loads.atom, 0, 1, sBoxes[None, None, None, slot * runs + run], gBox, modes=3
            )
            cute.copy(loads.atom, source, to, tma_bar_ptr=full)
