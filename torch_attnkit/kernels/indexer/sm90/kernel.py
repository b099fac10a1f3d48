"""What to compile for the indexer's scores on Hopper. Imports cutlass."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from torch_attnkit.cuda import fake

from .plan import Config
from .scores import Scores


def trace(arch: str, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    c = Config(*config)
    T, requests = fake.dim32(), fake.dim32()
    by_name = lambda name: "u8" if name == "f8e4m3" else name  # not every torch hands E4M3 over
    step = 16 // (fake.dtype(c.dtype).width // 8)
    steps = (fake.dim(step), fake.dim(step), 1)
    arguments = [
        fake.tensor(by_name(c.dtype), (T, c.heads, c.dim), steps),
        fake.tensor(by_name(c.stored), (fake.dim32(), fake.dim32(), c.dim), align=c.load),
        fake.tensor(c.weights, (T, c.heads), align=fake.dtype(c.weights).width // 8),
        fake.tensor("i32", (T,), (None,), align=4),
        fake.tensor("i32", (T,), (None,), align=4) if c.ids else None,
        fake.tensor("i32", (requests, fake.dim32()), align=4) if c.paged else None,
        fake.tensor("f32", (T, c.heads, 1), align=4) if c.q_scale else None,
        fake.tensor("f32", (fake.dim32(), fake.dim32(), 1), align=4) if c.k_scale else None,
        fake.tensor("f32", (T, fake.dim32()), align=4),
        Int32(0),
        fake.stream(),
    ]
    return Scores(c), arguments
