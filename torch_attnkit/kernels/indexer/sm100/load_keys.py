"""A block's keys from global to shared memory, in the layout of ``tcgen05``."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.sm100 import block_scaled
from torch_attnkit.cuda.sm100.products import swizzled

from ..arguments import Tensors, find
from .plan import KEYS, ROWS

_CHUNK = 16  # bytes
_UNROLL = 8  # rows whose chunks a thread asks for without a branch between them
_NARROW_TYPES = {1: Uint8, 2: Uint16}  # by bytes: what is loaded one by one


@cute.jit
def load(c: cutlass.Constexpr, t: Tensors, request: Int32, start: Int32, longest: Int32, keys: Int32):
    """All consumer threads: copy the block's keys to ``keys``, 16 bytes at a time, neighbouring threads neighbouring
    chunks; zeros from ``longest`` on."""
    thread = op.thread_index()
    chunks = const_expr(c.row_bytes // _CHUNK)
    chunk = thread % chunks
    in_box = const_expr(c.box_bytes // _CHUNK)
    # Addresses of 16 rows at a time would take more registers than half of a multiprocessor's blocks have.
    for i in cutlass.range(chunks, unroll=_UNROLL):
        key = thread // chunks + i * (KEYS // chunks)
        page, entry, valid = find(c.paged, t, request, start + key, longest)
        row = key % ROWS
        to = keys + key // ROWS * (ROWS * c.row_bytes) + chunk // in_box * (ROWS * c.box_bytes)
        to += swizzled(row, chunk % in_box, c.box_bytes)
        nbytes = const_expr(t.mK.element_type.width // 8)
        source = t.mK.iterator.toint()
        source += cutlass.select_(
            valid, (Int64(page) * t.mK.stride[0] + Int64(entry) * t.mK.stride[1]) * nbytes + chunk * _CHUNK, Int64(0)
        )
        _copy(c, to, source, valid)


@cute.jit
def _copy(c: cutlass.Constexpr, to: Int32, source: Int64, valid: cutlass.Boolean):
    """16 bytes, or zeros."""
    if const_expr(c.load == _CHUNK):
        op.copy_16_async(to, source, cutlass.select_(valid, Int32(_CHUNK), Int32(0)))
    elif const_expr(c.load == 4):
        for i in cutlass.range_constexpr(0, _CHUNK, 4):
            op.copy_4_async(to + i, source + cutlass.select_(valid, i, 0), cutlass.select_(valid, Int32(4), Int32(0)))
    else:
        kind = _NARROW_TYPES[c.load]
        rChunk = cute.make_rmem_tensor(_CHUNK // c.load, kind)
        rChunk.fill(0)
        if valid:
            for i in cutlass.range_constexpr(_CHUNK // c.load):
                at = cute.make_ptr(kind, source + i * c.load, cute.AddressSpace.gmem, assumed_align=c.load)
                rChunk[i] = copies.scalar(at)
        words = cute.recast_tensor(rChunk, Int32)
        copies.store_words(to, [words[i] for i in range(4)], cute.AddressSpace.smem)


@cute.jit
def load_scale(c: cutlass.Constexpr, t: Tensors, request: Int32, row: Int32, longest: Int32, tiles: Int32):
    """This thread's key's float32 scale; MXFP4 scales go to shared memory."""
    scale = Float32(1)
    if const_expr(c.k_scale or c.four):
        page, entry, valid = find(c.paged, t, request, row, longest)
        word = Int32(0)
        if valid:
            if const_expr(c.four):
                for i in cutlass.range_constexpr(c.dim // 32):
                    word = word | (Int32(t.mKScale[page, entry, i]) << (8 * i))
            else:
                scale = Float32(t.mKScale[page, entry, 0])
        if const_expr(c.four):
            key = op.thread_index()
            at = tiles + key // ROWS * block_scaled.TILE_BYTES + block_scaled.word_of_row(key % ROWS)
            store_word(at, word)
    return scale


def store_word(at: Int32, word: Int32) -> None:
    """To shared memory."""
    pointer = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = word
