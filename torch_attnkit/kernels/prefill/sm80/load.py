"""Copies by ``cp.async`` of the kernel by ``mma.sync``: rows of Q, and blocks of K and V from where they lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.smem import CHUNK

from ..key_blocks import MaskedKeys
from .config import MmaConfig
from .seqlen import clipped, keys_of


class RowSource(NamedTuple):
    """Where a tile's keys or values begin, and how far it is to the next row and, in pages, to the next page."""

    at: Int64
    row_bytes: Int64
    page_bytes: Int64


class AsyncLoader(Fixed):
    """All threads of a CTA, 16 bytes of a row at a time.

    Rows at which no query of the sequence looks become zeros, since 0 * nan is nan; nothing is read for them.
    """

    def __init__(self, config: MmaConfig, sequences: Any):
        self.c, self.sequences = config, sequences
        self.nbytes = config.kv_bytes

    @cute.jit
    def load_query(self, q: cute.Tensor, tile: Any, target: Int32):
        """Start the copy of a tile's rows of Q; those behind the last repeat it."""
        c, thread = self.c, cute.arch.thread_idx()[0]
        chunks = const_expr(c.dim * (c.dtype.width // 8) // CHUNK)
        for n in cutlass.range_constexpr(-(-c.tile_m * chunks // c.threads)):
            i = thread + n * c.threads
            if i < c.tile_m * chunks:
                row, chunk = i // chunks, i % chunks
                token, head = tile.token_and_head(clipped(row, tile))
                token = cutlass.min(token, tile.seq.tokens - 1)
                source = q[tile.batch, token, head, None].iterator.toint() + chunk * CHUNK
                op.copy_16_async(target + row * c.pitches[0] + chunk * CHUNK, source, Int32(CHUNK))

    def sources(self, ins: Any, tile: Any, kv_index: Int32) -> tuple[RowSource, RowSource]:
        """Of K and of V."""
        return self._source(ins.k, tile, kv_index), self._source(ins.v, tile, kv_index)

    def _source(self, cache: cute.Tensor, tile: Any, kv_index: Int32) -> RowSource:
        nbytes = self.nbytes
        if self.c.kv == "paged":
            at = cache.iterator.toint() + Int64(cache.stride[2]) * tile.kv_head * nbytes
            return RowSource(at, Int64(cache.stride[1]) * nbytes, Int64(cache.stride[0]) * nbytes)
        keys = keys_of(self.sequences, cache, tile, kv_index)
        return RowSource(keys.iterator.toint(), Int64(keys.stride[0]) * nbytes, Int64(0))

    def _rows(self, dim: int) -> int:
        """Of a block, from which a thread copies a chunk."""
        return -(-self.c.tile_n * (dim * self.nbytes // CHUNK) // self.c.threads)

    @property
    def _looked_up(self) -> tuple[int, ...]:
        """Columns of K, and of V where its rows are other threads'."""
        c = self.c
        return (c.dim,) if c.dim == c.dim_v else (c.dim, c.dim_v)

    def pages(self) -> cute.Tensor:
        """Registers for the pages of a thread's rows of the next block."""
        return cute.make_rmem_tensor(sum(map(self._rows, self._looked_up)) if self.c.kv == "paged" else 1, Int32)

    @cute.jit
    def look_up(self, ins: Any, b: Int32, masked: MaskedKeys, block: Int32, rPages: cute.Tensor):
        """The pages of a block's keys; -1 where nobody looks, and for entries that are no page of the cache."""
        c = self.c
        if const_expr(c.kv == "paged"):
            before = 0
            for dim in self._looked_up:
                for n in cutlass.range_constexpr(self._rows(dim)):
                    key = block * c.tile_n + self._position(n, dim)[0]
                    page = Int32(-1)
                    if not masked.hold(key):
                        column = key // c.page
                        if column < Int32(ins.table.shape[1]):
                            row = ins.table.iterator.toint() + Int64(ins.table.stride[0]) * b * 4
                            page = op.load_pair(row + column * 4)
                            if page >= Int32(ins.k.shape[0]):
                                page = Int32(-1)
                    rPages[before + n] = page
                before += self._rows(dim)

    @cute.jit
    def load(self, sources: tuple, masked: MaskedKeys, block: Int32, rPages: cute.Tensor, stage: Int32):
        """Start the copy of a block into a stage."""
        c = self.c
        before, target = 0, stage
        for dim, pitch, source in zip((c.dim, c.dim_v), c.staged_pitches, sources, strict=True):
            chunks, step = const_expr(dim * self.nbytes // CHUNK), self._step(dim)
            row, chunk = self._position(0, dim)
            key, to = block * c.tile_n + row, target + row * pitch + chunk * CHUNK
            at, further = source.at + source.row_bytes * key + chunk * CHUNK, source.row_bytes * step
            for n in cutlass.range_constexpr(self._rows(dim)):
                if const_expr(step == 0):
                    row, chunk = self._position(n, dim)
                    key, to = block * c.tile_n + row, target + row * pitch + chunk * CHUNK
                    at = source.at + source.row_bytes * key + chunk * CHUNK
                if const_expr(c.kv == "paged"):
                    page = rPages[before + n]
                    valid = page >= 0
                    offset = source.page_bytes * cutlass.max(page, 0) + source.row_bytes * (key % c.page)
                    at = source.at + offset + chunk * CHUNK
                else:
                    valid = not masked.hold(key)
                source_of = cutlass.select_(valid, at, source.at)
                if (row < c.tile_n) or const_expr(c.tile_n * chunks % c.threads == 0):
                    op.copy_16_async(to, source_of, cutlass.select_(valid, Int32(CHUNK), Int32(0)))
                key, to, at = key + step, to + step * pitch, at + further
            before += 0 if len(self._looked_up) == 1 else self._rows(dim)
            target += c.tile_n * pitch

    def _step(self, dim: int) -> int:
        """Rows from a thread's copy to its next, in the same columns; 0 where its columns change."""
        chunks = dim * self.nbytes // CHUNK
        return self.c.threads // chunks if self.c.threads % chunks == 0 else 0

    def _position(self, n: int, dim: int) -> tuple[Int32, Int32]:
        """Row and chunk of a thread's n-th copy."""
        chunks = dim * self.nbytes // CHUNK
        i = cute.arch.thread_idx()[0] + n * self.c.threads
        return i // chunks, i % chunks
