"""sparse_fmha_with_swa: every token attends a sliding window of its request and chosen compressed entries.

Keys are values (K = V) and shared by all heads. Token t of request r sees
``swa_kv[r, max(0, swa_end - window):swa_end]`` together with the entries of ``compressed_kv[r]`` that
``topk_indices[t]`` lists (-1 = absent, the others distinct), or all of them without a list; of either only those
below ``compressed_len[t]``. One softmax runs over the union; ``sink`` joins its denominator. ``request_ids`` says
which request a token belongs to; without it the tokens come in R equal blocks. Returns out and the natural-log
LSE, sink left out. With ``normalize=False`` out is the numerator ``sum_j exp(s_j - max) k_j`` and row_sum the
denominator ``sum_j exp(s_j - max)``, for merge_partials; otherwise row_sum is empty.

Either cache may lie in pages: with ``swa_block_table`` or ``compressed_block_table`` key j of request r is in page
``table[r, j // P]``, slot ``j % P``, of a cache of pages of P keys. Ends, lists and lengths go on counting the keys of
the request, S or C of them, as many as its row of the table has slots. What a table holds for pages at which no token
looks may be any value. Instead of numbers both caches may hold rows of kv_cache_write's ``format`` and ``rope_dim``,
with ``global_scale`` if they were written with one: they are attended as if they were decoded to q's dtype first.
Source: DeepSeek-V4 (2026): window attention with compressed sparse (CSA) and heavily compressed (HCA) entries. Pages:
PagedAttention (arXiv 2309.06180). The fp8 row is FlashMLA's.
"""

from torch_attnkit.core import Kernel, Op
from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels import sparse
from torch_attnkit.kernels.sparse import metal
from torch_attnkit.kernels.sparse.sm80 import plan as sm80
from torch_attnkit.kernels.sparse.sm90 import plan as sm90
from torch_attnkit.kernels.sparse.sm100 import plan as sm100
from torch_attnkit.oracle import meanings, rules, shards

from . import caches

_LEAST = sm90.LEAST_BYTES
_ROWS = {
    "every row of q must start at a multiple of 16 bytes": lambda c: caches.aligned(c.arg.q, 16),
    f"rows of numbers in the caches must start at multiples of 16 bytes, encoded ones at multiples of {_LEAST}": (
        lambda c: all(caches.aligned(rows, 16 if c.arg.format == "none" else _LEAST) for rows in caches.given(c))
    ),
    "fewer than 2^31 tokens times heads": lambda c: c.dim["Tq"] * c.dim["Hq"] < 2**31,
    "fewer than 2^31 keys of a request": lambda c: c.dim["S"] < 2**31 and c.dim["C"] < 2**31,
}

