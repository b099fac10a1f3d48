"""How many clusters of CTAs a GPU runs at once."""

from __future__ import annotations


def resident_clusters(ctas: int, sms: int, per_sm: int) -> int:
    """How many clusters of ``ctas`` CTAs are resident at a time. A cluster stays inside a GPC, which has 16 or 18 SMs.

    How many GPCs of which size a GPU has cannot be queried: an H200 with 132 SMs held fewer than 32 clusters of 4.
    """
    if ctas <= 2:
        return sms * per_sm // ctas
    return min(sms // gpc * (gpc * per_sm // ctas) for gpc in (16, 18))
