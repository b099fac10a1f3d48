"""Softmax attention of a block of queries per sequence over its cache on Hopper: K and V cross memory once.

    producer warp  --K and V, a ring each, by TMA-->  shared memory  -->  1 or 2 consumer warpgroups, 64 rows each

The rows of a tile are all query heads of a KV head for as many queries as fit: 16 queries with 4 heads each fill one
``wgmma``. Consumers keep scores, probabilities and output in registers (``mainloop.py``). Here is what the warps of a
CTA do with a work tile. A kernel gives it one (``multi_single.py``), or one after another (``multi_persistent.py``);
which these are, ``DenseSequences`` says.

Tile letters: M rows, N keys.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.opaque import anew
from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm90 import softmax

from ..blocks import Sequence, UnseenKeys, unseen_keys
from . import multi_combine
from .mainloop import WARPGROUP, Barrier, Consumer, Mainloop, Stages
from .multi_blocks import MaskRules, RowBounds, WorkTile, row_bounds
from .multi_types import Config, Inputs, Layouts, Loads, Outputs, Scalars

# Registers per thread of the producer's and the consumers' warpgroups, by (consumers, CTAs on a multiprocessor).
_REGISTERS = {(1, 1): (56, 256), (1, 2): (24, 232), (2, 1): (24, 240), (3, 1): (32, 160)}


class Once(Ring):
    """The place of rows of Q that a CTA loads once."""

    def __init__(self) -> None:
        super().__init__(None, None, 1)

    def release(self, n: Int32) -> None:
        """Nobody waits for it."""


@dataclass
class SharedMemory(Fixed):
    """Mbarriers, then Q, K and V; and once these have been read, a split's partial result over all three."""

    stages: Stages

    @property
    def partial(self) -> Int32:
        """The address of the partial result: M rows of ``Config.pitch`` floats, then (maximum, sum) of each."""
        return self.stages.sQ.iterator.toint()


