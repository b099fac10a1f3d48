"""indexer_scores: how relevant each compressed cache entry is to each token, for indexer_topk to choose from.

``scores[t, j] = sum_h weights[t, h] * relu(q[t, h] . k[r, j])`` in float32 for the entries j < k_len[t] of
the token's request r, and -inf for the others. The scales of softmax and heads belong in ``weights``.
request_ids None: token t belongs to request ``t * R // Tq``. With ``block_table`` the keys lie in pages of Sk
entries and S = Mp * Sk; only pages that some token of the request sees are looked at, and the table may hold
anything behind them. ``format`` says what q and k are: "none" the model dtype; "fp8" E4M3 with a float32
scale per row (k_scale, and q_scale unless it is folded into weights); "mxfp4" E2M1 pairs with a UE8M0 scale
per 32. Kernels add up products of E4M3 as the tensor cores do, in 14 bits on Hopper; sums over heads are float32.
Source: the lightning indexer of DeepSeek-V3.2 and V4 (arXiv 2512.02556, 2606.19348).
"""

from collections.abc import Iterator

from torch_attnkit.core import Kernel, Op
from torch_attnkit.core.family import Launcher
from torch_attnkit.core.op import Call, Predicate, Shards, of_dtypes
from torch_attnkit.core.spec import DTYPES, short
from torch_attnkit.kernels import indexer
from torch_attnkit.kernels.indexer import metal
from torch_attnkit.kernels.indexer.sm80 import plan as sm80
from torch_attnkit.kernels.indexer.sm90 import plan as sm90
from torch_attnkit.kernels.indexer.sm100 import plan as sm100
from torch_attnkit.oracle import meanings, shards

_CODES = {"fp8": DTYPES["f8e4m3"], "mxfp4": DTYPES["u8"]}
_SCALES = {"fp8": DTYPES["f32"], "mxfp4": DTYPES["u8"]}


def _dtypes(c: Call) -> bool:
    """The dtypes that go with the format. Raises TypeError, as the table does for a dtype of no format."""
    want = {n: _CODES.get(c.arg.format, c.dtype) for n in ("q", "k")}
    if c.arg.format != "none":
        want |= {n: _SCALES[c.arg.format] for n in ("q_scale", "k_scale")}
    for name, dtype in want.items():
        tensor = getattr(c.arg, name)
        if tensor is not None and tensor.dtype != dtype:
            accepted = f"accepted with format {c.arg.format!r}: {short(dtype)}"
            raise TypeError(f"{c.op}: {name} is {short(tensor.dtype)}, {accepted}")
    return True


def _needs(format: str) -> dict[str, Predicate]:
    """What the kernels need besides."""
    return {
        f"format must be {format!r}": of_dtypes(lambda c: c.arg.format == format),
        f"Hi must be 1 to {sm90.MOST_HEADS}": lambda c: 1 <= c.dim["Hi"] <= sm90.MOST_HEADS,
        "R must be 1 to 65535": lambda c: 1 <= c.dim["R"] < 2**16,
        "fewer than 2^23 tokens": lambda c: c.dim["Tq"] < 2**23,
        "fewer than 2^30 entries": lambda c: c.dim["S"] < 2**30,
    }


def _rows(on: str, dims: dict[str, tuple[int, ...]], launcher: Launcher | None = None) -> Iterator[Kernel]:
    """A row for each format."""
    for format, dtypes in (("fp8", "bf16 f16 f32"), ("mxfp4", "bf16 f16 f32"), ("none", "bf16 f16")):
        yield Kernel(on, dtypes, {"Qb": dims[format]}, "paged request_ids", _needs(format), launcher)


