"""The ops of a GPT-OSS-20B decode step, counted in the simulator and modelled on a chip: ``python -m bench.modelled``.

Of each op: what its launches take at least on the chip, by the busiest of its resources (sim/ptx/counters.py), beside
the time that the memory takes for the bytes that nobody can spare: weights of the chosen experts, keys and values that
are seen, inputs and results. Lanes that read one address read it once, as sectors count. Latency and launches are not
in it. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import torch_attnkit
from torch_attnkit.served.models import MODELS, Experts
from torch_attnkit.sim import ptx
from torch_attnkit.sim.ptx import counters

MODEL = MODELS["gpt-oss-20b"]
LAYERS = 24  # half of them with each window
BLOCK = 32  # of MXFP4
SECTOR = 32  # bytes
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Step:
    """A call: how often a step makes it, and the bytes that it has to move."""

    op: str
    kind: str
    times: int
    args: tuple[Any, ...]
    options: dict[str, Any]
    nbytes: int


def size(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


def steps(keys: int) -> Iterator[Step]:
    """Those of one token behind ``keys`` others, in bf16 with experts in MXFP4."""
    a, e = MODEL.attention, MODEL.experts
    assert a is not None and e is not None
    heads, kv = (torch.randn(1, n, a.dim).to(BF16) for n in (a.heads, a.kv_heads))
    cache = [torch.randn(1, a.kv_heads, keys, a.dim).to(BF16) for _ in range(2)]
    sink, length = torch.randn(a.heads), torch.tensor([keys], dtype=torch.int32)
    angles = [torch.randn(1, 1, a.dim // 2).to(BF16) for _ in range(2)]
    slot = torch.tensor([keys - 1], dtype=torch.int32)
    append = (heads, kv, kv.clone(), *cache, *angles, slot, sink.to(BF16))
    yield Step("rope_kv_cache_append", "", LAYERS, append, {}, size(heads, heads, kv, kv, kv, kv, *angles, sink))
    for window in sorted(a.windows):
        seen = keys if window < 0 else window
        moved = size(heads, heads, sink) + 2 * a.kv_heads * seen * a.dim * BF16.itemsize
        kind = "all keys" if window < 0 else f"window {window}"
        yield Step("sdpa_decode", kind, LAYERS // 2, (heads, *cache, length, sink), {"window": window}, moved)
    width = a.heads * a.dim
    for kind, columns, rows in (
        ("to q, k, v", e.hidden, width + 2 * a.kv_heads * a.dim), ("from heads", width, e.hidden),
        ("router", e.hidden, e.count),
    ):  # fmt: skip
        product = [torch.randn(*shape).to(BF16) for shape in ((1, columns), (rows, columns), (rows,))]
        yield Step("linear_decode", kind, LAYERS, tuple(product), {}, size(*product) + rows * 2)
    logits = torch.randn(1, e.count).to(BF16)
    yield Step("route_softmax", "", LAYERS, (logits,), {"topk": e.topk}, size(logits) + e.topk * 8)
    yield experts(e)


def experts(e: Experts) -> Step:
    def packed(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (e.count, rows, columns // 2), dtype=torch.uint8)
        return codes, torch.randint(118, 124, (e.count, rows, columns // BLOCK), dtype=torch.uint8)

    x, weights = torch.randn(1, e.hidden).to(BF16), torch.rand(1, e.topk)
    chosen = torch.randperm(e.count)[: e.topk].view(1, e.topk).int()
    matrices = (*packed(2 * e.width, e.hidden), *packed(e.hidden, e.width))
    biases = torch.randn(e.count, 2 * e.width).to(BF16), torch.randn(e.count, e.hidden).to(BF16)
    options = dict(format="mxfp4", swiglu=e.swiglu, limit=e.limit, interleaved=e.interleaved)
    moved = size(*matrices, *biases) * e.topk // e.count + 2 * size(x)
    return Step("fp4_moe", "", LAYERS, (x, weights, chosen, *matrices, None, None, *biases), options, moved)


def least(launch: ptx.Launch, chip: counters.Chip) -> tuple[float, str]:
    """Microseconds that a launch takes at least on ``chip``, and the resource that says so."""
    c = launch.counters
    asked = c["global_sectors"] * SECTOR + c["tma_read"] + c["tma_written"] + c["cp_async"]
    times = counters.times(launch, chip) | {"memory": asked / (chip.memory * 1e6)}
    return max((us, what) for what, us in times.items())


def main(target: str = "sm120", keys: int = 4096) -> None:
    """Print the table for a TARGET, whose chip is the one that its simulator stands for."""
    torch.manual_seed(0)
    console, table = Console(), Table("op", "a step", "us for the bytes", "us at least", "by", "launches")
    needed = taken = 0.0
    chip = None
    for step in steps(keys):
        with torch_attnkit.simulate(target), ptx.counting() as launches:
            getattr(torch.ops.attnkit, step.op)(*step.args, **step.options)
        chip = counters.CHIPS[launches[0].target]
        bounds = [least(launch, chip) for launch in launches]
        memory, longest = step.nbytes / (chip.memory * 1e6), sum(us for us, _ in bounds)
        needed, taken = needed + step.times * memory, taken + step.times * longest
        named = f"{step.op} {step.kind}".strip()
        most = max(bounds)[1]
        table.add_row(named, str(step.times), f"{memory:.2f}", f"{longest:.2f}", most, str(len(bounds)))
    table.add_row("all", "", f"{needed:.0f}", f"{taken:.0f}", f"{taken / needed:.3f}", "")
    assert chip is not None
    table.title = f"modelled on {chip.name} ({target}), not measured: one token of GPT-OSS-20B behind {keys} keys"
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
