"""A CuTeDSL kernel of one's own in the simulator: its race is found, with the line, and the fixed kernel is judged.

The kernel adds up 128 numbers. Each of four warps adds up its part and leaves it in shared memory; the last thread adds
up the four. Its author has forgotten the barrier between the two. The plain schedule lets the last warp come last, so
that a test of the result passes, as it may on a GPU. A checked run finds the race whatever the result is, and says
where; hostile schedules show that it matters. With the barrier all of them are right.

    python examples/find_a_race.py

It needs Linux and ``pip install 'torch_attnkit[sim]'``, and no GPU.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch

from torch_attnkit.sim import ptx

WARPS, LANES = 4, 32
THREADS = WARPS * LANES
SEEDS = range(1, 9)  # schedules in which warps run in an order that is legal and hostile


@cute.kernel
def add_up_kernel(out: cute.Tensor, x: cute.Tensor, fixed: cutlass.Constexpr):
    thread = cute.arch.thread_idx()[0]
    parts = cutlass.memory.SmemAllocator().allocate_tensor(
        cutlass.Float32, cute.make_layout(WARPS), byte_alignment=16
    )  # (WARPS,)
    part = cute.arch.warp_reduction_sum(x[thread])
    if thread % LANES == 0:
        parts[thread // LANES] = part
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    if thread == THREADS - 1:
        out[0] = parts[0] + parts[1] + parts[2] + parts[3]


@cute.jit
def add_up(out: cute.Tensor, x: cute.Tensor, fixed: cutlass.Constexpr):
    add_up_kernel(out, x, fixed).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


def right(kernel: Any, x: torch.Tensor, **settings: Any) -> bool:
    """Whether the sum is right in a run under these settings; integers add up exactly."""
    out = torch.zeros(1)
    ptx.run(kernel, out, x, **settings)
    return bool(out[0] == x.sum())


def main() -> None:
    x = torch.randint(1, 100, (THREADS,), generator=torch.Generator().manual_seed(0)).float()
    hasty, fixed = (ptx.compile(add_up, torch.zeros(1), x, flag, arch="sm90") for flag in (False, True))

    print("a plain run is right:", right(hasty, x))
    try:
        right(hasty, x, check=True)
    except ptx.CheckError as error:
        print("a checked run finds:", *str(error).splitlines()[:6], sep="\n  ")
    else:
        raise AssertionError("the race was not found")
    print(f"hostile schedules that are right: {sum(right(hasty, x, seed=s) for s in SEEDS)} of {len(SEEDS)}")

    judged = [right(fixed, x, check=True, seed=s) for s in (0, *SEEDS)]
    print(f"fixed, checked runs that are right: {sum(judged)} of {len(judged)}")
    assert all(judged)


if __name__ == "__main__":
    main()
