"""sdpa_multi: a block of T query tokens per sequence over a KV cache that already holds the block itself.

``kv_len`` counts the block: query r of a sequence has position ``kv_len - T + r``. A query at a negative
position is not in the cache (a block longer than its sequence) and attends nothing. With ``causal`` it sees
the keys from ``kv_start`` up to its own position (speculative verify, chunked prefill), otherwise all of
[kv_start, kv_len) (block diffusion); ``window`` and ``sink_tokens`` narrow both. In q heads stand behind tokens,
in the caches before them: a q as torch's SDPA has it, (B, Hq, T, D), needs ``.transpose(1, 2)``. Returns out and
the natural-log LSE, sink left out. q and the caches stand for themselves times ``q_scale``, ``k_scale`` and
``v_scale``, one positive number for each sequence and KV head (None: 1), as in flash_attention.
Source: MetalTile ``sdpa_multi``; scales as FlashAttention-3 (arXiv 2407.08608) has them; sinks as in GPT-OSS
(OpenAI, 2025) and StreamingLLM (arXiv 2309.17453).
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import prefill
from torch_attnkit.kernels.prefill import metal
from torch_attnkit.kernels.prefill.sm80 import tiles as sm80
from torch_attnkit.kernels.prefill.sm90 import tiles as sm90
from torch_attnkit.kernels.prefill.sm100 import plan as sm100
from torch_attnkit.oracle import meanings, rules, shards

_FEATURES = "gqa sink kv_start bidirectional window sink_tokens softcap"

OP = Op(
    schema="sdpa_multi(Tensor q, Tensor k_cache, Tensor v_cache, Tensor kv_len, Tensor? sink=None,"
    " Tensor? kv_start=None, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, *,"
    " float? scale=None, bool causal=True, int window=-1, int sink_tokens=0, float softcap=0.0)"
    " -> (Tensor out, Tensor lse)",
    dims={
        "q": "B T Hq D:T8",
        "k_cache": "B Hkv S D:T8",
        "v_cache": "B Hkv S Dv:T8",
        "kv_len": "B:i32<i64",
        "sink": "Hq:f32<bf16|f16",
        "kv_start": "B:i32<i64",
        "q_scale": "[B Hkv]:f32",
        "k_scale": "[B Hkv]:f32",
        "v_scale": "[B Hkv]:f32",
        "out": "B T Hq Dv",
        "lse": "B T Hq:f32",
    },
    meaning=meanings.take(
        meanings.ATTENTION,
        "sink kv_start q_scale k_scale v_scale scale causal window sink_tokens softcap out lse",
        q="Query tokens of each sequence, its last T, heads behind tokens.",
        k_cache="Keys of each sequence, key j in slot j, heads before tokens, those of the query tokens among them.",
        v_cache="Values of each sequence, as k_cache has keys.",
        kv_len="Keys of each sequence that count, its T query tokens among them, 0 to S. Query r has position"
        " kv_len - T + r; at a negative one it sees nothing.",
    ),
    axes=meanings.axes("B T Hq Hkv S D Dv"),
    layouts={"out": rules.wide("B T Hq Dv")},
    where=rules.HEADS | rules.SCORES,
    features=rules.GQA
    | rules.SINK
    | rules.KV_START
    | {"bidirectional": lambda c: not c.arg.causal}
    | rules.WINDOW
    | rules.SCALES,
    # Not by T: where kv_len is less than T, the first queries stand before all keys and see none.
    shards=shards.ATTENTION,
    apart="B",
    varies=dict.fromkeys(
        ("sm80", "sm89", "sm120"), "when a row's sums are rescaled follows from the rows that share its tile"
    ),
    kernels=(
        Kernel("cpu", "f32 f16 bf16", features="gqa sink kv_start bidirectional window sink_tokens"),
        *rules.by_head(
            "sm90", sm90.BITS16, sm90.heads(sm90.BITS16), _FEATURES, rules.CACHE_ROWS, launcher=prefill.HOPPER_CACHE
        ),
        *rules.by_head("sm100", sm100.DTYPES, sm100.TILES, _FEATURES, launcher=prefill.BLACKWELL_CACHE),
        *rules.of_codes("sm100", sm100.CODES, sm100.TILES, f"{_FEATURES} scales", launcher=prefill.BLACKWELL_CACHE),
        *rules.by_head("sm80 sm89 sm120", sm80.DTYPES, sm80.MMA_TILES, _FEATURES, launcher=prefill.AMPERE_CACHE),
        Kernel("mps", metal.DTYPES, {"D": metal.DIMS}, _FEATURES, rules.value_dim(metal.MOST_DIM_V)),
        Kernel("mps", metal.CODES, {"D": metal.DIMS}, f"{_FEATURES} scales", rules.value_dim(metal.MOST_DIM_V)),
        *rules.of_codes(
            "sm90", sm90.FP8, sm90.heads(sm90.FP8), f"{_FEATURES} scales", launcher=prefill.HOPPER_CACHE_FP8
        ),
        *rules.of_codes(
            "sm89 sm120", sm80.CODES, sm80.MMA_TILES_FP8, f"{_FEATURES} scales", launcher=prefill.AMPERE_CACHE
        ),
    ),
)
