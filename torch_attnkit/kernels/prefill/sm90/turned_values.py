"""V of E4M3 turned around on its way: from blocks as they come, a key's columns together, to a column's keys together.

    TMA -> (N, Dv) bytes -> 3 warps: a word of each of 4 keys, bytes exchanged, a word of each of 4 columns -> (Dv, N)

Products of bytes read both operands along the axis that they add up. Keys lie in the order of P's registers (see
``codes.py``), so that the 4 words of a column's 16 places are 16 keys that follow one another: a lane has 16 keys by 4
columns at a time, and writes 16 bytes of each column. Keys at which no row looks become zeros here, since 0 * nan is
nan. Lanes begin with different columns when they write, and where a row is shorter than all banks, those of every
other 16 keys read the second of two neighbours first: of heads of 64, 128 and 256 no bank has two words of an access.
Both are in the selectors of the exchange, and cost nothing.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.ring import Fixed, Ring

from ..blocks import unseen_keys
from .multi_blocks import WorkTile
from .multi_codes_types import Config

_LANES = 32
_KEYS, _COLUMNS = 16, 4  # of a lane at a time
_WORD = 4  # bytes


class TurnedValues(Fixed):
    """The stages of V as it comes with their ring, and what turns them around."""

    def __init__(self, config: Config, memory: Any, ring: Ring):
        self.c, self.ring = config, ring
        self.stages = memory.allocate_tensor(config.dtype, staged_layout(config), 1024)  # (N, Dv, stages)
        words = cute.make_ordered_layout((config.tile_n, config.dim_v // _WORD, config.stages), order=(1, 0, 2))
        self.words = cute.make_tensor(cute.recast_ptr(self.stages.iterator, dtype=Int32), words)

    @cute.jit
    def turn(self, target: Ring, sV: cute.Tensor, tile: WorkTile, scalars: Any, fills: Int32):
        """The warps behind the first: all blocks of a work tile into sV (Dv, N, stages).

        ``fills`` of both rings were before.
        """
        c, source = self.c, self.ring
        unseen = unseen_keys(c, tile.seq, scalars)
        for step in cutlass.range(tile.first, tile.stop, unroll=1):
            n = fills + step - tile.first
            first = tile.block(step) * c.tile_n
            target.await_empty(n)
            source.wait(n)
            words, sVt = self.words[None, None, source.slot(n)], sV[None, None, target.slot(n)]
            if unseen.overlap(first, first + c.tile_n):
                self._block(words, sVt, first, unseen)
            else:
                self._block(words, sVt, first, None)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            source.release(n)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(target.full + target.slot(n))

    @cute.jit
    def _block(self, words: cute.Tensor, sVt: cute.Tensor, first: Int32, unseen: Any):
        """A block, (N, Dv / 4) words, into (Dv, N) bytes; its first key is ``first``. ``unseen``: or None."""
        c = self.c
        quads = const_expr(c.dim_v // _COLUMNS)
        thread = cute.arch.thread_idx()[0] - _LANES
        for i in cutlass.range(thread, quads * (c.tile_n // _KEYS), _LANES * c.turning_warps, unroll=1):
            quad, chunk = i % quads, i // quads
            swap = chunk % 2 if const_expr(quads < _LANES) else 0
            turn = quad // 2 % _COLUMNS
            # Nibbles of pairs of columns, (j, 4 + j) each, the first being column ``turn``.
            pairs = permute_bytes(Int32(0x73625140), Int32(0x73625140), 0x3210 + 0x1111 * turn)
            pairs ^= swap * 0x44444444
            columns = [cute.make_rmem_tensor(_KEYS, c.dtype) for _ in range(_COLUMNS)]
            of_words = [cute.recast_tensor(column, Int32) for column in columns]
            for place in cutlass.range_constexpr(_KEYS // _WORD):
                found = []
                for key in (0, 8):
                    for neighbour in (swap, swap ^ 1):
                        at = _KEYS * chunk + 2 * place + key + neighbour
                        word = words[at, quad]
                        if const_expr(unseen is not None):
                            word = cutlass.select_(unseen.hold(first + at), Int32(0), word)
                        found.append(word)
                for j, word in enumerate(_exchanged(found, pairs)):
                    of_words[j][place] = word
            for j in cutlass.range_constexpr(_COLUMNS):
                row = sVt[quad * _COLUMNS + (turn + j) % _COLUMNS, None]
                cute.autovec_copy(columns[j], cute.local_tile(row, (_KEYS,), (chunk,)))


def _exchanged(words: list, pairs: Int32) -> list[Int32]:
    """Words of four keys become words of four columns, in the order that ``pairs`` says."""
    halves = [[permute_bytes(words[i], words[i + 1], order) for i in (0, 2)] for order in (pairs, pairs >> 16)]
    return [permute_bytes(*both, order) for both in halves for order in (0x5410, 0x7632)]


def staged_layout(c: Config) -> cute.Layout:
    """Of V as it comes: (N, Dv, stages)."""
    return cute.make_ordered_layout((c.tile_n, c.dim_v, c.stages), order=(1, 0, 2))
