"""nvfp4_quantize: numbers to NVFP4, E2M1 pairs under an E4M3 scale per 16 along the last axis.

``global_scale`` multiplies: block scale = e4m3(amax / 6 * global_scale), element = e2m1(x * global_scale / scale), ties
to even; 448 * 6 / amax(x) uses the whole range, None is 1. ``scale`` is (..., K/16), or with scale_layout "128x4" the
scales of all rows of x as one matrix in the order of block-scaled tensor cores, padded with zeros to multiples of
(128, 4). Element 2i lies in the low nibble of byte i. NaN gives +6, infinities saturate. A global scale of 0, infinity
or NaN, as that quotient is for infinite, zero or NaN numbers, gives what these operations give: zeros, 6 under scales
of 448, and where 0 meets infinity or NaN anything, scales of NaN.
Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149); cuBLAS, "1D block scaling factors".
"""

import math

from torch_attnkit.core import Kernel, Op
from torch_attnkit.formats.scale_layout import padded_shape
from torch_attnkit.kernels import fp4 as kernels
from torch_attnkit.oracle import fp4, meanings, shards

OP = Op(
    schema="nvfp4_quantize(Tensor x, Tensor? global_scale=None, *, str scale_layout='linear')"
    " -> (Tensor codes, Tensor scale)",
    dims={"x": "... K", "global_scale": ":f32", "codes": "... K/2:u8", "scale": "... K/16:u8"},
    meaning=meanings.take(
        meanings.FP4,
        "codes scale_layout",
        x="Numbers to be coded, in blocks of 16 along the last axis. NaN becomes +6, infinities saturate.",
        global_scale="Factor of x before it is coded, at best 448 * 6 / amax(x); None is 1. Accepted are 0 to 2^115,"
        " infinity and NaN: 0 gives zeros, infinity 6 under scales of 448, NaN scales of NaN.",
        scale="An E4M3 scale per 16 numbers, as bytes in the order of scale_layout; padding is 0.",
    ),
    axes=meanings.axes("Ms Ks", K="numbers of a row"),
    layouts={"scale": fp4.swizzled("Ms Ks:u8")},
    derive={
        "Ms": lambda c: padded_shape(math.prod(c.batch), c.dim["K"] // 16)[0],
        "Ks": lambda c: padded_shape(math.prod(c.batch), c.dim["K"] // 16)[1],
    },
    where={"K, the last axis of x, must be a multiple of 16": lambda c: c.dim["K"] % 16 == 0},
    choices={"scale_layout": fp4.LAYOUTS},
    features=fp4.SWIZZLED | {"global_scale": lambda c: c.arg.global_scale is not None},
    shards=shards.BLOCKS,
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="swizzled global_scale",
            needs={
                "fewer than 2^30 scales, with the padding of the 128x4 layout": lambda c: (
                    math.prod(padded_shape(math.prod(c.batch), c.dim["K"] // 16)) < 2**30
                )
            },
            launcher=kernels.NVIDIA_QUANTIZE,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="swizzled global_scale",
            needs={
                "fewer than 2^29 scales, with the padding of the 128x4 layout": lambda c: (
                    math.prod(padded_shape(math.prod(c.batch), c.dim["K"] // 16)) < 2**29
                )
            },
            launcher=kernels.METAL_QUANTIZE,
        ),
    ),
)
