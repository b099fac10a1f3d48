"""Tokens' results from those of their experts, weighted and added up in the order of the choices."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op

from .arguments import Tensors

_THREADS = 256
_EACH = 4  # features of a thread


class Total:
    """A launch of its own: where an expert has many tokens, the block that brings a token's last result would add up
    more of them, alone, than its next work tile can wait for."""

    @cute.jit
    def launch(self, tensors: Tensors, stream: Any):
        tokens, features = (Int32(n) for n in tensors.out.shape)
        blocks = (features + _EACH * _THREADS - 1) // (_EACH * _THREADS)
        self.kernel(tensors).launch(grid=[tokens, blocks, 1], block=[_THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, tensors: Tensors):
        cute.arch.griddepcontrol_wait()
        token = cute.arch.block_idx()[0]
        feature = (cute.arch.block_idx()[1] * _THREADS + cute.arch.thread_idx()[0]) * _EACH
        top_k = Int32(tensors.indices.shape[1])
        if feature < Int32(tensors.out.shape[1]):
            sums = [Float32(0.0)] * _EACH
            for k in cutlass.range(top_k, unroll=4):
                place = tensors.order[token * top_k + k]
                weight = tensors.weights[token, k]
                row = Int64(cutlass.max(place, Int32(0))) * tensors.partial.stride[0]
                rV = cute.make_rmem_tensor(_EACH, Float32)
                copies.load(tensors.partial.iterator + (row + feature), rV)
                sums = [s + cutlass.select_(place >= 0, rV[i] * weight, Float32(0.0)) for i, s in enumerate(sums)]
            pairs = [op.pack(tensors.out.element_type, *sums[i : i + 2]) for i in (0, 2)]
            at = Int64(token) * tensors.out.stride[0] + feature
            op.store_2_pairs(tensors.out.iterator.toint() + at * 2, *pairs)
