"""What to compile for the indexer's scores on Blackwell."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from torch_attnkit.cuda import fake

from .plan import Config
from .scores import Scores


def trace(arch: str, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    c = Config(*config)
    T, requests = fake.dim32(), fake.dim32()
    stored = "u8" if c.four or c.stored == "f8e4m3" else c.stored  # not every torch hands E4M3 over
    width = fake.dtype(stored).width // 8
    steps = (fake.dim(16 // width), fake.dim(16 // width), 1)
    scale = ("u8", 1) if c.four else ("f32", 4)
    scaled = lambda *sizes: fake.tensor(scale[0], (*sizes, None), align=scale[1])
    arguments = [
        fake.tensor(stored, (T, c.heads, c.row_bytes // width), steps),
        fake.tensor(stored, (fake.dim32(), fake.dim32(), None), align=max(c.load, width)),
        fake.tensor(c.weights, (T, c.heads), align=fake.dtype(c.weights).width // 8),
        fake.tensor("i32", (T,), (None,), align=4),
        fake.tensor("i32", (T,), (None,), align=4) if c.ids else None,
        fake.tensor("i32", (requests, fake.dim32()), align=4) if c.paged else None,
        scaled(T, c.heads) if c.q_scale or c.four else None,
        scaled(fake.dim32(), fake.dim32()) if c.k_scale or c.four else None,
        fake.tensor("f32", (T, fake.dim32()), align=4),
        Int32(0),
        fake.stream(),
    ]
    return Scores(c, fake.dtype(stored)), arguments
