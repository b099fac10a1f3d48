"""Which rows of a packed batch a CTA works on when all query heads of a KV head share a tile, and a sequence's keys lie
in pages."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda.ring import Fixed

from ..blocks import Sequence
from .multi_blocks import MaskRules, part_of_cluster, quotient, row_tile

_LANES = 32


def slots(tokens: Int32, group: Int32, offsets: Int32, span: int) -> Int32:
    """Places for tiles of ``span`` rows: enough for those of all sequences and of what lies behind the last."""
    return tokens * group // span + offsets


def all_slots(c, ins, span: int) -> Int32:
    """Those of all KV heads."""
    heads = Int32(ins.k.shape[2])
    group = Int32(c.group) if c.group else Int32(ins.q.shape[1]) // heads
    return slots(Int32(ins.q.shape[0]), group, Int32(ins.cu_q.shape[0]), span) * heads


def rows_from(t: cute.Tensor, q0: Int32) -> cute.Tensor:
    """A packed tensor from row ``q0`` on, with an axis for the batch in front."""
    moved = cute.domain_offset((q0, *(0 for _ in t.shape[1:])), t)
    return cute.make_tensor(moved.iterator, cute.prepend(moved.layout, cute.make_layout(1, stride=0)))


@cute.jit
def sequence_of(offsets: cute.Tensor, group: Int32, slot: Int32, span: cutlass.Constexpr):
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


@cute.jit
def sequence(c: cutlass.Constexpr, ins, b: Int32):
    """Sequence ``b``; offsets and lengths outside of the tensors are cut off. What lies behind the last is one without
    keys."""
    all_rows, sequences = Int32(ins.q.shape[0]), Int32(ins.kv_len.shape[0])
    clip = lambda x, most: cutlass.max(cutlass.min(Int32(x), most), Int32(0))
    q0, inside = clip(ins.cu_q[b], all_rows), b < sequences
    q1 = clip(ins.cu_q[cutlass.min(b + 1, sequences)], all_rows)
    tokens = cutlass.select_(inside, q1, all_rows) - q0
    keys = Int32(ins.table.shape[1]) * c.page
    end = cutlass.select_(inside, clip(ins.kv_len[cutlass.min(b, sequences - 1)], keys), Int32(0))
    return Sequence(q0, tokens, end - tokens, Int32(0), end)


def group_of(ins) -> tuple[Int32, Float32]:
    """Query heads that share a KV head, and 1 over that."""
    group = quotient(Int32(ins.q.shape[1]), Int32(ins.k.shape[2]))
    return group, cute.arch.rcp_approx(Float32(group))


@cute.jit
def tile_of(c: cutlass.Constexpr, ins, rules: MaskRules, index: Int32, span: cutlass.Constexpr):
    """The rows of one slot and KV head, all steps of them, the number of their sequence, and whether there are any.

    Later rows of a sequence come first: they see more keys.
    """
    heads = Int32(ins.k.shape[2])
    slot = quotient(index, heads)
    kv_head = index - slot * heads
    group = group_of(ins)
    b, number = sequence_of(ins.cu_q, group[0], slot, span)
    seq = sequence(c, ins, b)
    begin, there = first_row(seq, group[0], number, span)
    return row_tile(c, seq, (Int32(0), kv_head), group, begin, span, rules), b, there


def first_row(seq: Sequence, group: Int32, number: Int32, span: int) -> tuple:
    """Where the ``number``-th tile of a sequence from behind begins, and whether there is one."""
    tiles = (seq.tokens * group + (span - 1)) // span
    there = (seq.tokens > 0) & (number >= 0) & (number < tiles)
    return cutlass.select_(there, (tiles - 1 - number) * span, Int32(0)), there


class PackedSequences(Fixed):
    """Those of a packed batch over pages, and one of what lies behind the last: ``multi_schedule.Sequences``."""

    one_tile = False

    def __init__(self, config: Any):
        self.c, self.group = config, group_of

    def count(self, ins: Any) -> Int32:
        return Int32(ins.cu_q.shape[0])

    def kv_heads(self, ins: Any) -> Int32:
        return Int32(ins.k.shape[2])

    def batch(self, b: Int32) -> Int32:
        return Int32(0)

    def sequence(self, ins: Any, scalars: Any, b: Int32) -> Sequence:
        return sequence(self.c, ins, b)

    def clusters(self, ins: Any) -> Int32:
        heads = self.kv_heads(ins)
        group = Int32(ins.q.shape[1]) // heads
        return slots(Int32(ins.q.shape[0]), group, self.count(ins), self.c.cluster_rows) * heads

    @cute.jit
    def work_tile(self, ins: Any, scalars: Any):
        c, index = self.c, cute.arch.cluster_idx()[0]
        whole, b, there = tile_of(c, ins, MaskRules.of(scalars), index, c.cluster_rows)
        return part_of_cluster(c, whole, cute.arch.block_in_cluster_idx()[0], scalars.ctas), b, there
