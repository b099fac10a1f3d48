"""Which tokens of a block see some of its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda.ring import Fixed

from .plan import MOST_TOKENS

_LANES = 32


@dataclass
class Tokens(Fixed):
    """A block's tokens in shared memory: those that see some of its keys from the front, the others from the back."""

    sToken: cute.Tensor  # (MOST_TOKENS)
    sLength: cute.Tensor  # (MOST_TOKENS)
    sCount: cute.Tensor  # (3): tokens that see some keys, tokens that see none, the longest length of the first

    def at(self, n: Int32) -> Int32:
        """The n-th token that sees keys; past the end the last."""
        return self.sToken[cutlass.min(n, self.sCount[0] - 1)]


def allocate(memory: Any) -> Tokens:
    vector = lambda size: memory.allocate_tensor(Int32, cute.make_layout(size), byte_alignment=16)
    return Tokens(vector(MOST_TOKENS), vector(MOST_TOKENS), vector(3))


@cute.jit
def sort(
    tokens: Tokens, mLength: cute.Tensor, mIds: cute.Tensor | None, entries: Int32, requests: Int32, request: Int32,
    first: Int32, last: Int32, start: Int32,
):  # fmt: skip
    """One warp: compact the request's tokens from ``first`` to ``last`` by whether they see keys from ``start`` on.
    Lengths and request ids out of range are clamped."""
    lane = cute.arch.lane_idx()
    below = (Int32(1) << lane) - 1
    some, none, longest = Int32(0), Int32(0), Int32(0)
    rounds = const_expr(MOST_TOKENS // _LANES)
    rLength, rOwner = (cute.make_rmem_tensor(rounds, Int32) for _ in range(2))
    for i in cutlass.range_constexpr(rounds):  # all on their way before the first is looked at
        token = cutlass.min(first + i * _LANES + lane, last - 1)
        rLength[i] = Int32(mLength[token])
        rOwner[i] = request if const_expr(mIds is None) else Int32(mIds[token])
    for i in cutlass.range_constexpr(rounds):
        token = first + i * _LANES + lane
        length = cutlass.max(cutlass.min(rLength[i], entries), Int32(0))
        in_request = (token < last) & (cutlass.max(cutlass.min(rOwner[i], requests - 1), Int32(0)) == request)
        sees, blind = in_request & (length > start), in_request & (length <= start)
        votes, others = cute.arch.vote_ballot_sync(sees), cute.arch.vote_ballot_sync(blind)
        if sees:
            position = some + Int32(cute.arch.popc(votes & below))
            tokens.sToken[position], tokens.sLength[position] = token, length
            longest = cutlass.max(longest, length)
        if blind:
            tokens.sToken[MOST_TOKENS - 1 - none - Int32(cute.arch.popc(others & below))] = token
        some += Int32(cute.arch.popc(votes))
        none += Int32(cute.arch.popc(others))
    longest = cute.arch.warp_redux_sync(longest, "max")
    if lane == 0:
        tokens.sCount[0], tokens.sCount[1], tokens.sCount[2] = some, none, longest
