"""causal_conv1d: a depthwise convolution over each sequence's tokens, ahead of the gated delta rule.

Sequences are packed one after another: b has the tokens [cu_seqlens[b], cu_seqlens[b+1]); a decode step has one token
each. Channel c of token t is

    out[t, c] = act(bias[c] + sum_i weight[c, i] x[t - W + 1 + i, c])

where tokens before the sequence's first are those that its state holds, of slot ``state_index[b]``, or zeros where
``past[b]`` is 0; act is silu, or nothing. Sums are float32, out is rounded once. The state is left with the last Ws
tokens, newest last, in place; a sequence without tokens leaves it as it is. Of a slot of -1 nothing is read or kept,
and out is 0, as it is for tokens past the last offset. No two sequences may name one slot.
Source: Gated Delta Networks (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it; causal-conv1d (Dao, 2023).
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import delta
from torch_attnkit.kernels.delta.problem import ACTIVATIONS, MOST_COLUMNS, WIDTHS
from torch_attnkit.oracle import meanings

_LIMITS = {
    f"the state must have at most {MOST_COLUMNS} columns": lambda c: c.dim["Ws"] <= MOST_COLUMNS,
    "at most 65534 sequences": lambda c: c.dim["B"] < 2**16 - 1,
    "fewer than 2^31 tokens and channels": lambda c: max(c.dim["Tq"], c.dim["C"]) < 2**31 - 2**16,
}

OP = Op(
    schema="causal_conv1d(Tensor x, Tensor weight, Tensor(a!) conv_state, Tensor cu_seqlens, Tensor state_index,"
    " Tensor? bias=None, Tensor? past=None, *, str activation='silu') -> Tensor out",
    dims={
        "x": "Tq C",
        "weight": "C W",
        "conv_state": "Ns C Ws",
        "cu_seqlens": "B+1:i32<i64",
        "state_index": "B:i32<i64",
        "bias": "C",
        "past": "B:i32<i64",
        "out": "Tq C",
    },
    meaning=dict(
        x="Tokens of all sequences, packed one after another.",
        weight="Weights of each channel, that of the newest token last.",
        conv_state="Pool of states, written in place: the last Ws tokens of a sequence, newest last. Slots that"
        " state_index does not name stay as they are.",
        cu_seqlens="Offsets of the sequences in x, from 0 and never falling. Two equal ones are a sequence without"
        " tokens, whose slot stays as it is.",
        state_index="Slot of each sequence, -1 to Ns - 1; -1 keeps none.",
        bias="Added to each channel's sum; None adds nothing.",
        past="Tokens of each sequence before these; 0 begins with zeros whatever the slot holds, else it is read. None"
        " reads all.",
        activation="silu or none, applied to the sum.",
        out="The activation of each token's sums, rounded once; 0 where a sequence has no slot.",
    ),
    axes=meanings.axes(
        "B Tq", C="channels", W="tokens that a sum has, 2 to 4", Ws="tokens that a state holds", Ns="slots of the pool"
    ),
    where={
        f"W must be {WIDTHS[0]} to {WIDTHS[-1]}": lambda c: c.dim["W"] in WIDTHS,
        "the state must hold at least W - 1 tokens": lambda c: c.dim["Ws"] >= c.dim["W"] - 1,
        "conv_state must not overlap itself": lambda c: all(
            c.arg.conv_state.stride(axis) > 0 or c.arg.conv_state.shape[axis] < 2 for axis in range(3)
        ),
    },
    choices={"activation": ACTIVATIONS},
    features={"bias": lambda c: c.arg.bias is not None},
    varies={"cpu": "how PyTorch's silu rounds follows from where in its vectors an element lies"},
    whole="slots are shared by all sequences; give each process its own pool, or some channels",
    kernels=(
        Kernel("cuda", "bf16 f16 f32", features="bias", needs=dict(_LIMITS), launcher=delta.NVIDIA_CONV),
        Kernel("mps", "bf16 f16 f32", features="bias", needs=dict(_LIMITS), launcher=delta.METAL_CONV),
    ),
)
