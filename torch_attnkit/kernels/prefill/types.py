"""What the prefill kernels of all architectures are compiled for and given."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32


@dataclass(frozen=True, kw_only=True)
class Features:
    """The features that a kernel is compiled with, and the types of its tensors; the base of every Config."""

    dtype: Any
    dim: int
    dim_v: int
    tile_n: int
    causal: bool = False
    window: bool = False
    sink_tokens: bool = False
    softcap: bool = False
    sink: bool = False
    kv_len: bool = False
    kv_start: bool = False
    normalize: bool = True
    varlen: bool = False
    ends_at_kv_len: bool = False  # queries end where their sequence's keys do, not where the tensor of keys does
    scales: tuple[bool, ...] = ()  # which of q's, k's and v's there are; (): none

    @property
    def padded(self) -> bool:
        """Whether V holds rows that may be anything: they are cleared, since 0 * nan is nan."""
        return self.kv_len or self.kv_start or self.varlen or self.window

    @property
    def uneven(self) -> bool:
        """Whether a tile's work grows with its place in the sequence."""
        return self.causal and not self.window


class Inputs(NamedTuple):
    """Dense (B, T, Hq, D), (B, S, Hkv, D), (B, S, Hkv, Dv), or packed without the batch axis."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    sink: Any  # (Hq) or None
    low: Any  # dense: kv_start (B) or None; packed: cu_seqlens_q (B + 1)
    high: Any  # dense: kv_len (B) or None; packed: cu_seqlens_k (B + 1)
    scales: Any  # of q, k and v, (B, Hkv) or None each; or None


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
    section: Int32  # of TileScheduler
    sms: Int32
