"""Routed experts with FP4 weights, quantised activations, many tokens, on sm120: grouped GEMM by block-scaled ``mma``.

    ring of cp.async   codes of tokens and weights and the tokens' scales: a commit group a stage, waited for by
                       cp.async.wait_group and one CTA barrier
    scales of weights  a stage's by one warp of eight in turn, through registers, as soon as it has stored its last
    mainloop           mainloop.py -> float32 sums
    epilogue           epilogue.py

Three launches: slots sorted and x quantised (``sm100/permute.py``), the GEMM of w13, the GEMM of w2. A CTA has a work
tile: tokens of an expert by 128 rows of its weights; CTAs behind the last tile of tokens leave. The CTA that writes the
last of a token's results for some features sums them, in the order of the choices.

A row of a stage is 64 bytes, a token's in MXFP8 128: chunks of 16 change their places with every second row, or every
row, so that eight rows lie in different banks. Tokens that a tile does not have, and chunks behind K, are zeros; rows
behind the last of the weights repeat it, and their results are not used.

Constraints: activations in the format of the weights, or MXFP8 beside MXFP4; packed rows start and end at multiples of
16 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import copies, fake
from torch_attnkit.cuda import warp_ops as op

from ..arguments import Flags, Matrices, Scalars, Tensors, arguments
from ..sm90.load_weights import ScaleLoader, weight_row
from ..sm100.config import WEIGHT_ROWS, QuantizedRow, by_scale
from ..sm100.epilogue import factor_of
from ..sm100.kernel import Experts
from ..sm100.permute import SortAndQuantize
from ..work_tiles import WorkTile
from .config import ROW_BYTES, Config
from .epilogue import StoreEpilogue, SwigluEpilogue
from .mainloop import BlockScaledMainloop, Mxfp8Mainloop
from .plan import ALIGNMENT

_CHUNK = 16  # bytes that a thread copies at once


class Sources(NamedTuple):
    """What a thread copies of every stage: where its chunks of the first begin, and the scales of a token."""

    tokens: list[Int64]
    valid: list[Int32]  # bytes of a token's chunk, 0 for one that the tile does not have
    weights: list[Int64]
    scales_at: Int64
    scales: Int32  # how many there are


class BlockScaledGemm:
    """One of the two."""

    def __init__(self, config: Config, epilogue: Any):
        self.c, self.epilogue = config, epilogue
        mainloop = Mxfp8Mainloop if config.activations == "mxfp8" else BlockScaledMainloop
        self.mainloop, self.scales = mainloop(config), ScaleLoader(config)
        self.warps = config.threads // 32
        self.lanes = config.token_bytes // _CHUNK, ROW_BYTES // _CHUNK  # threads that copy a row of tokens, of weights

    @cute.jit
    def launch(
        self, tensors: Tensors, flags: Flags, weights: Matrices, rows: cute.Tensor, scalars: Scalars, tiles: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """``rows``: x or h, as ``QuantizedRow`` has them; ``tiles``: of tokens at most."""
        c = self.c
        row_tiles = (Int32(weights.packed.shape[1]) + (WEIGHT_ROWS - 1)) // WEIGHT_ROWS
        self.kernel(tensors, flags, weights, rows, scalars).launch(
            grid=(tiles, row_tiles, 1), block=(c.threads, 1, 1), smem=c.stages * c.stage_bytes + 1024, stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: Tensors, flags: Flags, weights: Matrices, rows: cute.Tensor, scalars: Scalars):
        tile_idx, row_tile, _ = cute.arch.block_idx()
        ring = cutlass.memory.SmemAllocator().allocate(self.c.stages * self.c.stage_bytes, 1024).toint()
        if tile_idx < tensors.tiles[0, 0]:
            expert, first, columns = (tensors.tiles[1 + tile_idx, i] for i in range(3))
            tile = WorkTile(expert, first, columns, row_tile)
            rSum = self.multiply(flags, weights, rows, tile, ring)
            self.epilogue.run(tensors, scalars, rSum, tile, factor_of(flags, weights, expert))

    @cute.jit
    def multiply(self, flags: Flags, weights: Matrices, rows: cute.Tensor, tile: WorkTile, ring: Int32):
        """The sums of a work tile."""
        c, stages = self.c, const_expr(self.c.stages)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        steps = (Int32(weights.packed.shape[2]) + (ROW_BYTES - 1)) // ROW_BYTES
        sources = self.sources(flags, weights, rows, tile)
        starts = self.scales.rows(flags, weights, tile, cute.arch.lane_idx())
        held = copies.fragments(c.rows // 32, c.scales // 4, Uint32)
        if warp < steps:
            self.read_scales(flags, weights, tile, starts, warp, held)
        for k in cutlass.range(stages - 1, unroll=1):
            self.load(flags, weights, tile, sources, starts, held, k, steps, ring, warp)
        rSum = cute.make_rmem_tensor(cute.make_layout((4, c.n_tiles, c.m_tiles)), Float32)
        rSum.fill(0.0)
        own = self.mainloop.offsets()
        for k in cutlass.range(steps, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.barrier()  # this stage is visible to all, and the previous one is no longer read
            self.load(flags, weights, tile, sources, starts, held, k + (stages - 1), steps, ring, warp)
            self.mainloop.multiply(rSum, ring + k % stages * c.stage_bytes, own)
        cute.arch.cp_async_wait_group(0)
        return rSum

    @cute.jit
    def sources(self, flags: Flags, weights: Matrices, rows: cute.Tensor, tile: WorkTile):
        """This thread's."""
        c, tid = self.c, cute.arch.thread_idx()[0]
        base = rows.iterator.toint() + Int64(tile.first) * rows.stride[0] * 2
        tokens, valid, of_weights = [], [], []
        lanes = const_expr(self.lanes[0])
        for i in cutlass.range_constexpr(c.tokens * lanes // c.threads):
            token = tid // lanes + i * (c.threads // lanes)
            here = token < tile.columns
            row = Int64(cutlass.select_(here, token, Int32(0))) * rows.stride[0] * 2
            tokens.append(base + row + tid % lanes * _CHUNK)
            valid.append(Int32(cutlass.select_(here, Int32(_CHUNK), Int32(0))))
        count, lanes = Int32(weights.packed.shape[1]), const_expr(self.lanes[1])
        of_expert = weights.packed.iterator.toint() + Int64(tile.expert) * weights.packed.stride[0]
        for i in cutlass.range_constexpr(WEIGHT_ROWS * lanes // c.threads):
            row = cutlass.min(weight_row(c, flags, tile, tid // lanes + i * (c.threads // lanes), count), count - 1)
            of_weights.append(of_expert + Int64(row) * weights.packed.stride[1] + tid % lanes * _CHUNK)
        elements = Int32(weights.packed.shape[2]) * 2
        here = tid < tile.columns
        at = base + Int64(cutlass.select_(here, tid, Int32(0))) * rows.stride[0] * 2
        at += QuantizedRow(elements, c.activations).code_bytes
        # NVFP4 rows have scales of whole words of four, see ``SortAndQuantize`` and the epilogue.
        scales = elements // c.block
        if const_expr(c.format == "nvfp4"):
            scales = (scales + 3) // 4 * 4
        return Sources(tokens, valid, of_weights, at, Int32(cutlass.select_(here, scales, Int32(0))))

    @cute.jit
    def load(
        self, flags: Flags, weights: Matrices, tile: WorkTile, sources: Sources, starts: list[Int64],
        held: list[cute.Tensor], k: Int32, steps: Int32, ring: Int32, warp: Int32,
    ):  # fmt: skip
        """Start the copies of stage k, if there is one; a commit group all the same."""
        if k < steps:
            stage = ring + k % self.c.stages * self.c.stage_bytes
            self.copy(weights, sources, k, stage)
            if warp == k % self.warps:
                self.store_scales(held, stage)
                if k + self.warps < steps:
                    self.read_scales(flags, weights, tile, starts, k + self.warps, held)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy(self, weights: Matrices, sources: Sources, k: Int32, stage: Int32):
        """All codes, and the tokens' scales."""
        c, tid = self.c, cute.arch.thread_idx()[0]
        nbytes, lanes = Int32(weights.packed.shape[2]), const_expr(self.lanes[0])
        k_bytes = k * c.token_bytes
        inside = k_bytes + tid % lanes * _CHUNK < nbytes * (c.token_bytes // ROW_BYTES)
        for i in cutlass.range_constexpr(len(sources.tokens)):
            row = tid // lanes + i * (c.threads // lanes)
            swizzle = row if const_expr(lanes == 8) else row >> 1
            valid = Int32(cutlass.select_(inside, sources.valid[i], Int32(0)))
            at = sources.tokens[i] + Int32(cutlass.select_(inside, k_bytes, Int32(0)))
            op.copy_16_async(stage + row * c.token_bytes + ((tid ^ swizzle) % lanes) * _CHUNK, at, valid)
        lanes = const_expr(self.lanes[1])
        k_bytes = k * ROW_BYTES
        inside = k_bytes + tid % lanes * _CHUNK < nbytes
        for i in cutlass.range_constexpr(len(sources.weights)):
            row = tid // lanes + i * (c.threads // lanes)
            valid = Int32(cutlass.select_(inside, Int32(_CHUNK), Int32(0)))
            at = sources.weights[i] + Int32(cutlass.select_(inside, k_bytes, Int32(0)))
            op.copy_16_async(stage + c.weights_at + row * ROW_BYTES + ((tid ^ (row >> 1)) % lanes) * _CHUNK, at, valid)
        if tid < c.tokens:
            words = const_expr(c.scale_bytes // 4)
            for i in cutlass.range_constexpr(words):
                first = (k * words + i) * 4
                left = cutlass.max(cutlass.min(sources.scales - first, Int32(4)), Int32(0))
                at = sources.scales_at + Int32(cutlass.select_(left > 0, first, Int32(0)))
                if const_expr(c.format == "nvfp4"):
                    left = Int32(cutlass.select_(left > 0, Int32(4), Int32(0)))
                op.copy_4_async(stage + c.scales_at + tid * c.scale_bytes + i * 4, at, left)

    @cute.jit
    def read_scales(
        self, flags: Flags, weights: Matrices, tile: WorkTile, starts: list[Int64], k: Int32, held: list[cute.Tensor]
    ):
        """By a warp: those of the weights of stage k."""
        new = self.scales.read(flags, weights, tile, starts, k)
        for i in cutlass.range_constexpr(len(held)):
            for j in cutlass.range_constexpr(cute.size(held[i])):
                held[i][j] = new[i][j]

    @cute.jit
    def store_scales(self, held: list[cute.Tensor], stage: Int32):
        c = self.c
        first = stage + c.scales_at + (c.tokens + cute.arch.lane_idx()) * c.scale_bytes
        for i in cutlass.range_constexpr(len(held)):
            words = [Int32(held[i][j]) for j in range(cute.size(held[i]))]
            copies.store_words(first + 32 * i * c.scale_bytes, words, cute.AddressSpace.smem)


def trace(
    arch: str, *, dtype: str, index_dtype: str, format: str, activations: str, columns: int, experts: int,
    scale_vectors: tuple[int, int], code_alignment: int,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``columns``: tokens of a work tile; ``experts``: at least so many; ``scale_vectors``: of both GEMMs the bytes of
    scales that a load takes."""
    assert by_scale(format, activations) and code_alignment == ALIGNMENT
    up, down = (
        Config(format, activations, columns, paired, vector)
        for paired, vector in zip((True, False), scale_vectors, strict=True)
    )
    made = Experts(
        SortAndQuantize(activations, experts, WEIGHT_ROWS, columns, even_first=activations == "mxfp8"),
        BlockScaledGemm(up, SwigluEpilogue(up)),
        BlockScaledGemm(down, StoreEpilogue(down)),
    )
    tensors, scalars, up_tiles, down_tiles, stream = arguments(dtype, index_dtype, code_alignment)
    x = fake.tensor("bf16", (None, None), (fake.dim(8), 1))
    return made, [tensors, x, scalars, Int32(0), up_tiles, down_tiles, stream]
