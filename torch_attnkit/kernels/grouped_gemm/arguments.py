"""Arguments of the grouped GEMM kernels on every architecture, and fake tensors to compile with."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import fake


class Matrices(NamedTuple):
    """Weights of one GEMM."""

    packed: cute.Tensor  # (E, rows, columns / 2), bytes
    scale: cute.Tensor  # (E, rows, blocks), or in the 128x4 layout (E, padded rows, padded blocks)
    bias: cute.Tensor  # (E, rows), anything without its flag
    divisor: cute.Tensor  # (E), global scales, likewise
    activation: cute.Tensor  # (1), the global scale of the tokens' rows, likewise


class Tensors(NamedTuple):
    """The tensors of a call. ``count`` is zero before and after every launch."""

    x: cute.Tensor  # (Tq, N)
    weights: cute.Tensor  # (Tq, K)
    indices: cute.Tensor  # (Tq, K)
    up: Matrices
    down: Matrices
    out: cute.Tensor  # (Tq, N)
    # (2 slots), by expert: slot t * K + k is the k-th choice of token t; behind them, of every tile of tokens, how many
    # parts of h are there. By ``wgmma`` as in ``SortByGrid``.
    order: cute.Tensor
    tiles: cute.Tensor  # (1 + tiles, 4): how many there are; expert, first row in ``order``, tokens
    h: cute.Tensor  # (parts of slots, whole stages or spans) in that order, as ``permute_k.py`` has it
    partial: cute.Tensor  # (slots, N), by slot; by ``wgmma`` in the order of ``h``
    count: cute.Tensor  # (Tq, row tiles), results of a token that have come, and tickets; or as in ``SortByGrid``


class Flags(NamedTuple):
    """Which optional tensors of a GEMM are given, and how its scales and rows are laid out."""

    bias: Int32
    divisor: Int32
    activation: Int32
    swizzled: Int32
    interleaved: Int32


class Scalars(NamedTuple):
    up: Flags
    down: Flags
    gptoss: Int32
    alpha: Float32
    limit: Float32  # infinite without one


def arguments(dtype: str, index_dtype: str, code_alignment: int) -> list[Any]:
    """Stand-ins for ``Tensors``, ``Scalars``, the blocks of both GEMMs, and the stream; ``code_alignment`` as in
    ``Config``."""
    size = fake.dim

    def vector(kind: str) -> Any:
        return fake.tensor(kind, (None,), (1,), align=4)

    def matrices() -> Matrices:
        a = code_alignment
        packed = fake.tensor("u8", (size(), size(16), size(a)), (size(a), size(a), 1), align=a)
        scale = fake.tensor("u8", (None, None, None), align=1)
        return Matrices(packed, scale, fake.tensor(dtype, (None, None), align=2), vector("f32"), vector("f32"))

    tensors = Tensors(
        x=fake.tensor(dtype, (None, None), (size(8), 1)),
        weights=fake.tensor("f32", (None, None), (None, None), align=4),
        indices=fake.tensor(index_dtype, (None, None), (None, None), align=4),
        up=matrices(),
        down=matrices(),
        out=fake.tensor(dtype, (None, None), (size(8), 1)),
        order=vector("i32"),
        tiles=fake.tensor("i32", (None, 4), (4, 1)),
        h=fake.tensor("bf16", (None, None), (size(8), 1)),
        partial=fake.tensor("f32", (None, None), (size(4), 1)),
        count=fake.tensor("i32", (None, None), align=4),
    )
    flags = Flags(*(Int32(0) for _ in range(5)))
    scalars = Scalars(flags, flags, Int32(0), Float32(0), Float32(0))
    return [tensors, scalars, Int32(0), Int32(0), fake.stream()]


@cute.jit
def global_scale_of(flags: Flags, weights: Matrices) -> Float32:
    """The global scale of the activations of a GEMM, 1 without one."""
    scale = Float32(1.0)
    if flags.activation != 0:
        scale = weights.activation[0]
    return scale


def chosen(tensors: Tensors, token: Int32, k: Int32) -> Int32:
    """The k-th choice of a token, -1 for one that is no expert."""
    index = tensors.indices[token, k]
    inside = (index >= 0) & (index < tensors.up.packed.shape[0])
    return cutlass.select_(inside, Int32(index), Int32(-1))
