"""What the roles of the Blackwell decode kernel are given, and what they pass on."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from torch_attnkit.cuda.stream_k import Partition

from .config import Tcgen05Config


class Loads(NamedTuple):
    """The TMA atoms and the tensors of coordinates that go with them; ``v`` is not used where V is K."""

    k_atom: cute.CopyAtom
    k: cute.Tensor  # (S, D, Hkv, B), or over pages (Ps, D, Hkv, Np)
    v_atom: cute.CopyAtom
    v: cute.Tensor


class Products(NamedTuple):
    scores: cute.TiledMma
    output: cute.TiledMma


class Layouts(NamedTuple):
    """Of shared memory, stages last. K, V and the boxes of a load are the same bytes."""

    q: cute.ComposedLayout  # ((N, K), 1, part / K, parts), where K is 32 bytes
    k: cute.ComposedLayout  # ((128, K), 1, part / K, stages)
    v: cute.ComposedLayout  # ((part, K), 1, 128 / K, stages)
    p: cute.ComposedLayout  # ((N, K), 1, 128 / K, 1)
    boxes: cute.ComposedLayout  # (box, columns, boxes of all stages)


class CtaTile(NamedTuple):
    """A cluster's work tile as one CTA has it: ``tiles`` tiles of its group, every ``step``-th from ``first`` on."""

    b: Int32
    kv_head: Int32
    head: Int32  # of the CTA's heads the first
    heads: Int32  # of them, none where the group is narrower than the cluster's heads
    first: Int32
    step: Int32
    tiles: Int32
    row: Int32  # the first of the CTA's heads that the CTA combines
    rows: Int32  # of them


class Cta(NamedTuple):
    """Where a CTA stands: its heads and its share of the keys, of ``splits``; and how the work is cut (``Partition``).

    Numbers that warps keep in shared memory are flat: hence the entries of ``Partition`` one by one.
    """

    side: Int32
    split: Int32
    splits: Int32
    rank: Int32  # in the cluster
    cluster: Int32
    clusters: Int32
    total: Int32
    blocks: Int32
    each: Int32
    extra: Int32

    @property
    def cut(self) -> Partition:
        return Partition(self.total, self.blocks, self.each, self.extra)


class Next(NamedTuple):
    """Where the loop over work tiles goes on, and what of the one that ends is needed then."""

    at: Int32
    stop: Int32
    before: Int32
    sequence: Int32
    n: Int32
    with_tiles: Int32
    odd: Int32
    whole: Int32
    start: Int32
    tiles: Int32


# Fills of the ring are in the order of use, K and V of a tile apart by the next tile's K. ``n`` tiles were before the
# work tile, which has tile i.
def key_fill(config: Tcgen05Config, n: Int32, i: Int32) -> Int32:
    c = config
    return c.parts * (n + i) if c.same else c.parts * (n + i) + c.value_parts * (n + cutlass.max(i - 1, 0))


def value_fill(config: Tcgen05Config, n: Int32, i: Int32, tiles: Int32) -> Int32:
    c = config
    return c.parts * (n + i) if c.same else c.parts * (n + cutlass.min(i + 2, tiles)) + c.value_parts * (n + i)
