"""The roles of a Blackwell prefill kernel that hold rows: softmax, and correction with the store. Imports cutlass."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..prefill_tiles import Outside
from ..prefill_types import Inputs, Outputs, Scalars
from ..warp_ops import exp2
from . import multi, tmem
from . import prefill_softmax as softmax
from .prefill_types import ROWS, Config, Tile

# Columns of the output that a correction thread holds at a time; with 32 it spills in a pair, and where it stores
# float32, for a share of the keys, with 16 too.
_CHUNK = 16


class Rows:
    """Thread i of a warpgroup has row i of the tile, which is lane i of tensor memory."""

    c: Config

    def buffer(self, t: int, n: Int32) -> tuple:
        """The buffer of scores of block n, and the phase of its barriers; blocks count from the kernel's start."""
        if const_expr(self.c.tiles == 2):
            return t, n & 1
        return n & 1, (n >> 1) & 1

    @cute.jit
    def softmax(self, ins: Inputs, scalars: Scalars, bars, notes, shared, warp: Int32):
        """One warpgroup for each tile: scores to probabilities, and the rows' maxima and sums."""
        c = self.c
        if const_expr(c.tiles == 1):
            self._softmax_tile(ins, scalars, bars, notes, shared, warp, 0)
        elif warp < 4:
            self._softmax_tile(ins, scalars, bars, notes, shared, warp, 0)
        else:
            self._softmax_tile(ins, scalars, bars, notes, shared, warp, 1)

    @cute.jit
    def _softmax_tile(self, ins: Inputs, scalars: Scalars, bars, notes, shared, warp: Int32, t: cutlass.Constexpr):
        c = self.c
        factors, finals = shared
        row = cute.arch.thread_idx()[0] % ROWS
        # What is subtracted from the row's scores, their weights' sum, and their true maximum.
        state = cute.make_rmem_tensor(3, Float32)
        turn, n = Int32(0), Int32(0)
        tile = self._read(bars["notes"], notes, turn)
        while tile.row >= 0:
            plan = self._visit(tile, scalars)
            position = tile.shift + self.token_of(tile, t, row)
            at = (self.scaled(ins, scalars, tile), bars, factors, warp, tile, position, state)
            self._block(at, t, n, plan.block(Int32(0)), "first")
            if const_expr(c.causal or c.window):
                for i in cutlass.range(1, plan.full, unroll=1):
                    self._block(at, t, n + i, plan.block(i), "both")
            for i in cutlass.range(plan.full, plan.full_end, unroll=1):
                self._block(at, t, n + i, plan.block(i), "")
            if const_expr(c.kv_start or c.window):
                for i in cutlass.range(plan.full_end, plan.steps, unroll=1):
                    self._block(at, t, n + i, plan.block(i), "left")
            for k in cutlass.range_constexpr(3):
                finals[row, k, 2 * t + (turn & 1)] = state[k]
            n += plan.steps
            place, _ = self.turn_of(t, n - 1)
            self._arrive(bars["factors"].full + place, shared=True)
            turn += 1
            tile = self._read(bars["notes"], notes, turn)

    def scaled(self, ins: Inputs, scalars: Scalars, tile: Tile) -> Scalars:
        """The scalars of a tile's scores, which are products of E4M3 codes: with the scales of q and k."""
        c = self.c
        if const_expr(not any(c.scales[:2])):
            return scalars
        both = Float32(1.0)
        for scale in ins.scales[:2]:
            if const_expr(scale is not None):
                both *= self._scale(ins, scale, tile)
        if const_expr(c.softcap):
            return scalars._replace(cap_slope=scalars.cap_slope * both)
        return scalars._replace(scale_log2=scalars.scale_log2 * both)

    def _scale(self, ins: Inputs, scale: cute.Tensor, tile: Tile) -> Float32:
        """A tile's entry of a scale (sequences, Hkv); of what lies behind the last sequence the last one's."""
        heads = scale.shape[1]
        group = Int32(ins.q.shape[1 if self.c.varlen else 2]) // Int32(heads) // self.c.group
        return Float32(scale[cutlass.min(tile.batch, Int32(scale.shape[0]) - 1), tile.head // group])

    def turn_of(self, t: int, k: Int32) -> tuple:
        """Where a softmax group leaves its k-th factors, counted from the kernel's start, and the barrier's phase."""
        turns = self.c.turns
        return t * turns + (k & (turns - 1)), (k >> (turns.bit_length() - 1)) & 1

    def row(self) -> Int32:
        """The row of a tile that this thread has."""
        return cute.arch.thread_idx()[0] % ROWS

    def speaks(self, valid: cutlass.Boolean) -> cutlass.Boolean:
        """Whether this thread writes its row's LSE and sum."""
        return valid

    def element(self, at: int) -> int:
        """Which element of the row stands in column ``at`` of an output."""
        return at

    def token_of(self, tile: Tile, t: int, row: Int32) -> Int32:
        """The token that a row of tile t has, within its sequence."""
        first = (tile.row * self.c.ctas + cute.arch.block_idx()[0] % self.c.ctas) * self.c.rows
        return first + (ROWS * t + row) // self.c.group

    def _arrive(self, barrier: cute.Pointer, shared: bool = False) -> None:
        """Once for the warp, after all its lanes.

        Loads and stores of tensor memory, and the waits for them, are the whole warp's. What its lanes have written to
        ``shared`` memory on their own has to be brought together first.
        """
        if const_expr(shared):
            cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def _block(self, at, t: cutlass.Constexpr, n: Int32, block: Int32, edge: cutlass.Constexpr):
        """Block n's probabilities in place of its scores, and what the output so far must be multiplied by.

        ``edge``: where a limit of what the rows see may cross the block: "first", which is any in a tile's first block,
        "both", "left" where the right one cannot, or "" for no limit.
        """
        c = self.c
        scalars, bars, factors, warp, tile, position, state = at
        slot, phase = self.buffer(t, n)
        cute.arch.mbarrier_wait(bars["scores"].full + slot, phase)
        tmem.after_sync()
        base = tmem.lanes(slot * c.tile_n + Int32(c.scores[0]), warp)
        s = tmem.load(base, c.tile_n)
        if const_expr(c.softcap):
            s = softmax.capped(s, scalars.cap_slope)
        if const_expr(edge != ""):
            s = self._masked(s, scalars, tile, block, position, edge)
        if const_expr(edge == "first"):
            top = softmax.row_max(s, -Float32.inf)
            peak, total = top, Float32(0.0)
        else:
            old = state[0]
            top = softmax.row_max(s, old)
            peak = cute.arch.fmax(state[2], top)
            lag = softmax.CODES_LAG if c.codes else softmax.LAG
            top, factor = softmax.followed(old, top, scalars.scale_log2, lag)
            total = state[1] * factor
            place, _ = self.turn_of(t, n - 1)
            factors[cute.arch.thread_idx()[0] % ROWS, place] = factor
            self._arrive(bars["factors"].full + place, shared=True)
        if const_expr(c.normalize):
            offset = cutlass.select_(top == -Float32.inf, Float32(0.0), -top * scalars.scale_log2)
            p = softmax.probabilities(s, scalars.scale_log2, offset, c.eighths)
        else:
            safe = cutlass.select_(top == -Float32.inf, Float32(0.0), top)
            p = softmax.exact_probabilities(s, scalars.scale_log2, safe, c.eighths)
        tmem.store(base, softmax.packed(p, c.dtype), "r")
        tmem.await_stores()
        tmem.before_sync()
        self._arrive(bars["scores"].empty + slot)
        state[0], state[1] = top, softmax.row_sum(p, total)
        if const_expr(not c.normalize):
            state[2] = peak

    def _masked(self, s: list, scalars: Scalars, tile: Tile, block: Int32, position: Int32, edge: str) -> list:
        """-inf for keys that the row must not see."""
        c = self.c
        origin = block * c.tile_n
        start, stop = tile.start - origin, tile.end - origin
        low = high = sinks_end = end = None
        if const_expr(edge != "left"):
            end = cutlass.min(stop, position + 1 - origin) if c.causal else stop
        if const_expr(c.window):
            low = cutlass.max(start, position - scalars.window + 1 - origin)
            if const_expr(edge != "left" and not c.causal):
                high = position + scalars.window - origin
            if const_expr(c.sink_tokens):
                sinks_end = cutlass.min(start + scalars.sink_tokens, stop)
        elif const_expr(c.kv_start):
            low = start
        return softmax.keep_within(s, softmax.Limits(low, high, start if c.kv_start else None, sinks_end, end))

    @cute.jit
    def correct(self, ins: Inputs, outs: Outputs, scalars: Scalars, bars, notes, shared, sV: cute.Tensor, warp: Int32):
        """One warpgroup: keeps the outputs in step with the rows' maxima, and stores them."""
        c = self.c
        factors, finals = shared
        row = cute.arch.thread_idx()[0] % ROWS
        turn, n = Int32(0), Int32(0)
        tile = self._read(bars["notes"], notes, turn)
        while tile.row >= 0:
            plan = self._visit(tile, scalars)
            for i in cutlass.range(0, plan.steps, unroll=1):
                if const_expr(c.tiles == 1):
                    if i > 0:
                        cute.arch.mbarrier_wait(bars["output"].full, (n + i - 1) & 1)
                for t in cutlass.range_constexpr(c.tiles):
                    if i > 0:
                        place, phase = self.turn_of(t, n + i - 1)
                        cute.arch.mbarrier_wait(bars["factors"].full + place, phase)
                        self._rescale(factors[row, place], t, warp)
                    if const_expr(c.padded and t == 0):
                        # Not before the waits above: they say that V's last fill of this stage is over and done with,
                        # without which a wait for the parity of this one would not mean this one.
                        self._clear_rows(bars, n + i, self._outside(tile, scalars), plan.block(i), sV)
                    slot, _ = self.buffer(t, n + i)
                    self._arrive(bars["scores"].empty + slot, shared=c.padded and t == 0)
            n += plan.steps
            for t in cutlass.range_constexpr(c.tiles):
                place, phase = self.turn_of(t, n - 1)
                cute.arch.mbarrier_wait(bars["factors"].full + place, phase)
                phase = (n - 1) & 1 if c.tiles == 1 else turn & 1
                cute.arch.mbarrier_wait(bars["output"].full + t, phase)
                tmem.after_sync()
                self._store(ins, outs, scalars, tile, t, finals[row, None, 2 * t + (turn & 1)], warp)
            tmem.before_sync()
            turn += 1
            tile = self._read(bars["notes"], notes, turn)

    @cute.jit
    def _rescale(self, factor: Float32, t: cutlass.Constexpr, warp: Int32):
        """The output of tile t times the rows' factors, unless all of the warp's are 1."""
        tmem.after_sync()
        if cute.arch.vote_any_sync(factor < 1.0):
            for at in cutlass.range_constexpr(0, self.c.columns, _CHUNK):
                base = tmem.lanes(Int32(self.c.outputs[t] + at), warp)
                values = tmem.load(base, _CHUNK)
                tmem.store(base, softmax.rescaled(values, factor))
            tmem.await_stores()
        tmem.before_sync()

    @cute.jit
    def _clear_rows(self, bars, n: Int32, unseen: Outside, block: Int32, sV: cute.Tensor):
        """Write 0 over the rows of V's block at which nobody looks, before the tensor cores read them."""
        c = self.c
        low = block * c.tile_n
        if unseen.meets(low, low + c.tile_n):
            bars["v"].wait(n)
            thread = cute.arch.thread_idx()[0] % ROWS
            zero, k_dim = c.dtype(0.0), 256 // c.dtype.width  # keys of one product
            for key in cutlass.range(thread, c.tile_n, ROWS, unroll=1):
                if unseen.holds(low + key):
                    for d in cutlass.range(0, c.dim_v, unroll=8):
                        sV[(d, key % k_dim), 0, key // k_dim, bars["v"].slot(n)] = zero
            cute.arch.fence_view_async_shared()

    def _index(self, ins: Inputs, tile: Tile, head: Int32, token: Int32) -> tuple:
        if const_expr(self.c.varlen):
            return tile.q0 + token, head
        return multi.place_of(self.c, tile, Int32(ins.q.shape[0])), token, head

    @cute.jit
    def _store(
        self,
        ins: Inputs,
        outs: Outputs,
        scalars: Scalars,
        tile: Tile,
        t: cutlass.Constexpr,
        final: cute.Tensor,
        warp: Int32,
    ):
        """Divide by the row's sum and write out, LSE and row sum; a thread has its row's consecutive elements."""
        c, row = self.c, self.row()
        head, token = tile.head * c.group + row % c.group, self.token_of(tile, t, row)
        scalars = self.scaled(ins, scalars, tile)
        top, total = final[0], final[1]
        shift = cutlass.select_(top == -Float32.inf, Float32(0.0), top) * scalars.scale_log2
        lse = (shift + cute.math.log2(total, fastmath=True)) * Float32(softmax.LN_2)
        lse = cutlass.select_(total == 0.0, -Float32.inf, lse)
        weight = total
        if const_expr(c.sink):
            weight += exp2(Float32(ins.sink[head]) * Float32(softmax.LOG2_E) - shift)
        factor = cute.arch.rcp_approx(cutlass.select_(total == 0.0, Float32(1.0), weight))
        if const_expr(not c.normalize):  # relative to the true maximum
            factor = cutlass.select_(total == 0.0, Float32(1.0), exp2((top - final[2]) * scalars.scale_log2))
        valid = token < tile.tokens
        absent = tile.shift + token < 0
        if const_expr(c.at_end):  # a query in front of its sequence attends nothing, whatever its mask lets through
            lse = cutlass.select_(absent, -Float32.inf, lse)
        if self.speaks(valid):
            outs.lse[self._index(ins, tile, head, token)] = lse
            if const_expr(not c.normalize):
                outs.row_sum[self._index(ins, tile, head, token)] = total * factor
        if const_expr(c.codes):
            factor *= 1 / softmax.CODES_UNIT
        if const_expr(len(c.scales) > 0 and c.scales[2]):
            factor *= self._scale(ins, ins.scales[2], tile)
        chunk = const_expr(_CHUNK // 2 if c.split else _CHUNK)
        for at in cutlass.range_constexpr(0, c.columns, chunk):
            values = softmax.rescaled(tmem.load(tmem.lanes(Int32(c.outputs[t] + at), warp), chunk), factor)
            if const_expr(c.at_end):  # not by a factor of 0: they may be nan
                values = [Float32(cutlass.select_(absent, Float32(0.0), v)) for v in values]
            if valid:
                address = outs.out[(*self._index(ins, tile, head, token), None)].iterator + self.element(at)
                pointer = cute.make_ptr(Int32, address.toint(), cute.AddressSpace.gmem, assumed_align=16)
                stored = [v.bitcast(Int32) for v in values]
                if const_expr(not c.split):
                    kind = cutlass.BFloat16 if c.codes else c.dtype
                    stored = [softmax.pack(values[j], values[j + 1], kind) for j in range(0, chunk, 2)]
                target = cute.make_tensor(pointer, cute.make_layout(len(stored)))
                words = cute.make_rmem_tensor(len(stored), Int32)
                for j in cutlass.range_constexpr(len(stored)):
                    words[j] = stored[j]
                cute.autovec_copy(words, target)
