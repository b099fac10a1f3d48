"""merge_partials: the attention over a set of keys, from the attentions over P parts of it.

``lse = log sum_p exp(lse_p)`` and ``out = sum_p exp(lse_p - lse) out_p``, in fp32. With ``row_sum`` the
partials are numerators and are divided by it first. A partial with lse -inf has seen nothing and its out is
not looked at, nor one with lse +inf, which FlashAttention-2 writes for a row without keys; if all are such, out is 0
and lse -inf. ``sink`` is applied once, after the merge: ``out *= sigmoid(lse - sink)``; lse leaves it out, so merged
results can be merged again.
Source: Flash-Decoding's split-KV reduction; cascade inference (FlashInfer, arXiv 2501.01005, attention
states).
"""

import torch

from torch_attnkit.core import Kernel, Op
from torch_attnkit.core.op import Shards
from torch_attnkit.kernels import merge
from torch_attnkit.oracle import meanings, rules

_OUT = (torch.float32, torch.bfloat16, torch.float16)

OP = Op(
    schema="merge_partials(Tensor out_partial, Tensor lse_partial, Tensor? sink=None, Tensor? row_sum=None, *,"
    " ScalarType? dtype=None) -> (Tensor out, Tensor lse)",
    dims={
        "out_partial": "P R H Dv",
        "lse_partial": "P R H:f32",
        "sink": "H:f32<bf16|f16",
        "row_sum": "P R H:f32",
        "out": "R H Dv:@dtype",
        "lse": "R H:f32",
    },
    meaning={
        "out_partial": "Attention over each part of the keys; where lse_partial is infinite it is not looked at.",
        "lse_partial": "Natural logarithm of the sum of exp(score) over each part's keys, sinks left out; -inf and +inf"
        " are a part without keys.",
        "sink": "A logit per head, in the unit of lse, applied once after the merge: out is multiplied by"
        " sigmoid(lse - sink). None and -inf are no sink.",
        "row_sum": "Denominators of partials that are numerators (normalize=False), each divided by its own; None: they"
        " are normalised already.",
        "dtype": "Dtype of out, a floating point type; None is that of out_partial.",
        "out": "Attention over all parts, accumulated in float32 and rounded once; 0 where no part has a key.",
        "lse": "Logarithm of the sum over all parts, -inf where none has a key; sink left out, so that results can be"
        " merged again.",
    },
    axes=meanings.axes("Dv", P="partial results", R="rows: tokens", H="heads"),
    where={"dtype must be a floating point type": lambda c: c.arg.dtype is None or c.arg.dtype.is_floating_point},
    features=rules.SINK
    | {
        "row_sum": lambda c: c.arg.row_sum is not None,
        "dtype": lambda c: c.arg.dtype not in (None, c.dtype),
    },
    shards=(Shards("R"), Shards("H")),
    apart="R",
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="sink row_sum dtype",
            needs={
                "dtype must be float32, bfloat16 or float16": lambda c: c.arg.dtype in (None, *_OUT),
                "fewer than 2^31 rows": lambda c: c.dim["R"] * c.dim["H"] < 2**31,
                "Dv must be at most 8192": lambda c: c.dim["Dv"] <= 8192,
            },
            launcher=merge.NVIDIA,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="sink row_sum dtype",
            needs={"dtype must be float32, bfloat16 or float16": lambda c: c.arg.dtype in (None, *_OUT)},
            launcher=merge.METAL,
        ),
    ),
)
