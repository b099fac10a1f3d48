"""flash_attention: attention of T queries over S keys per sequence (prefill, encoders, cross attention).

Query i has position ``S - T + i`` (bottom-right alignment), whatever ``kv_len`` says. It sees the keys in
[kv_start, kv_len), with ``causal`` those up to its position, with ``window`` those nearer than that, besides
the first ``sink_tokens`` of its sequence. ``kv_len`` and ``kv_start`` describe right and left padding of the
keys. Heads stand behind tokens, as in flash-attn. Tensors as torch's SDPA has them, (B, H, T, D), need
``.transpose(1, 2)``; as they are they may fit, and mean H tokens of T heads. ``sink`` joins the denominator
only. Returns out and the natural-log LSE, sink left out. With ``normalize=False`` out is the numerator
``sum_j exp(s_j - max) v_j`` and row_sum the denominator ``sum_j exp(s_j - max)``, for merge_partials;
otherwise row_sum is empty.
q, k and v stand for themselves times ``q_scale``, ``k_scale`` and ``v_scale``, one positive number for each
sequence and KV head (None: 1), in every dtype. They are meant for E4M3, whose out is bfloat16.
Source: FlashAttention-2 (arXiv 2307.08691); scales as FlashAttention-3 (arXiv 2407.08608) has them; sinks as
in GPT-OSS (OpenAI, 2025) and StreamingLLM (arXiv 2309.17453).
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import prefill
from torch_attnkit.kernels.prefill import metal
from torch_attnkit.kernels.prefill.sm80 import tiles as sm80
from torch_attnkit.kernels.prefill.sm90 import tiles as sm90
from torch_attnkit.kernels.prefill.sm100 import plan as sm100
from torch_attnkit.oracle import meanings, rules, shards

_ALL = "gqa sink kv_len kv_start causal window sink_tokens softcap unnormalized"
_VALUES = rules.value_dim(metal.MOST_DIM_V)

OP = Op(
    schema="flash_attention(Tensor q, Tensor k, Tensor v, Tensor? sink=None, Tensor? kv_len=None,"
    " Tensor? kv_start=None, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, *,"
    " float? scale=None, bool causal=False, int window=-1, int sink_tokens=0,"
    " float softcap=0.0, bool normalize=True) -> (Tensor out, Tensor lse, Tensor row_sum)",
    dims={
        "q": "B T Hq D:T8",
        "k": "B S Hkv D:T8",
        "v": "B S Hkv Dv:T8",
        "sink": "Hq:f32<bf16|f16",
        "kv_len": "B:i32<i64",
        "kv_start": "B:i32<i64",
        "q_scale": "[B Hkv]:f32",
        "k_scale": "[B Hkv]:f32",
        "v_scale": "[B Hkv]:f32",
        "out": "B T Hq Dv",
        "lse": "B T Hq:f32",
        "row_sum": "B T Hq:f32",
    },
    meaning=meanings.take(
        meanings.ATTENTION,
        "sink kv_start q_scale k_scale v_scale scale causal window sink_tokens softcap normalize lse row_sum",
        q="Queries, heads behind tokens. Query i of a sequence has position S - T + i, whatever kv_len says.",
        k="Keys of each sequence, heads behind tokens; key j has position j.",
        v="Values of each sequence, as k has keys.",
        kv_len="Keys of each sequence that count (right padding), 0 to S; None is S. It moves no query; a sequence of 0"
        " has out 0 and lse -inf.",
        out=meanings.NUMERATOR,
    ),
    axes=meanings.axes("B T S Hq Hkv D Dv"),
    layouts={"out": rules.wide("B T Hq Dv")},
    where=rules.HEADS | rules.SCORES | rules.PARTIAL,
    unless={"row_sum": lambda c: c.arg.normalize},
    features=rules.GQA
    | rules.SINK
    | {"kv_len": lambda c: c.arg.kv_len is not None}
    | rules.KV_START
    | rules.CAUSAL
    | rules.WINDOW
    | rules.UNNORMALIZED
    | rules.SCALES,
    exclusive=rules.SINK_OR_PARTIAL,
    shards=shards.ATTENTION + shards.QUERIES,
    apart="B",
    varies=dict.fromkeys(
        ("sm80", "sm89", "sm120"), "when a row's sums are rescaled follows from the rows that share its tile"
    ),
    kernels=(
        Kernel("cpu", "f32 f16 bf16", {}, "gqa sink kv_len kv_start causal window sink_tokens"),
        *rules.by_head("sm90", sm90.BITS16, sm90.heads(sm90.BITS16), _ALL, launcher=prefill.HOPPER),
        *rules.by_head("sm100", sm100.DTYPES, sm100.TILES, _ALL, launcher=prefill.BLACKWELL),
        *rules.of_codes("sm100", sm100.CODES, sm100.TILES, f"{_ALL} scales", launcher=prefill.BLACKWELL),
        *rules.by_head("sm80 sm89 sm120", sm80.DTYPES, sm80.MMA_TILES, _ALL, launcher=prefill.AMPERE),
        Kernel("mps", metal.DTYPES, {"D": metal.DIMS}, _ALL, _VALUES, launcher=prefill.METAL),
        Kernel("mps", metal.CODES, {"D": metal.DIMS}, f"{_ALL} scales", _VALUES, launcher=prefill.METAL),
        *rules.by_head("sm90", sm90.BITS16, sm90.heads(sm90.BITS16, wide=True), _ALL, launcher=prefill.HOPPER_HDIM512),
        *rules.of_codes("sm90", sm90.FP8, sm90.heads(sm90.FP8), f"{_ALL} scales", launcher=prefill.HOPPER_FP8),
        *rules.of_codes("sm89 sm120", sm80.CODES, sm80.MMA_TILES_FP8, f"{_ALL} scales", launcher=prefill.AMPERE),
    ),
)
