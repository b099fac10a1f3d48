"""Kernel arguments: tensors, scalars, and the fake ones that a kernel is compiled with."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import fake
from torch_attnkit.kernels.cache.problem import Row


class DenseTensors(NamedTuple):
    """16-bit results."""

    out: cute.Tensor  # (T, H, D)
    lse: cute.Tensor  # (T, H)
    row_sum: cute.Tensor  # (T, H)


class Fp4Tensors(NamedTuple):
    """FP4 results, and the angles and scale that they need."""

    codes: cute.Tensor  # (T, H, D/2), contiguous
    scale: cute.Tensor  # (T, H, D/block) or (groups, padded T, columns), contiguous
    cos: cute.Tensor  # (T, pairs)
    sin: cute.Tensor  # (T, pairs)
    global_scale: cute.Tensor  # (1)


class Tensors(NamedTuple):
    """Tensors of a call; placeholders of the right dtype where ``Scalars`` says that there is none."""

    q: cute.Tensor  # (T, H, D)
    near: cute.Tensor  # (R, S, Rb), in pages (N, P, Rb)
    end: cute.Tensor  # (T)
    far: cute.Tensor  # (R, C, Rb), in pages (N, P, Rb)
    indices: cute.Tensor  # (T, K)
    length: cute.Tensor  # (T)
    request: cute.Tensor  # (T)
    sink: cute.Tensor  # (H)
    near_table: cute.Tensor  # (R, M)
    far_table: cute.Tensor  # (R, M)
    global_scale: cute.Tensor  # (1), of encoded rows
    results: DenseTensors | Fp4Tensors
    splits: cute.Tensor  # the workspace: partial results of clusters that share a work tile
    count: cute.Tensor  # (work tiles * 8), how many of them have arrived; zero before and after every launch


class Scalars(NamedTuple):
    """Scalars of a call; the last four are of its ``Plan``."""

    scale: Float32  # of a product of q and a key, into powers of two
    rescale_threshold: Float32  # powers of two by which a maximum may grow before what is subtracted follows
    window: Int32
    entries: Int32
    listed: Int32
    tokens_each: Int32  # of a request, where requests have equally many
    has_list: Int32
    has_length: Int32
    has_requests: Int32
    has_sink: Int32
    normalize: Int32
    requests: Int32
    capacity: Int32  # window keys of a request
    head_blocks: Int32
    ctas: Int32
    groups: Int32
    concurrent: Int32


def arguments(dtype: str, dim: int, row: Row, align: int, angles: str | None) -> list[Any]:
    """Fake ``Tensors``, ``Scalars`` and stream. ``angles``: dtype of cos and sin, for FP4 results."""
    T, H = fake.dim(), fake.dim()

    def heads() -> Any:
        return fake.tensor(dtype, (T, H, dim), (fake.dim(8), fake.dim(8), 1))

    def cache() -> Any:
        kind = dtype if row.plain else "u8"
        step = align // (2 if row.plain else 1)  # elements
        return fake.tensor(kind, (None, None, row.size), (fake.dim(step), fake.dim(step), 1), align=align)

    def matrix(length: Any) -> Any:
        return fake.tensor("i32", (length, None), (None, None), align=4)

    def vector(kind: str, length: Any) -> Any:
        return fake.tensor(kind, (length,), (None,), align=4)

    def by_head() -> Any:
        return fake.tensor("f32", (T, H), (None, 1), align=4)

    def results() -> DenseTensors | Fp4Tensors:
        if angles is None:
            return DenseTensors(heads(), by_head(), by_head())
        cos, sin = (fake.tensor(angles, (T, None), (None, 1), align=fake.dtype(angles).width // 8) for _ in range(2))
        codes, scale = (fake.tensor("u8", (None,) * 3, align=16) for _ in range(2))
        return Fp4Tensors(codes, scale, cos, sin, vector("f32", None))

    tensors = Tensors(
        q=heads(),
        near=cache(),
        end=vector("i32", T),
        far=cache(),
        indices=matrix(T),
        length=vector("i32", T),
        request=vector("i32", T),
        sink=vector("f32", H),
        near_table=matrix(None),
        far_table=matrix(None),
        global_scale=vector("f32", None),
        results=results(),
        splits=fake.tensor("f32", (None,), (1,), align=4),
        count=vector("i32", None),
    )
    return [tensors, Scalars(Float32(0), Float32(0), *(Int32(0) for _ in range(15))), fake.stream()]
