"""What a CTA of the Blackwell decode kernel has: operands of its launch, its place in the work, and shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm100 import tmem
from torch_attnkit.cuda.stream_k import Partition
from torch_attnkit.cuda.warp_ops import thread_index

from ..schedule import Visible
from .config import PRODUCT_WARP, SOFTMAX_THREADS, THREADS, Tcgen05Config

T = TypeVar("T")


class Loads(NamedTuple):
    """The TMA atoms and the tensors of coordinates that go with them; ``v`` is not used where V is K."""

    k_atom: cute.CopyAtom
    k: cute.Tensor  # (S, D, Hkv, B), or over pages (Ps, D, Hkv, Np)
    v_atom: cute.CopyAtom
    v: cute.Tensor


class TiledMmas(NamedTuple):
    """Of S' = K Q' and of O' = V' P'."""

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

    What warps keep in shared memory is flat: hence the entries of ``Partition`` one by one.
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


class NextTile(NamedTuple):
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


class PerWarp(Fixed, Generic[T]):
    """A tuple of scalars of which each warp has a copy in shared memory, where it costs the softmax no registers."""

    def __init__(self, kind: type[T], sValues: cute.Tensor):
        self.kind, self.sValues = kind, sValues  # (fields, warps)

    def put(self, values: T) -> None:
        warp = thread_index() >> 5
        with cute.arch.elect_one():
            for i, value in enumerate(values):
                self.sValues[i, warp] = value
        cute.arch.sync_warp()

    def get(self) -> T:
        warp = thread_index() >> 5
        got = self.kind(*(self.sValues[i, warp] for i in range(len(self.kind._fields))))
        cute.arch.sync_warp()
        return got


@dataclass
class Memory(Fixed):
    """Barriers, the ring, and tensors in shared memory; ``*_at`` are addresses."""

    # mbarriers
    query: cute.Pointer  # full: Q
    scores: cute.Pointer  # one for each buffer of S'
    values: cute.Pointer  # full: a tile of V, unless V is K
    probabilities: cute.Pointer  # full: P', and O' rescaled to it
    output: cute.Pointer  # full: O'
    ring: Ring
    # from one work tile to the next
    cta: PerWarp[Cta]
    next: PerWarp[NextTile]
    tile: PerWarp[CtaTile]
    keys: PerWarp[Visible]
    flag_at: Int32  # is-last-CTA
    # operands
    query_at: Int32
    p_at: Int32
    ring_at: Int32
    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sP: cute.Tensor
    sBoxes: cute.Tensor
    # statistics of the softmax
    sShift: cute.Tensor  # (heads), what is added to a head's scores, in powers of two
    sChange: cute.Tensor  # (heads), of the shift, in this tile
    sFactor: cute.Tensor  # (heads), two to that
    sWarps: cute.Tensor  # (heads * 4), maxima or sums of the four warps
    # results, which the cluster reads
    sStat: cute.Tensor  # (heads * 2), a work tile's row_max and row_sum
    sO: cute.Tensor  # (heads * Dv)


@cute.jit
def allocate(config: cutlass.Constexpr, layouts: Layouts, warp: Int32):
    """Lay out shared memory, initialise the mbarriers and allocate tensor memory; a cluster barrier must follow."""
    c = config
    memory = cutlass.memory.SmemAllocator()
    large = memory.allocate(c.shared.nbytes, 1024).toint()
    query_at, p_at, ring_at = c.shared.query.at(large), c.shared.probabilities.at(large), c.shared.ring.at(large)

    def staged(at: Int32, layout: cute.ComposedLayout) -> cute.Tensor:
        pointer = cute.make_ptr(c.dtype, at, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=c.dtype), layout.outer)

    def floats(count: int) -> cute.Tensor:
        return memory.allocate_tensor(Float32, cute.make_layout(count), 16)

    def per_warp(kind: Any) -> Any:
        return PerWarp(kind, memory.allocate_tensor(Int32, cute.make_layout((len(kind._fields), THREADS // 32)), 16))

    cta, upcoming, tile, keys = per_warp(Cta), per_warp(NextTile), per_warp(CtaTile), per_warp(Visible)
    # How many there are, and how many arrivals complete a phase.
    counts = {
        "query": (1, 1), "scores": (2, 1), "values": (1, 1), "probabilities": (1, SOFTMAX_THREADS // 32),
        "output": (1, 1),
    }  # fmt: skip
    single = {name: memory.allocate_array(cutlass.Int64, stages) for name, (stages, _) in counts.items()}
    ring = Ring(*(memory.allocate_array(cutlass.Int64, c.stages) for _ in range(2)), c.stages)
    flag_at, base = memory.allocate(16, 16).toint(), memory.allocate(4, 4)
    if warp == 0:
        with cute.arch.elect_one():
            for name, (stages, arrivals) in counts.items():
                for i in range(stages):
                    cute.arch.mbarrier_init(single[name] + i, arrivals)
            for i in range(c.stages):
                cute.arch.mbarrier_init(ring.full + i, 1)
                cute.arch.mbarrier_init(ring.empty + i, c.sides)
    if warp == PRODUCT_WARP:
        cute.arch.alloc_tmem(tmem.COLUMNS, cute.recast_ptr(base, dtype=Int32))
    rows = cute.make_ptr(Float32, c.shared.results.at(large), cute.AddressSpace.smem, assumed_align=16)
    return Memory(
        **single,
        ring=ring,
        cta=cta,
        next=upcoming,
        tile=tile,
        keys=keys,
        flag_at=flag_at,
        query_at=query_at,
        p_at=p_at,
        ring_at=ring_at,
        sQ=staged(query_at, layouts.q),
        sK=staged(ring_at, layouts.k),
        sV=staged(ring_at, layouts.v),
        sP=staged(p_at, layouts.p),
        sBoxes=staged(ring_at, layouts.boxes),
        sShift=floats(c.heads),
        sChange=floats(c.heads),
        sFactor=floats(c.heads),
        sWarps=floats(c.heads * 4),
        sStat=floats(c.heads * 2),
        sO=cute.make_tensor(rows, cute.make_layout(c.heads * c.dim_v)),
    )


# The ring is filled in the order of use: K(0), K(1), V(0), K(2), V(1) ... ``n`` tiles precede the work tile of tile i.
def key_fill(config: Tcgen05Config, n: Int32, i: Int32) -> Int32:
    c = config
    return c.parts * (n + i) if c.same else c.parts * (n + i) + c.value_parts * (n + cutlass.max(i - 1, 0))


def value_fill(config: Tcgen05Config, n: Int32, i: Int32, tiles: Int32) -> Int32:
    c = config
    return c.parts * (n + i) if c.same else c.parts * (n + cutlass.min(i + 2, tiles)) + c.value_parts * (n + i)
