"""How a launch of gated_delta_rule is cut: rows of the state a CTA, warps of each role, stages."""

from __future__ import annotations

from dataclasses import dataclass

from torch_attnkit.cuda.limits import Limits
from torch_attnkit.cuda.smem import CHUNK, RESERVED, Region

TOKENS = 32  # of a chunk, one a lane
ROWS = 16  # of the state, V, that a warp has: those of an m16n8k16
MOST_KEY_DIM = 128  # a lane holds K / 2 numbers of the state
VALUES = 3  # chunks of v in shared memory, of each state warp
_FACTORS = 4  # numbers of float32 a token: for S k, for S q, for the update, and a spare that aligns them


@dataclass(frozen=True)
class Config:
    """A CTA has ``16 * state_warps`` rows of V of a head, and as many output warps; its Gram warps take chunks in
    turns."""

    dims: tuple[int, int]  # K, V
    state_warps: int
    gram_warps: int
    stages: int  # chunks in shared memory, more than Gram warps: one begins to load the next while it computes
    copies: int  # of a state warp's registers in shared memory, for its output warp
    normalized: bool  # q and k have length 1 when they are used
    past: bool  # whether there is such a tensor

    @property
    def threads(self) -> int:
        return 32 * (2 * self.state_warps + self.gram_warps)

    @property
    def rows(self) -> int:
        return ROWS * self.state_warps

    @property
    def tiles(self) -> int:
        """CTAs of a head."""
        return -(-self.dims[1] // self.rows)

    # Rows have 16 bytes more than numbers: ldmatrix reads eight of them without a bank conflict.

    @property
    def key_pitch(self) -> int:
        return 2 * self.dims[0] + CHUNK

    @property
    def square_pitch(self) -> int:
        return 2 * TOKENS + CHUNK

    @property
    def value_pitch(self) -> int:
        return 2 * ROWS + CHUNK

    @property
    def scratch_pitch(self) -> int:
        return 4 * ROWS + CHUNK  # of float32

    # A stage: k, q, the inverse A, the products P, factors of tokens.

    @property
    def key(self) -> Region:
        return Region(0, TOKENS * self.key_pitch)

    @property
    def query(self) -> Region:
        return Region(self.key.end, self.key.nbytes)

    @property
    def inverse(self) -> Region:
        return Region(self.query.end, TOKENS * self.square_pitch)

    @property
    def products(self) -> Region:
        return Region(self.inverse.end, self.inverse.nbytes)

    @property
    def factors(self) -> Region:
        return Region(self.products.end, 4 * _FACTORS * TOKENS)

    @property
    def stage_bytes(self) -> int:
        return self.factors.end

    # Behind the stages: tiles of v for each state warp, and its registers for its output warp; for each Gram warp the
    # diagonal blocks of L, numbers of tokens, and a term of the blocks' inverses (the other is over L).

    @property
    def value(self) -> Region:
        return Region(self.stages * self.stage_bytes, self.state_warps * VALUES * self.value_bytes)

    @property
    def value_bytes(self) -> int:
        return TOKENS * self.value_pitch

    @property
    def copy(self) -> Region:
        return Region(self.value.end, self.state_warps * self.copies * self.copy_bytes)

    @property
    def copy_bytes(self) -> int:
        return 32 * 16 * (self.dims[0] // 16 + TOKENS // 16)

    @property
    def scratch(self) -> Region:
        return Region(self.copy.end, self.gram_warps * self.scratch_bytes)

    @property
    def scratch_bytes(self) -> int:
        return TOKENS * (self.scratch_pitch + 4 * _FACTORS + self.value_pitch)

    @property
    def barriers(self) -> Region:
        return Region(self.scratch.end, 8 * 2 * (self.stages + self.state_warps * self.copies))

    @property
    def nbytes(self) -> int:
        return self.barriers.end


def configure(dims: tuple[int, int], heads: int, normalized: bool, past: bool, limits: Limits, sms: int) -> Config:
    """How ``heads``, of all sequences, are cut on a GPU of ``sms`` multiprocessors, one CTA each at a time.

    Two state warps a CTA have the shortest chain, and Gram warps keep up with them. Four take 1.55 times as long for
    half of the CTAs. H200, 8192 tokens: 32 heads 278 and 433 us, 4 x 64 heads 2211 and 1725 us (docs/lab/delta.md)."""
    warps = -(-dims[1] // ROWS)
    cost = {n: -(-heads * -(-warps // n) // sms) * time for n, time in ((2, 1.0), (4, 1.55))}
    for state_warps in sorted(cost, key=lambda n: cost[n]):
        for gram_warps, stages, copies in ((3, 7, 2), (3, 5, 2), (2, 5, 2), (2, 4, 2), (2, 3, 1)):
            config = Config(dims, min(state_warps, warps), gram_warps, stages, copies, normalized, past)
            if config.nbytes + RESERVED <= limits.shared:
                return config
    raise AssertionError(f"no room for chunks of {dims}")
