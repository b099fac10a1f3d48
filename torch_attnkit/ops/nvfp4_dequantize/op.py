"""nvfp4_dequantize: the numbers that NVFP4 codes stand for, ``element * scale / global_scale``.

``codes`` holds two E2M1 numbers a byte, the even one in the low nibble; ``scale`` an E4M3 number per 16, as bytes or
float8, linear (..., K/16) or in the 128x4 layout, where all rows of codes are one matrix padded to multiples of
(128, 4); its padding is not looked at. ``global_scale`` is the number the tensor was multiplied by, None is 1. The
quotient is rounded to float32 (float64 if that is asked for), then to ``dtype``, default float32. An element of 0 is
not divided: it is 0 under a global scale of 0, infinity or NaN, too, where the others are what the quotient is.
Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149); cuBLAS, "1D block scaling factors".
"""

import math

from torch_attnkit.core import Kernel, Op
from torch_attnkit.formats.scale_layout import padded_shape
from torch_attnkit.kernels import fp4 as kernels
from torch_attnkit.oracle import fp4, meanings, shards

OP = Op(
    schema="nvfp4_dequantize(Tensor codes, Tensor scale, Tensor? global_scale=None, *, str scale_layout='linear',"
    " ScalarType? dtype=None) -> Tensor x",
    dims={"codes": "... K/2:u8", "scale": "... K/16:u8|f8e4m3", "global_scale": ":f32", "x": "... K:@dtype"},
    meaning=meanings.take(
        meanings.FP4,
        "codes scale_layout dtype",
        scale="An E4M3 scale per 16 numbers, as bytes or float8, in the order of scale_layout; padding is not looked"
        " at.",
        global_scale="What x was multiplied by before it was coded; None is 1. Accepted are 0 to 2^115, infinity and"
        " NaN, under which an element of 0 stays 0.",
        x="element * scale / global_scale, rounded to float32 and then to dtype.",
    ),
    axes=meanings.axes("Ms Ks", K="numbers of a row"),
    layouts={"scale": fp4.swizzled("Ms Ks:u8|f8e4m3")},
    where={
        "K, two numbers a byte of codes, must be a multiple of 16": lambda c: c.dim["K"] % 16 == 0,
        "scale in the 128x4 layout must be (rows of codes, K/16) rounded up to multiples of (128, 4)": lambda c: (
            c.arg.scale_layout == "linear"
            or (c.dim["Ms"], c.dim["Ks"]) == padded_shape(math.prod(c.batch), c.dim["K"] // 16)
        ),
    }
    | fp4.DTYPE,
    choices={"scale_layout": fp4.LAYOUTS},
    features=fp4.SWIZZLED | {"global_scale": lambda c: c.arg.global_scale is not None},
    shards=shards.BLOCKS,
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="swizzled global_scale",
            needs={"fewer than 2^33 numbers": lambda c: math.prod(c.batch) * c.dim["K"] < 2**33},
            launcher=kernels.NVIDIA_DEQUANTIZE,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="swizzled global_scale",
            needs={"fewer than 2^33 numbers": lambda c: math.prod(c.batch) * c.dim["K"] < 2**33},
            launcher=kernels.METAL_DEQUANTIZE,
        ),
    ),
)
