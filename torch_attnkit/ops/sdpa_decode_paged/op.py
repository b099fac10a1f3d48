"""sdpa_decode_paged: one query token per sequence against a KV cache that is stored in pages.

Row i of ``block_table`` lists the pages of sequence i in order: key j lies in page ``block_table[i, j // Ps]``, slot
``j % Ps``. Entries of pages of which the query sees no key, at or past the length, before ``kv_start`` or outside of
the window, are ignored and may hold any value, -1 for one. Otherwise the contract of sdpa_decode: the query sits at
``kv_len - 1`` and attends [kv_start, kv_len), or of those the last ``window`` and the first ``sink_tokens``; ``sink``
joins the denominator only; out and the natural-log LSE (sink left out) are returned. q and the pages stand for
themselves times ``q_scale``, ``k_scale`` and ``v_scale``, one positive number for each sequence and KV head (None: 1).
Caches have the dtype of q or are E4M3, which sdpa_decode says how to make; out has the dtype of q, bfloat16 where that
is E4M3.
Source: PagedAttention (arXiv 2309.06180); scales as FlashAttention-3 (arXiv 2407.08608) has them.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import decode
from torch_attnkit.kernels.decode import metal
from torch_attnkit.kernels.decode.plan import FP8_KV_HEADS
from torch_attnkit.kernels.decode.problem import LATENTS
from torch_attnkit.kernels.decode.sm80 import plan as sm80
from torch_attnkit.kernels.decode.sm90 import plan as sm90
from torch_attnkit.kernels.decode.sm100 import plan as sm100
from torch_attnkit.oracle import meanings, rules, shards

# cp.async copies 16 bytes at a time.
_ROWS = rules.CACHE_ROWS | {
    "every row of q must start at a multiple of 4 bytes": lambda c: all(
        s * c.dtype.itemsize % 4 == 0 for s in c.arg.q.stride()[:-1]
    ),
}
# Pages of an odd number of keys cost registers that spill, and those of one key where elements have 16 bits.
_PAGES = {"Ps must be a multiple of 16": lambda c: c.dim["Ps"] % 16 == 0}
_FP8_PAGES = {"Ps must be 1 or a multiple of 16": lambda c: c.dim["Ps"] == 1 or c.dim["Ps"] % 16 == 0}
_FP8_ROWS = _ROWS | _FP8_PAGES
_FEATURES = "gqa sink kv_start window sink_tokens softcap"
_FP8 = f"{_FEATURES} scales"
_16_BITS = _ROWS | _PAGES | rules.SAME_DTYPE
_VALUES = rules.value_dim(metal.MOST_DIM_V)
_LATENTS: list[dict[str, tuple[int, ...]]] = [{"D": (d,), "Dv": (dv,)} for d, dv in LATENTS]

OP = Op(
    schema="sdpa_decode_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor kv_len,"
    " Tensor? sink=None, Tensor? kv_start=None, Tensor? q_scale=None, Tensor? k_scale=None,"
    " Tensor? v_scale=None, *, float? scale=None, int window=-1, int sink_tokens=0, float softcap=0.0)"
    " -> (Tensor out, Tensor lse)",
    dims={
        "q": "B Hq D:T8",
        "k_cache": "Np Ps Hkv D:T8|f8e4m3",
        "v_cache": "Np Ps Hkv Dv:T8|f8e4m3",
        "block_table": "B Mp:i32<i64",
        "kv_len": "B:i32<i64",
        "sink": "Hq:f32<bf16|f16",
        "kv_start": "B:i32<i64",
        "q_scale": "[B Hkv]:f32",
        "k_scale": "[B Hkv]:f32",
        "v_scale": "[B Hkv]:f32",
        "out": "B Hq Dv",
        "lse": "B Hq:f32",
    },
    meaning=meanings.take(
        meanings.ATTENTION,
        "block_table sink q_scale k_scale v_scale scale sink_tokens softcap out lse",
        q="The query token of each sequence; its position is kv_len - 1.",
        k_cache="Keys in pages, in the dtype of q or E4M3; block_table says whose they are.",
        v_cache="Values in pages, as k_cache has keys and in its dtype.",
        kv_len="Keys of each sequence that count, 0 to Mp * Ps; the query is the last of them. A sequence of 0 has out"
        " 0 and lse -inf.",
        kv_start="First key of each sequence that counts (left padding), 0 to Mp * Ps; None is 0. At or past kv_len no"
        " key is left: out 0, lse -inf.",
        window=meanings.LAST_KEYS,
    ),
    axes=meanings.axes("B Hq Hkv D Dv Np Ps Mp bits"),
    layouts={"out": rules.wide("B Hq Dv")},
    derive=rules.BITS,
    where=rules.HEADS | {"Ps must be at least 1": lambda c: c.dim["Ps"] > 0} | rules.SCORES | rules.CACHES,
    features=rules.GQA | rules.SINK | rules.KV_START | rules.WINDOW | rules.SCALES,
    shards=shards.ATTENTION,
    apart="B",
    kernels=(
        Kernel("cpu", "f32 f16 bf16", features="gqa sink kv_start window sink_tokens softcap"),
        *rules.by_head("sm80 sm89 sm120", sm80.DTYPES, sm80.HEADS, _FEATURES, _16_BITS, launcher=decode.NVIDIA),
        *rules.of_codes(
            "sm80 sm89 sm120", sm80.DTYPES, FP8_KV_HEADS, _FP8, _FP8_ROWS, rules.EIGHT_BITS, launcher=decode.NVIDIA
        ),
        *rules.by_head("sm90", sm90.DTYPES, sm90.HEADS, _FEATURES, _16_BITS, launcher=decode.NVIDIA),
        *rules.by_head("sm100", sm100.DTYPES, sm100.HEADS, _FEATURES, _16_BITS, launcher=decode.NVIDIA),
        *rules.of_codes("sm100", sm100.FP8, sm100.FP8_HEADS, _FP8, _ROWS | _PAGES, launcher=decode.NVIDIA),
        *rules.of_codes(
            "sm90", sm90.FP8_KV_DTYPES, FP8_KV_HEADS, _FP8, _FP8_ROWS, rules.EIGHT_BITS, launcher=decode.NVIDIA
        ),
        *rules.of_codes("sm100", sm100.DTYPES, FP8_KV_HEADS, _FP8, _FP8_ROWS, rules.EIGHT_BITS, launcher=decode.NVIDIA),
        Kernel("mps", metal.DTYPES, {"D": metal.DIMS}, _FEATURES, _VALUES | rules.SAME_DTYPE, launcher=decode.METAL),
        Kernel("mps", metal.FP8_KV_DTYPES, {"D": metal.DIMS} | rules.EIGHT_BITS, _FP8, _VALUES, launcher=decode.METAL),
        *(Kernel("sm100", sm100.DTYPES, head, _FEATURES, _16_BITS, launcher=decode.NVIDIA) for head in _LATENTS),
        *(Kernel("mps", metal.DTYPES, head, _FEATURES, rules.SAME_DTYPE, launcher=decode.METAL) for head in _LATENTS),
        *(
            Kernel("mps", metal.FP8_KV_DTYPES, head | rules.EIGHT_BITS, _FP8, launcher=decode.METAL)
            for head in _LATENTS
        ),
        *(Kernel("sm90", sm90.DTYPES, head, _FEATURES, _16_BITS, launcher=decode.NVIDIA) for head in _LATENTS),
        *(Kernel("sm100", sm100.FP8, head, _FP8, _ROWS | _PAGES, launcher=decode.NVIDIA) for head in _LATENTS),
    ),
)
