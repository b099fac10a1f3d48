"""The scheduler of the prefill kernels: which work tiles there are, in which order, and which keys each visits."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


class KeyBlocks(NamedTuple):
    """The blocks of keys that a work tile visits, from the last to the first, then those of the sink tokens.

    Step i of ``steps`` visits ``block(i)``. Steps before ``full`` and from ``full_end`` on hold keys that some query
    must not see; step 0 always counts as such.
    """

    last: Int32
    near: Int32
    sinks_last: Int32
    full: Int32
    full_end: Int32
    steps: Int32

    def block(self, i: Int32) -> Int32:
        near = i < self.near
        return cutlass.max(cutlass.select_(near, self.last - i, self.sinks_last - (i - self.near)), Int32(0))


class Sequence(NamedTuple):
    """One sequence: ``tokens`` queries from row ``q0`` of the tensors on, the first at position ``shift``, which may
    see the keys in [start, end). Positions and keys count from the sequence's first key."""

    q0: Int32
    tokens: Int32
    shift: Int32
    start: Int32
    end: Int32


class MaskedKeys(NamedTuple):
    """Keys before ``start``, from ``end`` on, and from ``left``, where sink tokens end, to ``right``, where the first
    window begins; None without windows."""

    start: Int32
    end: Int32
    left: Any = None
    right: Any = None

    def overlap(self, low: Int32, high: Int32):
        """Whether a key of [low, high) may be one of these."""
        found = (low < self.start) | (high > self.end)
        return found if self.right is None else found | ((low < self.right) & (high > self.left))

    def hold(self, key: Int32):
        found = (key < self.start) | (key >= self.end)
        return found if self.right is None else found | ((key >= self.left) & (key < self.right))


def dense(c, ins, batch: Int32) -> Sequence:
    """A dense batch's sequence, for a kernel's Config and Inputs. Lengths outside of the tensors are cut off.

    The queries end where the tensor of keys does, or with ``ends_at_kv_len`` where the sequence's keys do.
    """
    tokens, keys = Int32(ins.q.shape[1]), Int32(ins.k.shape[1])
    clip = lambda x: cutlass.max(cutlass.min(Int32(x), keys), Int32(0))
    start = clip(ins.low[batch]) if c.kv_start else Int32(0)
    end = clip(ins.high[batch]) if c.kv_len else keys
    return Sequence(Int32(0), tokens, (end if c.ends_at_kv_len else keys) - tokens, start, end)


