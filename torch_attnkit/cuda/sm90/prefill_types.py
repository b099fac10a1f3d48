"""What a prefill kernel is compiled for, and the groups of arguments that its functions pass on."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32


@dataclass(frozen=True)
class Config:
    """What is fixed at compile time."""

    dtype: Any
    dim: int
    dim_v: int
    tile_m: int
    tile_n: int
    stages: int
    q_stages: int
    causal: bool = False
    window: bool = False
    sink_tokens: bool = False
    softcap: bool = False
    sink: bool = False
    kv_len: bool = False
    kv_start: bool = False
    normalize: bool = True
    turns: bool = True
    late_rescale: bool = False
    varlen: bool = False
    pair: bool = False  # two CTAs, on neighbouring heads that share keys, load half of K and V each, for both

    @property
    def consumers(self) -> int:
        return self.tile_m // 64

    @property
    def padded(self) -> bool:
        """Whether V holds rows that may be anything: they are cleared, since 0 * nan is nan."""
        return self.kv_len or self.kv_start or self.varlen


class Inputs(NamedTuple):
    """Dense (B, T, Hq, D), (B, S, Hkv, D), (B, S, Hkv, Dv), or packed without the batch axis."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    sink: Any  # (Hq) or None
    low: Any  # dense: kv_start (B) or None; packed: cu_seqlens_q (B + 1)
    high: Any  # dense: kv_len (B) or None; packed: cu_seqlens_k (B + 1)


class Outputs(NamedTuple):
    """Dense (B, T, Hq, Dv) and (B, T, Hq), or packed without the batch axis."""

    out: cute.Tensor
    lse: cute.Tensor
    row_sum: Any  # or None


class Scalars(NamedTuple):
    scale_log2: Float32  # of what the mask sees: the scores, or the capped scores
    cap_slope: Float32  # scale / softcap
    window: Int32
    sink_tokens: Int32
    section: Int32  # of Order
    sms: Int32


class Loads(NamedTuple):
    """The three TMA atoms and the tensors of coordinates that go with them."""

    q_atom: cute.CopyAtom
    q: cute.Tensor  # (T, D, Hq, B); packed: (T, D, Hq)
    k_atom: cute.CopyAtom
    k: cute.Tensor  # (S, D, Hkv, B); packed: (S, D, Hkv)
    v_atom: cute.CopyAtom
    v: cute.Tensor  # (S, Dv, Hkv, B); packed: (S, Dv, Hkv)


class Place(NamedTuple):
    """Where a lane's results go: its first row within the sequence, which has ``tokens`` rows from ``q0`` on."""

    batch: Int32
    head: Int32
    q0: Int32
    row: Int32
    tokens: Int32


class Layouts(NamedTuple):
    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
