"""What comes out of a chunk of gated_delta_rule: out = e^G nq (S q') + V' P', 16 channels a warp.

S and V' are a state warp's registers, q, P and the factors a Gram warp's. No state warp waits for any of this.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.word_ops import load_words

from .config import TOKENS, Config
from .products import GROUPS, add_lower, scale_tokens, times_tokens


class Output(Fixed):
    def __init__(self, config: Config, dtype: Any):
        self.c, self.dtype = config, dtype

    def taken(self, copy: Int32) -> tuple[list, list]:
        """S and V' as operands, from where a state warp left them."""
        steps, at = self.c.dims[0] // 16, copy + 16 * cute.arch.lane_idx()
        words = [load_words(4, at + 512 * i) for i in range(steps + TOKENS // 16)]
        return words[:steps], words[steps:]

    def multiply(self, state: list, values: list, stage: Int32) -> cute.Tensor:
        """(4, groups of 8 tokens): rows are channels and columns tokens."""
        c = self.c
        rOut = times_tokens(c, self.dtype, state, c.query.at(stage))
        scale_tokens(c, rOut, stage, 1)
        add_lower(c, rOut, values, c.products.at(stage), by_columns=False)
        return rOut

    @cute.jit
    def store(self, rOut: cute.Tensor, mOut: cute.Tensor, first: Int32, count: Int32, head: Int32, row: Int32):
        """Transposed across the warp, a pair of channels a lane; ``row`` is the warp's first."""
        lane = cute.arch.lane_idx()
        begin = Int64(head) * mOut.stride[1] + row + lane % 4 * 2
        for n in cutlass.range_constexpr(GROUPS):
            token = 8 * n + lane // 4
            for channels in cutlass.range_constexpr(2):
                pair = op.transpose_8x8(op.pack(self.dtype, rOut[2 * channels, n], rOut[2 * channels + 1, n]))
                if (token < count) & (row + 8 * channels < self.c.dims[1]):
                    target = mOut.iterator + (Int64(first + token) * mOut.stride[0] + begin + 8 * channels)
                    words = cute.make_ptr(Int32, target.toint(), cute.AddressSpace.gmem, assumed_align=4)
                    cute.make_tensor(words, cute.make_layout(1))[0] = pair
