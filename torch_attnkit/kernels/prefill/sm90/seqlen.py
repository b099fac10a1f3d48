"""Where sequences lie, and which of their rows and blocks of keys are a work tile that all query heads of a KV head
share (PackGQA): in a cache, in pages, in a dense batch, or packed.

A kernel's ``Sequences`` number the work tiles of a launch for its scheduler, and find rows and keys for the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from torch_attnkit.cuda.ring import Fixed

from ..key_blocks import KeyBlocks, Sequence, cover, dense
from ..types import Inputs, Outputs
from .config import CacheInputs, Config, GroupScalars, PagedInputs, RowInputs, RowOutputs
from .mask import MaskRules

_LANES = 32


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


class Sequences(Protocol):
    """Where a kernel's sequences are, for its loader and its consumers. Each scheduler has methods of its own, which
    say which tiles there are. By a tile's ``kv_index`` its keys are found: the number of its sequence, or the key, or
    row of k, from which its blocks count."""

    key_modes: tuple[int, ...]  # the axes of k and v that become (S, D, Hkv), and B if there is one

    def keys(self, t: cute.Tensor, tile: WorkTile, kv_index: Int32) -> cute.Tensor: ...  # of a tile, (S, D)
    def rows(self, ins: Any, outs: Any, tile: WorkTile, kv_index: Int32) -> tuple[Any, RowOutputs]: ...


class CacheSequences(Fixed):
    """Those of a batch over caches (B, Hkv, S, D), whose queries end where their keys do; kv_index is a sequence."""

    one_tile, key_modes = True, (2, 3, 1, 0)

    def __init__(self, config: Config):
        self.c = config

    def count(self, ins: CacheInputs) -> Int32:
        return Int32(ins.q.shape[0])

    def kv_heads(self, ins: CacheInputs) -> Int32:
        return Int32(ins.k.shape[1])

    def batch(self, b: Int32) -> Int32:
        return b

    def group(self, ins: CacheInputs) -> tuple[Int32, Float32]:
        return _group_of(Int32(ins.q.shape[2]), Int32(ins.k.shape[1]))

    @cute.jit
    def sequence(self, ins: CacheInputs, scalars: GroupScalars, b: Int32):
        """Lengths outside of what the caches hold are cut off."""
        keys, tokens = Int32(ins.k.shape[2]), Int32(ins.q.shape[1])
        end = cutlass.max(cutlass.min(Int32(ins.kv_len[b]), keys), Int32(0))
        start = Int32(0)
        if scalars.has_start != 0:
            start = cutlass.max(cutlass.min(Int32(ins.kv_start[b]), keys), Int32(0))
        return Sequence(Int32(0), tokens, end - tokens, start, end)

    def _row_tiles(self, ins: CacheInputs) -> Int32:
        """Clusters that the rows of a KV head need, each for its keys or a part of them."""
        rows = Int32(ins.q.shape[1]) * (Int32(ins.q.shape[2]) // Int32(ins.k.shape[1]))
        return (rows + (self.c.tile_rows - 1)) // self.c.tile_rows

    def clusters(self, ins: CacheInputs) -> Int32:
        return self._row_tiles(ins) * self.kv_heads(ins) * self.count(ins)

    @cute.jit
    def cluster_tile(self, ins: CacheInputs, scalars: GroupScalars):
        """Later rows come first."""
        c = self.c
        rank, tile = cute.arch.block_in_cluster_idx()[0], Uint32(cute.arch.cluster_idx()[0])
        row_tiles, heads = Uint32(self._row_tiles(ins)), Uint32(ins.k.shape[1])
        others = tile // row_tiles
        batch = Int32(others // heads)
        head = Int32(others) - batch * Int32(heads)
        begin = Int32(row_tiles - 1 - (tile - others * row_tiles)) * c.tile_rows
        seq = self.sequence(ins, scalars, batch)
        whole = row_tile(c, seq, (batch, head), self.group(ins), begin, c.tile_rows, MaskRules.of(scalars))
        return part_of_cluster(c, whole, rank, scalars.ctas), batch, True

    def keys(self, t: cute.Tensor, tile: WorkTile, kv_index: Int32) -> cute.Tensor:
        return t[None, None, tile.kv_head, tile.batch]

    def rows(
        self, ins: CacheInputs, outs: RowOutputs, tile: WorkTile, kv_index: Int32
    ) -> tuple[CacheInputs, RowOutputs]:
        return ins, outs


class PagedSequences(Fixed):
    """Those of packed queries over pages, and one of what lies behind the last; kv_index is a sequence's number."""

    one_tile = False

    def __init__(self, config: Config):
        self.c = config

    def count(self, ins: PagedInputs) -> Int32:
        return Int32(ins.cu_q.shape[0])

    def kv_heads(self, ins: PagedInputs) -> Int32:
        return Int32(ins.k.shape[2])

    def batch(self, b: Int32) -> Int32:
        return Int32(0)

    def group(self, ins: PagedInputs) -> tuple[Int32, Float32]:
        return _group_of(Int32(ins.q.shape[1]), Int32(ins.k.shape[2]))

    def sequence(self, ins: PagedInputs, scalars: GroupScalars | None, b: Int32) -> Sequence:
        """Offsets and lengths outside of the tensors are cut off. What lies behind the last is one without keys."""
        return _paged_sequence(self.c, ins, b)

    def max_tiles(self, ins: PagedInputs) -> Int32:
        """Of all KV heads."""
        heads = self.kv_heads(ins)
        group = Int32(self.c.group) if self.c.group else Int32(ins.q.shape[1]) // heads
        return _max_tiles(Int32(ins.q.shape[0]), group, self.count(ins), self.c.tile_rows) * heads

    clusters = max_tiles

    @cute.jit
    def cluster_tile(self, ins: PagedInputs, scalars: GroupScalars):
        index = cute.arch.cluster_idx()[0]
        whole, b, valid = self.nth_tile(ins, MaskRules.of(scalars), None, index)
        return part_of_cluster(self.c, whole, cute.arch.block_in_cluster_idx()[0], scalars.ctas), b, valid

    @cute.jit
    def nth_tile(self, ins: PagedInputs, rules: MaskRules, section: Any, index: Int32):
        """Later rows of a sequence come first: they see more keys."""
        heads, tile_rows = Int32(ins.k.shape[2]), self.c.tile_rows
        slot = quotient(index, heads)
        kv_head = index - slot * heads
        group = self.group(ins)
        b, number = _sequence_of(ins.cu_q, group[0], slot, tile_rows)
        seq = self.sequence(ins, None, b)
        begin, valid = _first_row(seq, group[0], number, tile_rows)
        return row_tile(self.c, seq, (Int32(0), kv_head), group, begin, tile_rows, rules), b, valid

    def queries_from(self, q: cute.Tensor, tile: WorkTile) -> cute.Tensor:
        return _packed_queries_from(q, tile)

    def rows(self, ins: PagedInputs, outs: RowOutputs, tile: WorkTile, kv_index: Int32) -> tuple[RowInputs, RowOutputs]:
        """A tile's sequence as a dense batch of one; what lies behind the last has that one's scales."""
        q0, scales = tile.seq.q0, None
        if ins.scales is not None:
            known = cutlass.min(kv_index, Int32(ins.kv_len.shape[0]) - 1)
            scales = tuple(cute.domain_offset((known, 0), scale) for scale in ins.scales)
        return RowInputs(_rows_from(ins.q, q0), ins.sink, scales), RowOutputs(*(_rows_from(t, q0) for t in outs))


