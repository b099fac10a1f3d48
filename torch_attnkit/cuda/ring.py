"""Ring buffers in shared memory: TMA fills a stage, consumer warps release it; a full and an empty mbarrier each."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32


class Fixed:
    """An object that a traced loop reads but never changes: CuTeDSL does not carry its fields through iterations."""

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> "Fixed":
        return self


class Ring(Fixed):
    """``stages`` buffers with one producer warp; ``n`` counts fills from the kernel's start, stage and phase follow
    from it.

    A power of two of stages is best: index arithmetic between a wait and the next product delays the product. With
    ``pair`` each CTA of a cluster fills half of a stage in both, and consumers of both CTAs release it.
    """

    def __init__(self, full: cute.Pointer, empty: cute.Pointer, stages: int, pair: bool = False):
        self.full, self.empty, self.stages, self.pair = full, empty, stages, pair

    def slot(self, n: Int32) -> Int32:
        if self.stages & (self.stages - 1):
            return Int32(Uint32(n) % self.stages)
        return n & (self.stages - 1)

    def phase(self, n: Int32) -> Int32:
        if self.stages & (self.stages - 1):
            return Int32(Uint32(n) // self.stages) & 1
        return (n >> (self.stages.bit_length() - 1)) & 1

    def await_empty(self, n: Int32) -> cute.Pointer:
        """Producer: wait until the stage of fill ``n`` is released; returns its full barrier."""
        cute.arch.mbarrier_wait(self.empty + self.slot(n), self.phase(n) ^ 1)
        return self.full + self.slot(n)

    def acquire(self, n: Int32, nbytes: int) -> cute.Pointer:
        """Producer: ``await_empty``, and set the bytes that the full barrier expects."""
        full = self.await_empty(n)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, nbytes)
        return full

    def wait(self, n: Int32) -> None:
        cute.arch.mbarrier_wait(self.full + self.slot(n), self.phase(n))

    def release(self, n: Int32) -> None:
        """Consumer: each consumer warp arrives at the empty barrier once it has read fill ``n``."""
        with cute.arch.elect_one():
            if self.pair:
                for rank in (0, 1):
                    cute.arch.mbarrier_arrive(self.empty + self.slot(n), rank)
            else:
                cute.arch.mbarrier_arrive(self.empty + self.slot(n))


@cute.jit
def rings(memory: Any, warp: Int32, table: cutlass.Constexpr) -> dict[str, Ring]:
    """Rings in newly allocated shared memory, by name; warp 0 initialises them.

    A line of the table: name, stages, and how many arrivals complete a phase of the full and of the empty barriers.
    """
    named = {}
    for name, stages, full, empty in table:
        bars = [memory.allocate_array(cutlass.Int64, stages) for _ in range(2)]
        ring = Ring(*bars, stages)
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(ring.full + i, full)
                    cute.arch.mbarrier_init(ring.empty + i, empty)
        named[name] = ring
    return named
