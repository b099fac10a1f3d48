"""gated_delta_rule: prompts through the gated delta rule, the prefill of Gated DeltaNet.

Sequences are packed one after another: b has the tokens [cu_seqlens[b], cu_seqlens[b+1]). Every value head has a matrix
S, (V, K), and a token with key k, query q, value v, decay g and strength beta does

    S <- exp(g) S;   u = beta (v - S k');   S <- S + u k'^T;   out = S q'

with k' = k / sqrt(|k|^2 + eps) and q' likewise, times ``scale``; without ``qk_l2norm`` k' is k and q' is scale q. Value
head h has the key head h // (Hv / Hk). All of it is float32, out is rounded once; kernels multiply in 16 bits (below).

Sequence b begins with the state of slot ``state_index[b]``, or with zeros where ``past[b]`` is 0, and leaves its last
state there, in place. A sequence without tokens leaves its slot as it is. Of a slot of -1 nothing is read or kept, and
out is 0. No two sequences may name one slot. Tokens past the last offset give out 0.

On NVIDIA GPUs tokens go by chunks of 32 through tensor cores: S is rounded to their dtype where it is multiplied, and
v - S k' and u to float16, which has to hold them (below 65504). A NaN reaches the tokens of its chunk before it, too.
Source: Gated Delta Networks (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it; slots as servers keep them.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import delta
from torch_attnkit.kernels.delta import metal
from torch_attnkit.kernels.delta.launch import MOST_DIM
from torch_attnkit.kernels.delta.sm80.config import MOST_KEY_DIM
from torch_attnkit.oracle import delta_rules

OP = Op(
    schema="gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor cu_seqlens,"
    " Tensor state_index, Tensor? past=None, *, float? scale=None, bool qk_l2norm=True, float eps=1e-6) -> Tensor out",
    dims={
        "q": "Tq Hk K",
        "k": "Tq Hk K",
        "v": "Tq Hv V",
        "g": "Tq Hv:f32",
        "beta": "Tq Hv:f32|T",
        "state": "Ns Hv V K:f32",
        "cu_seqlens": "B+1:i32<i64",
        "state_index": "B:i32<i64",
        "past": "B:i32<i64",
        "out": "Tq Hv V",
    },
    meaning=dict(
        q="Queries of all sequences, packed one after another.",
        k="Keys of all sequences, as q has queries.",
        v="Values of all sequences, as q has queries.",
        g="Natural logarithm of each token's decay, at most 0.",
        beta="Strength of each token's correction: sigmoid of its gate.",
        state="Pool of states, written in place. Slots that state_index does not name stay as they are.",
        cu_seqlens="Offsets of the sequences in q, from 0 and never falling. Two equal ones are a sequence without"
        " tokens, whose slot stays as it is.",
        state_index="Slot of each sequence, -1 to Ns - 1: where its state begins and is left. -1 keeps none.",
        past="Tokens of each sequence before these; 0 begins with zeros whatever the slot holds, else it is read. None"
        " reads all.",
        **delta_rules.MEANING,
        out="S q' of each token, with the state after it, rounded once; 0 where a sequence has no slot.",
    ),
    axes=delta_rules.axes("B Tq"),
    where=delta_rules.WHERE,
    varies=delta_rules.VARIES,
    whole=delta_rules.WHOLE,
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16",
            needs={
                f"K must be a multiple of 16 up to {MOST_KEY_DIM}": lambda c: (
                    c.dim["K"] % 16 == 0 and c.dim["K"] <= MOST_KEY_DIM
                ),
                "V must be a multiple of 8": lambda c: c.dim["V"] % 8 == 0,
                "at most 65534 sequences": lambda c: c.dim["B"] < 2**16 - 1,
                "fewer than 2^31 rows of a state": lambda c: c.dim["Hv"] * (c.dim["V"] + 128) < 2**31,
            },
            launcher=delta.NVIDIA_RULE,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            needs={
                f"K must be a multiple of {metal.VECTOR} up to {MOST_DIM}": lambda c: (
                    c.dim["K"] % metal.VECTOR == 0 and c.dim["K"] <= MOST_DIM
                ),
            },
            launcher=delta.METAL_RULE,
        ),
    ),
)
