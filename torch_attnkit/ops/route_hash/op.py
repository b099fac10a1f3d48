"""route_hash: the experts of each token from a table of token ids, weighted by sqrt(softplus(logit)).

Token r goes to the experts ``tid2eid[token_ids[r]]``, in the table's order; an expert may stand in a row more
than once. Their weights are ``sqrt(softplus(logits))`` in float32, 0 for logits below -104, divided by (their sum +
1e-20) if ``renormalize``, times ``route_scale``, as in route_sqrt_softplus. Token ids lie in [0, V), and the entries of
the table rows that are used in [0, E); the other rows may hold anything.
Source: the hash router of DeepSeek-V4's first layers (arXiv 2606.19348); Hash Layers (arXiv 2106.04426).
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import routing
from torch_attnkit.oracle import meanings, shards

OP = Op(
    schema="route_hash(Tensor logits, Tensor token_ids, Tensor tid2eid, *, float route_scale=1.0,"
    " bool renormalize=True) -> (Tensor weights, Tensor indices)",
    dims={
        "logits": "R E",
        "token_ids": "R:i32|i64",
        "tid2eid": "V K:i32|i64",
        "weights": "R K:f32",
        "indices": "R K:i32",
    },
    meaning=meanings.take(
        meanings.ROUTES,
        "logits route_scale renormalize",
        token_ids="Token id of each row, 0 to V - 1.",
        tid2eid="Experts of each token id, 0 to E - 1; one may stand in a row twice. Rows that no token uses may hold"
        " anything.",
        weights="sqrt(softplus(logit)) of each expert, 0 for logits below -104, times route_scale.",
        indices="Experts of each token, in the order of its row of tid2eid.",
    ),
    axes=meanings.axes("R E", V="token ids", K="experts of a token"),
    where={"K must be at least 1": lambda c: c.dim["K"] > 0},
    features={"renormalize": lambda c: c.arg.renormalize},
    shards=shards.ROUTES,
    apart="R",
    kernels=(
        Kernel("cpu", "f32 f16 bf16", features="renormalize"),
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="renormalize",
            needs={"fewer than 2^31 rows": lambda c: c.dim["R"] < 2**31},
            launcher=routing.NVIDIA_TABLE,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="renormalize",
            needs={"at most 2^26 rows": lambda c: c.dim["R"] <= 2**26},
            launcher=routing.METAL_TABLE,
        ),
    ),
)
