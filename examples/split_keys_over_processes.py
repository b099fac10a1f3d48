"""Two processes share the keys of a decode step and merge what they found: ``merge_partials`` over gloo.

Each process holds half of the cache of every sequence, attends its own half with ``sdpa_decode``, and sends the other
its output and log-sum-exp, Dv + 1 numbers a head, however long the cache is. The learned sink belongs to the whole and
joins once, at the merge. A sequence that is shorter than the first half leaves the second process nothing to attend:
its log-sum-exp is -inf, and the merge passes it over. The yardstick is one process with the whole cache.

    python examples/split_keys_over_processes.py

On GPUs the same lines run with the backend "nccl", one process a device.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torch_attnkit  # defines torch.ops.attnkit.*

ops = torch.ops.attnkit

WORLD = 2
B, HQ, HKV, S, D = 3, 8, 2, 64, 32
LENGTHS = (64, 41, 5)


def problem() -> tuple[torch.Tensor, ...]:
    """q, the caches, lengths and sinks; the same in every process."""
    gen = torch.Generator().manual_seed(0)
    q, sink = torch.randn(B, HQ, D, generator=gen), torch.randn(HQ, generator=gen)
    k, v = (torch.randn(B, HKV, S, D, generator=gen) for _ in range(2))
    return q, k, v, torch.tensor(LENGTHS, dtype=torch.int32), sink


def gathered(part: torch.Tensor) -> torch.Tensor:
    """What all processes have, (P, *shape)."""
    parts = [torch.empty_like(part) for _ in range(WORLD)]
    dist.all_gather(parts, part)
    return torch.stack(parts)


def work(rank: int, meeting: str, results: str) -> None:
    """One process: attend the keys [rank * S / 2, (rank + 1) * S / 2), then merge."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    q, k, v, kv_len, sink = problem()
    mine = slice(rank * S // WORLD, (rank + 1) * S // WORLD)
    inside = (kv_len - mine.start).clamp(0, S // WORLD)  # (B,) keys of each sequence that lie here
    out, lse = ops.sdpa_decode(q, k[:, :, mine], v[:, :, mine], inside)  # (B, Hq, D), (B, Hq)
    merged, _ = ops.merge_partials(gathered(out), gathered(lse), sink)  # (B, Hq, D)
    torch.save((inside, merged), f"{results}.{rank}")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        mp.spawn(work, (f"{folder}/meeting", str(results)), nprocs=WORLD)
        found = [torch.load(f"{results}.{rank}") for rank in range(WORLD)]
    q, k, v, kv_len, sink = problem()
    want, _ = ops.sdpa_decode(q, k, v, kv_len, sink)
    for rank, (inside, merged) in enumerate(found):
        difference = float((merged - want).abs().max())
        print(f"process {rank} attended {inside.tolist()} keys; merged, it is off by {difference:.1e}")
        assert difference < 1e-6


if __name__ == "__main__":
    main()
