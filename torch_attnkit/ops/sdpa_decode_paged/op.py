"""sdpa_decode_paged: one query token per sequence against a KV cache that is stored in pages.

Row i of ``block_table`` lists the pages of sequence i in order: key j lies in page ``block_table[i, j //
Ps]``, slot ``j % Ps``. Entries of pages at or past the length are ignored and may hold any value. Otherwise
the contract of sdpa_decode: the query sits at ``kv_len - 1`` and attends [kv_start, kv_len), or of those the
last ``window`` and the first ``sink_tokens``; ``sink`` joins the denominator only; out and the natural-log
LSE (sink left out) are returned.
Source: PagedAttention (arXiv 2309.06180).
"""

from torch_attnkit.core import Op
from torch_attnkit.oracle import rules

OP = Op(
    schema="sdpa_decode_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor kv_len,"
    " Tensor? sink=None, Tensor? kv_start=None, *, float? scale=None, int window=-1, int sink_tokens=0,"
    " float softcap=0.0) -> (Tensor out, Tensor lse)",
    dims={
        "q": "B Hq D",
        "k_cache": "Np Ps Hkv D",
        "v_cache": "Np Ps Hkv Dv",
        "block_table": "B Mp:i32",
        "kv_len": "B:i32",
        "sink": "Hq:f32",
        "kv_start": "B:i32",
        "out": "B Hq Dv",
        "lse": "B Hq:f32",
    },
    where=rules.HEADS | {"Ps must be at least 1": lambda c: c.dim["Ps"] > 0} | rules.SCORES,
    features=rules.GQA | rules.SINK | rules.KV_START | rules.WINDOW,
)