OP = Op(
    schema="indexer_scores(Tensor q, Tensor k, Tensor weights, Tensor k_len, Tensor? request_ids=None,"
    " Tensor? block_table=None, Tensor? q_scale=None, Tensor? k_scale=None, *, str format='none')"
    " -> Tensor scores",
    dims={
        "q": "Tq Hi Qb:T|f8e4m3|u8",
        "k": "Rk Sk Qb:T|f8e4m3|u8",
        "weights": "Tq Hi:f32|T",
        "k_len": "Tq:i32<i64",
        "request_ids": "Tq:i32<i64",
        "block_table": "R Mp:i32<i64",
        "q_scale": "Tq Hi Qs:f32|u8",
        "k_scale": "Rk Sk Qs:f32|u8",
        "scores": "Tq S:f32",
    },
    meaning=meanings.take(
        meanings.REQUESTS,
        "request_ids",
        q="Index queries of each token, stored as format says.",
        k="Index keys of each request's entries, stored as format says; with block_table pages of them.",
        weights="Weight of each head in the sum; scales of softmax and heads belong in it.",
        k_len="Entries that each token may see, 0 to S; the others score -inf.",
        block_table="Pages of each request in order: entry j lies in page block_table[r, j // Sk], slot j % Sk. Entries"
        " behind all that its tokens see may be anything. None: no pages.",
        q_scale="Scales of q: with 'fp8' a float32 per row (None: they are in weights), with 'mxfp4' a UE8M0 byte per"
        " 32 numbers, with 'none' None.",
        k_scale="Scales of k: with 'fp8' a float32 per row, with 'mxfp4' a UE8M0 byte per 32 numbers, with 'none'"
        " None.",
        format="How q and k are stored: 'none' in the model's dtype, 'fp8' as E4M3 under a scale per row, 'mxfp4' as"
        " E2M1 pairs under a scale per 32.",
        scores="Sum over heads of weights * relu(q . k), in float32; -inf for entries at or past k_len.",
    ),
    axes={
        "Tq": "tokens of all requests together",
        "Hi": "index heads",
        "Qb": "elements of a row of q and k: numbers, or bytes of two",
        "Rk": "requests, or with block_table pages",
        "Sk": "entries of a request, or with block_table of a page",
        "R": "requests",
        "Mp": "pages that a request has room for in block_table",
        "Qs": "scales of a row",
        "S": "entries of a request: Sk, or with block_table Mp * Sk",
    },
    derive={
        "R": lambda c: c.dim["Rk"] if c.arg.block_table is None else c.dim["R"],
        "S": lambda c: c.dim["Sk"] * (1 if c.arg.block_table is None else c.dim["Mp"]),
    },
    choices={"format": ("none", "fp8", "mxfp4")},
    where={
        "dtypes of the format": _dtypes,
        "format 'none' takes neither q_scale nor k_scale": lambda c: (
            c.arg.format != "none" or (c.arg.q_scale is None and c.arg.k_scale is None)
        ),
        "format 'fp8' needs k_scale, and one scale per row (Qs = 1)": lambda c: (
            c.arg.format != "fp8" or (c.arg.k_scale is not None and c.dim["Qs"] == 1)
        ),
        "format 'mxfp4' needs q_scale and k_scale, a byte per 16 of q and k (Qs = Qb / 16)": lambda c: (
            c.arg.format != "mxfp4"
            or (c.arg.q_scale is not None and c.arg.k_scale is not None and c.dim["Qs"] * 16 == c.dim["Qb"])
        ),
        "Tq must be a multiple of the number of requests R where request_ids is not given": lambda c: (
            c.arg.request_ids is not None or c.dim["Tq"] % max(c.dim["R"], 1) == 0 and (c.dim["R"] or not c.dim["Tq"])
        ),
    },
    features={
        "paged": lambda c: c.arg.block_table is not None,
        "request_ids": lambda c: c.arg.request_ids is not None,
    },
    shards=(*shards.INDEXER, Shards("Hi", sums="scores")),
    varies=dict.fromkeys(("cuda", "mps", "cpu"), "which kernel takes a token follows from how many there are"),
    kernels=(
        Kernel(
            "cpu",
            "f32 f16 bf16",
            needs={
                "format must be 'none'": of_dtypes(lambda c: c.arg.format == "none"),
            },
        ),
        *_rows("sm80 sm89 sm120", sm80.DIMS, indexer.NVIDIA),
        *_rows("sm90", sm90.DIMS, indexer.NVIDIA),
        *_rows("sm100", sm100.DIMS, indexer.NVIDIA),
        *_rows("mps", metal.DIMS),
    ),
)
