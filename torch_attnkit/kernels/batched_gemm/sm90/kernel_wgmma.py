"""Persistent batched GEMM of 16 bits on Hopper by ``wgmma``, swap-AB: weights are operand A, tokens the columns.

    1 warp             producer: weights and activations by TMA
    1 or 2 warpgroups  consumers, 64 features each: multiply, round, store by TMA

    ring     producers (arrivals)   consumers (arrivals)
    stages   TMA 1                  4 or 8 warps, of a cluster's both CTAs

While a tile's outputs are stored, the next one's operands are loaded. A pair of CTAs has neighbouring features of the
same tokens, of which each loads half by multicast. Accumulators have features along registers; ``stmatrix`` transposes
them to rows of tokens. TMA reads zeros beyond a tensor and does not write there. docs/kernels/batched_gemm.md has what
limits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from torch_attnkit.cuda import copies, fake
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed, Ring, rings
from torch_attnkit.cuda.sm90.matrix import store_transposed

from ..plan import CHUNK
from .plan import WARPGROUP_ROWS, Tile

_THREADS = 128  # of a warpgroup
_ROW_BYTES = WARPGROUP_ROWS * 2  # of a token's results, in chunks of 16 bytes that TMA swizzles within 8 rows
_STORED = 1  # + warpgroup: the named barrier at which its results are in shared memory


class TmaTensor(NamedTuple):
    """A tensor for TMA."""

    atom: cute.CopyAtom
    rows: cute.Tensor  # (rows, elements, G)


class TmaTensors(NamedTuple):
    weight: TmaTensor  # (N, K, G)
    x: TmaTensor  # (T, K, G)
    out: TmaTensor  # (T, N, G)


class OutputTile(NamedTuple):
    group: Int32
    tokens: Int32  # number of its tokens' tile
    features: Int32  # and of its features'


class StaticScheduler(NamedTuple):
    """A CTA's tiles: every so many-th, the features of the same tokens consecutive."""

    first: Int32
    step: Int32
    all: Int32
    features: Int32  # tiles of the same tokens, of a pair both together
    tokens: Int32  # tiles of a group

    def tile(self, unit: Int32, rank: Int32, ctas: int) -> OutputTile:
        rest = unit // self.features
        return OutputTile(rest // self.tokens, rest % self.tokens, unit % self.features * ctas + rank)


@dataclass
class WgmmaSmem(Fixed):
    """A block's shared memory."""

    ring: Ring
    sW: cute.Tensor  # (features, K, stages)
    sX: cute.Tensor  # (tokens, K, stages)
    sOut: cute.Tensor  # (tokens, WARPGROUP_ROWS, buffers of all warpgroups)


class WgmmaGemm:
    def __init__(self, tile: Tile, dtype: Any, out_dtype: Any):
        self.c, self.dtype, self.out_dtype = tile, dtype, out_dtype

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (T, G, K)
        mWeight: cute.Tensor,  # (G, N, K)
        mOut: cute.Tensor,  # (T, G, N)
        sms: Int32,
        stream: Any,
    ):
        c = self.c
        accesses = TmaTensors(
            weight=TmaTensor(*copies.tma_atom(_rows(mWeight, (1, 2, 0)), self._layout(c.features))),
            x=TmaTensor(*copies.tma_atom(_rows(mX, (0, 2, 1)), self._layout(c.tokens), c.ctas)),
            out=self._stores(_rows(mOut, (0, 2, 1))),
        )
        clusters = cutlass.min(sms // c.ctas, self._scheduler(mOut).all)
        self.kernel(accesses, mOut, (Int32(mX.shape[2]) + (c.k - 1)) // c.k).launch(
            grid=[clusters * c.ctas, 1, 1], block=[c.threads, 1, 1], cluster=[c.ctas, 1, 1], stream=stream,
            min_blocks_per_mp=1, preferred_smem_carveout=100, use_pdl=c.early,
        )  # fmt: skip

    def _layout(self, rows: int) -> cute.ComposedLayout:
        """(rows, K, stages) in shared memory."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (rows, self.c.k, self.c.stages), order=(0, 1, 2))

    def _results(self) -> cute.ComposedLayout:
        """(tokens, features, buffers of all warpgroups)."""
        c, atom = self.c, warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.out_dtype)
        return cute.tile_to_shape(atom, (c.stored, WARPGROUP_ROWS, c.consumers * c.buffers), order=(0, 1, 2))

    def _stores(self, mOut: cute.Tensor) -> TmaTensor:
        tile = cute.select(self._results(), mode=[0, 1])
        store = cpasync.CopyBulkTensorTileS2GOp()
        return TmaTensor(*cpasync.make_tiled_tma_atom(store, mOut, tile, (self.c.stored, WARPGROUP_ROWS)))

    def _scheduler(self, mOut: cute.Tensor) -> StaticScheduler:
        c, (tokens, groups, n) = self.c, (Int32(size) for size in mOut.shape)
        features = (n + (c.features * c.ctas - 1)) // (c.features * c.ctas)
        tiles = (tokens + (c.tokens - 1)) // c.tokens
        return StaticScheduler(Int32(0), Int32(1), groups * tiles * features, features, tiles)

    @cute.kernel
    def kernel(self, accesses: TmaTensors, mOut: cute.Tensor, steps: Int32):
        """``steps``: stages of a work tile."""
        c = self.c
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        slots = self._slots(warp)
        if warp == 4 * c.consumers:
            for access in accesses:
                cpasync.prefetch_descriptor(access.atom)
        cute.arch.mbarrier_init_fence()
        self._sync()
        cute.arch.griddepcontrol_launch_dependents()
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        scheduler = self._scheduler(mOut)._replace(first=block // c.ctas, step=blocks // c.ctas)
        rank = block % c.ctas
        if warp == 4 * c.consumers:
            cute.arch.griddepcontrol_wait()  # whatever reads or writes memory comes behind these loads
            self._load(accesses, scheduler, rank, steps, slots)
        else:
            self._consume(accesses, scheduler, rank, steps, slots, warp)
        if const_expr(c.pair):
            self._sync()  # neither block may leave while the other still writes to its memory

    def _slots(self, warp: Int32) -> WgmmaSmem:
        c, memory = self.c, cutlass.memory.SmemAllocator()
        made = rings(memory, warp, (("stages", c.stages, 1, 4 * c.consumers * c.ctas),))["stages"]
        sW, sX, sOut = (
            memory.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)
            for dtype, layout in (
                (self.dtype, self._layout(c.features)),
                (self.dtype, self._layout(c.tokens)),
                (self.out_dtype, self._results()),
            )
        )
        return WgmmaSmem(Ring(made.full, made.empty, c.stages, c.pair), sW, sX, sOut)

    def _sync(self) -> None:
        """All threads of the block, or of both blocks of a pair."""
        if const_expr(self.c.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

    @cute.jit
    def _load(self, accesses: TmaTensors, scheduler: StaticScheduler, rank: Int32, steps: Int32, slots: WgmmaSmem):
        c, (weight, x, _) = self.c, accesses
        both = {"mcast_mask": cutlass.Int16(3)} if c.pair else {}
        n = Int32(0)
        for unit in cutlass.range(scheduler.first, scheduler.all, scheduler.step, unroll=1):
            tile = scheduler.tile(unit, rank, c.ctas)
            gW = cute.local_tile(weight.rows[None, None, tile.group], (c.features, c.k), (tile.features, None))
            gX = cute.local_tile(x.rows[None, None, tile.group], (c.tokens, c.k), (tile.tokens, None))
            tWs, tWg = copies.tma_partition(weight.atom, 0, 1, slots.sW, gW)  # (box, stages), (box, steps)
            tXs, tXg = copies.tma_partition(x.atom, rank, c.ctas, slots.sX, gX)
            for k in cutlass.range(steps, unroll=1):
                full, slot = slots.ring.acquire(n, c.stage_bytes), slots.ring.slot(n)
                cute.copy(weight.atom, tWg[None, k], tWs[None, slot], tma_bar_ptr=full)
                cute.copy(x.atom, tXg[None, k], tXs[None, slot], tma_bar_ptr=full, **both)
                n += 1

    @cute.jit
    def _consume(
        self, accesses: TmaTensors, scheduler: StaticScheduler, rank: Int32, steps: Int32, slots: WgmmaSmem, warp: Int32
    ):
        c, group = self.c, warp // 4
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (c.consumers, 1, 1),
            (WARPGROUP_ROWS, c.tokens),
        )  # fmt: skip
        thr_mma = mma.get_slice(group * _THREADS)
        tA = thr_mma.make_fragment_A(thr_mma.partition_A(slots.sW))  # (mma, M, K, stages), descriptors of shared memory
        tB = thr_mma.make_fragment_B(thr_mma.partition_B(slots.sX))
        rSum = cute.make_rmem_tensor(mma.partition_shape_C((c.features, c.tokens)), Float32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        n = Int32(0)
        for unit in cutlass.range(scheduler.first, scheduler.all, scheduler.step, unroll=1):
            rSum.fill(0.0)
            for k in cutlass.range(steps, unroll=1):
                slots.ring.wait(n + k)
                slot = slots.ring.slot(n + k)
                warpgroup.fence()
                for step in cutlass.range_constexpr(cute.size(tA, mode=[2])):
                    cute.gemm(mma, rSum, tA[None, None, step, slot], tB[None, None, step, slot], rSum)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if k > 0:
                    slots.ring.release(n + k - 1)
            warpgroup.wait_group(0)
            slots.ring.release(n + steps - 1)
            n += steps
            self._store(rSum, accesses.out, scheduler.tile(unit, rank, c.ctas), slots.sOut, warp)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # a block that ends takes its shared memory along

    @cute.jit
    def _store(self, rSum: cute.Tensor, out: TmaTensor, tile: OutputTile, sOut: cute.Tensor, warp: Int32):
        """Some tokens at a time; a warpgroup's first warp starts the stores, and waits for its buffers to be read."""
        c, group = self.c, warp // 4
        rows = tile.features * c.consumers + group  # number of the warpgroup's features
        gOut = cute.local_tile(out.rows[None, None, tile.group], (c.stored, WARPGROUP_ROWS), (None, rows))
        tOs, tOg = copies.tma_partition(out.atom, 0, 1, sOut, gOut)
        parts = const_expr(c.tokens // c.stored)
        for part in cutlass.range_constexpr(parts):
            buffer = group * c.buffers + part % c.buffers
            if warp % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(c.buffers - 1, read=True)
            cute.arch.barrier(barrier_id=_STORED + group, number_of_threads=_THREADS)
            self._round(rSum, part, sOut.iterator.toint() + buffer * c.result_bytes, warp % 4)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=_STORED + group, number_of_threads=_THREADS)
            if warp % 4 == 0:
                cute.copy(out.atom, tOs[None, buffer], tOg[None, tile.tokens * parts + part])
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _round(self, rSum: cute.Tensor, part: cutlass.Constexpr, buffer: Int32, warp: Int32):
        """A warp's 16 features of the part's tokens to shared memory: per 8 tokens two tiles of 8 x 8 features."""
        lane = cute.arch.lane_idx()
        # A lane gives the address of one row, a token's 8 features, of the four tiles of 16 tokens.
        token, chunk = lane // 16 * 8 + lane % 8, warp * 2 + lane // 8 % 2
        at = buffer + token * _ROW_BYTES + (chunk ^ (lane % 8)) * 16
        first = const_expr(part * self.c.stored // 8)
        for eight in cutlass.range_constexpr(first, first + self.c.stored // 8, 2):
            tiles = const_expr(min(2, self.c.stored // 8) * 2)
            words = [op.pack(self.out_dtype, *(rSum[4 * eight + 2 * i + j] for j in range(2))) for i in range(tiles)]
            store_transposed(at + (eight - first) * 8 * _ROW_BYTES, words)


def _rows(t: cute.Tensor, axes: tuple[int, ...]) -> cute.Tensor:
    """``t`` as (rows, elements, G)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=list(axes)))


def trace(arch: str, dtypes: tuple[str, str], config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """``dtypes`` of the operands and of the result; ``config``: a ``Tile``."""

    def rows(dtype: str) -> Any:
        return fake.tensor(dtype, (None, None, fake.dim(CHUNK)), (fake.dim(CHUNK), fake.dim(CHUNK), 1), align=16)

    made = WgmmaGemm(Tile(*config), *(fake.dtype(name) for name in dtypes))
    return made, [rows(dtypes[0]), rows(dtypes[0]), rows(dtypes[1]), Int32(0), fake.stream()]
