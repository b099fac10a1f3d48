"""kimi_delta_step: a few tokens of each sequence through the delta rule with a gate a channel, a step of Kimi Linear.

Every head has a matrix S, (V, K), in a pool of slots. A token with key k, query q, value v and gates a, b does

    S <- S diag(exp(g));   u = beta (v - S k');   S <- S + u k'^T;   out = S q'

where g has a number for each channel of K: -exp(A_log) softplus(a + dt_bias), or with ``lower_bound`` that times
sigmoid(exp(A_log) (a + dt_bias)). beta = sigmoid(b), k' = k / sqrt(|k|^2 + eps) and q' likewise, times ``scale``;
without ``qk_l2norm`` k' is k and q' is scale q. All of it is float32, out is rounded once. With gates that are the same
for all channels of a head it is gated_delta_step.

Slots, drafts and ``accepted`` are as in gated_delta_step: sequence b begins with the state of slot
``state_index[b, accepted[b] - 1]``, or of column 0; the state after token t goes to ``state_index[b, t]``, in place; -1
keeps nothing. No two sequences may name one slot.
Source: Kimi Linear (arXiv 2510.26692); ``lower_bound`` as GLM-5 has it.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import delta
from torch_attnkit.kernels.delta import metal
from torch_attnkit.kernels.delta.launch import LANES, MOST_DIM
from torch_attnkit.kernels.delta.problem import VECTOR
from torch_attnkit.oracle import delta_rules

MOST_TOKENS = 8

OP = Op(
    schema="kimi_delta_step(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,"
    " Tensor(a!) state, Tensor state_index, Tensor? accepted=None, *, float? scale=None, bool qk_l2norm=True,"
    " float eps=1e-6, float? lower_bound=None) -> Tensor out",
    dims={
        "q": "B n Hv K",
        "k": "B n Hv K",
        "v": "B n Hv V",
        "a": "B n Hv K",
        "b": "B n Hv",
        "A_log": "Hv:f32|T",
        "dt_bias": "Hv K:f32|T",
        "state": "Ns Hv V K:f32",
        "state_index": "B n:i32<i64",
        "accepted": "B:i32<i64",
        "out": "B n Hv V",
    },
    meaning=dict(
        q="Queries of the new tokens.",
        k="Keys of the new tokens.",
        v="Values of the new tokens.",
        a="Gate of each channel's decay, before dt_bias.",
        b="Gate of the correction, before the sigmoid.",
        A_log="Natural logarithm of each head's rate of decay.",
        dt_bias="What is added to a, for each channel.",
        state="Pool of states, written in place. Slots that state_index does not name stay as they are.",
        state_index="Slot of the state after each token, -1 to Ns - 1; -1 keeps none. The step begins with the state of"
        " column accepted - 1, or of column 0.",
        accepted="Tokens of the step before that were accepted, for each sequence; cut off at 1 and n. None is 1.",
        **delta_rules.MEANING,
        lower_bound="The least g, below 0, of gates by a sigmoid; None takes softplus, which has no bound.",
        out="S q' of each token, with the state after it, computed in float32 and rounded once; 0 where a sequence has"
        " no state.",
    ),
    axes={axis: words for axis, words in delta_rules.axes("B", n="tokens of a sequence").items() if axis != "Hk"}
    | {"Hv": "heads, each with a state"},
    where=delta_rules.PLAIN
    | {
        "n must be 1 to 8": lambda c: 1 <= c.dim["n"] <= MOST_TOKENS,
        "lower_bound must be below 0": lambda c: c.arg.lower_bound is None or c.arg.lower_bound < 0,
    },
    varies=delta_rules.VARIES,
    whole=delta_rules.WHOLE,
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            needs={
                f"K must be a multiple of {LANES * VECTOR} up to {MOST_DIM}": lambda c: (
                    c.dim["K"] % (LANES * VECTOR) == 0 and c.dim["K"] <= MOST_DIM
                ),
                "at most 65535 sequences": lambda c: c.dim["B"] < 2**16,
                "fewer than 2^31 rows of a state": lambda c: c.dim["Hv"] * (c.dim["V"] + 16) < 2**31,
            },
            launcher=delta.NVIDIA_STEP,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            needs={
                f"K must be a multiple of {metal.VECTOR} up to {MOST_DIM}": lambda c: (
                    c.dim["K"] % metal.VECTOR == 0 and c.dim["K"] <= MOST_DIM
                ),
            },
            launcher=delta.METAL_STEP,
        ),
    ),
)
