"""The roles of the wide Blackwell prefill kernel that hold rows: softmax, and correction with the store.

Threads i and i + 64 of a warpgroup have row i of the CTA's 64, which are lanes i and i + 64 of tensor memory: the first
has the first half of a block's keys and of each product's columns, the other the second. They agree on a maximum
through shared memory, block by block, and keep sums of their own, which are added up at a tile's end. Imports cutlass.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import nvvm

from ..prefill_tiles import Outside
from ..prefill_types import Inputs, Outputs, Scalars
from . import prefill_softmax as softmax
from . import tmem
from .prefill_rows import Rows
from .prefill_types import ROWS, Tile
from .prefill_wide_types import CTAS, HALF, LANES, WideConfig, element


def _thread() -> Int32:
    """Of the warpgroup, which is the thread's lane of tensor memory."""
    return cute.arch.thread_idx()[0] % ROWS


class WideRows(Rows):
    c: WideConfig

    def row(self) -> Int32:
        return LANES * (cute.arch.block_idx()[0] % CTAS) + _thread() % LANES

    def token_of(self, tile: Tile, t: int, row: Int32) -> Int32:
        pair = cute.arch.block_idx()[0] // CTAS % self.c.ctas
        return (tile.row * self.c.ctas + pair) * self.c.rows + self.row() // self.c.group

    def speaks(self, valid: cutlass.Boolean) -> cutlass.Boolean:
        return valid & (_thread() < LANES)

    def element(self, at: int) -> Int32:
        return element(at, _thread() // LANES)

    def _tell_leader(self, barrier: cute.Pointer) -> None:
        """Arrive once for the warp at a barrier of the CTA that issues the pair's products.

        What its lanes wrote to this CTA's shared memory is then read by products that the other CTA issued.
        """
        cute.arch.sync_warp()
        leader = cute.arch.block_idx()[0] % self.c.cluster & -CTAS
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier, leader, scope=nvvm.MemScopeKind.CLUSTER)

    @cute.jit
    def _block(self, at, t: cutlass.Constexpr, n: Int32, block: Int32, edge: cutlass.Constexpr):
        """Block n's probabilities into shared memory, and what the output so far must be multiplied by.

        ``edge``: where a limit of what the rows see may cross the block, as for the narrow kernel.
        """
        c = self.c
        scalars, bars, (factors, peaks, sP), warp, tile, position, state = at
        thread, keys = _thread(), c.tile_n // 2
        half = thread // LANES
        slot, phase = self.buffer(t, n)
        cute.arch.mbarrier_wait(bars["scores"].full + slot, phase)
        tmem.after_sync()
        s = tmem.load(tmem.lanes(slot * keys + Int32(c.scores[0]), warp), keys)
        if const_expr(c.softcap):
            s = softmax.capped(s, scalars.cap_slope)
        if const_expr(edge != ""):
            # The thread's keys seen as a block of their own: everything else lies nearer by their distance.
            near = half * keys
            moved = tile._replace(start=tile.start - near, end=tile.end - near)
            s = self._masked(s, scalars, moved, block, position - near, edge)
        top = softmax.row_max(s, -Float32.inf if edge == "first" else state[0])
        peaks[thread, n & 1] = top
        # Among the two warps that have the same rows.
        cute.arch.barrier(barrier_id=1 + warp % 2, number_of_threads=64)
        top = cute.arch.fmax(top, peaks[thread ^ LANES, n & 1])
        peak, total = top, Float32(0.0)
        if const_expr(edge != "first"):
            peak = cute.arch.fmax(state[2], top)
            lag = softmax.CODES_LAG if c.codes else softmax.LAG
            top, factor = softmax.followed(state[0], top, scalars.scale_log2, lag)
            total = state[1] * factor
            place, _ = self.turn_of(t, n - 1)
            factors[thread, place] = factor
            self._arrive(bars["factors"].full + place, shared=True)
        if const_expr(c.normalize):
            offset = cutlass.select_(top == -Float32.inf, Float32(0.0), -top * scalars.scale_log2)
            p = softmax.probabilities(s, scalars.scale_log2, offset, c.eighths)
        else:
            safe = cutlass.select_(top == -Float32.inf, Float32(0.0), top)
            p = softmax.exact_probabilities(s, scalars.scale_log2, safe, c.eighths)
        words = softmax.packed(p, c.dtype)
        if const_expr(edge != "first"):
            # The last product has read the last P. A tile's first scores come after it anyway.
            cute.arch.mbarrier_wait(bars["output"].full, (n - 1) & 1)
        self._keep(sP, words, half)
        cute.arch.fence_view_async_shared()
        tmem.before_sync()
        self._tell_leader(bars["scores"].empty + slot)
        state[0], state[1] = top, softmax.row_sum(p, total)
        if const_expr(not c.normalize):
            state[2] = peak

    def _keep(self, sP: cute.Tensor, words: list, half: Int32) -> None:
        """A row's half of the probabilities where the products look for it: 128 bytes, a part, or half of that.

        With 128-byte swizzling row r's 16 bytes number j lie at number j ^ r % 8 (PTX ISA, "Swizzling Modes").
        """
        row = _thread() % LANES
        part, first = (half, 0) if self.c.parts == 2 else (0, half * (len(words) // 4))
        line = sP.iterator.toint() + (part * LANES + row) * 128
        for j in range(0, len(words), 4):
            at = (first + j // 4) ^ (row & 7)
            to = cute.make_ptr(Int32, line + at * 16, cute.AddressSpace.smem, assumed_align=16)
            four = cute.make_rmem_tensor(4, Int32)
            for i in range(4):
                four[i] = words[j + i]
            cute.autovec_copy(four, cute.make_tensor(to, cute.make_layout(4)))

    @cute.jit
    def correct(self, ins: Inputs, outs: Outputs, scalars: Scalars, bars, notes, shared, sV: cute.Tensor, warp: Int32):
        """One warpgroup: keeps the output in step with the rows' maxima, waits for V, and stores.

        Each CTA waits for its own half of V, which it may have to clear, and lets the pair's products begin.
        """
        c = self.c
        factors, finals = shared
        thread = _thread()
        turn, n = Int32(0), Int32(0)
        tile = self._read(bars["notes"], notes, turn)
        while tile.row >= 0:
            plan = self._visit(tile, scalars)
            for i in cutlass.range(0, plan.steps, unroll=1):
                if i > 0:
                    self._await_block(bars, n + i - 1)
                    self._rescale(factors[thread, self.turn_of(0, n + i - 1)[0]], 0, warp)
                # Not before the waits above: they say that V's last fills are over and done with, without which a wait
                # for the parity of these would not mean these.
                for part in cutlass.range_constexpr(c.v_pieces):
                    bars["v"].wait((n + i) * c.v_pieces + part)
                if const_expr(c.padded):
                    self._clear_rows(bars, n + i, self._outside(tile, scalars), plan.block(i), sV)
                self._tell_leader(bars["scores"].empty + self.buffer(0, n + i)[0])
            n += plan.steps
            self._await_block(bars, n - 1)
            tmem.after_sync()
            final = cute.make_rmem_tensor(3, Float32)
            for k in cutlass.range_constexpr(3):
                final[k] = finals[thread, k, turn & 1]
            final[1] += finals[thread ^ LANES, 1, turn & 1]
            self._store(ins, outs, scalars, tile, 0, final, warp)
            tmem.before_sync()
            turn += 1
            tile = self._read(bars["notes"], notes, turn)

    def _await_block(self, bars, n: Int32) -> None:
        """Until block n's output is whole, and what the softmax says about it is there."""
        cute.arch.mbarrier_wait(bars["output"].full, n & 1)
        place, phase = self.turn_of(0, n)
        cute.arch.mbarrier_wait(bars["factors"].full + place, phase)

    @cute.jit
    def _clear_rows(self, bars, n: Int32, unseen: Outside, block: Int32, sV: cute.Tensor):
        """Write 0 over this CTA's part of the rows of V at which nobody looks, before the products."""
        c = self.c
        low = block * c.tile_n
        if unseen.meets(low, low + c.tile_n):
            key = _thread()
            if unseen.holds(low + key):
                zero, k_dim = c.dtype(0.0), 256 // c.dtype.width  # keys of one product
                for h in cutlass.range_constexpr(c.halves):
                    slot = bars["v"].slot(n * c.v_pieces + c.parts * h + key // c.part)
                    for d in cutlass.range(0, HALF // 2, unroll=8):
                        sV[(d, key % k_dim), 0, key % c.part // k_dim, slot] = zero
            cute.arch.fence_view_async_shared()
