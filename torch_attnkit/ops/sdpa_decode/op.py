"""sdpa_decode: one query token per sequence against a preallocated KV cache.

The query of sequence b sits at position ``kv_len[b] - 1`` and attends the keys [kv_start, kv_len), or of those the
last ``window`` and the first ``sink_tokens``. Grouped heads share a KV head; a learned ``sink`` logit per head joins
the denominator only. Returns out and the natural-log LSE (sink left out), so that partial results can be merged.
q and the caches stand for themselves times ``q_scale``, ``k_scale`` and ``v_scale``, one positive number for each
sequence and KV head (None: 1).
Source: MetalTile ``sdpa_decode``; scales as FlashAttention-3 (arXiv 2407.08608) has them; sinks as in GPT-OSS
(OpenAI, 2025) and StreamingLLM (arXiv 2309.17453).
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.oracle import rules

# cp.async copies 16 bytes at a time.
_ROWS = {
    "every row of the caches must start at a multiple of 16 bytes": lambda c: all(
        stride * c.dtype.itemsize % 16 == 0
        for cache in (c.arg.k_cache, c.arg.v_cache)
        for stride in cache.stride()[:-1]
    ),
    "every row of q must start at a multiple of 4 bytes": lambda c: all(
        s * c.dtype.itemsize % 4 == 0 for s in c.arg.q.stride()[:-1]
    ),
}
_FEATURES = "gqa sink kv_start window sink_tokens softcap"
_CUDA = tuple(
    Kernel(arch, "bf16 f16", {"D": (d,), "Dv": (dv,)}, _FEATURES, _ROWS)
    for arch in ("sm90", "sm100")
    for d, dv in ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512))
)
_CODES = Kernel("sm100", "f8e4m3", {"D": (64, 128, 256, 512)}, f"{_FEATURES} scales", _ROWS | rules.SAME_DIM)
_MPS = Kernel("mps", "bf16 f16 f32", {"D": (32, 64, 80, 96, 128, 192, 256, 512)}, _FEATURES, rules.value_dim(512))

OP = Op(
    schema="sdpa_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor kv_len, Tensor? sink=None,"
    " Tensor? kv_start=None, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, *,"
    " float? scale=None, int window=-1, int sink_tokens=0, float softcap=0.0) -> (Tensor out, Tensor lse)",
    dims={
        "q": "B Hq D:T8",
        "k_cache": "B Hkv S D:T8",
        "v_cache": "B Hkv S Dv:T8",
        "kv_len": "B:i32",
        "sink": "Hq:f32",
        "kv_start": "B:i32",
        "q_scale": "B Hkv:f32",
        "k_scale": "B Hkv:f32",
        "v_scale": "B Hkv:f32",
        "out": "B Hq Dv",
        "lse": "B Hq:f32",
    },
    layouts={"out": rules.wide("B Hq Dv")},
    where=rules.HEADS | rules.SCORES,
    features=rules.GQA | rules.SINK | rules.KV_START | rules.WINDOW | rules.SCALES,
    kernels=(*_CUDA, _CODES, _MPS),
)
