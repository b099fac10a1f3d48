"""How many clusters of CTAs a GPU runs at once."""

from __future__ import annotations


def at_once(ctas: int, sms: int, per_sm: int) -> int:
    """Clusters that run at the same time. A cluster stays inside a GPC, which has 16 or 18 multiprocessors, in twos.

    Which of them a GPU has cannot be read from it: of clusters of 4 an H200 with 132 ran fewer than 32.
    """
    if ctas <= 2:
        return sms * per_sm // ctas
    return min(sms // gpc * (gpc * per_sm // ctas) for gpc in (16, 18))
