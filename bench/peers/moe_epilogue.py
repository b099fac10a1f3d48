"""The SiLU form of SwiGLU as a function that triton_kernels' product calls on its accumulator."""

import triton
import triton.language as tl


@triton.jit(repr=lambda _: "_silu_of_pairs")
def silu_of_pairs(accumulator, limit):
    """Columns of gate and up in turn to half as many; gate <= limit, -limit <= up <= limit."""
    pairs = tl.reshape(accumulator, (accumulator.shape[0], accumulator.shape[1] // 2, 2))
    gate, up = tl.split(pairs)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1 + tl.exp(-gate)) * up
