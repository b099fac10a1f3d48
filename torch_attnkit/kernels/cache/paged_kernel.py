"""Device side of paged_kv_cache_write: keys and values of tokens to slots of pages.

    CTA (token, 0)   keys: vectors of all heads, one a thread and iteration -> rounded or E4M3 -> page, slot
    CTA (token, 1)   values, likewise

No pipeline: a thread waits for its own loads alone. A vector lies in one head. Tokens without a valid slot are skipped.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr

from torch_attnkit.cuda import copies, e4m3, fake, fp4, pdl


class _PagedWriter:
    def __init__(self, heads: int, dims: tuple[int, ...], width: int, threads: int):
        self.heads, self.dims, self.width, self.threads = heads, dims, width, threads

    @cute.jit
    def __call__(
        self,
        mK: cute.Tensor,  # (R, Hkv, D)
        mV: cute.Tensor,  # (R, Hkv, Dv)
        mKcache: cute.Tensor,  # (Np, Ps, Hkv, D)
        mVcache: cute.Tensor,  # (Np, Ps, Hkv, Dv)
        mSlot: cute.Tensor,  # (R,)
        mKscale: cute.Tensor | None,  # (Hkv,)
        mVscale: cute.Tensor | None,  # (Hkv,)
        stream: cuda.CUstream,
    ):
        self.kernel(mK, mV, mKcache, mVcache, mSlot, mKscale, mVscale).launch(
            grid=(mSlot.shape[0], 2, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=pdl.use()
        )

    @cute.kernel
    def kernel(
        self,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mKcache: cute.Tensor,
        mVcache: cute.Tensor,
        mSlot: cute.Tensor,
        mKscale: cute.Tensor | None,
        mVscale: cute.Tensor | None,
    ):
        pdl.launch_dependents()
        pdl.wait()
        token, side, _ = cute.arch.block_idx()
        slot = Int64(copies.scalar(mSlot.iterator + Int64(token)))
        if (slot >= 0) & (slot < Int64(mKcache.shape[0]) * mKcache.shape[1]):
            page = Int32(slot) // Int32(mKcache.shape[1])
            entry = Int32(slot) - page * Int32(mKcache.shape[1])
            if side == 0:
                self.write(mK, mKcache, mKscale, token, page, entry, self.dims[0])
            else:
                self.write(mV, mVcache, mVscale, token, page, entry, self.dims[1])

    @cute.jit
    def write(
        self, mX: cute.Tensor, mCache: cute.Tensor, mScale: cute.Tensor | None, token: Int32, page: Int32, entry: Int32,
        dim: cutlass.Constexpr,
    ):  # fmt: skip
        """All heads of a token, of ``dim`` channels each."""
        source = mX.iterator + Int64(token) * mX.stride[0]
        target = mCache.iterator + (Int64(page) * mCache.stride[0] + Int64(entry) * mCache.stride[1])
        end, width = const_expr(self.heads * dim), const_expr(self.width)
        for at in cutlass.range(cute.arch.thread_idx()[0] * width, end, self.threads * width, unroll=1):
            head = at // dim
            col = at - head * dim
            rX = cute.make_rmem_tensor(width, mX.element_type)
            copies.load(source + (Int64(head) * mX.stride[1] + col), rX)
            to = target + (Int64(head) * mCache.stride[2] + col)
            if const_expr(mCache.element_type is Float8E4M3FN):
                x = [rX[i].to(Float32) for i in range(width)]
                if const_expr(mScale is not None):
                    scale = copies.scalar(mScale.iterator + head)
                    x = [fp4.divide(number, scale) for number in x]
                copies.store(_to_e4m3(x), cute.recast_ptr(to, dtype=Uint8))
            else:
                copies.store(rX, to)


def _to_e4m3(x: list[Float32]) -> cute.Tensor:
    """E4M3 bytes in registers."""
    codes = cute.make_rmem_tensor(len(x), Uint8)
    if len(x) % 4 == 0:
        words = cute.recast_tensor(codes, Int32)
        for i in range(len(x) // 4):
            words[i] = e4m3.pack(x[4 * i : 4 * i + 4])
    else:
        for i, number in enumerate(x):
            codes[i] = e4m3.pair(number, Float32(0)).to(Uint8)
    return codes


def trace(
    arch: str, heads: int, dims: tuple[int, int], dtypes: tuple[str, str, str], scaled: tuple[bool, bool], width: int,
    threads: int,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``dims`` of a head of keys and of values; ``dtypes`` of tokens, caches and slots; a vector has ``width``
    elements."""
    new, stored, slot = dtypes
    tokens = [fake.tensor(new, (None, heads, d), align=width * fake.dtype(new).width // 8) for d in dims]
    caches = [fake.tensor(stored, (None, None, heads, d), align=width * fake.dtype(stored).width // 8) for d in dims]
    scales = [fake.tensor("f32", (heads,), align=4) if s else None for s in scaled]
    arguments = [*tokens, *caches, fake.tensor(slot, (None,), align=4), *scales, fake.stream()]
    return _PagedWriter(heads, dims, width, threads), arguments
