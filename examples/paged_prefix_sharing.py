"""A paged key-value cache in which requests share the pages of their common prefix.

Four requests begin with the same 40 tokens. These are stored once, in pages of 16 keys; the rows of the block table of
all four point to them. A page that is shared and half full is copied by the first request that writes to it. Each
decode step writes one row a request (``kv_cache_write``) and attends through the table (``sdpa_decode_paged``). The
yardstick is ``sdpa_decode`` over a dense cache for each request.

    python examples/paged_prefix_sharing.py
"""

from __future__ import annotations

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

ops = torch.ops.attnkit

REQUESTS, PREFIX, STEPS = 4, 40, 30
PAGE, PAGES = 16, 24  # keys a page, pages of the pool
HQ, HKV, D = 8, 2, 64


class Pool:
    """Pages of keys and values, (Np, Ps, Hkv, D) each, and how many requests use each of them."""

    def __init__(self) -> None:
        self.k, self.v = (torch.zeros(PAGES, PAGE, HKV, D) for _ in range(2))
        self.users = [0] * PAGES

    def take(self) -> int:
        page = self.users.index(0)
        self.users[page] = 1
        return page

    def write(self, pages: list[int], first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rows k and v, (T, Hkv, D), become the keys first, first + 1, ... of who has these pages, in order."""
        at = torch.arange(first, first + len(k))
        slot = torch.tensor(pages)[at // PAGE] * PAGE + at % PAGE  # (T,) rows of the pool
        for cache, rows in ((self.k, k), (self.v, v)):
            ops.kv_cache_write(rows.flatten(1), cache.view(PAGES * PAGE, HKV * D), slot)

    def writable(self, pages: list[int], key: int) -> None:
        """Make the page of ``key`` the request's own: a new one behind its last, a copy of one that others use."""
        index = key // PAGE
        if index == len(pages):
            pages.append(self.take())
        elif self.users[pages[index]] > 1:
            old, new = pages[index], self.take()
            self.k[new], self.v[new] = self.k[old], self.v[old]
            self.users[old] -= 1
            pages[index] = new


def main() -> None:
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen)

    pool, prefix = Pool(), [normal(PREFIX, HKV, D) for _ in range(2)]
    shared = [pool.take() for _ in range(-(-PREFIX // PAGE))]
    pool.write(shared, 0, *prefix)
    tables = [list(shared) for _ in range(REQUESTS)]
    for page in shared:
        pool.users[page] = REQUESTS

    # The yardstick: every request has a cache of its own, (B, Hkv, S, D).
    dense_k, dense_v = (torch.zeros(REQUESTS, HKV, PREFIX + STEPS, D) for _ in range(2))
    dense_k[:, :, :PREFIX], dense_v[:, :, :PREFIX] = (t.transpose(0, 1) for t in prefix)

    worst = 0.0
    for step in range(STEPS):
        length = PREFIX + step + 1
        q, k, v = normal(REQUESTS, HQ, D), normal(REQUESTS, HKV, D), normal(REQUESTS, HKV, D)
        for r, pages in enumerate(tables):
            pool.writable(pages, length - 1)
            pool.write(pages, length - 1, k[r : r + 1], v[r : r + 1])
        dense_k[:, :, length - 1], dense_v[:, :, length - 1] = k, v

        table = torch.tensor(tables, dtype=torch.int32)  # (B, Mp)
        kv_len = torch.full((REQUESTS,), length, dtype=torch.int32)  # (B,)
        out, _ = ops.sdpa_decode_paged(q, pool.k, pool.v, table, kv_len)  # (B, Hq, D)
        want, _ = ops.sdpa_decode(q, dense_k, dense_v, kv_len)
        worst = max(worst, float((out - want).abs().max()))

    used, unshared = sum(n > 0 for n in pool.users), sum(map(len, tables))
    print("block table:", *tables, sep="\n  ")
    print(f"{used} pages of {PAGE} keys are in use, {unshared} without sharing")
    print(f"largest difference to dense caches in {STEPS} steps: {worst:.1e}")
    assert worst < 1e-5
    assert used == unshared - (REQUESTS - 1) * (PREFIX // PAGE)


if __name__ == "__main__":
    main()
