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

from torch_attnkit.core import Op
from torch_attnkit.ops.gated_delta_step.op import OP as GATED
from torch_attnkit.oracle import delta_rules

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
    meaning={name: GATED.meaning[name] for name in GATED.meaning if name != "beta_scale"}
    | dict(
        a="Gate of each channel's decay, before dt_bias.",
        dt_bias="What is added to a, for each channel.",
        lower_bound="The least g, below 0, of gates by a sigmoid; None takes softplus, which has no bound.",
    ),
    axes={axis: words for axis, words in GATED.axes.items() if axis != "Hk"} | {"Hv": "heads, each with a state"},
    where={words: holds for words, holds in GATED.where.items() if "Hk" not in words}
    | {"lower_bound must be below 0": lambda c: c.arg.lower_bound is None or c.arg.lower_bound < 0},
    varies=delta_rules.VARIES,
    whole=delta_rules.WHOLE,
    kernels=GATED.kernels,
)
