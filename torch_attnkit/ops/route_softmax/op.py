"""route_softmax: the topk experts with the largest logits, weighted by a softmax over all or over the chosen.

Experts come in descending order of their logits, ties to the lowest index; the order never depends on how an
exponential was rounded. Weights, in float32: with ``softmax_first`` the softmax over all E experts (Qwen),
else over the chosen (GPT-OSS); divided by (their sum + 1e-20) if ``renormalize``; times ``route_scale``. A
logit of -inf has weight 0, and a row of nothing but -inf has weights 0. Logits of NaN or +inf are refused.
Source: the routers of GPT-OSS (arXiv 2508.10925) and Qwen3 (arXiv 2505.09388).
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import routing
from torch_attnkit.oracle import meanings, shards

OP = Op(
    schema="route_softmax(Tensor logits, *, int topk, bool softmax_first=False, bool renormalize=False,"
    " float route_scale=1.0) -> (Tensor weights, Tensor indices)",
    dims={"logits": "R E", "weights": "R K:f32", "indices": "R K:i32"},
    meaning=meanings.take(
        meanings.ROUTES,
        "logits topk route_scale renormalize indices",
        weights="Weight of each chosen expert, times route_scale.",
        softmax_first="Whether weights are a softmax over all E experts (Qwen), or over the chosen alone (GPT-OSS).",
    ),
    axes=meanings.axes("R E K"),
    derive={"K": lambda c: c.arg.topk},
    where={"topk must be between 1 and the number of experts E": lambda c: 1 <= c.arg.topk <= c.dim["E"]},
    features={
        "softmax_first": lambda c: c.arg.softmax_first,
        "renormalize": lambda c: c.arg.renormalize,
    },
    shards=shards.ROUTES,
    apart="R",
    kernels=(
        Kernel("cpu", "f32 f16 bf16", features="softmax_first renormalize"),
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="softmax_first renormalize",
            needs={"fewer than 2^31 rows": lambda c: c.dim["R"] < 2**31},
            launcher=routing.NVIDIA,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="softmax_first renormalize",
            needs={"at most 2^26 rows": lambda c: c.dim["R"] <= 2**26},
            launcher=routing.METAL,
        ),
    ),
)
