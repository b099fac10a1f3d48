"""rope_kv_cache_write: q's heads normed and rotated; rows of keys, rotated and encoded, into the slots of a cache.

Each head of q is divided by its root mean square over D, ``q * rsqrt(mean(q^2) + eps)``, without a weight; then its
last ``rope_dim`` channels are rotated, interleaved pairs (a, b) to (a cos - b sin, b cos + a sin). Both in float32,
rounded once to the result, (Tq, Hq, D). Rows of kv are rotated likewise, rounded to their dtype, and written as
kv_cache_write does: row t to row ``slot[t]`` of ``cache``, in place; slot -1 is skipped, and no slot may appear twice.
Rows of the cache, ``format``, ``rope_dim`` and ``global_scale`` are as there; nothing between rows is touched.
Source: the attention of DeepSeek-V4 (arXiv 2606.19348); RMSNorm (arXiv 1910.07467); RoFormer (arXiv 2104.09864).
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.core.op import Call, Predicate
from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels import cache
from torch_attnkit.kernels.cache.problem import MOST_CHANNELS, VECTOR
from torch_attnkit.oracle import cache_rows, meanings


def _whole_vectors(c: Call) -> bool:
    return c.dim["D"] % VECTOR == 0 and c.arg.rope_dim % VECTOR == 0


_NEEDS: dict[str, Predicate] = {
    f"D and rope_dim must be multiples of {VECTOR}": _whole_vectors,
    f"D at most {MOST_CHANNELS}": lambda c: c.dim["D"] <= MOST_CHANNELS,
    "cos and sin must be of one dtype": lambda c: c.arg.cos.dtype == c.arg.sin.dtype,
}

OP = Op(
    schema="rope_kv_cache_write(Tensor q, Tensor kv, Tensor(a!) cache, Tensor slot, Tensor cos, Tensor sin,"
    " Tensor? global_scale=None, *, float eps=1e-6, str format='none', int rope_dim=64) -> Tensor q_out",
    dims={
        "q": "Tq Hq D",
        "kv": "Tq D",
        "cache": "Nc Rb:T|u8",
        "slot": "Tq:i32|i64",
        "cos": "Tq R2:f32|T",
        "sin": "Tq R2:f32|T",
        "global_scale": ":f32",
        "q_out": "Tq Hq D",
    },
    meaning=meanings.take(
        meanings.CACHE,
        "cache slot global_scale format",
        q="Queries; each head is divided by the root of its mean square + eps, then rotated.",
        kv="New rows of keys and values; they are rotated as q is, not normed, and stored.",
        rope_dim="Channels at the end of a head and of a row of kv that are rotated, twice the columns of cos and sin;"
        " encoded rows keep them in bfloat16.",
        q_out="q, normed and rotated in float32 and rounded once.",
    )
    | meanings.take(meanings.HEADS, "cos sin eps"),
    axes=meanings.axes("Hq R2 Nc Rb fmt", Tq="tokens", D="channels of a head, and of a row of kv"),
    derive={"fmt": lambda c: kv_cache.FORMATS.index(c.arg.format)},  # 0 none, 1 fp8, 2 nvfp4, 3 mxfp4
    choices={"format": kv_cache.FORMATS},
    where={
        "D must be at least 1": lambda c: c.dim["D"] > 0,
        "eps must be positive": lambda c: c.arg.eps > 0,
        "rope_dim must be twice the columns of cos and sin, at most D": lambda c: (
            c.arg.rope_dim == 2 * c.dim["R2"] <= c.dim["D"]
        ),
        **cache_rows.RULES,
        "rows of cache must not overlap": lambda c: c.dim["Nc"] <= 1 or c.arg.cache.stride(0) >= c.dim["Rb"],
    },
    features={"global_scale": lambda c: c.arg.global_scale is not None},
    whole="every process that holds the cache has to write every row of it; give each its own cache, and some heads",
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="global_scale",
            needs=_NEEDS | {"fewer than 2^30 heads of tokens": lambda c: c.dim["Tq"] * (c.dim["Hq"] + 1) < 2**30},
            launcher=cache.NVIDIA_ROPE,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="global_scale",
            needs=_NEEDS | {"at most 2^26 heads of tokens": lambda c: c.dim["Tq"] * (c.dim["Hq"] + 1) <= 2**26},
            launcher=cache.METAL_ROPE,
        ),
    ),
)
