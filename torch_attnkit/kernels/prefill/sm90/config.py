"""What the Hopper prefill kernels are compiled for, and the tensors and scalars that they are given."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32

from torch_attnkit.cuda import fake

from .. import arguments as shared
from ..key_blocks import Sequence
from ..types import Features, Inputs
from .tiles import DYNAMIC, STATIC, STREAM_K

WARPGROUP = 128  # threads


@dataclass(frozen=True, kw_only=True)
class Config(Features):
    """What is fixed at compile time.

    ``scheduler`` and ``kv`` (where keys lie: dense, packed, cache or paged) choose the kernel's parts. With the static
    scheduler a tile's rows are queries of one head; with the others all query heads of a KV head share it (PackGQA),
    and where keys are a cache or pages, the call's features are numbers in ``GroupScalars``.
    """

    tile_m: int
    stages: int  # of K and V; of E4M3 with PackGQA, of K and of V as it comes, of ``fp8_kv`` of both as they come
    scheduler: str = STATIC
    kv: str = "dense"
    q_stages: int = 1
    per_sm: int = 1  # CTAs that share a multiprocessor
    ping_pong: bool = True
    late_rescale: bool = False
    pair: bool = False  # two CTAs, on neighbouring heads or tiles that share keys, load half of K and V each, for both
    promote: bool = True  # of E4M3: sums of several blocks of keys are added up in float32
    group: int = 0  # query heads of a KV head, where the dynamic scheduler loads rows of Q by TMA
    page: int = 1  # keys
    box: int = 0  # keys of a page that TMA loads at once; 0: threads copy rows
    in_order: bool = False  # from the last block to the first, also in windows, whichever rows share the tile
    fp8_kv: bool = False  # K and V are E4M3 beside queries of 16 bits, to which the producer widens them

    @property
    def fp8(self) -> bool:
        return self.dtype.width == 8

    @property
    def converted(self) -> bool:
        """Whether warps of the producer bring what TMA loads into the form that products take."""
        return (self.fp8 or self.fp8_kv) and self.scheduler != STATIC

    @property
    def out_dtype(self) -> Any:
        """Of E4M3 inputs bf16."""
        return BFloat16 if self.fp8 else self.dtype

    @property
    def padded(self) -> bool:
        """Of E4M3 rows of V at which nobody looks are zeros since V was transposed."""
        return not self.fp8 and super().padded

    @property
    def p_offset(self) -> int:
        """Probabilities, their sums and the output so far are 2^p_offset times what they stand for: rounded to E4M3,
        whose largest number is 448, more small ones remain."""
        return 8 if self.fp8 else 0

    @property
    def hdim512(self) -> bool:
        """Whether the output is split over two consumers."""
        return self.dim_v > 256

    @property
    def consumers(self) -> int:
        """Warpgroups."""
        return 2 if self.hdim512 else self.tile_m // 64

    @property
    def threads(self) -> int:
        """Of the consumers."""
        return WARPGROUP * self.consumers

    @property
    def ctas(self) -> int:
        """That load each block together."""
        return 2 if self.pair else 1

    @property
    def loader_warps(self) -> int:
        """Of the producer's warpgroup, the first: they load keys."""
        if self.kv != "paged" or self.converted:
            return 1
        most = 2 if self.scheduler == DYNAMIC else 4  # two have other work
        if not self.box:
            return most
        return next(n for n in range(most, 0, -1) if self.boxes // self.ctas % n == 0)

    @property
    def v_dtype(self) -> Any:
        """Of V as products take it, and so of probabilities: widened E4M3 is exact in f16, which rounds them less."""
        return Float16 if self.fp8_kv else self.dtype

    @property
    def convert_warps(self) -> int:
        """Of the producer's warpgroup, those that transpose V of E4M3, or widen K and V."""
        return 3 if self.converted else 0

    @property
    def k_stages(self) -> int:
        """Of K as products take it."""
        return 2 if self.fp8_kv else self.stages

    @property
    def v_stages(self) -> int:
        """Of V as products take it."""
        return 2 if self.convert_warps else self.stages

    @property
    def boxes(self) -> int:
        """Of a block of keys, for each of its runs of columns."""
        return self.tile_n // self.box

    @property
    def box_columns(self) -> int:
        """Of a box of K or of rows of Q: what a row of the swizzled layout has, 128, 64 or 32 bytes."""
        if self.fp8:
            return next(columns for columns in (128, 64, 32) if self.dim % columns == 0)
        return 64 if self.dim % 64 == 0 and self.dim_v % 64 == 0 else 32

    @property
    def tile_rows(self) -> int:
        """Rows of a cluster's tiles together; with the dynamic scheduler whole queries, with all their heads."""
        return self.tile_m // self.group * self.group if self.group else self.tile_m * self.ctas

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
        """Of Q, K and V in shared memory, and of V as it comes."""
        if self.fp8_kv:
            return 2 * self.tile_m * self.dim + (2 * self.k_stages + self.stages) * self.tile_n * (
                self.dim + self.dim_v
            )
        keys = self.stages * self.tile_n * (self.dim + self.dim_v)
        transposed = self.tile_n * self.v_stages * self.dim_v if self.convert_warps else 0
        return self.dtype.width // 8 * (self.tile_m * self.dim + keys + transposed)


class CacheInputs(NamedTuple):
    """E4M3 comes as bytes, which every torch hands over."""

    q: cute.Tensor  # (B, T, Hq, D)
    k: cute.Tensor  # (B, Hkv, S, D)
    v: cute.Tensor  # (B, Hkv, S, Dv)
    kv_len: cute.Tensor  # (B)
    sink: cute.Tensor  # (Hq), anything where GroupScalars.has_sink is 0
    kv_start: cute.Tensor  # (B), likewise with has_start
    scales: Any  # of q, k and v, (B, Hkv) each; or None


class PagedInputs(NamedTuple):
    """E4M3 comes as bytes, which every torch hands over."""

    q: cute.Tensor  # (Tq, Hq, D)
    k: cute.Tensor  # (Np, Ps, Hkv, D)
    v: cute.Tensor  # (Np, Ps, Hkv, Dv)
    scales: Any  # of q, k and v, (B, Hkv) each; or None
    cu_q: cute.Tensor  # (B + 1)
    table: cute.Tensor  # (B, Mp)
    kv_len: cute.Tensor  # (B)
    sink: cute.Tensor  # (Hq), anything where GroupScalars.has_sink is 0


class RowInputs(NamedTuple):
    """Of one packed sequence, as a dense batch of one has them."""

    q: cute.Tensor  # (1, T, Hq, D)
    sink: cute.Tensor  # (Hq)
    scales: Any  # of q, k and v, from the sequence's on; or None


class RowOutputs(NamedTuple):
    out: cute.Tensor  # (B, T, Hq, Dv)
    lse: cute.Tensor  # (B, T, Hq)


class GroupScalars(NamedTuple):
    """Of kernels whose tiles a KV head's query heads share."""

    scale_log2: Float32  # of what the mask sees: the scores, or the capped scores
    cap_slope: Float32  # scale / softcap
    window: Int32  # a large number: none
    sink_tokens: Int32
    causal: Int32
    has_sink: Int32
    has_start: Int32
    ctas: Int32  # of a cluster: they share the keys of a tile, or, as a pair, load them for each other


class SplitWorkspace(NamedTuple):
    """Device memory in which stream-K CTAs leave splits, and how many CTAs there are."""

    splits: cute.Tensor  # floats, two slots a CTA
    count: cute.Tensor  # zeros, one a CTA
    ctas: Int32
    start: Int32  # blocks of keys that take as long as a work tile's start and end


class TileCounter(NamedTuple):
    """From which CTAs of the dynamic scheduler take their work tiles, and how many CTAs there are at most."""

    count: cute.Tensor  # one zero
    ctas: Int32
    section: Int32  # of dense batches: KV heads whose keys share the L2, and whose tiles are taken together


class Layouts(NamedTuple):
    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout


class StaticTile(NamedTuple):
    """Work tile info of the static scheduler."""

    row: Int32  # number of the tile of M queries within its sequence; -1: there is none left
    head: Int32
    batch: Int32
    seq: Sequence

    @classmethod
    def of(cls, values: list[Int32]) -> "StaticTile":
        return cls(*values[:3], Sequence(*values[3:]))

    def info(self) -> list[Int32]:
        return [self.row, self.head, self.batch, *self.seq]


class OutputRows(NamedTuple):
    """Where a lane's results go: its first row within the sequence, which has ``tokens`` rows from ``q0`` on."""

    batch: Int32
    head: Int32
    q0: Int32
    row: Int32
    tokens: Int32


def arguments(dtype: str, config: Config) -> list[Any]:
    """Stand-ins for what the host passes: inputs, outputs, scalars, a workspace if the scheduler has one, the stream.

    Rows of q, k and v start at multiples of 16 bytes, as vectors and TMA need.
    """
    make = {"dense": shared.dense, "packed": shared.packed, "cache": _cache_arguments, "paged": _paged_arguments}
    ins, outs, scalars, stream = make[config.kv](dtype, config)
    if config.scheduler != STATIC:
        scalars = GroupScalars(Float32(0), Float32(0), *(Int32(0) for _ in range(6)))
    elif config.fp8:
        ins = ins._replace(v=transposed_values(config))
    workspace = {STREAM_K: _split_workspace, DYNAMIC: _tile_counter}.get(config.scheduler)
    return [ins, outs, scalars, *([workspace()] if workspace else []), stream]


def transpose_arguments(dtype: str, config: Features) -> list[Any]:
    """Those of V's transposition ahead of the kernel."""
    ins, _, scalars, stream = (shared.packed if config.varlen else shared.dense)(dtype, config)
    return [Inputs(*ins), transposed_values(config), scalars, stream]


def transposed_values(config: Features) -> Any:
    """V that was transposed, (B, Hkv, Dv, S'), packed without the first axis."""
    axes = [fake.dim32() for _ in range(1 if config.varlen else 2)]
    return shared._rows("u8", *axes, config.dim_v, fake.dim(16))


def _cache_arguments(dtype: str, config: Config) -> list[Any]:
    B, T, S, Hq, Hkv = (fake.dim32() for _ in range(5))
    q, k, v = _stored(dtype, config, (B, T, Hq), (B, Hkv, S))
    rest = shared._vector("i32", B), shared._vector("f32", None), shared._vector("i32", B)
    ins = CacheInputs(q, k, v, *rest, shared._scales(config, B, Hkv))
    return [ins, _outputs(dtype, config, B, T, Hq), None, fake.stream()]


def _paged_arguments(dtype: str, config: Config) -> list[Any]:
    T, B, count, Np, Hq, Hkv = (fake.dim32() for _ in range(6))
    q, k, v = _stored(dtype, config, (T, Hq), (Np, config.page, Hkv))
    scales, cu_q = shared._scales(config, B, Hkv), shared._vector("i32", count)
    rest = fake.tensor("i32", (B, None), align=4), shared._vector("i32", B), shared._vector("f32", None)
    return [PagedInputs(q, k, v, scales, cu_q, *rest), _outputs(dtype, config, T, Hq), None, fake.stream()]


def _stored(dtype: str, config: Config, queries: tuple, keys: tuple) -> list[Any]:
    """q, k and v; E4M3 as bytes."""
    of_q = "u8" if dtype == "f8e4m3" else dtype
    of_kv = "u8" if config.fp8_kv else of_q
    shapes = (of_q, *queries, config.dim), (of_kv, *keys, config.dim), (of_kv, *keys, config.dim_v)
    return [shared._rows(*shape) for shape in shapes]


def _outputs(dtype: str, config: Config, *rows: Any) -> RowOutputs:
    """``rows`` are the axes of a row of the output."""
    out = shared._rows("bf16" if dtype == "f8e4m3" else dtype, *rows, config.dim_v)
    return RowOutputs(out, fake.tensor("f32", rows, align=4))


def _split_workspace() -> SplitWorkspace:
    splits, count = fake.tensor("f32", (None,), align=16), fake.tensor("i32", (None,), align=4)
    return SplitWorkspace(splits, count, Int32(0), Int32(0))


def _tile_counter() -> TileCounter:
    return TileCounter(fake.tensor("i32", (None,), (None,), align=4), Int32(0), Int32(0))
