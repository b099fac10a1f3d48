"""kv_cache_gather: rows of a cache, decoded: what kv_cache_write stored, in the order of ``slot``.

out[r] is row ``slot[r]`` of the cache, zeros where slot is -1; a slot may appear more than once. format "none" returns
the numbers. "fp8", "nvfp4" and "mxfp4" rows are bytes as kv_cache_write describes them; their ``head_dim`` D cannot be
told from the row and must be given (0 stands for the size of the row, format "none" only). ``global_scale`` is the one
the rows were written with. The default of ``dtype`` is the dtype of the cache, and float32 for bytes; numbers are
rounded once to it. Stored numbers below 2^128 fit float32. Those that are not, to which kv_cache_write may round the
largest numbers of float32 and what infinities are stored as, come back infinite, as in every rounding to float32, and
as they are stored with ``dtype`` float64.
Source: the caches of DeepSeek-V4 (arXiv 2606.19348); the fp8 row is FlashMLA's.
"""

import torch

from torch_attnkit.core import Kernel, Op
from torch_attnkit.core.op import Shards
from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels import cache
from torch_attnkit.oracle import cache_rows, fp4, meanings

_OUT = (torch.float32, torch.bfloat16, torch.float16)

OP = Op(
    schema="kv_cache_gather(Tensor cache, Tensor slot, Tensor? global_scale=None, *, str format='none',"
    " int head_dim=0, int rope_dim=64, ScalarType? dtype=None) -> Tensor out",
    dims={"cache": "Nc Rb:T|u8", "slot": "R:i32|i64", "global_scale": ":f32", "out": "R D:@dtype"},
    meaning=meanings.take(
        meanings.CACHE,
        "format rope_dim",
        cache="Rows to be read: numbers with format 'none', with the others bytes as kv_cache_write stores them.",
        slot="Row of the cache for each row of out, -1 to Nc - 1; -1 gives zeros, and a slot may stand more than once.",
        global_scale="Factor that the rows were written with, for format 'nvfp4' only; None is 1.",
        head_dim="D, the channels of a decoded row; 0 is the size of the row, for format 'none' only.",
        dtype="Dtype of out, a floating point type; None is that of cache, and float32 for encoded rows.",
        out="The rows that slot names, decoded and rounded once to dtype.",
    ),
    axes=meanings.axes("Nc Rb fmt", R="rows that are read", D="channels of a decoded row"),
    derive={
        "fmt": lambda c: kv_cache.FORMATS.index(c.arg.format),  # 0 none, 1 fp8, 2 nvfp4, 3 mxfp4
        "D": lambda c: c.arg.head_dim or c.dim["Rb"],
    },
    choices={"format": kv_cache.FORMATS},
    where={
        "head_dim must be given with formats 'fp8', 'nvfp4' and 'mxfp4'": lambda c: (
            c.arg.format == "none" or c.arg.head_dim != 0
        ),
        **cache_rows.RULES,
    }
    | fp4.DTYPE,
    features={"global_scale": lambda c: c.arg.global_scale is not None},
    shards=(Shards("R"),),
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            features="global_scale",
            needs={
                "dtype must be float32, bfloat16 or float16": lambda c: c.arg.dtype in (None, *_OUT),
                "fewer than 2^31 rows": lambda c: c.dim["R"] < 2**31,
            },
            launcher=cache.NVIDIA_GATHER,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            features="global_scale",
            needs={
                "dtype must be float32, bfloat16 or float16": lambda c: c.arg.dtype in (None, *_OUT),
                "at most 2^26 rows": lambda c: c.dim["R"] <= 2**26,
            },
            launcher=cache.METAL_GATHER,
        ),
    ),
)
