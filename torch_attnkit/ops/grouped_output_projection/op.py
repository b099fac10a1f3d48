"""grouped_output_projection: each group of heads through its own matrix, as ``tgk,grk->tgr`` of o and wo_a.

format "none": o and wo_a are in the model dtype, Ko = K. "nvfp4" and "mxfp4": both are E2M1 pairs (Ko = K/2 bytes) with
block scales along K, linear (Tq, G, K/block) and (G, R, K/block), or per group in the 128x4 layout,
(G, ceil128(Tq), ceil4(K/block)) and (G, ceil128(R), ceil4(K/block)): what inverse_rope_fp4 returns. o_global and
wo_global are the numbers that o and wo_a were multiplied by (nvfp4 only; None is 1). Products and sums in fp32, one
rounding at the store to ``dtype``; its default is the model dtype, and float32 where both operands are bytes.
Source: the grouped output projection of DeepSeek-V4 (arXiv 2606.19348).
"""

import torch

from torch_attnkit.core import Kernel, Op
from torch_attnkit.core.op import Call, Predicate, Shards, of_dtypes
from torch_attnkit.core.spec import short
from torch_attnkit.kernels import batched_gemm
from torch_attnkit.oracle import fp4, meanings, shards


def _dtypes(c: Call) -> bool:
    """The dtypes of o and wo_a that go with the format. Raises TypeError, as the table does."""
    for name in ("o", "wo_a"):
        dtype = getattr(c.arg, name).dtype
        if (short(dtype) == "u8") != (c.arg.format != "none"):
            accepted = f"accepted with format {c.arg.format!r}: {short(c.dtype) if c.arg.format == 'none' else 'u8'}"
            raise TypeError(f"{c.op}: {name} is {short(dtype)}, {accepted}")
    return fp4.scale_dtypes("o_scale", "wo_scale")(c)


_METAL: dict[str, Predicate] = {
    "fewer than 2^16 groups": lambda c: c.dim["G"] < 2**16,
    "fewer than 2^22 tokens and rows of wo_a": lambda c: max(c.dim["Tq"], c.dim["R"]) < 2**22,
    "fewer than 2^30 numbers in a row": lambda c: c.dim["Ko"] < 2**29,
}

