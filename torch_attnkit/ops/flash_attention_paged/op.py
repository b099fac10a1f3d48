"""flash_attention_paged: a block of queries of any length for each sequence, over a KV cache that is stored in pages.

Sequence b has the query tokens [cu_seqlens_q[b], cu_seqlens_q[b+1]) and ``kv_len[b]`` keys, its own block among them:
query r of a block of T has position ``kv_len - T + r``. One call thereby takes a mixed batch: prompts and chunks of
them, suffixes behind a shared prefix, drafts to verify, and single tokens. Key j lies in page ``block_table[b, j //
Ps]``, slot ``j % Ps``; entries of pages of which no query of the sequence sees a key, at or past the length or outside
of all windows, are ignored and may hold any value, -1 for one. With ``causal`` a query sees the keys up to its own
position, otherwise all ``kv_len``; ``window`` and ``sink_tokens`` narrow both; ``sink`` joins the denominator only. A
query at a negative position (a block longer than its sequence) and tokens past the last offset give out 0 and lse -inf.
Returns out and the natural-log LSE, sink left out. ``max_seqlen_q`` and ``max_seqlen_k`` are hints for the launch (-1:
unknown); they bound the lengths. q and the caches stand for themselves times ``q_scale``, ``k_scale`` and ``v_scale``,
one positive number for each sequence and KV head (None: 1). Caches have the dtype of q or are E4M3, which sdpa_decode
says how to make; out has the dtype of q, bfloat16 where that is E4M3.
Source: PagedAttention (arXiv 2309.06180), FlashAttention-2 (arXiv 2307.08691); scales as FlashAttention-3 (arXiv
2407.08608) has them; sinks as in GPT-OSS (OpenAI, 2025) and StreamingLLM (arXiv 2309.17453).
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import prefill
from torch_attnkit.kernels.prefill import metal
from torch_attnkit.kernels.prefill.sm80 import tiles as sm80
from torch_attnkit.kernels.prefill.sm90 import tiles as sm90
from torch_attnkit.kernels.prefill.sm100 import plan as sm100
from torch_attnkit.oracle import meanings, rules, shards

# Rows that TMA gathers have numbers of 31 bits.
_ROWS = {
    f"Np * Ps * Hkv must be below 2^31 where Ps is no multiple of {sm100.LEAST_BOX}": lambda c: (
        c.dim["Ps"] % sm100.LEAST_BOX == 0 or c.dim["Np"] * c.dim["Ps"] * c.dim["Hkv"] < 2**31
    ),
}
# Other pages are rows that threads copy, which the kernels over E4M3 have no warps for.
_BOXES = {"Ps must be a multiple of 8": lambda c: c.dim["Ps"] % 8 == 0}
_16_BITS = rules.CACHE_ROWS | rules.SAME_DTYPE
_VALUES = rules.value_dim(metal.MOST_DIM_V)
_FEATURES = "gqa sink bidirectional window sink_tokens softcap"

OP = Op(
    schema="flash_attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cu_seqlens_q, Tensor block_table,"
    " Tensor kv_len, Tensor? sink=None, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, *,"
    " float? scale=None, bool causal=True, int window=-1, int sink_tokens=0, float softcap=0.0,"
    " int max_seqlen_q=-1, int max_seqlen_k=-1) -> (Tensor out, Tensor lse)",
    dims={
        "q": "Tq Hq D:T8",
        "k_cache": "Np Ps Hkv D:T8|f8e4m3",
        "v_cache": "Np Ps Hkv Dv:T8|f8e4m3",
        "cu_seqlens_q": "B+1:i32<i64",
        "block_table": "B Mp:i32<i64",
        "kv_len": "B:i32<i64",
        "sink": "Hq:f32<bf16|f16",
        "q_scale": "[B Hkv]:f32",
        "k_scale": "[B Hkv]:f32",
        "v_scale": "[B Hkv]:f32",
        "out": "Tq Hq Dv",
        "lse": "Tq Hq:f32",
    },
    meaning=meanings.take(
        meanings.ATTENTION,
        "cu_seqlens_q block_table sink q_scale k_scale v_scale scale causal window sink_tokens softcap max_seqlen_q"
        " max_seqlen_k out lse",
        q="Queries of all sequences, packed one after another: the last tokens of each.",
        k_cache="Keys in pages, in the dtype of q or E4M3, those of the query tokens among them; block_table says whose"
        " they are.",
        v_cache="Values in pages, as k_cache has keys and in its dtype.",
        kv_len="Keys of each sequence that count, its query tokens among them, 0 to Mp * Ps. Query r of T has position"
        " kv_len - T + r; at a negative one it sees nothing.",
    ),
    axes=meanings.axes("B Tq Hq Hkv D Dv Np Ps Mp bits"),
    layouts={"out": rules.wide("Tq Hq Dv")},
    derive=rules.BITS,
    where=rules.HEADS
    | {"Ps must be at least 1": lambda c: c.dim["Ps"] > 0}
    | rules.SCORES
    | rules.CACHES
    | {
        "max_seqlen_q must be -1 (unknown) or at least 0": lambda c: c.arg.max_seqlen_q >= -1,
        "max_seqlen_k must be -1 (unknown) or at least 0": lambda c: c.arg.max_seqlen_k >= -1,
    },
    features=rules.GQA | rules.SINK | {"bidirectional": lambda c: not c.arg.causal} | rules.WINDOW | rules.SCALES,
    shards=shards.HEADS,
    varies=dict.fromkeys(
        ("sm80", "sm89", "sm120"), "when a row's sums are rescaled follows from the rows that share its tile"
    ),
    kernels=(
        Kernel("cpu", "f32 f16 bf16", features="gqa sink bidirectional window sink_tokens"),
        *rules.by_head(
            "sm90", sm90.BITS16, sm90.heads(sm90.BITS16), _FEATURES, _16_BITS, launcher=prefill.HOPPER_PAGES
        ),
        *rules.by_head(
            "sm100", sm100.DTYPES, sm100.TILES, _FEATURES, _16_BITS | _ROWS, launcher=prefill.BLACKWELL_PAGES
        ),
        *rules.by_head(
            "sm80 sm89 sm120", sm80.DTYPES, sm80.MMA_TILES, _FEATURES, rules.SAME_DTYPE, launcher=prefill.AMPERE_PAGES
        ),
        Kernel("mps", metal.DTYPES, {"D": metal.DIMS}, _FEATURES, _VALUES | rules.SAME_DTYPE),
        *rules.of_codes(
            "sm90",
            sm90.FP8,
            sm90.heads(sm90.FP8),
            f"{_FEATURES} scales",
            rules.CACHE_ROWS | _BOXES,
            launcher=prefill.HOPPER_PAGES_FP8,
        ),
        *rules.of_codes(
            "sm89 sm120", sm80.CODES, sm80.MMA_TILES_FP8, f"{_FEATURES} scales", launcher=prefill.AMPERE_PAGES
        ),
        *rules.of_codes(
            "sm90",
            sm90.BITS16,
            sm90.heads(sm90.FP8_KV),
            f"{_FEATURES} scales",
            rules.CACHE_ROWS | _BOXES,
            rules.EIGHT_BITS,
            launcher=prefill.HOPPER_PAGES,
        ),
        *rules.of_codes(
            "sm80 sm89 sm120",
            sm80.DTYPES,
            sm80.MMA_TILES_FP8_KV,
            f"{_FEATURES} scales",
            sizes=rules.EIGHT_BITS,
            launcher=prefill.AMPERE_PAGES,
        ),
        *rules.of_codes(
            "sm100",
            sm100.DTYPES,
            sm100.FP8_KV_TILES,
            f"{_FEATURES} scales",
            rules.CACHE_ROWS | _BOXES,
            rules.EIGHT_BITS,
            launcher=prefill.BLACKWELL_PAGES,
        ),
        Kernel("mps", metal.CODES, {"D": metal.DIMS}, f"{_FEATURES} scales", _VALUES),
        Kernel("mps", metal.DTYPES, {"D": metal.DIMS} | rules.EIGHT_BITS, f"{_FEATURES} scales", _VALUES),
    ),
)
