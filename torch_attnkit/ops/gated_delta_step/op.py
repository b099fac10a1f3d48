"""gated_delta_step: a few tokens of each sequence through the gated delta rule, a decode step of Gated DeltaNet.

Every value head has a matrix S, (V, K), in a pool of slots. A token with key k, query q, value v and gates a, b does

    S <- exp(g) S;   u = beta (v - S k');   S <- S + u k'^T;   out = S q'

with g = -exp(A_log) softplus(a + dt_bias), beta = beta_scale sigmoid(b), k' = k / sqrt(|k|^2 + eps) and q' likewise,
times ``scale``; without ``qk_l2norm`` k' is k and q' is scale q. Value head h has the key head h // (Hv / Hk). All of
it is float32, out is rounded once.

Sequence b begins with the state of slot ``state_index[b, accepted[b] - 1]``, or of column 0 without ``accepted``; the
state after token t goes to slot ``state_index[b, t]``, in place. So drafts keep a state each, and the next step begins
with that of the last one that was accepted. A slot of -1 keeps nothing; where it is the first one, nothing is read
either, and out is 0. No two sequences may name one slot.
Source: Gated Delta Networks (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it; slots as servers keep them.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import delta
from torch_attnkit.kernels.delta import metal
from torch_attnkit.kernels.delta.launch import LANES, MOST_DIM
from torch_attnkit.kernels.delta.problem import VECTOR
from torch_attnkit.oracle import delta_rules

MOST_TOKENS = 8

OP = Op(
    schema="gated_delta_step(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,"
    " Tensor(a!) state, Tensor state_index, Tensor? accepted=None, *, float? scale=None, bool qk_l2norm=True,"
    " float eps=1e-6, float beta_scale=1.0) -> Tensor out",
    dims={
        "q": "B n Hk K",
        "k": "B n Hk K",
        "v": "B n Hv V",
        "a": "B n Hv",
        "b": "B n Hv",
        "A_log": "Hv:f32|T",
        "dt_bias": "Hv:f32|T",
        "state": "Ns Hv V K:f32",
        "state_index": "B n:i32<i64",
        "accepted": "B:i32<i64",
        "out": "B n Hv V",
    },
    meaning=dict(
        q="Queries of the new tokens.",
        k="Keys of the new tokens.",
        v="Values of the new tokens.",
        a="Gate of the decay, before dt_bias, softplus and the factor -exp(A_log).",
        b="Gate of the correction, before the sigmoid.",
        A_log="Natural logarithm of each head's rate of decay.",
        dt_bias="What is added to a, for each head.",
        state="Pool of states, written in place. Slots that state_index does not name stay as they are.",
        state_index="Slot of the state after each token, -1 to Ns - 1; -1 keeps none. The step begins with the state of"
        " column accepted - 1, or of column 0.",
        accepted="Tokens of the step before that were accepted, for each sequence; cut off at 1 and n. None is 1.",
        **delta_rules.MEANING,
        beta_scale="Factor of sigmoid(b): 2 allows eigenvalues from -1 to 1.",
        out="S q' of each token, with the state after it, computed in float32 and rounded once; 0 where a sequence has"
        " no state.",
    ),
    axes=delta_rules.axes("B", n="tokens of a sequence"),
    where=delta_rules.WHERE | {"n must be 1 to 8": lambda c: 1 <= c.dim["n"] <= MOST_TOKENS},
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
