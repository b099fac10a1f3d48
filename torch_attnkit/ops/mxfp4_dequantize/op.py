"""mxfp4_dequantize: the numbers that MXFP4 codes stand for, ``element * 2^(scale - 127)``.

``codes`` holds two E2M1 numbers a byte, the even one in the low nibble; ``scale`` a UE8M0 exponent per 32, as bytes or
float8, linear (..., K/32) or in the 128x4 layout, where all rows of codes are one matrix padded to multiples of
(128, 4); its padding is not looked at. Scale byte 255 gives NaN. The product, exact below 2^128, is rounded once to
``dtype``, default float32.
Source: OCP Microscaling Formats v1.0, section 5; cuBLAS, "1D block scaling factors layout".
"""

import math

from torch_attnkit.core import Kernel, Op
from torch_attnkit.formats.scale_layout import padded_shape
from torch_attnkit.kernels import fp4 as kernels
from torch_attnkit.oracle import fp4, meanings, shards

OP = Op(
    schema="mxfp4_dequantize(Tensor codes, Tensor scale, *, str scale_layout='linear', ScalarType? dtype=None)"
    " -> Tensor x",
    dims={"codes": "... K/2:u8", "scale": "... K/32:u8|f8e8m0", "x": "... K:@dtype"},
    meaning=meanings.take(
        meanings.FP4,
        "codes scale_layout dtype",
        scale="A UE8M0 scale per 32 numbers, 2^(byte - 127), as bytes or float8, in the order of scale_layout; 255"
        " gives NaN. Padding is not looked at.",
        x="element * scale, rounded once to dtype.",
    ),
    axes=meanings.axes("Ms Ks", K="numbers of a row"),
    layouts={"scale": fp4.swizzled("Ms Ks:u8|f8e8m0")},
    where={
        "K, two numbers a byte of codes, must be a multiple of 32": lambda c: c.dim["K"] % 32 == 0,
        "scale in the 128x4 layout must be (rows of codes, K/32) rounded up to multiples of (128, 4)": lambda c: (
            c.arg.scale_layout == "linear"
            or (c.dim["Ms"], c.dim["Ks"]) == padded_shape(math.prod(c.batch), c.dim["K"] // 32)
        ),
    }
    | fp4.DTYPE,
    choices={"scale_layout": fp4.LAYOUTS},
    features=fp4.SWIZZLED,
    shards=shards.BLOCKS,
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="swizzled",
            needs={"fewer than 2^33 numbers": lambda c: math.prod(c.batch) * c.dim["K"] < 2**33},
            launcher=kernels.NVIDIA_DEQUANTIZE,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="swizzled",
            needs={"fewer than 2^33 numbers": lambda c: math.prod(c.batch) * c.dim["K"] < 2**33},
            launcher=kernels.METAL_DEQUANTIZE,
        ),
    ),
)
