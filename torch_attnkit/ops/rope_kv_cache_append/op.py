"""rope_kv_cache_append: a token of each sequence, its heads of q and its keys rotated, keys and values into a cache.

Of every head of q and of the keys the first ``2 * R2`` channels are rotated: pairs (a, b) of channels i and i + R2 to
(a cos - b sin, b cos + a sin), in float32, rounded once; other channels stay. q returns so, (B, Hq, D). Keys and values
go to row ``slot[b]`` of the caches, in place; slot -1 is skipped. Without ``slot`` the caches are full: all rows move
up by one, the first is lost, and the token becomes the last, as a sliding window has it whose keys stand in order.
``sink`` returns in float32, which attention takes: a decode step has one launch less.
Source: RoFormer (arXiv 2104.09864), halves as GPT-NeoX pairs them; the static caches of transformers.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import cache
from torch_attnkit.oracle import meanings

OP = Op(
    schema="rope_kv_cache_append(Tensor q, Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor cos, Tensor sin, Tensor? slot=None, Tensor? sink=None) -> (Tensor q_out, Tensor sink_out)",
    dims={
        "q": "B Hq D",
        "key": "B Hkv D",
        "value": "B Hkv Dv",
        "k_cache": "B Hkv S D",
        "v_cache": "B Hkv S Dv",
        "cos": "Ba 1 R2:f32|T",
        "sin": "Ba 1 R2:f32|T",
        "slot": "Bs:i32|i64",
        "sink": "Hq:f32|T",
        "q_out": "B Hq D",
        "sink_out": "Hq:f32",
    },
    meaning=dict(
        q="Queries of the new tokens, one a sequence.",
        key="Keys of the new tokens; they are rotated as q is.",
        value="Values of the new tokens.",
        k_cache="Keys of each sequence, written in place. What no slot names stays as it is.",
        v_cache="Values of each sequence, written in place as k_cache is.",
        cos="Cosine of the angle of the rotated pairs, channels i and i + R2 of a head, for each sequence or for all.",
        sin="Sine of the angle of the rotated pairs, as cos has them.",
        slot="Row of the caches for each sequence's token, or one for all, -1 to S - 1; -1 skips it. None: rows move up"
        " by one, and the token becomes row S - 1.",
        sink="A number for each query head, such as attention's sinks; None is none.",
        q_out="q, rotated in float32 and rounded once.",
        sink_out="sink in float32; empty without one.",
    ),
    axes=meanings.axes(
        "B Hq R2 S Dv",
        Hkv="KV heads",
        D="channels of a key's head",
        Ba="rows of cos and sin, B or 1",
        Bs="slots, B or 1",
    ),  # fmt: skip
    where={
        "cos and sin must have a row for each sequence, or one": lambda c: c.dim["Ba"] in (1, c.dim["B"]),
        "slot must be one for each sequence, or one": lambda c: (
            c.arg.slot is None or c.arg.slot.shape[0] in (1, c.dim["B"])
        ),
        "2 * R2 must be at most D": lambda c: 2 * c.dim["R2"] <= c.dim["D"],
        "k_cache and v_cache must not overlap themselves": lambda c: all(
            t.stride(axis) > 0 or t.shape[axis] < 2 for t in (c.arg.k_cache, c.arg.v_cache) for axis in range(3)
        ),
    },
    unless={"sink_out": lambda c: c.arg.sink is None},
    whole="every process that holds a cache has to write every token of it; give each its own sequences, or some heads",
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            needs={
                "cos and sin must be of one dtype": lambda c: c.arg.cos.dtype == c.arg.sin.dtype,
                "at most 65535 sequences": lambda c: c.dim["B"] < 2**16,
                "fewer than 2^20 heads": lambda c: max(c.dim["Hq"], c.dim["Hkv"]) < 2**20,
                "fewer than 2^31 rows": lambda c: c.dim["S"] < 2**31,
                "D and Dv at most 1024": lambda c: max(c.dim["D"], c.dim["Dv"]) <= 1024,
            },
            launcher=cache.NVIDIA_APPEND,
        ),
    ),
)
