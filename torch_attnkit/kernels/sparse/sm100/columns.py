"""O' as a thread of the softmax's warpgroups finds it: a column of all heads of its warpgroup.

Neighbouring threads exchange one of every two heads for the neighbour's column of the other: each then has pairs of
columns, of every second head, as words of the call's dtype.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.sm100 import tmem

from .config import Config
from .memory import Memory
from .softmax_warps import four

# Of two words, the lower or the upper half of either, that of the lane with the lower column first.
_LOWER_HALVES, _UPPER_HALVES = 0x5410, 0x3276


def columns_of(config: Config, p: Int32, h0: Int32) -> list[Float32]:
    """This thread's column of part p of O', for the warpgroup's heads."""
    at = tmem.lanes(config.mma.tensor_memory.output + p * config.heads + h0, cute.arch.warp_idx())
    got = tmem.load(at, config.mma.own)
    tmem.await_loads()
    return got


def halves_of(lane: Int32) -> Int32:
    """Which bytes of its word and its neighbour's a lane keeps."""
    return cutlass.select_(lane & 1 != 0, Int32(_UPPER_HALVES), Int32(_LOWER_HALVES))


def factors_of(config: Config, m: Memory, h0: Int32) -> list[cute.Tensor]:
    """Of the warpgroup's heads, by fours."""
    return [four(m.sFactor, h0 + h) for h in range(0, config.mma.own, 4)]


def pair_of(config: Config, rO: list[Float32], factors: list[cute.Tensor], h: int, halves: Int32) -> Int32:
    """Two columns, this thread's and its neighbour's, of head ``h`` in even lanes and ``h + 1`` in odd ones, times the
    head's factor and rounded."""
    fours = factors[h // 4]
    pair = cute.arch.mul_packed_f32x2((rO[h], rO[h + 1]), (fours[h % 4], fours[h % 4 + 1]))
    word = op.pack(config.dtype, *pair)
    return permute_bytes(word, cute.arch.shuffle_sync_bfly(word, 1), halves)
