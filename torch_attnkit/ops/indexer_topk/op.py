"""indexer_topk: which cache entries each token attends, as the set of the topk largest scores.

An entry j of token t counts if ``j < k_len[t]`` (None: every entry) and its score is above -inf; NaN counts
as -inf. Of those the topk largest are chosen, ties to the lowest index, and written in ascending order of
index, with -1 behind them where there are fewer. topk may exceed S. Equal scores give equal indices on every
device.
Source: the lightning indexer of DeepSeek-V3.2 and V4 (arXiv 2512.02556, 2606.19348).
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.core.op import Shards
from torch_attnkit.kernels import topk
from torch_attnkit.oracle import meanings

OP = Op(
    schema="indexer_topk(Tensor scores, Tensor? k_len=None, *, int topk) -> Tensor indices",
    dims={"scores": "Tq S", "k_len": "Tq:i32<i64", "indices": "Tq K:i32"},
    meaning=meanings.take(
        meanings.REQUESTS,
        "topk indices",
        scores="Score of each entry for each token.",
        k_len="Entries that each token may choose from, the first so many, 0 to S; None is S.",
    ),
    axes=meanings.axes("K", Tq="tokens", S="entries"),
    derive={"K": lambda c: c.arg.topk},
    where={"topk must be at least 1": lambda c: c.arg.topk >= 1},
    features={"k_len": lambda c: c.arg.k_len is not None},
    shards=(Shards("Tq"),),
    kernels=(
        Kernel("cpu", "f32 f16 bf16", features="k_len"),
        Kernel(
            "cuda",
            "f32 bf16 f16",
            features="k_len",
            needs={
                "fewer than 2^28 rows": lambda c: c.dim["Tq"] < 2**28,
                "fewer than 2^30 entries, and as many to choose": lambda c: max(c.dim["S"], c.dim["K"]) < 2**30,
            },
            launcher=topk.NVIDIA,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="k_len",
            needs={
                "fewer than 2^22 rows": lambda c: c.dim["Tq"] < 2**22,
                "fewer than 2^30 entries, and as many to choose": lambda c: max(c.dim["S"], c.dim["K"]) < 2**30,
            },
            launcher=topk.METAL,
        ),
    ),
)
