"""route_sqrt_softplus: the experts of each token by sqrt(softplus(logit)), a bias steering the choice.

``s = sqrt(softplus(logits))`` in float32. The topk experts with the largest ``s + bias`` are chosen, in
descending order, ties to the lowest index. Their weights are the unbiased s, divided by (their sum + 1e-20)
if ``renormalize``, times ``route_scale``. A logit below -104, where e^x is 0 in float32, has score 0, and so has
one of -inf; above, s is right in all its bits but the last. A row of chosen scores that are all 0 has weights 0. Any
number of experts. Logits of NaN or +inf and biases of NaN are not accepted.
Source: the top-k router of DeepSeek-V4 (arXiv 2606.19348); the selection bias, arXiv 2408.15664.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import routing
from torch_attnkit.oracle import meanings, shards

OP = Op(
    schema="route_sqrt_softplus(Tensor logits, Tensor? bias=None, *, int topk, float route_scale=1.0,"
    " bool renormalize=True) -> (Tensor weights, Tensor indices)",
    dims={"logits": "R E", "bias": "E:f32<bf16|f16", "weights": "R K:f32", "indices": "R K:i32"},
    meaning=meanings.take(
        meanings.ROUTES,
        "logits topk route_scale renormalize indices",
        bias="Added to each expert's score for the choice, not for its weight; None adds nothing. NaN raises on a CPU.",
        weights="Score of each chosen expert without bias, sqrt(softplus(logit)), 0 for logits below -104, times"
        " route_scale.",
    ),
    axes=meanings.axes("R E K"),
    derive={"K": lambda c: c.arg.topk},
    where={"topk must be between 1 and the number of experts E": lambda c: 1 <= c.arg.topk <= c.dim["E"]},
    features={
        "bias": lambda c: c.arg.bias is not None,
        "renormalize": lambda c: c.arg.renormalize,
    },
    shards=shards.ROUTES,
    apart="R",
    kernels=(
        Kernel("cpu", "f32 f16 bf16", features="bias renormalize"),
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="bias renormalize",
            needs={"fewer than 2^31 rows": lambda c: c.dim["R"] < 2**31},
            launcher=routing.NVIDIA,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="bias renormalize",
            needs={"at most 2^26 rows": lambda c: c.dim["R"] <= 2**26},
            launcher=routing.METAL,
        ),
    ),
)
