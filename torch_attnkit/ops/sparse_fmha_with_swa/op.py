"""sparse_fmha_with_swa: every token attends a sliding window of its request and chosen compressed entries.

Keys are values (K = V) and shared by all heads. Token t of request r sees
``swa_kv[r, max(0, swa_end - window):swa_end]`` together with the entries of ``compressed_kv[r]`` that
``topk_indices[t]`` lists (-1 = absent, the others distinct), or all of them without a list; of either only those
below ``compressed_len[t]``. One softmax runs over the union; ``sink`` joins its denominator. ``request_ids`` says
which request a token belongs to; without it the tokens come in R equal blocks. Returns out and the natural-log
LSE, sink left out. With ``normalize=False`` out is the numerator ``sum_j exp(s_j - max) k_j`` and row_sum the
denominator ``sum_j exp(s_j - max)``, for merge_partials; otherwise row_sum is empty.
Source: DeepSeek-V4 (2026): window attention with compressed sparse (CSA) and heavily compressed (HCA) entries.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels.sparse.sm90 import plan as sm90
from torch_attnkit.oracle import rules

_SM90 = {
    "every row of q, swa_kv and compressed_kv must start at a multiple of 16 bytes": lambda c: all(
        stride * c.dtype.itemsize % 16 == 0
        for rows in (c.arg.q, c.arg.swa_kv, c.arg.compressed_kv)
        if rows is not None
        for stride in rows.stride()[:-1]
    ),
    "fewer than 2^31 tokens times heads": lambda c: c.dim["Tq"] * c.dim["Hq"] < 2**31,
}

OP = Op(
    schema="sparse_fmha_with_swa(Tensor q, Tensor swa_kv, Tensor swa_end, Tensor? compressed_kv=None,"
    " Tensor? topk_indices=None, Tensor? compressed_len=None, Tensor? request_ids=None, Tensor? sink=None, *,"
    " float? scale=None, int window=128, bool normalize=True) -> (Tensor out, Tensor lse, Tensor row_sum)",
    dims={
        "q": "Tq Hq D",
        "swa_kv": "R S D",
        "swa_end": "Tq:i32",
        "compressed_kv": "R C D",
        "topk_indices": "Tq K:i32",
        "compressed_len": "Tq:i32",
        "request_ids": "Tq:i32",
        "sink": "Hq:f32",
        "out": "Tq Hq D",
        "lse": "Tq Hq:f32",
        "row_sum": "Tq Hq:f32",
    },
    where={
        "D must be at least 1": lambda c: c.dim["D"] > 0,
        "window must be at least 0": lambda c: c.arg.window >= 0,
        "topk_indices needs compressed_kv": lambda c: c.arg.topk_indices is None or c.arg.compressed_kv is not None,
        "compressed_len needs compressed_kv": lambda c: c.arg.compressed_len is None or c.arg.compressed_kv is not None,
        "Tq must be a multiple of R when request_ids is not given": lambda c: (
            c.arg.request_ids is not None or c.dim["Tq"] == 0 or (c.dim["R"] > 0 and c.dim["Tq"] % c.dim["R"] == 0)
        ),
    }
    | rules.PARTIAL,
    unless={"row_sum": lambda c: c.arg.normalize},
    features={
        "compressed": lambda c: c.arg.compressed_kv is not None,
        "topk": lambda c: c.arg.topk_indices is not None,
        "compressed_len": lambda c: c.arg.compressed_len is not None,
        "request_ids": lambda c: c.arg.request_ids is not None,
    }
    | rules.SINK
    | rules.UNNORMALIZED,
    exclusive=rules.SINK_OR_PARTIAL,
    kernels=(
        Kernel(
            "sm90",
            sm90.DTYPES,
            {"D": tuple(sm90.TILES)},
            "compressed topk compressed_len request_ids sink unnormalized",
            _SM90,
        ),
    ),
)
