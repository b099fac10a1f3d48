"""What the prefill kernel by ``mma.sync`` is compiled for, its shared memory, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Float32, Int32

from torch_attnkit.cuda.smem import CHUNK, Region

from ..sm90.config import Config, arguments
from .tiles import ATOM, MOST_IN_REGISTERS, WARP


@dataclass(frozen=True)
class MmaShared:
    """The shared memory of a CTA: rows of Q, K and V, each ``CHUNK`` bytes longer than what it holds."""

    ring: Region  # (stages, K then V of a block)
    block: Region  # of E4M3 that is widened, K then V of the block at work; else empty
    query: Region  # rows of a tile; where they go on to registers, over the last stage and the block

    @property
    def nbytes(self) -> int:
        return max(self.block.end, self.query.end)


@dataclass(frozen=True, kw_only=True)
class MmaConfig(Config):
    """``atoms``: products of 16 rows that a warp has one behind the other, with one load of keys and values."""

    atoms: int = 1

    @property
    def warps(self) -> int:
        return self.tile_m // (ATOM * self.atoms)

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def tile_rows(self) -> int:
        """All: rows of Q are copied one by one, so that a tile may begin and end amid a query's heads."""
        return self.tile_m

    @property
    def query_in_registers(self) -> bool:
        return self.dim * self.atoms <= MOST_IN_REGISTERS

    @property
    def pitches(self) -> tuple[int, int]:
        """Bytes from row to row of K (and Q) and of V: eight rows that are read at once lie in different banks."""
        nbytes = self.dtype.width // 8
        return self.dim * nbytes + CHUNK, self.dim_v * nbytes + CHUNK

    @property
    def kv_bytes(self) -> int:
        """Of an element of K and V as they come."""
        return 1 if self.fp8_kv else self.dtype.width // 8

    @property
    def staged_pitches(self) -> tuple[int, int]:
        """``pitches`` of K and V as they come."""
        return self.dim * self.kv_bytes + CHUNK, self.dim_v * self.kv_bytes + CHUNK

    @property
    def stage_bytes(self) -> int:
        return self.tile_n * sum(self.staged_pitches)

    @property
    def shared(self) -> MmaShared:
        ring, query = self.stages * self.stage_bytes, self.tile_m * self.pitches[0]
        block = Region(ring, self.tile_n * sum(self.pitches) if self.fp8_kv else 0)
        begin = block.end if not self.query_in_registers else (self.stages - 1) * self.stage_bytes
        return MmaShared(Region(0, ring), block, Region(begin, query))


class TileScalars(NamedTuple):
    """``GroupScalars`` of tiles without clusters."""

    scale_log2: Float32  # of what the mask sees: the scores, or the capped scores
    cap_slope: Float32  # scale / softcap
    window: Int32  # a large number: none
    sink_tokens: Int32
    causal: Int32
    has_sink: Int32
    has_start: Int32
    section: Int32  # of dense batches: KV heads whose keys share the L2, and whose tiles are taken together


def mma_arguments(dtype: str, config: MmaConfig) -> list[Any]:
    """Stand-ins for what the host passes: inputs, outputs, scalars, the stream."""
    ins, outs, _, stream = arguments(dtype, config)
    return [ins, outs, TileScalars(Float32(0), Float32(0), *(Int32(0) for _ in range(6))), stream]
