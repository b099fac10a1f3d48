"""flash_attention_varlen: flash_attention over sequences of different lengths, packed one after another.

Sequence b holds the query tokens [cu_seqlens_q[b], cu_seqlens_q[b+1]) and the keys [cu_seqlens_k[b],
cu_seqlens_k[b+1]), and is attended as flash_attention would, bottom-right aligned on its own. Tokens past the
last offset give out 0 and lse -inf. ``max_seqlen_q`` and ``max_seqlen_k`` are hints for the launch (-1:
unknown); they bound the lengths. Scales are flash_attention's, one for each sequence and KV head.
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

_ALL = "gqa sink causal window sink_tokens softcap unnormalized"
_VALUES = rules.value_dim(metal.MOST_DIM_V)

OP = Op(
    schema="flash_attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
    " Tensor? sink=None, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, *,"
    " float? scale=None, bool causal=False, int window=-1, int sink_tokens=0,"
    " float softcap=0.0, bool normalize=True, int max_seqlen_q=-1, int max_seqlen_k=-1)"
    " -> (Tensor out, Tensor lse, Tensor row_sum)",
    dims={
        "q": "Tq Hq D:T8",
        "k": "Tk Hkv D:T8",
        "v": "Tk Hkv Dv:T8",
        "cu_seqlens_q": "B+1:i32<i64",
        "cu_seqlens_k": "B+1:i32<i64",
        "sink": "Hq:f32<bf16|f16",
        "q_scale": "[B Hkv]:f32",
        "k_scale": "[B Hkv]:f32",
        "v_scale": "[B Hkv]:f32",
        "out": "Tq Hq Dv",
        "lse": "Tq Hq:f32",
        "row_sum": "Tq Hq:f32",
    },
    meaning=meanings.take(
        meanings.ATTENTION,
        "cu_seqlens_q sink q_scale k_scale v_scale scale causal window sink_tokens softcap normalize max_seqlen_q"
        " max_seqlen_k lse row_sum",
        q="Queries of all sequences, packed one after another. Query i of T in a sequence of S keys has position"
        " S - T + i.",
        k="Keys of all sequences, packed one after another.",
        v="Values of all sequences, as k has keys.",
        cu_seqlens_k="Offsets of the sequences in k and v, from 0 and never falling. Two equal ones are a sequence"
        " without keys: out 0, lse -inf.",
        out=meanings.NUMERATOR,
    ),
    axes=meanings.axes("B Tq Hq Hkv D Dv", Tk="keys of all sequences together"),
    layouts={"out": rules.wide("Tq Hq Dv")},
    where=rules.HEADS
    | rules.SCORES
    | rules.PARTIAL
    | {
        "max_seqlen_q must be -1 (unknown) or at least 0": lambda c: c.arg.max_seqlen_q >= -1,
        "max_seqlen_k must be -1 (unknown) or at least 0": lambda c: c.arg.max_seqlen_k >= -1,
    },
    unless={"row_sum": lambda c: c.arg.normalize},
    features=rules.GQA | rules.SINK | rules.CAUSAL | rules.WINDOW | rules.UNNORMALIZED | rules.SCALES,
    exclusive=rules.SINK_OR_PARTIAL,
    shards=shards.HEADS,
    varies=dict.fromkeys(
        ("sm80", "sm89", "sm120"), "when a row's sums are rescaled follows from the rows that share its tile"
    ),
    kernels=(
        Kernel("cpu", "f32 f16 bf16", features="gqa sink causal window sink_tokens"),
        *rules.by_head("sm90", sm90.BITS16, sm90.heads(sm90.BITS16), _ALL, launcher=prefill.HOPPER),
        *rules.by_head("sm100", sm100.DTYPES, sm100.TILES, _ALL, launcher=prefill.BLACKWELL),
        *rules.of_codes("sm100", sm100.CODES, sm100.TILES, f"{_ALL} scales", launcher=prefill.BLACKWELL),
        *rules.by_head("sm80 sm89 sm120", sm80.DTYPES, sm80.MMA_TILES, _ALL, launcher=prefill.AMPERE),
        Kernel("mps", metal.DTYPES, {"D": metal.DIMS}, _ALL, _VALUES, launcher=prefill.METAL),
        Kernel("mps", metal.CODES, {"D": metal.DIMS}, f"{_ALL} scales", _VALUES, launcher=prefill.METAL),
        *rules.by_head("sm90", sm90.BITS16, sm90.heads(sm90.BITS16, wide=True), _ALL, launcher=prefill.HOPPER_HDIM512),
        *rules.of_codes("sm90", sm90.FP8, sm90.heads(sm90.FP8), f"{_ALL} scales", launcher=prefill.HOPPER_FP8),
    ),
)
