"""Which rows and which blocks of keys a CTA works on when all query heads of a KV head share a tile."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from torch_attnkit.cuda.ring import Fixed

from ..blocks import KeyBlocks, Sequence, cover


class MaskRules(NamedTuple):
    """What decides which keys a query sees, beside its sequence."""

    causal: Int32  # 0 or 1
    window: Int32  # more than every length: none
    sink_tokens: Int32

    @classmethod
    def of(cls, scalars: Any) -> "MaskRules":
        return cls(scalars.causal, scalars.window, scalars.sink_tokens)


class WorkTile(NamedTuple):
    """What one CTA computes: ``rows`` rows of a tile, over steps ``first`` to ``stop`` of the blocks that it visits.

    The first row is query ``token`` of the sequence and head ``head`` of the ``group`` that share the KV head; the next
    row is the next head, or the first head of the next query.
    """

    batch: Int32
    kv_head: Int32
    group: Int32
    inverse: Float32  # 1 / group
    token: Int32
    head: Int32
    rows: Int32  # not positive where a pair's second tile lies behind the last query
    seq: Sequence
    blocks: KeyBlocks
    first: Int32
    stop: Int32

    @property
    def masked(self) -> Int32:
        """How many steps visit blocks with keys that some row must not see. They come first."""
        return self.blocks.full + self.blocks.steps - self.blocks.full_end

    def block(self, step: Int32) -> Int32:
        """The block of a step: right edge, left edge and sink tokens, then all that every row sees."""
        b, masked = self.blocks, self.masked
        behind = cutlass.select_(step < masked, step + b.full_end - b.full, step - masked + b.full)
        return b.block(cutlass.select_(step < b.full, step, behind))

    def token_and_head(self, row: Int32) -> tuple:
        """Query and query head of a row of the tile."""
        token, head = advance(self.head + row, self.group, self.inverse)
        return self.token + token, self.kv_head * self.group + head

    def position(self, row: Int32) -> Int32:
        return self.seq.shift + self.token_and_head(row)[0]


class DenseSequences(Fixed):
    """Those of a dense batch over caches (B, Hkv, S, D): ``multi_schedule.Sequences``."""

    one_tile = True

    def __init__(self, config: Any):
        self.c = config

    def count(self, ins: Any) -> Int32:
        return Int32(ins.q.shape[0])

    def kv_heads(self, ins: Any) -> Int32:
        return Int32(ins.k.shape[1])

    def batch(self, b: Int32) -> Int32:
        return b

    def group(self, ins: Any) -> tuple[Int32, Float32]:
        group = quotient(Int32(ins.q.shape[2]), Int32(ins.k.shape[1]))
        return group, cute.arch.rcp_approx(Float32(group))

    @cute.jit
    def sequence(self, ins: Any, scalars: Any, b: Int32):
        """Lengths outside of what the caches hold are cut off."""
        keys, tokens = Int32(ins.k.shape[2]), Int32(ins.q.shape[1])
        end = cutlass.max(cutlass.min(Int32(ins.kv_len[b]), keys), Int32(0))
        start = Int32(0)
        if scalars.has_start != 0:
            start = cutlass.max(cutlass.min(Int32(ins.kv_start[b]), keys), Int32(0))
        return Sequence(Int32(0), tokens, end - tokens, start, end)

    def _row_tiles(self, ins: Any) -> Int32:
        """Clusters that the rows of a KV head need, each for its keys or a part of them."""
        rows = Int32(ins.q.shape[1]) * (Int32(ins.q.shape[2]) // Int32(ins.k.shape[1]))
        return (rows + (self.c.cluster_rows - 1)) // self.c.cluster_rows

    def clusters(self, ins: Any) -> Int32:
        return self._row_tiles(ins) * self.kv_heads(ins) * self.count(ins)

    @cute.jit
    def work_tile(self, ins: Any, scalars: Any):
        """Later rows come first."""
        c = self.c
        rank, tile = cute.arch.block_in_cluster_idx()[0], Uint32(cute.arch.cluster_idx()[0])
        row_tiles, heads = Uint32(self._row_tiles(ins)), Uint32(ins.k.shape[1])
        others = tile // row_tiles
        batch = Int32(others // heads)
        place = batch, Int32(others) - batch * Int32(heads)
        begin = Int32(row_tiles - 1 - (tile - others * row_tiles)) * c.cluster_rows
        seq = self.sequence(ins, scalars, batch)
        whole = row_tile(c, seq, place, self.group(ins), begin, c.cluster_rows, MaskRules.of(scalars))
        return part_of_cluster(c, whole, rank, scalars.ctas), batch, True


def row_tile(
    c,
    seq: Sequence,
    place: tuple[Int32, Int32],
    group: tuple[Int32, Float32],
    begin: Int32,
    span: int,
    rules: MaskRules,
) -> WorkTile:
    """The ``span`` rows of a sequence from row ``begin`` on, all steps of them; ``place`` is (batch, KV head).

    ``group`` is how many query heads share the KV head, and 1 over that.
    """
    heads, inverse = group
    left = seq.tokens * heads - begin
    token = quotient(begin, heads)
    rest = begin - token * heads
    last = token + advance(rest + cutlass.min(left, span) - 1, heads, inverse)[0]
    blocks = key_blocks(seq, seq.shift + token, seq.shift + last, c.tile_n, rules)
    return WorkTile(*place, heads, inverse, token, rest, left, seq, blocks, Int32(0), blocks.steps)


def part_of_cluster(c, tile: WorkTile, rank: Int32, ctas: Int32) -> WorkTile:
    """What CTA ``rank`` of a cluster has of its rows: of a pair one tile with all keys, else all rows with a split of
    the keys, where the first CTAs have one block more if they do not divide evenly."""
    if c.pair:
        more, head = advance(tile.head + rank * c.tile_m, tile.group, tile.inverse)
        left = tile.rows - rank * c.tile_m
        return tile._replace(token=tile.token + more, head=head, rows=cutlass.min(left, c.tile_m))
    steps = tile.blocks.steps
    each = quotient(steps, ctas)
    extra = steps - each * ctas
    first = rank * each + cutlass.min(rank, extra)
    stop = first + each + cutlass.select_(rank < extra, Int32(1), Int32(0))
    return tile._replace(rows=cutlass.min(tile.rows, c.tile_m), first=first, stop=stop)


def quotient(n: Int32, by: Int32) -> Int32:
    """Of numbers that are not negative: without a sign, a division takes fewer instructions."""
    return Int32(Uint32(n) // Uint32(by))


def advance(heads: Int32, group: Int32, inverse: Float32) -> tuple:
    """``heads`` divided by ``group``, and the rest. In floats: exact below 2^20, and a fifth of the instructions."""
    token = Int32((Float32(heads) + 0.5) * inverse)
    return token, heads - token * group


def key_blocks(seq: Sequence, first: Int32, last: Int32, tile_n: int, rules: MaskRules) -> KeyBlocks:
    """The blocks of ``tile_n`` keys that the queries at positions first to last need; rules are known at the call."""
    causal = rules.causal != 0
    sinks_end = cutlass.min(seq.start + rules.sink_tokens, cutlass.select_(causal, last + 1, seq.end))
    sinks_end = cutlass.select_(rules.sink_tokens > 0, cutlass.min(sinks_end, seq.end), Int32(0))
    # Sink tokens may lie behind the window of early queries: the near part then reaches to their end.
    reach = cutlass.select_(causal, last + 1, cutlass.max(last + rules.window, sinks_end))
    full_reach = first + cutlass.select_(causal, Int32(1), rules.window)
    low = cutlass.max(seq.start, first - rules.window + 1)
    return cover(
        seq.start,
        (low, cutlass.max(low, last - rules.window + 1)),
        (cutlass.min(seq.end, full_reach), cutlass.min(seq.end, reach)),
        sinks_end,
        tile_n,
    )


class RowBounds(NamedTuple):
    """The keys of a lane's two rows: [lows, highs), and sink tokens from ``start`` to ``sinks_ends``."""

    lows: tuple
    highs: tuple
    start: Int32
    sinks_ends: tuple


def row_bounds(seq: Sequence, positions: tuple, rules: MaskRules) -> RowBounds:
    causal = rules.causal != 0
    ends = [cutlass.select_(causal, cutlass.min(seq.end, p + 1), seq.end) for p in positions]
    return RowBounds(
        lows=tuple(cutlass.max(seq.start, p - rules.window + 1) for p in positions),
        highs=tuple(
            cutlass.min(e, cutlass.select_(causal, e, p + rules.window)) for e, p in zip(ends, positions, strict=True)
        ),
        start=seq.start,
        sinks_ends=tuple(cutlass.min(seq.start + rules.sink_tokens, e) for e in ends),
    )
