"""The MMA warp: S' = K Q', O' += V' P', by tcgen05.

    S(0) | S(1) O(0) | S(2) O(1) | ...        where two tiles fit in the ring; else S(0) | O(0) | S(1) | O(1) | ...

V' is the ring's stage read along the other axis.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import tcgen05

from torch_attnkit.cuda.sm100 import mma, tmem

from .config import KEYS, Config
from .cta import CtaCoord, Memory

_INNER = 16  # of a product


class MmaWarp:
    """Operands are in lines of 128 bytes: columns of Q and K, heads of P'."""

    def __init__(self, config: Config):
        c = self.c = config
        size, line = c.itemsize, c.mma.row_bytes
        of_line = line // size // _INNER  # products
        self.scores = mma.instruction(c.dtype, KEYS, c.heads, across=False)
        self.output = mma.instruction(c.dtype, c.mma.part, c.heads, across=True)
        self.score_steps = [
            (
                i // of_line * KEYS * line + i % of_line * _INNER * size,
                i // of_line * c.heads * line + i % of_line * _INNER * size,
            )
            for i in range(c.mma.part // _INNER)
        ]
        self.p_line = c.heads * size
        self.output_steps = [(i * _INNER * line, i * _INNER * self.p_line) for i in range(KEYS // _INNER)]

    @cute.jit
    def run(self, cta: CtaCoord, m: Memory, tiles: Int32):
        """All MMAs of a work tile."""
        c = self.c
        if tiles > 0:
            cute.arch.mbarrier_wait(m.query, 0)
            tmem.after_sync()
            self._scores(m, Int32(0))
        for n in cutlass.range(1, tiles + 1, unroll=1):
            if const_expr(c.mma.ahead):
                if n < tiles:
                    self._scores(m, n)
            self._output(cta, m, n - 1)
            if const_expr(not c.mma.ahead):
                if n < tiles:
                    self._scores(m, n)

    @cute.jit
    def _scores(self, m: Memory, n: Int32):
        c = self.c
        column = c.mma.tensor_memory.scores(n & 1)
        for p in cutlass.range(c.mma.parts, unroll=1):
            fill = n * c.mma.parts + p
            m.ring.wait(fill)
            with cute.arch.elect_one():
                k = mma.descriptor(m.ring_at + m.ring.slot(fill) * c.mma.stage_bytes, c.mma.row_bytes)
                q = mma.descriptor(m.query_at + p * (c.heads * c.mma.part * c.itemsize), c.mma.row_bytes)
                mma.multiply(column, k, q, self.score_steps, self.scores, p)
        with cute.arch.elect_one():
            tcgen05.commit(m.scores + (n & 1))

    @cute.jit
    def _output(self, cta: CtaCoord, m: Memory, n: Int32):
        """Once P' is stored and O' rescaled. Commits release each part on both sides."""
        c = self.c
        mask = cutlass.Int16(3 << (cta.split * 2)) if c.sides > 1 else None
        cute.arch.mbarrier_wait(m.probabilities, n & 1)
        tmem.after_sync()
        for p in cutlass.range(c.mma.parts, unroll=1):
            slot = m.ring.slot(n * c.mma.parts + p)
            with cute.arch.elect_one():
                v = mma.descriptor(m.ring_at + slot * c.mma.stage_bytes, c.mma.row_bytes, KEYS * c.mma.row_bytes)
                probabilities = mma.descriptor(m.p_at, self.p_line, KEYS * self.p_line)
                column = c.mma.tensor_memory.output + p * c.heads
                mma.multiply(column, v, probabilities, self.output_steps, self.output, n)
                tcgen05.commit(m.ring.empty + slot, mask)
        with cute.arch.elect_one():
            tcgen05.commit(m.output)
