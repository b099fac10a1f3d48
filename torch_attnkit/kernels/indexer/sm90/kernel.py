"""What to compile for the indexer's scores on Hopper: for tokens that stream past keys, and for keys that stream past
tokens."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from torch_attnkit.cuda import fake

from .plan import Config, SelectConfig, StreamConfig
from .scores import Scores
from .select import Select
from .stream import Stream


def trace(arch: str, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    c = Config(*config)
    T, requests = fake.dim32(), fake.dim32()
    four = c.stored == "mxfp4"
    # Not every torch hands E4M3 over.
    stored, product = ("u8" if name in ("mxfp4", "f8e4m3") else name for name in (c.stored, c.dtype))
    k_scale = None
    if four or c.k_scale:
        k_scale = fake.tensor("u8" if four else "f32", (fake.dim32(), fake.dim32(), None), align=1 if four else 4)
    steps = (fake.dim(16 // c.itemsize), fake.dim(16 // c.itemsize), 1)
    arguments = [
        fake.tensor(product, (T, c.heads, c.dim), steps),
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


def trace_stream(arch: str, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    c = StreamConfig(*config)
    scores = fake.tensor("f32", (fake.dim32(), fake.dim32()), align=4)
    return Stream(c), [*_streamed(c), scores, Int32(0), fake.stream()]


def trace_select(arch: str, config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    *stream, room = config
    c = SelectConfig(StreamConfig(*stream), room)
    indices = fake.tensor("i32", (fake.dim32(), fake.dim32()), align=4)
    workspace = tuple(fake.tensor("i32", (None,)) for _ in range(2))
    return Select(c), [*_streamed(c.stream), indices, workspace, (Int32(0), Int32(0)), fake.stream()]


def _streamed(c: StreamConfig) -> list[Any]:
    """What both kernels for few tokens read."""
    T, requests = fake.dim32(), fake.dim32()

    def rows(name: str, row_bytes: int, *shape: Any) -> Any:
        name = "u8" if name in ("mxfp4", "f8e4m3") else name  # not every torch hands E4M3 over
        size = fake.dtype(name).width // 8
        step = 16 // size  # TMA takes multiples of 16 bytes
        return fake.tensor(name, (*shape, row_bytes // size), (fake.dim(step), fake.dim(step), 1))

    scale = None
    if c.scales:
        four = c.stored == "mxfp4"
        steps = (fake.dim(4), fake.dim(4), 1) if four else None
        scale = fake.tensor("u8" if four else "f32", (fake.dim32(), fake.dim32(), 4 if four else 1), steps, align=4)
    return [
        rows(c.dtype, c.dim * c.itemsize, T, c.heads),
        rows(c.stored, c.row_bytes, fake.dim32(), fake.dim32()),
        fake.tensor(c.weights, (T, c.heads), align=fake.dtype(c.weights).width // 8),
        fake.tensor("i32", (T,), (None,), align=4),
        fake.tensor("i32", (requests, fake.dim32()), align=4) if c.paged else None,
        fake.tensor("f32", (T, c.heads, 1), align=4) if c.q_scale else None,
        scale,
    ]