class DenseSequences(Fixed):
    """Those of a dense batch, (B, T, Hq, D) and (B, S, Hkv, D); kv_index is the key that a tile's blocks count from.

    Tiles of heads whose keys share the L2 follow one another, from the last rows, which a causal mask leaves most keys,
    to the first.
    """

    key_modes = (1, 3, 2, 0)

    def __init__(self, config: Config):
        self.c = config

    def queries_from(self, q: cute.Tensor, tile: WorkTile) -> cute.Tensor:
        return cute.domain_offset((0, tile.token, 0), q[None, None, None, tile.kv_head, tile.batch])

    def _row_tiles(self, ins: Inputs) -> Int32:
        return (Int32(ins.q.shape[1]) * self.c.group + (self.c.tile_rows - 1)) // self.c.tile_rows

    def max_tiles(self, ins: Inputs) -> Int32:
        return self._row_tiles(ins) * Int32(ins.k.shape[2]) * Int32(ins.k.shape[0])

    def nth_tile(self, ins: Inputs, rules: MaskRules, section: Int32, index: Int32) -> tuple:
        heads, row_tiles = Int32(ins.k.shape[2]), self._row_tiles(ins)
        of_section = row_tiles * section
        before = quotient(index, of_section)
        inside = index - before * of_section
        width = cutlass.min(section, heads * Int32(ins.k.shape[0]) - before * section)
        rank = quotient(inside, width)
        pair = before * section + inside - rank * width
        batch = quotient(pair, heads)
        begin = (row_tiles - 1 - rank) * self.c.tile_rows
        origin, seq = _from_window(self.c, dense(self.c, ins, batch), begin, rules)
        tile = row_tile(self.c, seq, (batch, pair - batch * heads), fixed_group(self.c), begin, self.c.tile_rows, rules)
        return tile, origin, tile.rows > 0

    def keys(self, t: cute.Tensor, tile: WorkTile, kv_index: Int32) -> cute.Tensor:
        return cute.domain_offset((kv_index, 0), t[None, None, tile.kv_head, tile.batch])

    def rows(self, ins: Inputs, outs: Outputs, tile: WorkTile, kv_index: Int32) -> tuple[Inputs, RowOutputs]:
        return ins, RowOutputs(outs.out, outs.lse)