def _bits_below(column: Int32, columns: int) -> Int32:
    """A bit for each of a lane's columns of a block, 0, 1, 8, 9, 16 ..., those below ``column`` being set."""
    inside = cutlass.max(cutlass.min(column, columns), Int32(0))
    one = Int32(1) if columns < 128 else Int64(1)  # of 128 columns all 32 bits may be set
    return Int32((one << (inside // 8 * 2 + cutlass.min(inside % 8, 2))) - 1)


@dataclass
class Mask(Fixed):
    """Which keys a consumer's rows see: the bounds of a lane's two rows, numbers that the call brings.

    Ranges of keys are bits, a word for each of a lane's rows: comparisons of every column need more registers than an
    output and a block's scores leave.
    """

    w: Consumer
    c: Config
    seq: Sequence
    bounds: RowBounds

    def apply(self, rS: cute.Tensor, block: Int32, edge: str) -> None:
        w, s, c = self.w, self.bounds, self.c
        if const_expr(c.softcap):
            softmax.cap(rS, w.scalars.cap_slope)
        origin = block * c.tile_n + w.lane % 4 * 2  # the key of this lane's first column
        below = lambda key: _bits_below(key - origin, c.tile_n)
        for r in range(2):
            seen = below(s.highs[r])
            if const_expr(c.window or c.kv_start):
                seen &= ~below(s.lows[r])
            if const_expr(c.sink_tokens):
                seen |= below(s.sinks_ends[r]) & ~below(s.start)
            for i in range(cute.size(rS)):
                if i // 2 % 2 == r:
                    bit = 1 << (i // 4 * 2 + i % 2)
                    bit = bit if bit < 1 << 31 else bit - (1 << 32)
                    rS[i] = cutlass.select_((seen & bit) != 0, rS[i], -Float32.inf)

    def unseen(self) -> UnseenKeys:
        return unseen_keys(self.c, self.seq, self.w.scalars)


def launch_shape(c: Config) -> dict[str, Any]:
    """What a launch is told of its CTAs, however many these are."""
    return {"block": [WARPGROUP + c.threads, 1, 1], "min_blocks_per_mp": c.per_sm, "preferred_smem_carveout": 100}


class Collective(Protocol):
    """What the warps of a CTA do together for a work tile (CUTLASS's word), whoever says which tile that is."""

    multi: "Multi"  # whose consumers they are
    registers: tuple[int, int]  # per thread of the producer's and the consumers' warpgroups, with one work tile a CTA

    def layouts(self) -> Layouts: ...
    def loads(self, ins: Any, layouts: Layouts) -> Any: ...
    def prefetch(self, loads: Any) -> None: ...
    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts) -> SharedMemory: ...
    def produce(
        self, loads: Any, ins: Any, tile: WorkTile, sequence: Int32, smem: SharedMemory, fills: Int32
    ) -> None: ...  # by the config's ``loader_warps``; ``fills`` of every ring were before
    def turn(
        self, scalars: Scalars, tile: WorkTile, smem: SharedMemory, fills: Int32
    ) -> None: ...  # by the warps behind these
    def rows(self, ins: Any, outs: Outputs, tile: WorkTile, sequence: Int32) -> tuple[Any, Outputs]: ...
    def attend(
        self, w: Consumer, rows: Any, scalars: Scalars, tile: WorkTile, smem: SharedMemory, fills: Int32
    ) -> tuple[Consumer, list[Float32]]: ...  # with the scalars of this tile, and the sums of a lane's rows


class Multi:
    """The ``Collective`` of a dense batch: a warp that loads, and consumers with a mainloop."""

    def __init__(self, config: Config):
        self.c, self.multi, self.mainloop, self.mask = config, self, Mainloop(config), Mask
        self.await_consumers = self.mainloop.await_consumers
        self.registers = _REGISTERS[config.consumers, config.per_sm]
        self.bytes_k, self.bytes_v = (
            config.tile_n * dim * config.dtype.width // 8 for dim in (config.dim, config.dim_v)
        )

    def layouts(self) -> Layouts:
        c = self.c
        shapes = (c.tile_m, c.dim, 1), (c.tile_n, c.dim, c.stages), (c.tile_n, c.dim_v, c.stages)
        return Layouts(*(self.mainloop.layout(shape) for shape in shapes))

    def loads(self, ins: Inputs, layouts: Layouts) -> Loads:
        keys_first = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0]))
        atoms = []
        for tensor, layout in ((ins.k, layouts.k), (ins.v, layouts.v)):
            atoms += copies.tma_atom(keys_first(tensor), layout, self.c.ctas)
        return Loads(*atoms)

    def prefetch(self, loads: Loads) -> None:
        for atom in (loads.k_atom, loads.v_atom):
            cpasync.prefetch_descriptor(atom)

    def rows(self, ins: Inputs, outs: Outputs, tile: WorkTile, sequence: Int32) -> tuple[Inputs, Outputs]:
        return ins, outs

    def shared_memory(self, memory, warp: Int32, layouts: Layouts) -> SharedMemory:
        c = self.c
        rings = self.mainloop.rings(memory, warp, ((c.stages, c.pair), (c.stages, c.pair)))
        return SharedMemory(Stages(Once(), *rings, *self.mainloop.operands(memory, layouts)))

    @cute.jit
    def produce(
        self, loads: Loads, ins: Inputs, tile: WorkTile, sequence: Int32, smem: SharedMemory, fills: Int32
    ):  # fmt: skip
        """One warp: the blocks of K and of V, V one behind K."""
        k_head, v_head = (t[None, None, tile.kv_head, tile.batch] for t in (loads.k, loads.v))
        self.produce_from(loads, k_head, v_head, tile, smem, fills)

    @cute.jit
    def produce_from(self, loads: Loads, k_head: Any, v_head: Any, tile: WorkTile, smem: SharedMemory, fills: Int32):
        """The same of a tile whose keys are (S, D), and values (S, Dv)."""
        c = self.c
        stages = smem.stages
        ring_k, ring_v = stages.ring_k, stages.ring_v
        rank = cute.arch.block_in_cluster_idx()[0] if c.pair else Int32(0)
        mask = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        gK = cute.local_tile(k_head, (c.tile_n, c.dim), (None, 0))  # (N, D, blocks)
        gV = cute.local_tile(v_head, (c.tile_n, c.dim_v), (None, 0))
        tKsK, tKgK = copies.tma_partition(loads.k_atom, rank, c.ctas, stages.sK, gK)  # (box, stages), (box, blocks)
        tVsV, tVgV = copies.tma_partition(loads.v_atom, rank, c.ctas, stages.sV, gV)
        for step in cutlass.range(tile.first, tile.stop + 1, unroll=1):
            n = fills + step - tile.first
            if step < tile.stop:
                full = ring_k.acquire(n, self.bytes_k)
                block = tile.block(step)
                cute.copy(loads.k_atom, tKgK[None, block], tKsK[None, ring_k.slot(n)], tma_bar_ptr=full, **mask)
            if step > tile.first:
                full = ring_v.acquire(n - 1, self.bytes_v)
                block = tile.block(step - 1)
                cute.copy(loads.v_atom, tVgV[None, block], tVsV[None, ring_v.slot(n - 1)], tma_bar_ptr=full, **mask)

    def turn(self, scalars: Scalars, tile: WorkTile, smem: SharedMemory, fills: Int32) -> None:
        """Nothing is turned around."""

    def consumer(self, scalars: Scalars, smem: SharedMemory, qk_mma, pv_mma) -> Consumer:
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        return self.mainloop.consumer(thread, smem.stages, qk_mma, pv_mma, scalars)

    def attend(
        self, w: Consumer, rows: Any, scalars: Scalars, tile: WorkTile, smem: SharedMemory, fills: Int32
    ) -> tuple[Consumer, list[Float32]]:
        """Leaves the output of 64 rows in registers, not divided yet; returns the sums of this lane's two."""
        self._load_queries(rows, tile, smem.stages.sQ, w)
        return w, self.attend_loaded(w, scalars, tile, Int32(0), fills)

    @cute.jit
    def attend_loaded(self, w: Consumer, scalars: Scalars, tile: WorkTile, fill: Int32, fills: Int32):
        """The same with the rows that fill ``fill`` of their ring brought."""
        positions = tuple(tile.position(w.row + 8 * r) for r in range(2))
        mask = self.mask(w, self.c, tile.seq, row_bounds(tile.seq, positions, MaskRules.of(scalars)))
        w.rO.fill(0.0)
        w.row_max.fill(-Float32.inf)
        w.row_sum.fill(0.0)
        first, stop = tile.first, tile.stop
        before = fills - first
        if first < stop:
            self.mainloop.first_block(w, mask, fill, fills, tile.block(first))
            plain = cutlass.max(first + 1, cutlass.min(tile.masked, stop))
            for i in cutlass.range(first + 1, plain, unroll=1):
                self.mainloop.next_block(w, mask, fill, before + i, tile.block(i), edge="both")
            for i in cutlass.range(plain, stop, unroll=1):
                self.mainloop.next_block(w, mask, fill, before + i, tile.block(i), edge="")
            w.stages.ring_q.release(fill)
            self.mainloop.last_product(w, before + stop - 1)
        else:
            w.stages.ring_q.release(fill)
        return multi_combine.row_sums(self.c, w, positions)

    @cute.jit
    def _load_queries(self, ins: Any, tile: WorkTile, sQ: cute.Tensor, w: Consumer):
        """The 64 rows of a warpgroup, through registers: neighbouring rows may be far apart, or of different queries.

        Rows behind the last repeat it; a tile without rows repeats the last query.
        """
        c = self.c
        width = const_expr(128 // c.dtype.width)  # elements of 16 bytes
        thread, chunks = anew(cute.arch.thread_idx()[0] % WARPGROUP), c.dim // width
        vectors = copies.fragments(64 * chunks // WARPGROUP, width, c.dtype)
        for n, vector in enumerate(vectors):
            i = thread + n * WARPGROUP
            row = cutlass.max(cutlass.min(w.warpgroup * 64 + i // chunks, tile.rows - 1), 0)
            token, head = tile.token_and_head(row)
            token = cutlass.min(token, tile.seq.tokens - 1)
            copies.load(ins.q[tile.batch, token, head, None].iterator + i % chunks * width, vector)
        for n, vector in enumerate(vectors):
            i = thread + n * WARPGROUP
            row = sQ[w.warpgroup * 64 + i // chunks, None, 0]
            cute.autovec_copy(vector, cute.local_tile(row, (width,), (i % chunks,)))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=int(Barrier.Q_STORED) + w.warpgroup, number_of_threads=WARPGROUP)
