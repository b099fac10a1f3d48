"""Where the warpgroups of a CTA wait for each other."""

from __future__ import annotations

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.smem import Region

from .config import CONSUMER_THREADS, CONSUMERS, HALVES, LOADERS, STAGED, Config
from .plan import SIDES


class NamedBarrier(IntEnum):
    """Of a CTA; 0 is that of all threads."""

    CONSUMERS = 1


class SharedRing(Ring):
    """One whose buffers are filled by both sides, half and half, and emptied when consumers of both have read them."""

    def release(self, n: Int32) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.slot(n))
            cute.arch.mbarrier_arrive(self.empty + self.slot(n), other_side())


class Meeting(Fixed):
    """The mbarriers. Rings count from the kernel's start, through all work tiles: those of probabilities, one for each
    warpgroup that makes them, its own tiles; that of keys the halves of their columns, two for each tile."""

    def __init__(self, config: Config, shared: Int32):
        c = self.c = config
        at = self.first = cute.make_ptr(
            cutlass.Int64, c.shared.barriers.at(shared), cute.AddressSpace.smem, assumed_align=8
        )
        self.query = Ring(at, at + 1, 1)
        places = HALVES * c.stages
        self.tiles = (SharedRing if c.sides == SIDES else Ring)(at + 2, at + 2 + places, places)
        at += 2 + 2 * places
        self.probabilities = [Ring(at + half, at + HALVES + half, 1) for half in range(HALVES)]
        at += 2 * HALVES
        self.staged = at  # rows of a tile and a warp have come
        at += STAGED * LOADERS * c.staged
        # Where CTAs share a work tile: what others send has come; all that read Q, in all of them, are through.
        self.come, self.read = at, at + 1

    def begin(self, ctas: Int32) -> None:
        """``ctas`` share a work tile."""
        for i, count in enumerate(self.c.arrivals):
            cute.arch.mbarrier_init(self.first + i, count)
        if self.c.merge:
            cute.arch.mbarrier_init(self.read, ctas * CONSUMERS)

    @cute.jit
    def tell_read(self, ctas: Int32):
        """This warp reads Q no more: others may write there. Called once."""
        cute.arch.cluster_wait()  # the others' mbarriers stand
        lane = cute.arch.lane_idx()
        if lane < ctas:
            cute.arch.mbarrier_arrive(self.read, peer(self.c, lane))

    def await_read(self) -> None:
        """Until no CTA of the cluster reads Q."""
        cute.arch.mbarrier_wait(self.read, 0)

    def mask(self, shared: Int32) -> cute.Tensor:
        """(stages, 4) words: bit i of word w, whether key 4 i + w of a tile counts."""
        pointer = cute.make_ptr(Int32, self.c.shared.masks.at(shared), cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout((self.c.stages, LOADERS), stride=(LOADERS, 1)))

    def info(self, shared: Int32) -> cute.Tensor:
        """(2): how many tiles the work tile has; whether this CTA is the last of those that have its rows."""
        pointer = cute.make_ptr(Int32, self.c.shared.info.at(shared), cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(2))


def rank(config: Config) -> Int32:
    """Which of the CTAs of a cluster with the same heads this is."""
    return cute.arch.block_in_cluster_idx()[0] // config.sides


def peer(config: Config, rank: Int32) -> Int32:
    """The CTA of the cluster with the same heads and that rank."""
    return rank * config.sides + cute.arch.block_in_cluster_idx()[0] % config.sides


def other_side() -> Int32:
    """Which CTA of the cluster has the same keys and other heads."""
    return cute.arch.block_in_cluster_idx()[0] ^ 1


def meet() -> None:
    """All consumers."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=CONSUMER_THREADS)


def sync_cluster() -> None:
    """All threads of a cluster meet; what they wrote to shared memory is there for the others."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def by_head(region: Region, shared: Int32) -> cute.Tensor:
    """Floats of shared memory, two for each head."""
    pointer = cute.make_ptr(Float32, region.at(shared), cute.AddressSpace.smem, assumed_align=8)
    return cute.make_tensor(pointer, cute.make_layout((HEADS, 2), stride=(2, 1)))
