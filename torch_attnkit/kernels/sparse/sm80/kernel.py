"""Sparse attention by ``mma.sync``, for sm_80, sm_89 and sm_120: each token has its own keys (window rows and listed
entries); K is V, shared by all heads.

    all warps   cp.async gathers of the next tiles, row by row (load.py) -> shared memory; encoded rows are staged and
                dequantised into one 16-bit tile
                S = Q K' -> online softmax -> P -> O += P V (mainloop.py): a warp has some columns of D for both
                products, Q and O of these in registers, and some heads for the softmax
                results, or a split in the workspace that the last CTA to arrive combines (epilogue.py)

Grid: a CTA a work tile, a token with 8, 16 or 32 of its heads; ``split_kv``: ``groups`` CTAs, each with a share of the
keys. There are no roles, no mbarriers and no clusters. Of a tile all threads of the CTA arrive at these barriers:

    tile     every thread's cp.async.wait_group is before it; nobody reads the tile before, or its P, any more
    decoded  of encoded rows: all warps have dequantised theirs
    scores   the sums of Q K' over every warp's columns are in shared memory
    P        P is

The copy of a later tile begins behind the first, so ``ahead`` tiles are in flight while one is attended. Sizes are in
plan.py. Constraints: D 128, 256 or 512; 16-bit elements; rows of q aligned to 16 bytes, of caches to ``align``.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from torch_attnkit.cuda import fake, pdl

from ..arguments import Scalars, Tensors, arguments
from ..token_keys import Keys, WorkTile, entry_of, first_entry_of, guess_of, keys_of, row_of, without_end
from .config import Config
from .epilogue import Epilogue
from .load import KeyLoader, load_query
from .mainloop import Mainloop


def trace(arch: str, *, dtype: str, dim: int, **sizes: Any) -> tuple[Any, list[Any]]:
    """The kernel for a ``Config``, and stand-ins for its arguments."""
    config = Config(fake.dtype(dtype), dim, **sizes)
    return SparseMma(config), arguments(dtype, dim, config.row, config.align, None)


class SparseMma:
    def __init__(self, config: Config):
        self.c, self.loader, self.mainloop = config, KeyLoader(config), Mainloop(config)
        self.epilogue = Epilogue(config, self.mainloop)

    @cute.jit
    def __call__(self, tensors: Tensors, scalars: Scalars, stream: Any):
        c = self.c
        self.kernel(tensors, scalars).launch(
            grid=[scalars.concurrent * scalars.groups, 1, 1], block=[c.threads, 1, 1], smem=c.shared_bytes,
            stream=stream, use_pdl=pdl.use(), min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: Tensors, scalars: Scalars):
        c = self.c
        shared = cutlass.memory.SmemAllocator().allocate(c.shared_bytes, 128).toint()
        index, part = cute.arch.block_idx()[0], Int32(0)  # work tile, and the CTA's index within it
        if const_expr(c.split_kv):
            block, groups = Uint32(index), Uint32(scalars.groups)
            index, part = Int32(block // groups), Int32(block % groups)
        tile = self.work_tile(tensors, scalars, index)
        pdl.launch_dependents()
        pdl.wait()  # no global memory is read or written before
        w = self.attend(tensors, scalars, tile, part, shared)
        if const_expr(c.split_kv):
            splits = tensors.splits.iterator.toint() + Int64(index) * scalars.groups * c.split.nbytes
            self.epilogue.store_split(splits + Int64(part) * c.split.nbytes, tile, w)
            if self.epilogue.is_last(tensors, scalars, index, shared):
                self.epilogue.combine(tensors, scalars, tile, splits)
        else:
            self.epilogue.store(tensors, scalars, tile, w, shared)

    def work_tile(self, tensors: Tensors, scalars: Scalars, index: Int32) -> WorkTile:
        """Tiles of a token are neighbours, so that its keys are read from device memory once."""
        blocks = Uint32(scalars.head_blocks)
        token, head = Int32(Uint32(index) // blocks), Int32(Uint32(index) % blocks) * self.c.heads
        return WorkTile(token, head, cutlass.min(Int32(tensors.q.shape[1]) - head, self.c.heads))

    @cute.jit
    def attend(self, tensors: Tensors, scalars: Scalars, tile: WorkTile, part: Int32, shared: Int32):
        c, loader = self.c, self.loader
        load_query(c, tensors, tile, shared)
        cute.arch.cp_async_commit_group()
        first = loader.key(Int32(0))
        guess = guess_of(tensors, scalars, tile.token, part, first)
        keys = keys_of(c, tensors, scalars, tile.token, part)
        if const_expr(not c.split_kv):
            keys = without_end(tensors, scalars, keys, tile.token)
        divisor = loader.divisor(tensors)
        tiles = cutlass.max(keys.stop - keys.first + (c.keys - 1), 0) // c.keys
        entry = first_entry_of(tensors, scalars, keys, tile.token, keys.first + first, guess)
        row = self._row(tensors, keys, Int32(0), entry)
        for n in cutlass.range_constexpr(c.ahead):
            if n < tiles:
                loader.load(row, shared, Int32(n))
            cute.arch.cp_async_commit_group()
            ahead = Int32(n + 1)
            row = self._row(tensors, keys, ahead, self._entry(tensors, scalars, keys, tile, ahead))
        cute.arch.cp_async_wait_group(c.ahead)
        cute.arch.barrier()  # Q has come
        w = self.mainloop.fragments(shared)
        for n in cutlass.range(tiles, unroll=1):
            cute.arch.cp_async_wait_group(c.ahead - 1)
            cute.arch.barrier()
            if const_expr(not c.row.plain):  # what other lanes copied has come, too
                loader.decode(divisor, shared, n)
                cute.arch.sync_warp()  # all lanes have read the stage
            ahead = n + c.ahead
            if ahead < tiles:
                loader.load(row, shared, ahead)
            cute.arch.cp_async_commit_group()
            if const_expr(not c.row.plain):
                cute.arch.barrier()
            entry = self._entry(tensors, scalars, keys, tile, ahead + 1)  # in flight while the tile is attended
            self.mainloop.tile(scalars, w, shared, loader.tile(shared, n), loader.valid(shared, n))
            row = self._row(tensors, keys, ahead + 1, entry)
        cute.arch.cp_async_wait_group(0)
        return w

    def _entry(self, tensors: Tensors, scalars: Scalars, keys: Keys, tile: WorkTile, n: Int32) -> Any:
        """Entry of this lane's key of tile n."""
        return entry_of(tensors, scalars, keys, tile.token, keys.first + self.loader.key(n))

    def _row(self, tensors: Tensors, keys: Keys, n: Int32, entry: Any) -> Any:
        """This lane's row of tile n."""
        return row_of(self.c, tensors, keys, keys.first + self.loader.key(n), entry)
