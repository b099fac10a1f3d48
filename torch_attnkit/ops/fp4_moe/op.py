"""fp4_moe: routed experts, each a gated MLP with FP4 weights, as one op from tokens to their weighted sum.

For token t and its k-th expert e: ``[gate, up] = w13[e] x[t] + bias13[e]``, ``h = swiglu(gate, up)``,
``y = w2[e] h + bias2[e]``, ``out[t] = sum_k weights[t, k] y``, in fp32 with one rounding at the store; h is rounded to
the model dtype. An index of -1 is no expert: it adds nothing, whatever its weight. What belongs
to experts that no token chooses is not looked at.

Weights are E2M1 pairs along the contracted axis with the scales of ``format``, linear (E, rows, columns/block) or per
expert in the 128x4 layout, zero-padded to multiples of (128, 4). An NVFP4 weight is element * scale / global, one
global number per expert; None is 1. Rows of w13 are [gate; up] halves, or gate and up in turn with ``interleaved``.
``swiglu``: gate <= limit, -limit <= up <= limit (None: unbounded), then "silu" gate * sigmoid(gate) * up, "gptoss"
gate * sigmoid(alpha * gate) * (up + 1). ``activations``: x and h (instead of its rounding to the model dtype) are
quantised along their last axis from their float32 values and multiplied as the numbers read back: "nvfp4" with
x_global and h_global, "mxfp4" and "mxfp8" (E4M3) with scales 2^ceil(log2(amax / largest element)) per 32.
Source: the experts of DeepSeek-V4 (arXiv 2606.19348), GPT-OSS (OpenAI, 2025) and Qwen3; GLU, arXiv 2002.05202.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.core.op import Shards
from torch_attnkit.kernels import grouped_gemm
from torch_attnkit.kernels.grouped_gemm import metal
from torch_attnkit.kernels.grouped_gemm.problem import MOST_EXPERTS
from torch_attnkit.oracle import fp4, meanings, shards

_ALL = "swizzled gptoss limit interleaved bias global_scale"
ACTIVATIONS = ("none", "nvfp4", "mxfp4", "mxfp8")

_SM90 = {
    "rows and experts of w13 and w2 must start at multiples of 8 bytes": lambda c: all(
        step % 8 == 0 for w in (c.arg.w13, c.arg.w2) for step in w.stride()[:2]
    ),
    f"E must be at most {MOST_EXPERTS}": lambda c: c.dim["E"] <= MOST_EXPERTS,
}
_SM100 = {
    "N and M must be multiples of 32": lambda c: c.dim["N"] % 32 == 0 and c.dim["M"] % 32 == 0,
    "rows and experts of w13 and w2 must start at multiples of 16 bytes": lambda c: all(
        step % 16 == 0 for w in (c.arg.w13, c.arg.w2) for step in w.stride()[:2]
    ),
    f"E must be at most {MOST_EXPERTS}": lambda c: c.dim["E"] <= MOST_EXPERTS,
}

OP = Op(
    schema="fp4_moe(Tensor x, Tensor weights, Tensor indices, Tensor w13, Tensor w13_scale, Tensor w2,"
    " Tensor w2_scale, Tensor? w13_global=None, Tensor? w2_global=None, Tensor? bias13=None, Tensor? bias2=None,"
    " Tensor? x_global=None, Tensor? h_global=None, *, str format='nvfp4', str activations='none',"
    " str swiglu='silu', float alpha=1.702, float? limit=None, bool interleaved=False,"
    " str scale_layout='linear') -> Tensor out",
    dims={
        "x": "Tq N",
        "weights": "Tq K:f32",
        "indices": "Tq K:i32|i64",
        "w13": "E M2 N/2:u8",
        "w13_scale": f"E M2 Ns:{fp4.SCALE}",
        "w2": "E N M/2:u8",
        "w2_scale": f"E N Ms:{fp4.SCALE}",
        "w13_global": "[E]:f32",
        "w2_global": "[E]:f32",
        "bias13": "E M2",
        "bias2": "E N",
        "x_global": ":f32",
        "h_global": ":f32",
        "out": "Tq N",
    },
    meaning=meanings.take(
        meanings.FP4,
        "scale_layout",
        x="Tokens that go into the experts.",
        weights="Factor of each chosen expert's output.",
        indices="Chosen experts of each token, 0 to E - 1; -1 is none and adds nothing, whatever its weight.",
        w13="First matrix of each expert, E2M1 pairs along N: its rows are gate and up, one half each or in turn"
        " (interleaved).",
        w13_scale="Scales of w13, one per block of N, as bytes or the 8-bit float of format, in the order of"
        " scale_layout for each expert.",
        w2="Second matrix of each expert, E2M1 pairs along M.",
        w2_scale="Scales of w2, one per block of M, as w13_scale has them.",
        w13_global="What w13 was multiplied by before it was coded: above 0 up to 2^115, for each expert or one for"
        " all; None is 1. For format 'nvfp4' only.",
        w2_global="What w2 was multiplied by before it was coded, as w13_global says it.",
        bias13="Added to gate and up, in the order of w13's rows; None adds nothing.",
        bias2="Added to each expert's output, before its weight; None adds nothing.",
        x_global="Factor of x before it is coded, above 0 up to 2^115; None is 1. For activations 'nvfp4' only.",
        h_global="Factor of h, the result of swiglu, before it is coded; otherwise as x_global.",
        format="Format of w13 and w2: 'nvfp4' has an E4M3 scale per 16 numbers, 'mxfp4' a UE8M0 scale per 32.",
        activations="What x and h are quantised to and read back from before each product; 'none' keeps the model's"
        " dtype.",
        swiglu="'silu' is gate * sigmoid(gate) * up, 'gptoss' is gate * sigmoid(alpha * gate) * (up + 1).",
        alpha="Factor inside the sigmoid of swiglu 'gptoss'; 'silu' does not look at it.",
        limit="Before swiglu gate is cut off above limit, up above limit and below -limit; None is unbounded, a number"
        " must be above 0.",
        interleaved="Whether rows of w13 and bias13 hold gate and up in turn; otherwise gate is the first half.",
        out="Sum over a token's experts of weight times output; 0 for a token without experts.",
    ),
    axes=meanings.axes(
        "E blk",
        Tq="tokens",
        K="experts of a token",
        N="channels of a token",
        M="channels inside an expert",
        M2="rows of w13, 2 * M",
        Ns="scales of a row of w13",
        Ms="scales of a row of w2",
        PM2="M2 rounded up to 128",
        PNs="Ns rounded up to 4",
        PN="N rounded up to 128",
        PMs="Ms rounded up to 4",
        act="activations by its place in none, nvfp4, mxfp4, mxfp8",
    ),
    # blk: numbers under one scale of a weight, 16 (nvfp4) or 32 (mxfp4); act: position of activations in ACTIVATIONS.
    derive={"blk": lambda c: fp4.BLOCK[c.arg.format], "act": lambda c: ACTIVATIONS.index(c.arg.activations)},
    layouts={
        "w13_scale": fp4.swizzled(f"E PM2 PNs:{fp4.SCALE}"),
        "w2_scale": fp4.swizzled(f"E PN PMs:{fp4.SCALE}"),
    },
    choices={
        "format": ("nvfp4", "mxfp4"),
        "activations": ACTIVATIONS,
        "swiglu": ("silu", "gptoss"),
        "scale_layout": fp4.LAYOUTS,
    },
    where={
        "dtypes of the scales": fp4.scale_dtypes("w13_scale", "w2_scale"),
        "w13 must have M2 = 2 * M rows, M being the numbers in a row of w2": lambda c: c.dim["M2"] == 2 * c.dim["M"],
        "N and M must be multiples of the block of format, 16 for nvfp4, 32 for mxfp4": lambda c: (
            c.dim["N"] % c.dim["blk"] == 0 and c.dim["M"] % c.dim["blk"] == 0
        ),
        "N and M must be multiples of the block of activations, 16 for nvfp4, 32 for mxfp4 and mxfp8": lambda c: (
            c.dim["N"] % fp4.BLOCK.get(c.arg.activations, 1) == 0
            and c.dim["M"] % fp4.BLOCK.get(c.arg.activations, 1) == 0
        ),
        "w13_scale must be (E, M2, N/block), in the 128x4 layout with both rounded up to multiples of 128 and 4": (
            lambda c: fp4.scale_fits(c, "M2", "Ns", c.dim["N"])
        ),
        "w2_scale must be (E, N, M/block), in the 128x4 layout with both rounded up to multiples of 128 and 4": (
            lambda c: fp4.scale_fits(c, "N", "Ms", c.dim["M"])
        ),
        "w13_global and w2_global are accepted with format 'nvfp4' only": lambda c: (
            c.arg.format == "nvfp4" or (c.arg.w13_global is None and c.arg.w2_global is None)
        ),
        "x_global and h_global are accepted with activations 'nvfp4' only": lambda c: (
            c.arg.activations == "nvfp4" or (c.arg.x_global is None and c.arg.h_global is None)
        ),
        "limit must be positive": lambda c: c.arg.limit is None or c.arg.limit > 0,
    },
    features=fp4.SWIZZLED
    | {
        "gptoss": lambda c: c.arg.swiglu == "gptoss",
        "limit": lambda c: c.arg.limit is not None,
        "interleaved": lambda c: c.arg.interleaved,
        "bias": lambda c: c.arg.bias13 is not None or c.arg.bias2 is not None,
        "global_scale": lambda c: any(
            g is not None for g in (c.arg.w13_global, c.arg.w2_global, c.arg.x_global, c.arg.h_global)
        ),
    },
    # Rows of w13 by the pairs of gate and up; experts are cut by ``integrations.distributed.ep_moe``.
    shards=(
        Shards("Tq"),
        Shards(
            "M2 M Ms", needs=shards.LINEAR | {"interleaved rows of w13": lambda c: c.arg.interleaved}, sums="out bias2"
        ),
    ),
    apart="Tq",
    kernels=(
        Kernel("sm90", "bf16 f16", {}, _ALL, _SM90, launcher=grouped_gemm.NVIDIA),
        Kernel("sm80 sm89 sm120", "bf16 f16", {}, _ALL, _SM90, launcher=grouped_gemm.NVIDIA),
        Kernel("cpu", "bf16 f16 f32", {}, _ALL),
        Kernel("mps", metal.DTYPES, {}, _ALL, launcher=grouped_gemm.METAL),
        Kernel("sm100", "bf16 f16", {}, _ALL, _SM100, launcher=grouped_gemm.NVIDIA),
    ),
)
