"""The arguments of a decode kernel: tensors, scalars, and stand-ins for them to compile with."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import fake


class HeadSizes(Protocol):
    """What of a kernel's config decides the types of its arguments."""

    @property
    def dtype(self) -> Any: ...
    @property
    def dim(self) -> int: ...
    @property
    def dim_v(self) -> int: ...
    @property
    def page(self) -> int: ...


class OfKvHead(Protocol):
    """What of a work tile says whose keys it attends."""

    @property
    def b(self) -> Int32: ...
    @property
    def kv_head(self) -> Int32: ...


class Tensors(NamedTuple):
    """The tensors of a call, as the host gives them. ``count`` is zero before and after every launch."""

    q: cute.Tensor  # (B, Hq, D)
    k: cute.Tensor  # (B, Hkv, S, D), or (Np, Ps, Hkv, D)
    v: cute.Tensor  # the same with Dv
    table: cute.Tensor | None  # (B, Mp), of a cache in pages
    kv_len: cute.Tensor  # (B)
    sink: cute.Tensor  # (Hq), anything where LaunchScalars.has_sink is 0
    kv_start: cute.Tensor  # (B), likewise with has_start
    out: cute.Tensor  # (B, Hq, Dv)
    lse: cute.Tensor  # (B, Hq)
    splits: cute.Tensor  # (2 * blocks * floats of a split)
    count: cute.Tensor  # (blocks), how many splits of a group have arrived, by its first CTA
    scales: tuple[cute.Tensor | None, ...] | None = None  # of q, k and v, (B, Hkv) or None each


class LaunchScalars(NamedTuple):
    """The scalars of a launch, as the host gives them; the last five are entries of its ``Plan``."""

    scale: Float32
    cap: Float32
    window: Int32
    sink_tokens: Int32
    has_sink: Int32
    has_start: Int32
    head_blocks: Int32
    whole: Int32
    concurrent: Int32
    least_tiles: Int32
    combine_blocks: Int32


class Scalars(NamedTuple):
    """What of them the CTAs read."""

    scale: Float32  # of the product, before the cap or, without one, into powers of two
    cap: Float32  # of the capped scores into powers of two; 0: no cap
    has_sink: Int32
    group: Int32  # query heads per KV head
    head_blocks: Int32  # groups that share a KV head: its query heads / heads, rounded up
    concurrent: Int32  # of them on neighbouring CTAs at the same time, all or 1: keys come from memory once
    least_tiles: Int32  # of a split


def kv_heads_of(tensors: Tensors, page: int) -> Int32:
    return Int32(tensors.k.shape[2 if page else 1])


def scalars_of(tensors: Tensors, given: LaunchScalars, page: int) -> Scalars:
    n = given
    group = Int32(tensors.q.shape[1]) // kv_heads_of(tensors, page)
    return Scalars(n.scale, n.cap, n.has_sink, group, n.head_blocks, n.concurrent, n.least_tiles)


def descaled(tensors: Tensors, which: slice, tile: OfKvHead, factor: Float32) -> Float32:
    """``factor`` times a sequence's and KV head's entries of those of the scales of q, k and v that there are."""
    for scale in tensors.scales[which] if tensors.scales else ():
        if scale is not None:
            factor = factor * scale[tile.b, tile.kv_head]
    return factor


def out_dtype(dtype: Any) -> Any:
    """Of E4M3 inputs bf16: four bits are too few for a mean of values."""
    return cutlass.BFloat16 if dtype.width == 8 else dtype


_SIZE = {"sm100": fake.dim32}  # of the caches; Blackwell's kernels divide by them


def arguments(
    arch: str, dtype: str, config: HeadSizes, scales: tuple[bool, ...] = (), kv: str | None = None
) -> list[Any]:
    """Stand-ins for what the host passes: ``Tensors``, ``LaunchScalars``, the number of CTAs, and the stream.

    ``dtype`` is that of q, and of the caches unless ``kv`` says otherwise; ``scales`` says which there are. E4M3 comes
    as bytes, since not every torch hands it over.
    """
    cached, size = kv or dtype, _SIZE.get(arch, fake.dim)
    B, Hq, Hkv, keys = size(), fake.dim(), size(), size()  # keys of a sequence, or pages
    word, line = 32 // fake.dtype(dtype).width, 128 // fake.dtype(cached).width  # elements of 4 and 16 bytes

    def stored(name: str) -> str:
        return "u8" if name == "f8e4m3" else name

    def vector(kind: str, length: Any) -> Any:
        return fake.tensor(kind, (length,), (None,), align=4)

    def cache(dim: int) -> Any:
        shape = (keys, config.page, Hkv, dim) if config.page else (B, Hkv, keys, dim)
        return fake.tensor(stored(cached), shape, (*(fake.dim(line) for _ in range(3)), 1))

    tensors = Tensors(
        q=fake.tensor(stored(dtype), (B, Hq, config.dim), (fake.dim(word), fake.dim(word), 1), align=4),
        k=cache(config.dim),
        v=cache(config.dim_v),
        table=fake.tensor("i32", (B, None), align=4) if config.page else None,
        kv_len=vector("i32", B),
        sink=vector("f32", None),
        kv_start=vector("i32", B),
        out=fake.tensor("bf16" if dtype == "f8e4m3" else dtype, (B, Hq, config.dim_v), (fake.dim(8), fake.dim(8), 1)),
        lse=fake.tensor("f32", (B, Hq), align=4),
        splits=fake.tensor("f32", (None,), (1,)),
        count=fake.tensor("i32", (None,), (1,)),
        scales=tuple(fake.tensor("f32", (B, Hkv), align=4) if on else None for on in scales) or None,
    )
    return [tensors, LaunchScalars(Float32(0), Float32(0), *(Int32(0) for _ in range(9))), Int32(0), fake.stream()]
