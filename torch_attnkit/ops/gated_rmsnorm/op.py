"""gated_rmsnorm: RMS norm of y over the last axis, times a weight, times silu of a gate z.

``out = w * y * rsqrt(mean(y^2) + eps) * silu(z)``, all in float32 with one rounding at the store. The norm
comes before the gate. y is the float32 output of a linear attention's state, or in the model dtype like z and
out; w is in either. Any number of batch axes, none included, and any N.
Source: MetalTile ``gated_rmsnorm``; the output norm of Gated DeltaNet (arXiv 2412.06464), as in Qwen3-Next.
"""

import math

from torch_attnkit.core import Kernel, Op
from torch_attnkit.core.op import Shards
from torch_attnkit.kernels import norm
from torch_attnkit.oracle import meanings

OP = Op(
    schema="gated_rmsnorm(Tensor y, Tensor z, Tensor w, *, float eps=1e-6) -> Tensor out",
    dims={"y": "... N:f32|T", "z": "... N", "w": "N:T|f32", "out": "... N"},
    meaning=meanings.take(
        meanings.HEADS,
        "eps",
        y="Rows to be normed, in float32 or the dtype of z.",
        z="Gate of each number: silu(z) multiplies the norm.",
        w="Weight of each channel.",
        out="w * y / sqrt(mean(y^2) + eps) * silu(z), computed in float32 and rounded once to the dtype of z.",
    ),
    axes=meanings.axes("N"),
    where={
        "N must be at least 1": lambda c: c.dim["N"] > 0,
        "eps must be positive": lambda c: c.arg.eps > 0,
    },
    shards=(Shards("..."),),
    backward="gated_rmsnorm_backward",
    apart="...",
    kernels=(
        Kernel("cpu", "f32 f16 bf16"),
        Kernel(
            "cuda",
            "bf16 f16 f32",
            needs={"fewer than 2^31 rows": lambda c: math.prod(c.batch) < 2**31},
            launcher=norm.NVIDIA,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            needs={"fewer than 2^27 rows": lambda c: math.prod(c.batch) < 2**27},
            launcher=norm.METAL,
        ),
    ),
)