@cute.jit
def packed(starts: tuple, rows: Int32, all_keys: Int32, slot: Int32, tile_m: cutlass.Constexpr):
    """A slot's (tile of ``tile_m`` queries, number of its sequence, first key, sequence). A whole warp calls this.

    ``starts`` are cu_seqlens_q and cu_seqlens_k, of tensors with ``rows`` queries and ``all_keys`` keys. Sequence b
    begins at slot ``cu_seqlens_q[b] // tile_m + b``, which leaves it enough of them without a prefix sum; some stay
    empty. What lies behind the last sequence is one more, without keys. Offsets outside of the tensors are cut off.
    """
    queries, keys = starts
    count, begun = Int32(queries.shape[0]), Int32(0)
    for first in cutlass.range(0, count, 32, unroll=1):
        i = first + cute.arch.lane_idx()
        row = Int32(queries[cutlass.min(i, count - 1)])
        begun += cute.arch.popc(cute.arch.vote_ballot_sync((i < count) & (row // tile_m + i <= slot)))
    b = cutlass.max(begun - 1, Int32(0))
    behind = cutlass.min(b + 1, count - 1)
    clip = lambda x, most: cutlass.max(cutlass.min(Int32(x), most), Int32(0))
    q0, k0 = clip(queries[b], rows), clip(keys[b], all_keys)
    q1 = cutlass.select_(b + 1 < count, clip(queries[behind], rows), rows)
    seen = cutlass.max(clip(keys[behind], all_keys) - k0, Int32(0))
    tokens = q1 - q0
    return slot - (q0 // tile_m + b), b, k0, Sequence(q0, tokens, seen - tokens, Int32(0), seen)


def masked_keys(c, seq: Sequence, scalars) -> MaskedKeys:
    """The keys of a sequence at which none of its queries looks, for a kernel's Config and Scalars."""
    if not c.window:
        return MaskedKeys(seq.start, seq.end)
    left = seq.start + scalars.sink_tokens if c.sink_tokens else seq.start
    # A window of 0 holds nothing, wherever a query is.
    right = cutlass.select_(scalars.window == 0, seq.end, seq.shift - scalars.window + 1)
    return MaskedKeys(seq.start, seq.end, left, right)


def key_blocks_of(c, seq: Sequence, first: Int32, count: int, scalars) -> KeyBlocks:
    """The blocks that ``count`` tokens of a sequence from ``first`` on need, for a kernel's Config and Scalars."""
    last = cutlass.min(first + count, seq.tokens) - 1
    window = scalars.window if c.window else None
    sink_tokens = scalars.sink_tokens if c.sink_tokens else None
    return key_blocks(seq, seq.shift + first, seq.shift + last, c.tile_n, c.causal, window, sink_tokens)


def key_blocks(seq: Sequence, first: Int32, last: Int32, tile_n: int, causal: bool, window, sink_tokens) -> KeyBlocks:
    """The blocks of ``tile_n`` keys that the queries at positions first to last need.

    ``window`` and ``sink_tokens`` are Int32, or None where the kernel has no such feature.
    """
    zero = Int32(0)
    end, full_end, low, full_low, sinks_end = seq.end, seq.end, seq.start, seq.start, zero
    if causal:
        end, full_end = cutlass.min(end, last + 1), cutlass.min(end, first + 1)
    if sink_tokens is not None:
        sinks_end = cutlass.min(seq.start + sink_tokens, end)
    if window is not None and not causal:
        # Sink tokens may lie behind the window of early queries: the near part then reaches to their end.
        end, full_end = cutlass.min(end, last + window), cutlass.min(end, first + window)
        end = cutlass.max(end, sinks_end)
    if window is not None:
        low, full_low = cutlass.max(low, first - window + 1), cutlass.max(low, last - window + 1)
    return cover(seq.start, (low, full_low), (full_end, end), None if sink_tokens is None else sinks_end, tile_n)


def cover(start: Int32, lows: tuple, ends: tuple, sinks_end, tile_n: int) -> KeyBlocks:
    """The blocks of ``tile_n`` keys that hold [lows[0], ends[1]) and [start, sinks_end), which is None without sinks.

    All queries see [lows[1], ends[0]).
    """
    zero = Int32(0)
    (low, full_low), (full_end, end) = lows, ends
    end, full_end = cutlass.max(end, zero), cutlass.max(full_end, zero)
    blocks_end = (end + (tile_n - 1)) // tile_n
    blocks_low = cutlass.min(low // tile_n, blocks_end)
    full_right = cutlass.max(blocks_low, cutlass.min(blocks_end, full_end // tile_n))
    full_left = cutlass.min(full_right, cutlass.max(blocks_low, (full_low + (tile_n - 1)) // tile_n))
    near = blocks_end - blocks_low
    sinks = sinks_last = zero
    if sinks_end is not None:
        sinks_last = cutlass.min((sinks_end + (tile_n - 1)) // tile_n, blocks_low)
        sinks = cutlass.max(sinks_last - start // tile_n, zero)
    full = cutlass.max(blocks_end - full_right, Int32(1))
    return KeyBlocks(
        last=blocks_end - 1,
        near=near,
        sinks_last=sinks_last - 1,
        full=full,
        full_end=cutlass.max(full, blocks_end - full_left),
        steps=cutlass.max(near + sinks, Int32(1)),
    )


class TileScheduler(NamedTuple):
    """All work tiles of a call: ``rows`` tiles of queries for each of ``heads`` times ``batches``.

    Every CTA of a persistent grid takes one tile of each round, forwards and backwards in turn, so that the CTA with
    the heaviest tile of one round has the lightest of the next.
    """

    rows: Int32
    heads: Int32
    batches: Int32
    section: Int32  # heads whose keys and values share the L2

    def work_tile(self, n: Int32, uneven: bool) -> tuple:
        """Tile of queries, head and batch of the n-th work tile.

        Tiles of one head are neighbours: they read the same keys at the same time. Where later rows see more keys
        (``uneven``), a round must hold tiles of one weight instead: a section's heads go together through their rows,
        the last section from the heaviest row to the lightest, the one before it the other way, and so on.
        """
        if const_expr(uneven):
            others = self.heads * self.batches
            before = n // (self.rows * self.section)
            rest = n - before * (self.rows * self.section)
            width = cutlass.min(self.section, others - before * self.section)
            rank, pair = rest // width, before * self.section + rest % width
            sections = (others + self.section - 1) // self.section
            falling = ((sections - 1 - before) & 1) == 0
            row = cutlass.select_(falling, self.rows - 1 - rank, rank)
        else:
            row, pair = n % self.rows, n // self.rows
        return row, pair % self.heads, pair // self.heads

    def num_tiles(self) -> Int32:
        return self.rows * self.heads * self.batches


def tile_of_round(number: Int32, cta: Int32, ctas: Int32) -> Int32:
    """The work tile that a CTA of a persistent grid takes in round ``number``."""
    backwards = (number & 1) != 0
    return number * ctas + cutlass.select_(backwards, ctas - 1 - cta, cta)
