"""sparse_fmha_inverse_rope_fp4: sparse_fmha_with_swa, whose output goes to an FP4 projection and nowhere else.

What ``inverse_rope_fp4(sparse_fmha_with_swa(q, ...)[0], cos, sin, o_global, ...)`` gives, with the arguments of both
under their names; where both have one, ``format`` and ``global_scale`` are those of the caches, ``o_format`` and
``o_global`` those of the result. Codes are (Tq, Hq, D/2), scales linear, (Tq, Hq, D/block), or in the 128x4 layout one
matrix for each of ``groups`` runs of heads, padding 0.

What is rounded, and where: attention is accumulated in float32, and its output is rounded to q's dtype, as if it were
stored. The last 2 * R2 channels of a head are rotated back in float32, two products and a sum, each rounded, and are
rounded to q's dtype again. From there on, amax of a block, its scale and its codes are what inverse_rope_fp4 says of
these numbers, to the bit. So a code is exact for the numbers that it stands for; these are as exact as attention is,
and where one of them lies as near to the border of two codes or scales, either is right (``oracle/fp4_results.py``).
On a target where both have kernels, codes and scales are those of the two ops in sequence.

There is no lse and no ``normalize``: codes cannot be merged with other partial results; who merges takes the two ops.
Source: the output projection of DeepSeek-V4 (arXiv 2606.19348).
"""

from dataclasses import replace

from torch_attnkit.core import Op
from torch_attnkit.core.op import Call
from torch_attnkit.kernels import sparse
from torch_attnkit.ops.inverse_rope_fp4.op import OP as ROPE
from torch_attnkit.ops.sparse_fmha_with_swa.op import OP as ATTENTION
from torch_attnkit.oracle import fp4, meanings, rules, shards


def _scales(c: Call) -> int:
    """With the padding of the 128x4 layout."""
    padded = c.dim["Gs"] * c.dim["PTq"] * c.dim["PDs"]
    return max(padded, c.dim["Tq"] * c.dim["Hq"] * c.dim["Ds"])


_NEEDS = {
    "cos and sin must be of one dtype": lambda c: c.arg.cos.dtype == c.arg.sin.dtype,
    "fewer than 2^31 scales, with the padding of the 128x4 layout": lambda c: _scales(c) < 2**31,
}
_WITHOUT = {*rules.PARTIAL, *rules.UNNORMALIZED}

OP = Op(
    schema="sparse_fmha_inverse_rope_fp4(Tensor q, Tensor swa_kv, Tensor swa_end, Tensor cos, Tensor sin,"
    " Tensor? compressed_kv=None, Tensor? topk_indices=None, Tensor? compressed_len=None, Tensor? request_ids=None,"
    " Tensor? sink=None, Tensor? swa_block_table=None, Tensor? compressed_block_table=None,"
    " Tensor? global_scale=None, Tensor? o_global=None, *, float? scale=None, int window=128, str format='none',"
    " int rope_dim=64, int groups=1, str o_format='nvfp4', str scale_layout='linear')"
    " -> (Tensor codes, Tensor o_scale)",
    dims={name: ATTENTION.dims[name] for name in ATTENTION.tensors}
    | {"cos": "Tq R2:f32|T", "sin": "Tq R2:f32|T", "o_global": ":f32"}
    | {"codes": "Tq Hq D/2:u8", "o_scale": "Tq Hq Ds:u8"},
    meaning={name: ATTENTION.meaning[name] for name in ATTENTION.argnames if name != "normalize"}
    | meanings.take(
        ROPE.meaning,
        "cos sin groups scale_layout codes",
        o_format="Format of the result: 'nvfp4' has an E4M3 scale per 16 numbers, 'mxfp4' a UE8M0 scale per 32, rounded"
        " up.",
        o_global="Factor of the output before it is coded, above 0 up to 2^115, for o_format 'nvfp4' only; None is 1.",
        o_scale=ROPE.meaning["scale"],
    ),
    axes=ATTENTION.axes | meanings.axes("R2 Ds Gs PTq PDs blk"),
    layouts=ATTENTION.layouts | {"o_scale": fp4.swizzled("Gs PTq PDs:u8")},
    derive=ATTENTION.derive | ROPE.derive | {"blk": lambda c: fp4.BLOCK[c.arg.o_format]},
    choices=ATTENTION.choices | {"o_format": ROPE.choices["format"], "scale_layout": fp4.LAYOUTS},
    where={rule: ok for rule, ok in ATTENTION.where.items() if rule not in _WITHOUT}
    | {rule: ROPE.where[rule] for rule in ROPE.where if rule.startswith(("cos and sin", "groups"))}
    | {
        "D must be a multiple of the block of o_format, 16 for nvfp4, 32 for mxfp4": lambda c: (
            c.dim["D"] % c.dim["blk"] == 0
        ),
        "o_global is accepted with o_format 'nvfp4' only": lambda c: (
            c.arg.o_format == "nvfp4" or c.arg.o_global is None
        ),
    },
    features={name: on for name, on in ATTENTION.features.items() if name not in _WITHOUT}
    | fp4.SWIZZLED
    | {"o_global": lambda c: c.arg.o_global is not None},
    shards=shards.with_linear_scales(shards.SPARSE),
    varies=dict.fromkeys(
        ("cuda", "mps", "cpu"), "into how many parts a token's keys are split follows from how many tokens there are"
    ),
    kernels=tuple(
        replace(
            row,
            features=" ".join([*(n for n in row.features.split() if n not in _WITHOUT), "swizzled", "o_global"]),
            needs=row.needs | _NEEDS,
            launcher=row.launcher and sparse.QUANTISED,
        )
        for row in ATTENTION.kernels
        if row.on != "cpu"
    ),
)
