"""What the decode kernel is made of: its configuration and shared memory, its tensors and scalars. Imports cutlass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import fake

COMBINERS = 512  # threads of a block of the kernel that merges parts


@dataclass(frozen=True)
class Config:
    """What is fixed at compile time. ``page``: keys of a page, 0 for a cache without pages."""

    dtype: Any
    dim: int
    dim_v: int
    heads: int  # query heads of a group, 8 or 16; fewer are padded
    keys: int  # of a tile, a multiple of 16
    warps: int
    stages: int
    page: int = 0
    combine: bool = False  # whether a second kernel merges parts, else the block that brings the last

    beside = False  # whether ``Scalars.beside`` can be more than 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def results(self) -> int:
        """How many results of a piece a block has in shared memory before it merges them."""
        return self.warps

    @property
    def pitch(self) -> int:
        """Bytes of a row of K in shared memory."""
        return self.dim * 2 + 16

    @property
    def pitch_v(self) -> int:
        return self.dim_v * 2 + 16

    @property
    def stage_bytes(self) -> int:
        return self.keys * (self.pitch + self.pitch_v)

    @property
    def row_floats(self) -> int:
        """Floats of a row of a warp's result in shared memory: four more, so that eight rows do not collide."""
        return self.dim_v + 4

    @property
    def shared_bytes(self) -> int:
        """The ring of every warp; when it has drained, the warps' results and then the weights of the merge."""
        merge = self.warps * self.heads * (self.row_floats + 2) * 4
        return max(self.warps * self.stages * self.stage_bytes, merge) + self.query_bytes + 16

    @property
    def blocks_per_sm(self) -> int:
        """As shared memory and, with 128 or 255 registers a thread, the register file allow."""
        threads = 512 if self.heads == 8 else 256
        return max(1, min(227 * 1024 // (self.shared_bytes + 1024), threads // self.threads))

    @property
    def query_bytes(self) -> int:
        """Where Q has no place in registers: every warp's copy, in the order in which its lanes use it."""
        return self.warps * self.heads * self.dim * 2 if self.dim > 256 else 0

    @property
    def query_offset(self) -> int:
        return self.shared_bytes - 16 - self.query_bytes

    @property
    def at_once(self) -> int:
        """Blocks of 16 columns of a tile that are on the way from shared memory at once."""
        return (8 if self.dim <= 256 else 2) // (self.keys // 16)

    @property
    def part_floats(self) -> int:
        """Floats of a partial result in the workspace: the output, then a maximum and a sum per head."""
        return self.heads * (self.dim_v + 2)


@dataclass(frozen=True)
class WideConfig:
    """The same for the kernel with up to 64 query heads; D and Dv are equal, and a multiple of 64.

    A tile of K and one of V are a buffer each of the ring, or one for both where V is K (``same``).
    """

    dtype: Any
    dim: int
    keys: int
    stages: int
    page: int = 0
    same: bool = False
    combine: bool = False

    heads = 64
    results = 1
    beside = True

    @property
    def dim_v(self) -> int:
        return self.dim

    @property
    def halves(self) -> int:
        """Warpgroups, each with its part of the columns: 64 rows of more than 256 fill no warpgroup's registers."""
        return 2 if self.dim > 256 else 1

    @property
    def part(self) -> int:
        """Columns of a warpgroup."""
        return self.dim // self.halves

    @property
    def threads(self) -> int:
        return 128 * self.halves

    @property
    def buffer_bytes(self) -> int:
        return self.keys * self.dim * 2

    @property
    def query_bytes(self) -> int:
        return self.heads * self.dim * 2

    @property
    def exchange_bytes(self) -> int:
        """Where two warpgroups exchange their sums over their columns."""
        return 0 if self.halves == 1 else 2 * self.heads * self.keys * 4

    @property
    def row_floats(self) -> int:
        return self.dim + 4

    @property
    def shared_bytes(self) -> int:
        """Q, the ring and the exchange; when these have been read, the result, and behind them a word."""
        return (
            max(
                self.query_bytes + self.stages * self.buffer_bytes + self.exchange_bytes,
                self.heads * (self.row_floats + 2) * 4,
            )
            + 16
        )

    @property
    def blocks_per_sm(self) -> int:
        """As shared memory and, with 255 registers a thread, the register file allow."""
        return max(1, min(227 * 1024 // (self.shared_bytes + 1024), 256 // self.threads))

    @property
    def part_floats(self) -> int:
        return self.heads * (self.dim + 2)


@dataclass(frozen=True)
class LatentConfig(WideConfig):
    """The same for 512 columns where V is K, up to 64 keys a tile: two warpgroups have the scores of tiles in turn, and
    one for each half of the columns has that half of the output, and loads it."""

    same: bool = True
    scorers = 2  # warpgroups of scores, tiles in turn
    turns = 2  # buffers of probabilities

    @property
    def threads(self) -> int:
        return 128 * (self.scorers + self.halves)

    @property
    def box(self) -> int:
        """Keys that TMA loads at once: of a tile that lie in one page whatever the tile."""
        return math.gcd(self.keys, self.page) if self.page else self.keys

    @property
    def boxes(self) -> int:
        """Of a tile, for each 64 columns."""
        return self.keys // self.box

    @property
    def weight_bytes(self) -> int:
        """Probabilities of a tile, as the second product reads them: rows of 128 bytes."""
        return self.heads * 128

    @property
    def exchange_bytes(self) -> int:
        """Probabilities and factors of the output; maxima, and what the second warpgroup of scores has at the end; and
        mbarriers: two for each turn, one for each tile, maximum and for Q."""
        floats = self.heads * (self.turns + self.scorers + 2)
        return self.turns * self.weight_bytes + floats * 4 + (self.stages + 2 * self.turns + self.scorers + 1) * 8


class Tensors(NamedTuple):
    """The tensors of a call, as the host gives them. ``count`` is zero before and after every launch."""

    q: cute.Tensor  # (B, Hq, D)
    k: cute.Tensor  # (B, Hkv, S, D), or (Np, Ps, Hkv, D)
    v: cute.Tensor  # the same with Dv
    table: Any  # (B, Mp) or None
    kv_len: cute.Tensor  # (B)
    sink: cute.Tensor  # (Hq), anything where Numbers.has_sink is 0
    kv_start: cute.Tensor  # (B), likewise with has_start
    out: cute.Tensor  # (B, Hq, Dv)
    lse: cute.Tensor  # (B, Hq)
    parts: cute.Tensor  # (2 * blocks * part_floats)
    count: cute.Tensor  # (blocks), how many parts of a group have come, by its first block
    scales: Any = None  # of q, k and v, (B, Hkv) or None each; or None


class Numbers(NamedTuple):
    """The scalars of a call, as the host gives them."""

    scale: Float32
    cap: Float32
    window: Int32
    sink_tokens: Int32
    has_sink: Int32
    has_start: Int32
    chunks: Int32
    by_group: Int32
    beside: Int32
    least: Int32
    combiners: Int32  # blocks of the kernel that merges parts


class Scalars(NamedTuple):
    scale: Float32  # of the product, before the cap or, without one, into powers of two
    cap: Float32  # of the capped scores into powers of two; 0: no cap
    has_sink: Int32
    group: Int32  # query heads per KV head
    chunks: Int32  # groups that share a KV head: its query heads / heads, rounded up
    beside: Int32  # of them that neighbouring blocks attend at once, all or 1: what one loads the L2 has for the others
    least: Int32  # tiles


class Piece(NamedTuple):
    """A run of tiles of one group."""

    b: Int32
    kv_head: Int32
    head: Int32  # its first query head
    heads: Int32  # of them
    first: Int32
    stop: Int32


def arguments(dtype: str, config: Any, size: Callable[[], Any], scales: tuple[bool, ...] = ()) -> list[Any]:
    """Stand-ins for what the host passes: ``Tensors``, ``Numbers``, the number of blocks, and the stream.

    ``config`` is that of any of the kernels, ``size`` makes the sizes of the caches, and ``scales`` says which there
    are. E4M3 comes as bytes, since not every torch hands it over.
    """
    B, Hq, Hkv, keys = size(), fake.dim(), size(), size()  # keys of a sequence, or pages
    stored, result = ("u8", "bf16") if dtype == "f8e4m3" else (dtype, dtype)
    step = 128 // config.dtype.width  # elements of 16 bytes

    def vector(kind: str, length: Any) -> Any:
        return fake.tensor(kind, (length,), (None,), align=4)

    def cache(dim: int) -> Any:
        shape = (keys, config.page, Hkv, dim) if config.page else (B, Hkv, keys, dim)
        return fake.tensor(stored, shape, (*(fake.dim(step) for _ in range(3)), 1))

    tensors = Tensors(
        q=fake.tensor(stored, (B, Hq, config.dim), (fake.dim(step // 4), fake.dim(step // 4), 1), align=4),
        k=cache(config.dim),
        v=cache(config.dim_v),
        table=fake.tensor("i32", (B, None), align=4) if config.page else None,
        kv_len=vector("i32", B),
        sink=vector("f32", None),
        kv_start=vector("i32", B),
        out=fake.tensor(result, (B, Hq, config.dim_v), (fake.dim(8), fake.dim(8), 1)),
        lse=fake.tensor("f32", (B, Hq), align=4),
        parts=fake.tensor("f32", (None,), (1,)),
        count=fake.tensor("i32", (None,), (1,)),
        scales=tuple(fake.tensor("f32", (B, Hkv), align=4) if on else None for on in scales) or None,
    )
    return [tensors, Numbers(Float32(0), Float32(0), *(Int32(0) for _ in range(9))), Int32(0), fake.stream()]
