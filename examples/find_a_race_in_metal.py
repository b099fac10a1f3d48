"""A Metal kernel of one's own in the simulator: the race of find_a_race.py, found and fixed, on Linux or macOS.

``torch_attnkit.sim.metal.compile_shader`` takes the text that ``torch.mps.compile_shader`` takes, compiles it for the
CPU, and runs it on CPU tensors. In the checked mode it watches every access: races, bounds, memory that nobody wrote,
barriers that not all threads reach.

    python examples/find_a_race_in_metal.py

It needs ``pip install 'torch_attnkit[sim]'``, and neither a Mac nor a GPU.
"""

from __future__ import annotations

import torch

from torch_attnkit.sim import metal

THREADS = 128  # four simdgroups
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SOURCE = """
#include <metal_stdlib>
using namespace metal;

kernel void add_up(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                   uint t [[thread_index_in_threadgroup]], uint group [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float parts[4];
    float part = simd_sum(x[t]);
    if (lane == 0) parts[group] = part;
    BARRIER
    if (t == 127) out[0] = parts[0] + parts[1] + parts[2] + parts[3];
}
"""


def right(barrier: str, mode: str) -> bool:
    """Whether the kernel with this text in the barrier's place gives the sum."""
    kernel = metal.compile_shader(SOURCE.replace("BARRIER", barrier)).add_up
    x, out = torch.arange(float(THREADS)), torch.zeros(1)
    with metal.settings(mode=mode):
        kernel(x, out, threads=THREADS, group_size=THREADS)
    return bool(out[0] == x.sum())


def main() -> None:
    print("without the barrier, unchecked, the sum is right:", right("", "fast"))
    try:
        right("", "checked")
    except metal.SimulationError as error:
        print("without the barrier, checked:", error)
    else:
        raise AssertionError("the race was not found")
    fixed = right(BARRIER, "checked")
    print("with the barrier, checked, the sum is right:", fixed)
    assert fixed


if __name__ == "__main__":
    main()
