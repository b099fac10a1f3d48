"""indexer_select: which cache entries each token attends, chosen by scores that the caller never sees.

What ``indexer_topk(indexer_scores(q, k, ...), k_len, topk=topk)`` gives, with the arguments of both under their names:
of the entries j < k_len[t] of the token's request the topk with the largest scores, ties to the lowest index, in
ascending order of index, -1 behind them where there are fewer; a score of NaN or -inf is never chosen.
It is an op of its own, not an option of one of these, because what it returns is one's and what it takes the other's;
and since (Tq, S) float32 scores are what it may save, no argument asks for them: who wants scores calls indexer_scores.
On Hopper scores of up to 4 tokens of one request stay in shared memory while they fit, up to about a million entries;
otherwise they are written, to memory that the call takes from torch and gives back, and read by a second launch.
Scores are as exact as indexer_scores says for the format. Entries whose scores differ from the K-th largest by less
may take each other's place; the same call gives the same indices each time. Where the sums are exact, as of small
integers, indices are.
Source: the lightning indexer of DeepSeek-V3.2 and V4 (arXiv 2512.02556, 2606.19348).
"""

from dataclasses import replace

from torch_attnkit.core import Op
from torch_attnkit.kernels import indexer
from torch_attnkit.ops.indexer_scores.op import OP as SCORES
from torch_attnkit.oracle import meanings, shards

_NEEDS = {"fewer than 2^30 entries to choose": lambda c: c.dim["K"] < 2**30}

OP = Op(
    schema="indexer_select(Tensor q, Tensor k, Tensor weights, Tensor k_len, Tensor? request_ids=None,"
    " Tensor? block_table=None, Tensor? q_scale=None, Tensor? k_scale=None, *, str format='none', int topk)"
    " -> Tensor indices",
    dims={name: SCORES.dims[name] for name in SCORES.tensors} | {"indices": "Tq K:i32"},
    meaning={name: SCORES.meaning[name] for name in SCORES.argnames}
    | meanings.take(
        meanings.REQUESTS, "topk indices", k_len="Entries that each token may choose from, the first so many, 0 to S."
    ),
    axes=SCORES.axes | meanings.axes("K"),
    derive=SCORES.derive | {"K": lambda c: c.arg.topk},
    choices=SCORES.choices,
    where=SCORES.where | {"topk must be at least 1": lambda c: c.arg.topk >= 1},
    features=SCORES.features,
    shards=shards.INDEXER,
    varies=dict.fromkeys(("cuda", "mps", "cpu"), "which kernel takes a token follows from how many there are"),
    kernels=tuple(
        replace(row, needs=row.needs | _NEEDS, launcher=row.launcher and indexer.SELECT)
        for row in SCORES.kernels
        if row.on != "cpu"
    ),
)