OP = Op(
    schema="grouped_output_projection(Tensor o, Tensor wo_a, Tensor? o_scale=None, Tensor? wo_scale=None,"
    " Tensor? o_global=None, Tensor? wo_global=None, *, str format='none', str scale_layout='linear',"
    " ScalarType? dtype=None) -> Tensor out",
    dims={
        "o": "Tq G Ko:T|u8",
        "wo_a": "G R Ko:T|u8",
        "o_scale": f"Tq G Ks:{fp4.SCALE}",
        "wo_scale": f"G R Ks:{fp4.SCALE}",
        "o_global": ":f32",
        "wo_global": ":f32",
        "out": "Tq G R:@dtype",
    },
    meaning=meanings.take(
        meanings.FP4,
        "scale_layout",
        o="Rows of each group of heads: numbers with format 'none', E2M1 pairs along K with the others.",
        wo_a="The matrix of each group, coded as o is.",
        o_scale="Scales of o, one per block of K, as bytes or the 8-bit float of format, in the order of scale_layout;"
        " None with format 'none'.",
        wo_scale="Scales of wo_a, as o_scale has them.",
        o_global="What o was multiplied by before it was coded, above 0 up to 2^115; None is 1. For format 'nvfp4'"
        " only.",
        wo_global="What wo_a was multiplied by before it was coded, as o_global says it.",
        format="How o and wo_a are stored: 'none' as numbers, 'nvfp4' as E2M1 under an E4M3 scale per 16, 'mxfp4' under"
        " a UE8M0 scale per 32.",
        dtype="Dtype of out, a floating point type; None is that of o, and float32 where o is coded.",
        out="Product of each token's row with the matrix of its group, accumulated in float32 and rounded once.",
    ),
    axes=meanings.axes(
        "PTq",
        Tq="tokens",
        G="groups of heads",
        R="rows of a group's matrix",
        Ko="elements of a row: K numbers, or K / 2 bytes of coded ones",
        Ks="scales of a row",
        PKs="Ks rounded up to 4",
        PR="R rounded up to 128",
        blk="numbers under one scale: 16 of nvfp4, 32 of mxfp4, 0 of none",
    ),
    # blk: numbers under one scale: 16 (nvfp4), 32 (mxfp4), 0 (none).
    derive={"blk": lambda c: fp4.BLOCK.get(c.arg.format, 0)},
    layouts={
        "o_scale": fp4.swizzled(f"G PTq PKs:{fp4.SCALE}"),
        "wo_scale": fp4.swizzled(f"G PR PKs:{fp4.SCALE}"),
    },
    choices={"format": ("none", "nvfp4", "mxfp4"), "scale_layout": fp4.LAYOUTS},
    where={
        "dtypes of the format": _dtypes,
        "format 'none' takes no scales, formats 'nvfp4' and 'mxfp4' need o_scale and wo_scale": lambda c: (
            (c.arg.o_scale is None) == (c.arg.wo_scale is None) == (c.arg.format == "none")
        ),
        "o_global and wo_global are accepted with format 'nvfp4' only": lambda c: (
            c.arg.format == "nvfp4" or (c.arg.o_global is None and c.arg.wo_global is None)
        ),
        "scale_layout must be 'linear' with format 'none'": lambda c: (
            c.arg.format != "none" or c.arg.scale_layout == "linear"
        ),
        "K = 2 * Ko must be a multiple of the block of format, 16 for nvfp4, 32 for mxfp4": lambda c: (
            c.dim["blk"] == 0 or 2 * c.dim["Ko"] % c.dim["blk"] == 0
        ),
        "o_scale and wo_scale must be (Tq, G, K/block) and (G, R, K/block), in the 128x4 layout (G, Tq, K/block) and"
        " (G, R, K/block) rounded up to multiples of 128 and 4": lambda c: (
            c.dim["blk"] == 0
            or (fp4.scale_fits(c, "Tq", "Ks", 2 * c.dim["Ko"]) and fp4.scale_fits(c, "R", "Ks", 2 * c.dim["Ko"]))
        ),
    }
    | fp4.DTYPE,
    features=fp4.SWIZZLED | {"global_scale": lambda c: c.arg.o_global is not None or c.arg.wo_global is not None},
    shards=(
        Shards("G"),
        Shards("Tq", needs=shards.LINEAR),
        Shards("R", needs=shards.LINEAR),
    ),
    apart="Tq",
    varies=dict.fromkeys(("cuda", "mps"), "which kernel takes a token follows from how many there are"),
    kernels=(
        Kernel(
            "cpu",
            "f32 f16 bf16",
            needs={
                "format must be 'none'": of_dtypes(lambda c: c.arg.format == "none"),
                "dtype must be float32, float16 or bfloat16": lambda c: c.arg.dtype != torch.float64,
            },
        ),
        Kernel(
            "cuda",
            "bf16 f16",
            needs={
                "format must be 'none'": of_dtypes(lambda c: c.arg.format == "none"),
                "dtype must be bfloat16 or float16": lambda c: c.arg.dtype in (None, torch.bfloat16, torch.float16),
                "fewer than 2^16 groups": lambda c: c.dim["G"] < 2**16,
                "fewer than 2^22 tokens": lambda c: c.dim["Tq"] < 2**22,
            },
            launcher=batched_gemm.NVIDIA,
        ),
        Kernel(
            "sm90",
            "bf16 f16",
            features="swizzled global_scale",
            needs={
                "format must be 'nvfp4' or 'mxfp4'": of_dtypes(lambda c: c.arg.format != "none"),
                "dtype must be bfloat16 or float16": lambda c: c.arg.dtype in (torch.bfloat16, torch.float16),
                "fewer than 2^16 groups": lambda c: c.dim["G"] < 2**16,
                "fewer than 2^22 tokens and rows of wo_a": lambda c: max(c.dim["Tq"], c.dim["R"]) < 2**22,
                "fewer than 2^33 numbers in a group": lambda c: max(c.dim["Tq"], c.dim["R"]) * c.dim["Ko"] < 2**32,
            },
            launcher=batched_gemm.NVIDIA,
        ),
        Kernel(
            "sm80 sm89 sm100 sm120",
            "bf16 f16 f32",
            features="swizzled global_scale",
            needs={
                "format must be 'nvfp4' or 'mxfp4'": of_dtypes(lambda c: c.arg.format != "none"),
                "dtype must be float32, bfloat16 or float16": lambda c: c.arg.dtype != torch.float64,
                "fewer than 2^16 groups": lambda c: c.dim["G"] < 2**16,
                "fewer than 2^22 tokens and rows of wo_a": lambda c: max(c.dim["Tq"], c.dim["R"]) < 2**22,
                "fewer than 2^33 numbers in a group": lambda c: max(c.dim["Tq"], c.dim["R"]) * c.dim["Ko"] < 2**32,
            },
            launcher=batched_gemm.NVIDIA,
        ),
        Kernel(
            "mps",
            "bf16 f16",
            needs={
                "format must be 'none'": of_dtypes(lambda c: c.arg.format == "none"),
                "dtype must be bfloat16 or float16": lambda c: c.arg.dtype in (None, torch.bfloat16, torch.float16),
            }
            | _METAL,
        ),
        Kernel(
            "mps",
            "bf16 f16",
            features="swizzled global_scale",
            needs={
                "format must be 'nvfp4' or 'mxfp4'": of_dtypes(lambda c: c.arg.format != "none"),
                "dtype must be bfloat16 or float16": lambda c: c.arg.dtype in (torch.bfloat16, torch.float16),
            }
            | _METAL,
        ),
    ),
)
