"""Which rows of a packed batch a CTA works on when all query heads of a KV head share a tile, and a sequence's keys lie
in pages."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..blocks import Sequence
from .multi_blocks import MaskRules, WorkTile, advance, key_blocks

_LANES = 32


def slots(tokens: Int32, group: Int32, offsets: Int32, span: int) -> Int32:
    """Places for tiles of ``span`` rows: enough for those of all sequences and of what lies behind the last."""
    return tokens * group // span + offsets


@cute.jit
def _sequence_of(offsets: cute.Tensor, group: Int32, slot: Int32, span: cutlass.Constexpr):
    """The sequence that a slot belongs to, and the slot's number in it. A whole warp calls this.

    Sequence b begins at slot ``offsets[b] * group // span + b``, which leaves it enough of them without a prefix sum;
    some stay empty. The lanes look at 32 sequences at a time: the last that begins before the slot, then among those
    that follow it.
    """
    low, width = Int32(0), Int32(offsets.shape[0])
    while width > 1:
        step = (width + (_LANES - 1)) // _LANES
        i = cute.arch.lane_idx() * step
        row = Int32(offsets[low + cutlass.min(i, width - 1)])
        begun = (i < width) & (row * group // span + low + i <= slot)
        found = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(begun)) - 1, Int32(0))
        width = cutlass.min(step, width - found * step)
        low += found * step
    return low, slot - (cutlass.max(Int32(offsets[low]), 0) * group // span + low)


def _share(steps: Int32, rank: Int32, ctas: Int32) -> tuple[Int32, Int32]:
    """The blocks of keys of a cluster's CTA: where they do not divide evenly, the first ones have one more."""
    each = Int32(Uint32(steps) // Uint32(ctas))
    extra = steps - each * ctas
    first = rank * each + cutlass.min(rank, extra)
    return first, first + each + cutlass.select_(rank < extra, Int32(1), Int32(0))


@cute.jit
def work_tile(c: cutlass.Constexpr, ins, scalars, rules: MaskRules, span: cutlass.Constexpr):
    """What this CTA computes, the number of its sequence, and whether the slot of this cluster holds a tile at all.

    Later rows of a sequence come first: they see more keys. Offsets and lengths outside of the tensors are cut off.
    What lies behind the last sequence is one without keys.
    """
    rank, index = cute.arch.block_in_cluster_idx()[0], Uint32(cute.arch.cluster_idx()[0])
    heads = Uint32(ins.k.shape[2])
    slot = Int32(index // heads)
    kv_head = Int32(index) - slot * Int32(heads)
    group = Int32(Uint32(ins.q.shape[1]) // heads)
    all_rows, sequences = Int32(ins.q.shape[0]), Int32(ins.kv_len.shape[0])
    b, local = _sequence_of(ins.cu_q, group, slot, span)
    clip = lambda x, most: cutlass.max(cutlass.min(Int32(x), most), Int32(0))
    q0, inside = clip(ins.cu_q[b], all_rows), b < sequences
    q1 = clip(ins.cu_q[cutlass.min(b + 1, sequences)], all_rows)
    tokens = cutlass.select_(inside, q1, all_rows) - q0
    keys = Int32(ins.table.shape[1]) * c.page
    end = cutlass.select_(inside, clip(ins.kv_len[cutlass.min(b, sequences - 1)], keys), Int32(0))
    tiles = (tokens * group + (span - 1)) // span
    begin = (tiles - 1 - local) * span
    there = (tokens > 0) & (local >= 0) & (local < tiles)
    inverse = cute.arch.rcp_approx(Float32(group))
    begin = cutlass.select_(there, begin, Int32(0))
    left = tokens * group - begin
    token = Int32(Uint32(begin) // Uint32(group))
    rest = begin - token * group
    seq = Sequence(q0, tokens, end - tokens, Int32(0), end)
    last = token + advance(rest + cutlass.min(left, span) - 1, group, inverse)[0]
    blocks = key_blocks(seq, seq.shift + token, seq.shift + last, c.tile_n, rules)
    first, stop = Int32(0), blocks.steps
    if cutlass.const_expr(c.pair):
        more, rest = advance(rest + rank * c.tile_m, group, inverse)
        token += more
        left -= rank * c.tile_m
    else:
        first, stop = _share(blocks.steps, rank, scalars.ctas)
    rows = cutlass.min(left, c.tile_m)
    return WorkTile(Int32(0), kv_head, group, inverse, token, rest, rows, seq, blocks, first, stop), b, there
