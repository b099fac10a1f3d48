"""sdpa_multi: a block of T query tokens per sequence over a KV cache that already holds the block itself.

``kv_len`` counts the block: query r of a sequence has position ``kv_len - T + r``. A query at a negative
position is not in the cache (a block longer than its sequence) and attends nothing. With ``causal`` it sees
the keys from ``kv_start`` up to its own position (speculative verify, chunked prefill), otherwise all of
[kv_start, kv_len) (block diffusion); ``window`` and ``sink_tokens`` narrow both. Returns out and the
natural-log LSE, sink left out. q and the caches stand for themselves times ``q_scale``, ``k_scale`` and
``v_scale``, one positive number for each sequence and KV head (None: 1), as in flash_attention.
Source: MetalTile ``sdpa_multi``; scales as FlashAttention-3 (arXiv 2407.08608) has them; sinks as in GPT-OSS
(OpenAI, 2025) and StreamingLLM (arXiv 2309.17453).
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.oracle import rules

# TMA reads no other rows, and nobody wants a copy of a cache.
_ROWS = {
    "every row of the caches must start at a multiple of 16 bytes": lambda c: all(
        stride % 8 == 0 for cache in (c.arg.k_cache, c.arg.v_cache) for stride in cache.stride()[:-1]
    )
}
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
        "kv_len": "B:i32",
        "sink": "Hq:f32",
        "kv_start": "B:i32",
        "q_scale": "B Hkv:f32",
        "k_scale": "B Hkv:f32",
        "v_scale": "B Hkv:f32",
        "out": "B T Hq Dv",
        "lse": "B T Hq:f32",
    },
    layouts={"out": rules.wide("B T Hq Dv")},
    where=rules.HEADS | rules.SCORES,
    features=rules.GQA
    | rules.SINK
    | rules.KV_START
    | {"bidirectional": lambda c: not c.arg.causal}
    | rules.WINDOW
    | rules.SCALES,
    kernels=(
        *(
            Kernel(arch, "bf16 f16", {"D": (d,), "Dv": (dv,)}, _FEATURES, _ROWS if arch == "sm90" else {})
            for arch in ("sm90", "sm100")
            for d, dv in ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
        ),
        Kernel("sm100", "bf16 f16", {"D": (512,), "Dv": (512,)}, _FEATURES),
        Kernel("sm100", "f8e4m3", {"D": (32, 64, 96, 128, 256, 512)}, f"{_FEATURES} scales", rules.SAME_DIM),
        Kernel("sm100", "f8e4m3", {"D": (192,), "Dv": (128,)}, f"{_FEATURES} scales"),
        Kernel("mps", "bf16 f16 f32", {"D": (32, 64, 80, 96, 128, 192, 256)}, _FEATURES, rules.value_dim(256)),
    ),
)