class PackedSequences(Fixed):
    """(T, Hq, D) and (S, Hkv, D), found by offsets; kv_index is the row of k from which a tile's blocks count."""

    key_modes = (0, 2, 1)

    def __init__(self, config: Config):
        self.c = config

    def queries_from(self, q: cute.Tensor, tile: WorkTile) -> cute.Tensor:
        return _packed_queries_from(q, tile)

    def max_tiles(self, ins: Inputs) -> Int32:
        tokens, offsets = Int32(ins.q.shape[0]), Int32(ins.low.shape[0])
        return _max_tiles(tokens, Int32(self.c.group), offsets, self.c.tile_rows) * Int32(ins.k.shape[1])

    def nth_tile(self, ins: Inputs, rules: MaskRules, section: Int32, index: Int32) -> tuple:
        heads, group = Int32(ins.k.shape[1]), fixed_group(self.c)
        slot = quotient(index, heads)
        b, number = _sequence_of(ins.low, group[0], slot, self.c.tile_rows)
        first, seq = self._sequence(ins, b)
        begin, valid = _first_row(seq, group[0], number, self.c.tile_rows)
        origin, seq = _from_window(self.c, seq, begin, rules)
        at = Int32(0), index - slot * heads
        return row_tile(self.c, seq, at, group, begin, self.c.tile_rows, rules), first + origin, valid

    def _sequence(self, ins: Inputs, b: Int32) -> tuple[Int32, Sequence]:
        """The first key of sequence ``b``, and the sequence; what lies behind the last is one without keys. Offsets
        outside of the tensors are cut off."""
        all_rows, all_keys = Int32(ins.q.shape[0]), Int32(ins.k.shape[0])
        last = Int32(ins.low.shape[0]) - 1
        behind = cutlass.min(b + 1, last)
        q0, k0 = _clip(ins.low[b], all_rows), _clip(ins.high[b], all_keys)
        q1 = cutlass.select_(b < last, _clip(ins.low[behind], all_rows), all_rows)
        tokens, keys = q1 - q0, cutlass.max(_clip(ins.high[behind], all_keys) - k0, Int32(0))
        return k0, Sequence(q0, tokens, keys - tokens, Int32(0), keys)

    def keys(self, t: cute.Tensor, tile: WorkTile, kv_index: Int32) -> cute.Tensor:
        return cute.domain_offset((kv_index, 0), t[None, None, tile.kv_head])

    def rows(self, ins: Inputs, outs: Outputs, tile: WorkTile, kv_index: Int32) -> tuple[Inputs, RowOutputs]:
        return ins, RowOutputs(*(_rows_from(t, tile.seq.q0) for t in (outs.out, outs.lse)))


SEQUENCES = {"dense": DenseSequences, "packed": PackedSequences, "cache": CacheSequences, "paged": PagedSequences}


# Work tiles.


def row_tile(
    c: Config, seq: Sequence, at: tuple[Int32, Int32], group: tuple[Int32, Float32], begin: Int32, tile_rows: int,
    rules: MaskRules,
) -> WorkTile:  # fmt: skip
    """The ``tile_rows`` rows of a sequence from row ``begin`` on, all steps of them; ``at`` is (batch, KV head).

    ``group`` is how many query heads share the KV head, and 1 over that.
    """
    heads, inverse = group
    left = seq.tokens * heads - begin
    token = quotient(begin, heads)
    rest = begin - token * heads
    last = token + advance(rest + cutlass.min(left, tile_rows) - 1, heads, inverse)[0]
    blocks = _blocks_of(seq, seq.shift + token, seq.shift + last, c.tile_n, rules)
    if c.in_order:  # all of them masked: those that all rows see are not left to the end
        blocks = blocks._replace(full=blocks.steps, full_end=blocks.steps)
    return WorkTile(*at, heads, inverse, token, rest, left, seq, blocks, Int32(0), blocks.steps)


def part_of_cluster(c: Config, tile: WorkTile, rank: Int32, ctas: Int32) -> WorkTile:
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


def _blocks_of(seq: Sequence, first: Int32, last: Int32, tile_n: int, rules: MaskRules) -> KeyBlocks:
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


