"""Barriers of a CTA: mbarrier pipelines, named barriers, and cluster barriers."""

from __future__ import annotations

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda.ring import Fixed, Ring
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.smem import Region

from .config import CONSUMER_THREADS, CONSUMERS, HALVES, LOADERS, STAGING_TILES, Config
from .plan import SIDES


class NamedBarrier(IntEnum):
    """IDs; 0 is __syncthreads. WARPGROUP + i is consumer warpgroup i's own."""

    CONSUMERS = 1
    WARPGROUP = 2


class PairedRing(Ring):
    """Ring that two CTAs advance in lock step: each fills half of a slot in both, consumers of both release it."""

    def release(self, n: Int32) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.slot(n))
            cute.arch.mbarrier_arrive(self.empty + self.slot(n), paired_cta())


class Barriers(Fixed):
    """All mbarriers. Phases count from kernel start across work tiles; the K/V ring has two slots a tile (half of the
    columns each), the P rings one slot per warpgroup."""

    def __init__(self, config: Config, shared: Int32):
        c = self.c = config
        at = self.first = cute.make_ptr(
            cutlass.Int64, c.shared.barriers.at(shared), cute.AddressSpace.smem, assumed_align=8
        )
        self.query = Ring(at, at + 1, 1)
        slots = HALVES * c.stages
        self.tiles = (PairedRing if c.sides == SIDES else Ring)(at + 2, at + 2 + slots, slots)
        at += 2 + 2 * slots
        self.probabilities = [Ring(at + half, at + HALVES + half, 1) for half in range(HALVES)]
        at += 2 * HALVES
        self.staged = at  # rows of a warp and staging tile have arrived
        at += STAGING_TILES * LOADERS * c.bulk
        # Split KV: peers' partials have arrived; every consumer of the cluster is done with Q.
        self.received, self.read = at, at + 1

    def init(self, ctas: Int32) -> None:
        """One thread; ``ctas`` share a work tile."""
        for i, count in enumerate(self.c.arrivals):
            cute.arch.mbarrier_init(self.first + i, count)
        if self.c.split_kv:
            cute.arch.mbarrier_init(self.read, ctas * CONSUMERS)

    @cute.jit
    def arrive_query_read(self, ctas: Int32):
        """This warp is done with Q, whose memory peers may overwrite. Once per kernel."""
        cute.arch.cluster_wait()  # peers' mbarriers are initialised
        lane = cute.arch.lane_idx()
        if lane < ctas:
            cute.arch.mbarrier_arrive(self.read, peer(self.c, lane))

    def wait_query_read(self) -> None:
        """Wait until every consumer warp of the cluster is done with Q."""
        cute.arch.mbarrier_wait(self.read, 0)

    def mask(self, shared: Int32) -> cute.Tensor:
        """(stages, 4) words: bit i of word w is set if key 4 i + w of a tile is valid."""
        pointer = cute.make_ptr(Int32, self.c.shared.masks.at(shared), cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout((self.c.stages, LOADERS), stride=(LOADERS, 1)))

    def info(self, shared: Int32) -> cute.Tensor:
        """(2): the work tile's number of K/V tiles; whether this CTA is the last of the clusters that share its
        rows."""
        pointer = cute.make_ptr(Int32, self.c.shared.info.at(shared), cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(2))


def rank(config: Config) -> Int32:
    """Rank among the cluster's CTAs with the same heads."""
    return cute.arch.block_in_cluster_idx()[0] // config.sides


def peer(config: Config, rank: Int32) -> Int32:
    """CTA of the cluster with the same heads and the given rank."""
    return rank * config.sides + cute.arch.block_in_cluster_idx()[0] % config.sides


def paired_cta() -> Int32:
    """CTA of the cluster with the same keys and the other head block."""
    return cute.arch.block_in_cluster_idx()[0] ^ 1


def sync_consumers() -> None:
    """Named barrier of both consumer warpgroups."""
    cute.arch.barrier(barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=CONSUMER_THREADS)


def sync_cluster() -> None:
    """Cluster barrier of all threads; makes shared-memory writes visible to peers."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def by_head(region: Region, shared: Int32) -> cute.Tensor:
    """(64 heads, 2) floats of shared memory."""
    pointer = cute.make_ptr(Float32, region.at(shared), cute.AddressSpace.smem, assumed_align=8)
    return cute.make_tensor(pointer, cute.make_layout((HEADS, 2), stride=(2, 1)))
