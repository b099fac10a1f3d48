"""paged_kv_cache_write: keys and values of new tokens into the pages of a cache.

Head h of token r goes to page ``slot[r] // Ps``, place ``slot[r] % Ps`` of ``k_cache`` and of ``v_cache``, in place;
slot -1 is skipped, and no slot may appear twice. Keys and values may be views of one tensor, as a product of q, k and v
gives them, and the caches views of one buffer, keys and values of a page behind one another or side by side; nothing
between them is touched. Caches have the dtype of the keys or are E4M3: then ``key / k_scale`` and ``value / v_scale``
are stored, rounded to nearest, ties to even, at most 448 in magnitude, with one positive number for all heads or one
for each (None: 1). These are the scales that sdpa_decode_paged takes.
Source: PagedAttention (arXiv 2309.06180); scales as vLLM's FP8 caches have them.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.kernels import cache
from torch_attnkit.oracle import meanings, rules

_NEEDS = {"fewer than 2^31 slots": lambda c: c.dim["Np"] * c.dim["Ps"] < 2**31}

OP = Op(
    schema="paged_kv_cache_write(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot,"
    " Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
    dims={
        "key": "R Hkv D",
        "value": "R Hkv Dv",
        "k_cache": "Np Ps Hkv D:T|f8e4m3",
        "v_cache": "Np Ps Hkv Dv:T|f8e4m3",
        "slot": "R:i32|i64",
        "k_scale": "[Hkv]:f32",
        "v_scale": "[Hkv]:f32",
    },
    meaning={
        "key": "Keys of new tokens.",
        "value": "Values of new tokens.",
        "k_cache": "Pages that keys are written to in place, in the dtype of key or E4M3. What no slot names stays as"
        " it is.",
        "v_cache": "Pages that values are written to in place, in the dtype of k_cache.",
        "slot": "Place of each token: page slot // Ps, place slot % Ps in it, -1 to Np * Ps - 1; -1 skips the token,"
        " and no other slot may stand twice.",
        "k_scale": "E4M3 caches store key / k_scale, at most 448 in magnitude: a finite number above 0 for each head or"
        " one for all; None is 1. Other caches take none.",
        "v_scale": "E4M3 caches store value / v_scale, as k_scale says it.",
    },
    axes=meanings.axes("R Np Ps bits", Hkv="KV heads", D="channels of a key's head", Dv="channels of a value's head"),
    derive=rules.BITS,
    where={
        "Ps must be at least 1": lambda c: c.dim["Ps"] > 0,
        "k_cache and v_cache must be of one dtype": lambda c: c.arg.k_cache.dtype == c.arg.v_cache.dtype,
        "scales are accepted with E4M3 caches only": lambda c: (
            c.dim["bits"] == 8 or (c.arg.k_scale is None and c.arg.v_scale is None)
        ),
    },
    features={"scales": lambda c: c.arg.k_scale is not None or c.arg.v_scale is not None},
    whole="every process that holds the cache has to write every token of it; give each its own cache, or its heads",
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="scales",
            needs=_NEEDS | {"fewer than 2^31 tokens": lambda c: c.dim["R"] < 2**31},
            launcher=cache.NVIDIA_PAGES,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="scales",
            needs=_NEEDS | {"at most 2^26 tokens": lambda c: c.dim["R"] <= 2**26},
            launcher=cache.METAL_PAGES,
        ),
    ),
)
