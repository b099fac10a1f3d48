"""What compiling a kernel takes, for the words of ``explain`` and ``info``."""

from __future__ import annotations

# Median seconds of a processor, by kernel: "seconds" in the .json of what ``warmup --models all --target sm90`` made on
# one of two cores of a server, CuTeDSL 4.8.1; of decode_mla, fp4, merge, norm and sparse by single kernels
# before. A kernel of wide tiles may take two to four times as long.
SECONDS = {
    "cache": 0.1,
    "decode_mla": 2.7,
    "decode_mma": 1.15,
    "decode_wgmma": 2.05,
    "fp4": 0.2,
    "grouped_gemm": 4.3,
    "grouped_gemm_wgmma": 9.65,
    "merge": 0.2,
    "norm": 0.2,
    "prefill": 2.0,
    "prefill_cached": 2.05,
    "prefill_dense": 2.0,
    "prefill_packed": 2.1,
    "prefill_paged": 2.2,
    "routing": 0.1,
    "sparse": 4.2,
}
_UNKNOWN = 2.0  # the median of all


def of(name: str) -> float:
    """Seconds for a kernel of this name (``compile.Request.name``), or of its family."""
    if name in SECONDS:
        return SECONDS[name]
    family = [s for n, s in SECONDS.items() if n.split("_")[0] == name.split("_")[0]]
    return max(family, default=_UNKNOWN)
