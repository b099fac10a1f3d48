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
    four = c.stored == "mxfp4"
    stored = "u8" if four or c.stored == "f8e4m3" else c.stored  # not every torch hands E4M3 over
    k_scale = None
    if four or c.k_scale:
        k_scale = fake.tensor("u8" if four else "f32", (fake.dim32(), fake.dim32(), None), align=1 if four else 4)
    steps = (fake.dim(8), fake.dim(8), 1)
    arguments = [
        fake.tensor(c.dtype, (T, c.heads, c.dim), steps),
        fake.tensor(stored, (fake.dim32(), fake.dim32(), None), align=c.load),
        fake.tensor(c.weights, (T, c.heads), align=fake.dtype(c.weights).width // 8),
        fake.tensor("i32", (T,), (None,), align=4),
        fake.tensor("i32", (T,), (None,), align=4) if c.ids else None,
        fake.tensor("i32", (requests, fake.dim32()), align=4) if c.paged else None,
        fake.tensor("f32", (T, c.heads, 1), align=4) if c.q_scale else None,
        k_scale,
        fake.tensor("f32", (T, fake.dim32()), align=4),
        (Int32(0), Int32(0)),
        fake.stream(),
    ]
    return Scores(c), arguments
