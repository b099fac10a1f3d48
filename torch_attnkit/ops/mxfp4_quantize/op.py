"""mxfp4_quantize: numbers to MXFP4, E2M1 pairs under a power of two per 32 along the last axis.

``rounding`` says which power: "ceil" 2^ceil(log2(amax / 6)), under which nothing saturates (DeepSeek, NVIDIA), "floor"
2^(floor(log2 amax) - 2), under which elements beyond 6 scales saturate (OCP). Elements round to nearest, ties to even.
``scale`` holds the biased exponents, (..., K/32), or with scale_layout "128x4" those of all rows of x as one matrix in
the order of block-scaled tensor cores, padded with zeros to multiples of (128, 4). Element 2i lies in the low nibble of
byte i. NaN gives +6; a block of zeros has scale byte 0.
Source: OCP Microscaling Formats v1.0, sections 5 and 6.3; cuBLAS, "1D block scaling factors layout".
"""

import math

from torch_attnkit.core import Kernel, Op
from torch_attnkit.formats import fp8
from torch_attnkit.formats.scale_layout import padded_shape
from torch_attnkit.kernels import fp4 as kernels
from torch_attnkit.oracle import fp4, meanings, shards

OP = Op(
    schema="mxfp4_quantize(Tensor x, *, str scale_layout='linear', str rounding='ceil')"
    " -> (Tensor codes, Tensor scale)",
    dims={"x": "... K", "codes": "... K/2:u8", "scale": "... K/32:u8"},
    meaning=meanings.take(
        meanings.FP4,
        "codes scale_layout",
        x="Numbers to be coded, in blocks of 32 along the last axis. NaN becomes +6.",
        rounding="'ceil' has scales of 2^ceil(log2(amax / 6)), under which nothing saturates; 'floor' (OCP) of"
        " 2^(floor(log2 amax) - 2), under which numbers beyond 6 scales do.",
        scale="A UE8M0 scale per 32 numbers, 2^(byte - 127), as bytes in the order of scale_layout; 0 for a block of"
        " zeros, and for padding.",
    ),
    axes=meanings.axes("Ms Ks", K="numbers of a row"),
    layouts={"scale": fp4.swizzled("Ms Ks:u8")},
    derive={
        "Ms": lambda c: padded_shape(math.prod(c.batch), c.dim["K"] // 32)[0],
        "Ks": lambda c: padded_shape(math.prod(c.batch), c.dim["K"] // 32)[1],
    },
    where={"K, the last axis of x, must be a multiple of 32": lambda c: c.dim["K"] % 32 == 0},
    choices={"scale_layout": fp4.LAYOUTS, "rounding": fp8.ROUNDINGS},
    features=fp4.SWIZZLED | {"floor": lambda c: c.arg.rounding == "floor"},
    shards=shards.BLOCKS,
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="swizzled floor",
            needs={
                "fewer than 2^30 scales, with the padding of the 128x4 layout": lambda c: (
                    math.prod(padded_shape(math.prod(c.batch), c.dim["K"] // 32)) < 2**30
                )
            },
            launcher=kernels.NVIDIA_QUANTIZE,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="swizzled floor",
            needs={
                "fewer than 2^29 scales, with the padding of the 128x4 layout": lambda c: (
                    math.prod(padded_shape(math.prod(c.batch), c.dim["K"] // 32)) < 2**29
                )
            },
            launcher=kernels.METAL_QUANTIZE,
        ),
    ),
)