def _from_window(c: Config, seq: Sequence, begin: Int32, rules: MaskRules) -> tuple[Int32, Sequence]:
    """The key from which the blocks of the tile at row ``begin`` count, and the sequence as seen from there.

    That is the first in a window, so that few blocks hold all that the tile sees. Sink tokens are in blocks of their
    own, which count from the first key.
    """
    if not c.window or c.sink_tokens:
        return Int32(0), seq
    origin = cutlass.max(seq.start, seq.shift + begin // c.group - rules.window + 1)
    return origin, seq._replace(shift=seq.shift - origin, start=Int32(0), end=seq.end - origin)


def quotient(n: Int32, by: Int32) -> Int32:
    """Of numbers that are not negative: without a sign, a division takes fewer instructions."""
    return Int32(Uint32(n) // Uint32(by))


def advance(heads: Int32, group: Int32, inverse: Float32) -> tuple:
    """``heads`` divided by ``group``, and the rest. In floats: exact below 2^20, and a fifth of the instructions."""
    token = Int32((Float32(heads) + 0.5) * inverse)
    return token, heads - token * group


def fixed_group(c: Config) -> tuple[Int32, Float32]:
    """Query heads that share a KV head, and 1 over that, where the kernel was compiled for their number."""
    return Int32(c.group), Float32(1 / c.group)


def _group_of(heads: Int32, kv_heads: Int32) -> tuple[Int32, Float32]:
    group = quotient(heads, kv_heads)
    return group, cute.arch.rcp_approx(Float32(group))


# Packed sequences.


def _clip(x: Int32, most: Int32) -> Int32:
    return cutlass.max(cutlass.min(Int32(x), most), Int32(0))


def _rows_from(t: cute.Tensor, q0: Int32) -> cute.Tensor:
    """A packed tensor from row ``q0`` on, with an axis for the batch in front."""
    moved = cute.domain_offset((q0, *(0 for _ in t.shape[1:])), t)
    return cute.make_tensor(moved.iterator, cute.prepend(moved.layout, cute.make_layout(1, stride=0)))


def _packed_queries_from(q: cute.Tensor, tile: WorkTile) -> cute.Tensor:
    return cute.domain_offset((0, tile.seq.q0 + tile.token, 0), q[None, None, None, tile.kv_head])


def _max_tiles(tokens: Int32, group: Int32, offsets: Int32, tile_rows: int) -> Int32:
    """Places for tiles of ``tile_rows`` rows: enough for those of all sequences and of what lies behind the last."""
    return tokens * group // tile_rows + offsets


@cute.jit
def _sequence_of(offsets: cute.Tensor, group: Int32, slot: Int32, tile_rows: cutlass.Constexpr):
    """The sequence that a slot belongs to, and the slot's number in it. A whole warp calls this.

    Sequence b begins at slot ``offsets[b] * group // tile_rows + b``, which leaves it enough without a prefix sum; some
    stay empty. The lanes look at 32 sequences at a time: the last that begins before the slot, then among those
    that follow it.
    """
    low, width = Int32(0), Int32(offsets.shape[0])
    while width > 1:
        step = (width + (_LANES - 1)) // _LANES
        i = cute.arch.lane_idx() * step
        row = Int32(offsets[low + cutlass.min(i, width - 1)])
        begun = (i < width) & (row * group // tile_rows + low + i <= slot)
        found = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(begun)) - 1, Int32(0))
        width = cutlass.min(step, width - found * step)
        low += found * step
    return low, slot - (cutlass.max(Int32(offsets[low]), 0) * group // tile_rows + low)


@cute.jit
def _paged_sequence(c: cutlass.Constexpr, ins: PagedInputs, b: Int32):
    all_rows, sequences = Int32(ins.q.shape[0]), Int32(ins.kv_len.shape[0])
    q0, inside = _clip(ins.cu_q[b], all_rows), b < sequences
    q1 = _clip(ins.cu_q[cutlass.min(b + 1, sequences)], all_rows)
    tokens = cutlass.select_(inside, q1, all_rows) - q0
    keys = Int32(ins.table.shape[1]) * c.page
    end = cutlass.select_(inside, _clip(ins.kv_len[cutlass.min(b, sequences - 1)], keys), Int32(0))
    return Sequence(q0, tokens, end - tokens, Int32(0), end)


def _first_row(seq: Sequence, group: Int32, number: Int32, tile_rows: int) -> tuple:
    """Where the ``number``-th tile of a sequence from behind begins, and whether there is one."""
    tiles = (seq.tokens * group + (tile_rows - 1)) // tile_rows
    valid = (seq.tokens > 0) & (number >= 0) & (number < tiles)
    return cutlass.select_(valid, (tiles - 1 - number) * tile_rows, Int32(0)), valid
