"""What the kernel for blocks of queries is compiled for, and the groups of arguments that its functions pass on."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import fake

from .. import arguments as shared


@dataclass(frozen=True)
class Config:
    """What is fixed at compile time. The rest of a call's features are numbers in ``Scalars``."""

    dtype: Any
    tile_m: int  # rows: queries times the query heads of a KV head
    tile_n: int
    stages: int
    per_sm: int  # CTAs that share a multiprocessor
    dim: int
    dim_v: int
    softcap: bool = False
    turns: bool = True
    late_rescale: bool = False
    pair: bool = False  # two CTAs, on neighbouring tiles of rows, load half of K and V each, for both

    turning_warps: ClassVar[int] = 0  # of the producer's warpgroup, those that turn V around
    scales: ClassVar[tuple[bool, ...]] = ()  # which of q's, k's and v's there are

    @property
    def out_dtype(self) -> Any:
        return self.dtype

    @property
    def loader_warps(self) -> int:
        """Of the producer's warpgroup, the first: they load keys."""
        return 1

    @property
    def ctas(self) -> int:
        """That load each block together."""
        return 2 if self.pair else 1

    @property
    def cluster_rows(self) -> int:
        return self.tile_m * self.ctas

    @property
    def consumers(self) -> int:
        return self.tile_m // 64

    @property
    def threads(self) -> int:
        """Of the consumers."""
        return 64 * 2 * self.consumers

    @property
    def normalize(self) -> bool:
        return True

    @property
    def padded(self) -> bool:
        """V may hold rows that may be anything: they are cleared, since 0 * nan is nan."""
        return True

    @property
    def window(self) -> bool:
        """There may be one, and sink tokens: numbers in ``Scalars`` say so."""
        return True

    sink_tokens = kv_start = window

    @property
    def ends_at_kv_len(self) -> bool:
        """Queries end where their sequence's keys do, and one before the first key attends nothing."""
        return True

    @property
    def pitch(self) -> int:
        """Floats from row to row of a partial result: eight more than it holds, so that rows do not collide."""
        return self.dim_v + 8

    @property
    def partial_bytes(self) -> int:
        """Of a partial result: rows of the output, then a maximum and a sum for each."""
        return self.tile_m * (self.pitch + 2) * (Float32.width // 8)

    @property
    def staged_bytes(self) -> int:
        """Of Q, K and V in shared memory."""
        return self.dtype.width // 8 * (self.tile_m * self.dim + self.stages * self.tile_n * (self.dim + self.dim_v))


class Inputs(NamedTuple):
    """E4M3 comes as bytes, which every torch hands over."""

    q: cute.Tensor  # (B, T, Hq, D)
    k: cute.Tensor  # (B, Hkv, S, D)
    v: cute.Tensor  # (B, Hkv, S, Dv)
    kv_len: cute.Tensor  # (B)
    sink: cute.Tensor  # (Hq), anything where Scalars.has_sink is 0
    kv_start: cute.Tensor  # (B), likewise with has_start
    scales: Any  # of q, k and v, (B, Hkv) each; or None


class Outputs(NamedTuple):
    out: cute.Tensor  # (B, T, Hq, Dv)
    lse: cute.Tensor  # (B, T, Hq)


class Scalars(NamedTuple):
    scale_log2: Float32  # of what the mask sees: the scores, or the capped scores
    cap_slope: Float32  # scale / softcap
    window: Int32  # a large number: none
    sink_tokens: Int32
    causal: Int32
    has_sink: Int32
    has_start: Int32
    ctas: Int32  # of a cluster: they share the keys of a tile, or, as a pair, load them for each other


class SplitWorkspace(NamedTuple):
    """Device memory in which persistent CTAs leave splits, and how many CTAs there are."""

    splits: cute.Tensor  # floats, two slots a CTA
    count: cute.Tensor  # zeros, one a CTA
    ctas: Int32
    start: Int32  # blocks of keys that take as long as a work tile's start and end


class Loads(NamedTuple):
    """The two TMA atoms and the tensors of coordinates that go with them."""

    k_atom: cute.CopyAtom
    k: cute.Tensor  # (S, D, Hkv, B)
    v_atom: cute.CopyAtom
    v: cute.Tensor  # (S, Dv, Hkv, B)


class Layouts(NamedTuple):
    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout


def arguments(dtype: str, config: Config) -> list[Any]:
    """Stand-ins for what the host passes: ``Inputs``, ``Outputs``, ``Scalars`` and the stream."""
    B, T, S, Hq, Hkv = (fake.dim32() for _ in range(5))
    stored = stored_as(dtype)
    ins = Inputs(
        shared._rows(stored, B, T, Hq, config.dim),
        shared._rows(stored, B, Hkv, S, config.dim),
        shared._rows(stored, B, Hkv, S, config.dim_v),
        shared._vector("i32", B),
        shared._vector("f32", None),
        shared._vector("i32", B),
        shared._scales(config, B, Hkv),
    )
    return [ins, *other_arguments(dtype, config, B, T, Hq)]


def stored_as(dtype: str) -> str:
    return "u8" if dtype == "f8e4m3" else dtype


def other_arguments(dtype: str, config: Config, *rows: Any) -> list[Any]:
    """Stand-ins for what comes behind ``Inputs``; ``rows`` are the axes of a row of the output."""
    out = shared._rows("bf16" if dtype == "f8e4m3" else dtype, *rows, config.dim_v)
    outs = Outputs(out, fake.tensor("f32", rows, align=4))
    return [outs, Scalars(Float32(0), Float32(0), *(Int32(0) for _ in range(6))), fake.stream()]


def split_workspace() -> SplitWorkspace:
    """Stand-ins for these."""
    splits, count = fake.tensor("f32", (None,), align=16), fake.tensor("i32", (None,), align=4)
    return SplitWorkspace(splits, count, Int32(0), Int32(0))
