"""kv_cache_write: rows of keys and values, encoded, into the slots of a cache.

Row r of kv goes to row ``slot[r]`` of ``cache``, in place; slot -1 is skipped, and no slot may appear twice. Rows of
the cache may lie apart (any row stride), and nothing between them is touched. format "none" stores the numbers, in the
cache's dtype, which is that of kv. The others store bytes: the D - rope_dim NoPE channels as E4M3 under UE8M0 scales
per 64 ("fp8"), E2M1 under E4M3 per 16 ("nvfp4", with ``global_scale``) or E2M1 under UE8M0 per 32 ("mxfp4"), then the
rope_dim RoPE channels in bfloat16, then the scales, padded to 4 bytes: 584, 380 and 368 bytes for D 512, rope_dim 64.
Such bytes are read by kv_cache_gather and the sparse attention ops, not by sdpa_decode, whose E4M3 caches have one
scale for each sequence and head.
Source: the caches of DeepSeek-V4 (arXiv 2606.19348); the fp8 row is FlashMLA's.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels import cache
from torch_attnkit.oracle import cache_rows, meanings

OP = Op(
    schema="kv_cache_write(Tensor kv, Tensor(a!) cache, Tensor slot, Tensor? global_scale=None, *,"
    " str format='none', int rope_dim=64) -> ()",
    dims={"kv": "R D", "cache": "Nc Rb:T|u8", "slot": "R:i32|i64", "global_scale": ":f32"},
    meaning=meanings.take(
        meanings.CACHE,
        "cache slot global_scale format rope_dim",
        kv="New rows of keys and values, RoPE channels last.",
    ),
    axes=meanings.axes("R Nc Rb fmt", D="channels of a row of kv"),
    derive={"fmt": lambda c: kv_cache.FORMATS.index(c.arg.format)},  # 0 none, 1 fp8, 2 nvfp4, 3 mxfp4
    choices={"format": kv_cache.FORMATS},
    where={
        **cache_rows.RULES,
        "rows of cache must not overlap": lambda c: c.dim["Nc"] <= 1 or c.arg.cache.stride(0) >= c.dim["Rb"],
    },
    features={"global_scale": lambda c: c.arg.global_scale is not None},
    whole="every process that holds the cache has to write every row of it; give each its own cache, or whole rows",
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="global_scale",
            needs={"fewer than 2^31 rows": lambda c: c.dim["R"] < 2**31},
            launcher=cache.NVIDIA_WRITE,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="global_scale",
            needs={"at most 2^26 rows": lambda c: c.dim["R"] <= 2**26},
            launcher=cache.METAL_WRITE,
        ),
    ),
)
