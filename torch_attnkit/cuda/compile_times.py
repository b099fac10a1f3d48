"""What compiling a kernel takes, for the words of ``explain`` and ``info``."""

from __future__ import annotations

# Median seconds of a processor, by kernel: those of ``warmup --models all --target sm90`` (``seconds`` in the .json of
# each) on one core of a Xeon, CuTeDSL 4.8.1.
SECONDS: dict[str, float] = {}
_UNKNOWN = 3.0  # the median of all


def of(name: str) -> float:
    """Seconds for a kernel of this name (``compile.Request.name``), or of its family."""
    if name in SECONDS:
        return SECONDS[name]
    family = [s for n, s in SECONDS.items() if n.split("_")[0] == name.split("_")[0]]
    return max(family, default=_UNKNOWN)