OP = Op(
    schema="sparse_fmha_with_swa(Tensor q, Tensor swa_kv, Tensor swa_end, Tensor? compressed_kv=None,"
    " Tensor? topk_indices=None, Tensor? compressed_len=None, Tensor? request_ids=None, Tensor? sink=None,"
    " Tensor? swa_block_table=None, Tensor? compressed_block_table=None, Tensor? global_scale=None, *,"
    " float? scale=None, int window=128, bool normalize=True, str format='none', int rope_dim=64)"
    " -> (Tensor out, Tensor lse, Tensor row_sum)",
    dims={
        "q": "Tq Hq D",
        "swa_kv": "R S D:T|u8",
        "swa_end": "Tq:i32<i64",
        "compressed_kv": "R C D:T|u8",
        "topk_indices": "Tq K:i32<i64",
        "compressed_len": "Tq:i32<i64",
        "request_ids": "Tq:i32<i64",
        "sink": "Hq:f32<bf16|f16",
        "swa_block_table": "R Mw:i32<i64",
        "compressed_block_table": "R Mc:i32<i64",
        "global_scale": ":f32",
        "out": "Tq Hq D",
        "lse": "Tq Hq:f32",
        "row_sum": "Tq Hq:f32",
    },
    meaning=meanings.take(
        meanings.ATTENTION,
        "sink scale normalize lse row_sum",
        q="Queries of all requests, a token a row; every head sees the same keys.",
        swa_kv="Keys of each request for the window, which are also its values: numbers in the dtype of q, or rows of"
        " format; with swa_block_table pages of them.",
        swa_end="End of each token's window, 0 to S: it sees keys max(0, swa_end - window) to swa_end - 1 of its"
        " request, none at 0.",
        compressed_kv="Compressed entries of each request, stored as swa_kv is, pages of them with"
        " compressed_block_table; None: the window is all that there is.",
        topk_indices="Entries that each token sees, 0 to C - 1, distinct; -1 is none. None: it sees all of them.",
        compressed_len="Entries that each token may see, 0 to C: those at or past it do not count, listed or not. None"
        " is C.",
        swa_block_table="Pages of each request's window keys in order: key j lies in page [r, j // Pw], slot j % Pw."
        " Those at which no token looks may be anything. None: no pages.",
        compressed_block_table="Pages of each request's entries in order, as swa_block_table has them; None: no pages.",
        window="Keys before swa_end that a token sees; 0 is none.",
        global_scale="Factor that the rows of the caches were written with, above 0 up to 2^115, for format 'nvfp4'"
        " only; None is 1.",
        out=meanings.NUMERATOR,
    )
    | meanings.take(meanings.REQUESTS, "request_ids")
    | meanings.take(meanings.CACHE, "format rope_dim"),
    axes=meanings.axes(
        "Hq Rb fmt",
        Tq="tokens of all requests together",
        D="channels of a head",
        R="requests",
        S="keys that a request has room for",
        C="entries that a request has room for",
        K="entries listed for a token",
        Mw="pages that a request has room for in swa_block_table",
        Mc="pages that a request has room for in compressed_block_table",
        Nw="pages of swa_kv",
        Pw="keys of a page of swa_kv",
        Nc="pages of compressed_kv",
        Pc="entries of a page of compressed_kv",
    ),
    # Pages of P keys, rows of Rb bytes.
    layouts={
        "swa_kv": lambda c: caches.layout(c, "R S" if c.arg.swa_block_table is None else "Nw Pw"),
        "compressed_kv": lambda c: caches.layout(c, "R C" if c.arg.compressed_block_table is None else "Nc Pc"),
    },
    derive={
        "S": lambda c: c.dim["S"] if c.arg.swa_block_table is None else c.dim["Mw"] * c.dim["Pw"],
        "C": caches.entries,
        "fmt": lambda c: kv_cache.FORMATS.index(c.arg.format),  # 0 none, 1 fp8, 2 nvfp4, 3 mxfp4
    },
    choices={"format": kv_cache.FORMATS},
    where={
        "D must be at least 1": lambda c: c.dim["D"] > 0,
        "window must be at least 0": lambda c: c.arg.window >= 0,
        "topk_indices needs compressed_kv": lambda c: c.arg.topk_indices is None or c.arg.compressed_kv is not None,
        "compressed_len needs compressed_kv": lambda c: c.arg.compressed_len is None or c.arg.compressed_kv is not None,
        "compressed_block_table needs compressed_kv": lambda c: (
            c.arg.compressed_block_table is None or c.arg.compressed_kv is not None
        ),
        "pages must have room for a key": lambda c: c.dim.get("Pw", 1) > 0 and c.dim.get("Pc", 1) > 0,
        **caches.RULES,
        "Tq must be a multiple of R when request_ids is not given": lambda c: (
            c.arg.request_ids is not None or c.dim["Tq"] == 0 or (c.dim["R"] > 0 and c.dim["Tq"] % c.dim["R"] == 0)
        ),
    }
    | rules.PARTIAL,
    unless={"row_sum": lambda c: c.arg.normalize},
    features={
        "compressed": lambda c: c.arg.compressed_kv is not None,
        "topk": lambda c: c.arg.topk_indices is not None,
        "compressed_len": lambda c: c.arg.compressed_len is not None,
        "request_ids": lambda c: c.arg.request_ids is not None,
        "swa_paged": lambda c: c.arg.swa_block_table is not None,
        "compressed_paged": lambda c: c.arg.compressed_block_table is not None,
    }
    | rules.SINK
    | rules.UNNORMALIZED,
    exclusive=rules.SINK_OR_PARTIAL,
    shards=shards.SPARSE,
    varies=dict.fromkeys(
        ("cuda", "mps", "cpu"), "into how many parts a token's keys are split follows from how many tokens there are"
    ),
    kernels=(
        Kernel(
            "cpu",
            "f32 f16 bf16",
            {"D": metal.DIMS},
            "compressed topk compressed_len request_ids swa_paged compressed_paged sink unnormalized",
        ),
        Kernel(
            "sm80 sm89 sm120",
            sm80.DTYPES,
            {"D": tuple(sm80.TILES)},
            "compressed topk compressed_len request_ids swa_paged compressed_paged sink unnormalized",
            _ROWS,
            launcher=sparse.NVIDIA,
        ),
        Kernel(
            "sm90",
            sm90.DTYPES,
            {"D": tuple(sm90.TILES)},
            "compressed topk compressed_len request_ids swa_paged compressed_paged sink unnormalized",
            _ROWS,
            launcher=sparse.NVIDIA,
        ),
        Kernel(
            "sm100",
            sm100.DTYPES,
            {"D": sm100.HEADS},
            "compressed topk compressed_len request_ids swa_paged compressed_paged sink unnormalized",
            _ROWS,
        ),
        Kernel(
            "mps",
            metal.DTYPES,
            {"D": metal.DIMS},
            "compressed topk compressed_len request_ids swa_paged compressed_paged sink unnormalized",
            {
                "fewer than 2^31 tokens times heads": lambda c: c.dim["Tq"] * c.dim["Hq"] < 2**31,
                "fewer than 2^30 keys of a request": lambda c: max(c.dim["S"], c.dim["C"]) < 2**30,
            },
        ),
    ),
)
