"""Keys and values out of the pages of a cache, as one tensor."""

from __future__ import annotations

import torch


def gathered(cache: torch.Tensor, pages: list[int], start: int, end: int) -> torch.Tensor:
    """Rows [start, end) of ``pages`` in their order, out of a cache (Np, Ps, H, D): (end - start, H, D).

    Pages that follow each other are a view.
    """
    first = pages[0] if pages else 0
    if pages == list(range(first, first + len(pages))):
        found = cache[first : first + len(pages)]
    else:
        found = cache.index_select(0, torch.tensor(pages, dtype=torch.int64, device="cpu"))
    return found.flatten(0, 1)[start:end]


def pages_of(row: torch.Tensor, size: int, start: int, end: int, count: int) -> tuple[list[int], int, int] | None:
    """The pages of keys [start, end) in a row (Mp) of a block table, and where these begin and end among theirs.

    None where one of them is none of ``count`` pages.
    """
    first = start // size
    found: list[int] = row[first : -(-end // size)].tolist() if start < end else []
    if found and not 0 <= min(found) <= max(found) < count:
        return None
    return found, start - first * size, end - first * size
