"""inverse_rope_fp4: attention output, rotated back to position 0 and quantised to FP4 for grouped_output_projection.

The last 2 * R2 channels of every head are interleaved pairs (a, b) and become (a cos + b sin, b cos - a sin) in fp32,
rounded to the model dtype; the channels before them are copied. Then each head is quantised along D as nvfp4_quantize
(with ``global_scale``) or mxfp4_quantize (rounding "ceil") does. Codes are (Tq, Hq, D/2). Scales are linear,
(Tq, Hq, D/block), or in the 128x4 layout one matrix for each of ``groups`` runs of Hq / groups heads,
(groups, ceil128(Tq), ceil4(Hq * D / groups / block)), padding 0; ``groups`` matters for this layout only.
Source: the output projection of DeepSeek-V4 (arXiv 2606.19348); RoFormer (arXiv 2104.09864).
"""

import math

from torch_attnkit.core import Kernel, Op
from torch_attnkit.core.op import Call, Shards
from torch_attnkit.formats.scale_layout import padded_shape
from torch_attnkit.kernels import fp4 as kernels
from torch_attnkit.oracle import fp4, meanings, shards


def _padded(c: Call) -> tuple[int, int]:
    """The size of one group's scales in the 128x4 layout; groups of 0 is refused later, by its rule."""
    return padded_shape(c.dim["Tq"], c.dim["Hq"] * c.dim["D"] // max(c.arg.groups, 1) // c.dim["blk"])


OP = Op(
    schema="inverse_rope_fp4(Tensor o, Tensor cos, Tensor sin, Tensor? global_scale=None, *, int groups=1,"
    " str format='nvfp4', str scale_layout='linear') -> (Tensor codes, Tensor scale)",
    dims={
        "o": "Tq Hq D",
        "cos": "Tq R2:f32|T",
        "sin": "Tq R2:f32|T",
        "global_scale": ":f32",
        "codes": "Tq Hq D/2:u8",
        "scale": "Tq Hq Ds:u8",
    },
    meaning=meanings.take(
        meanings.FP4,
        "scale_layout codes",
        o="Output of attention; the last 2 * R2 channels of each head are rotated back to position 0 before all are"
        " coded.",
        global_scale="Factor of the numbers before they are coded, as in nvfp4_quantize, for format 'nvfp4' only; None"
        " is 1.",
        groups="Runs of Hq / groups heads whose scales are one matrix each in the 128x4 layout, a divisor of Hq; with"
        " 'linear' it changes nothing.",
        format="'nvfp4' has an E4M3 scale per 16 numbers, 'mxfp4' a UE8M0 scale per 32, rounded up.",
        scale="A scale per block of a head, as bytes, in the order of scale_layout; padding is 0.",
    )
    | meanings.take(meanings.HEADS, "cos sin"),
    axes=meanings.axes("Hq R2 Ds Gs PTq PDs blk", Tq="tokens", D="channels of a head"),
    layouts={"scale": fp4.swizzled("Gs PTq PDs:u8")},
    derive={
        "blk": lambda c: fp4.BLOCK[c.arg.format],  # numbers under one scale: 16 (nvfp4) or 32 (mxfp4)
        "Ds": lambda c: c.dim["D"] // c.dim["blk"],
        "Gs": lambda c: c.arg.groups,
        "PTq": lambda c: _padded(c)[0],
        "PDs": lambda c: _padded(c)[1],
    },
    choices={"format": ("nvfp4", "mxfp4"), "scale_layout": fp4.LAYOUTS},
    where={
        "D must be a multiple of the block of format, 16 for nvfp4, 32 for mxfp4": lambda c: (
            c.dim["D"] % c.dim["blk"] == 0
        ),
        "cos and sin must have at most D/2 columns, one per rotated pair": lambda c: 2 * c.dim["R2"] <= c.dim["D"],
        "groups must be at least 1 and divide Hq": lambda c: c.arg.groups >= 1 and c.dim["Hq"] % c.arg.groups == 0,
        "global_scale is accepted with format 'nvfp4' only": lambda c: (
            c.arg.format == "nvfp4" or c.arg.global_scale is None
        ),
    },
    features=fp4.SWIZZLED | {"global_scale": lambda c: c.arg.global_scale is not None},
    shards=(Shards("Tq", needs=shards.LINEAR), Shards("Hq", needs=shards.LINEAR)),
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="swizzled global_scale",
            needs={
                "cos and sin must be of one dtype": lambda c: c.arg.cos.dtype == c.arg.sin.dtype,
                "fewer than 2^30 scales, with the padding of the 128x4 layout": lambda c: (
                    max(math.prod(_padded(c)) * c.arg.groups, c.dim["Tq"] * c.dim["Hq"] * c.dim["Ds"]) < 2**30
                ),
            },
            launcher=kernels.NVIDIA_ROPE,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="swizzled global_scale",
            needs={
                "cos and sin must be of one dtype": lambda c: c.arg.cos.dtype == c.arg.sin.dtype,
                "fewer than 2^29 scales, with the padding of the 128x4 layout": lambda c: (
                    max(math.prod(_padded(c)) * c.arg.groups, c.dim["Tq"] * c.dim["Hq"] * c.dim["Ds"]) < 2**29
                ),
            },
            launcher=kernels.METAL_ROPE,
        ),
    ),
)
