"""Attention of tokens that each have keys of their own on Hopper; keys are values, too, and shared by all heads.

    producer warpgroup     Q, and the keys of a tile, row by row, by cp.async
    2 consumer warpgroups  scores of their tiles -> online softmax -> P -> half of the output's columns (mainloop.py)
    one CTA a token        persistent: the next token's keys are on their way while this one's result is stored
    or several             they share the keys; each adds up a share of the rows, which the others send to it, and those
                           of several clusters meet in device memory (merge.py)

Up to 64 heads of a token are the rows of a product; fewer are padded. docs/lab/sparse.md has what limits it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.sm90.warpgroup import THREADS, WARPS

from .arguments import Numbers, Tensors, arguments
from .coded import CodedTiles
from .config import HALVES, Config
from .fp4_output import Fp4Output
from .inbox import Inbox
from .loads import Producer, ask_ahead, load_query
from .mainloop import Mainloop, Start
from .meeting import Meeting, sync_cluster
from .merge import Merge
from .once import Once
from .output import Output
from .plain import PlainTiles
from .plan import SIDES
from .results import Results
from .schedule import work_tile, work_tiles
from .staged import StagedTiles

# Of a thread of the producer and of a consumer; 168 is the mean. Who decodes needs more than who copies.
_REGISTERS, _CODED_REGISTERS = (56, 224), (72, 216)


class Sparse:
    """The kernel: a loop over work tiles for each role of warpgroups."""

    def __init__(self, config: Config):
        self.c = config
        tiles = PlainTiles if config.row.plain else StagedTiles if config.staged else CodedTiles
        self.producer = Producer(config, tiles(config))
        self.mainloops = [(Once if config.once else Mainloop)(config, half) for half in range(HALVES)]
        output = Output(config.dtype) if config.fp4 is None else Fp4Output(config)
        self.results = [Results(config, half, output) for half in range(HALVES)]
        self.merge = Merge(config, output)

    @cute.jit
    def __call__(self, tensors: Tensors, numbers: Numbers, stream: Any):
        c = self.c
        self.kernel(tensors, numbers).launch(
            grid=[numbers.together * numbers.groups * numbers.ctas, 1, 1], block=[c.threads, 1, 1],
            cluster=[numbers.ctas * c.sides, 1, 1],
            smem=c.shared_bytes, stream=stream, min_blocks_per_mp=1, preferred_smem_carveout=100, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: Tensors, numbers: Numbers):
        c = self.c
        shared = cutlass.memory.SmemAllocator().allocate(c.shared_bytes, 1024).toint()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        meeting = Meeting(c, shared)
        if cute.arch.thread_idx()[0] == 0:
            meeting.begin(numbers.ctas)
        cute.arch.mbarrier_init_fence()
        if const_expr(c.sides == SIDES):
            sync_cluster()
        else:
            cute.arch.barrier()
        if const_expr(c.merge):
            cute.arch.cluster_arrive_relaxed()  # ``tell_read`` waits for the others
        first, part = cute.arch.block_idx()[0], Int32(0)  # work tile, and which CTA of it this is
        if const_expr(c.merge):
            each = numbers.groups * numbers.ctas
            side, first = first % c.sides, first // c.sides
            first, part = first // each * c.sides + side, first % each
        # The launch began while the one before it ended, and lets the next begin likewise: all memory waits for that.
        cute.arch.griddepcontrol_launch_dependents()
        ask_ahead(c, tensors, numbers, work_tile(tensors, numbers, first), part)
        cute.arch.griddepcontrol_wait()
        few, many = const_expr(_REGISTERS if c.row.plain else _CODED_REGISTERS)
        if warp >= HALVES * WARPS:
            cute.arch.setmaxregister_decrease(few)
            if const_expr(c.once):
                tile = work_tile(tensors, numbers, first)
                load_query(c, tensors, tile, shared, meeting, THREADS)
                if const_expr(not c.row.plain):
                    self.producer.bring(0, tensors, numbers, tile, part, shared, meeting)
            else:
                self.producer.run(tensors, numbers, shared, meeting, first, part)
            if const_expr(c.merge):
                cute.arch.cluster_wait()
                cute.arch.cluster_arrive_relaxed()
                cute.arch.cluster_wait()
            if const_expr(c.sides == SIDES):
                sync_cluster()
        elif warp >= WARPS:
            cute.arch.setmaxregister_increase(many)
            self._consumer(1, tensors, numbers, shared, meeting, first, part)
        else:
            cute.arch.setmaxregister_increase(many)
            self._consumer(0, tensors, numbers, shared, meeting, first, part)

    def _consumer(self, half: int, *arguments: Any) -> None:
        (self._consume_once if self.c.once else self._consume)(half, *arguments)

    @cute.jit
    def _consume_once(
        self, half: cutlass.Constexpr, tensors: Tensors, numbers: Numbers, shared: Int32, meeting: Meeting,
        index: Int32, part: Int32,
    ):  # fmt: skip
        """The only work tile of a CTA, all keys of its share at once."""
        w, tile = self.mainloops[half].fragments(shared), work_tile(tensors, numbers, index)
        self.producer.bring(1 + half, tensors, numbers, tile, part, shared, meeting)
        maxima, sums = self.mainloops[half].run(numbers, shared, meeting, w)
        inbox = Inbox(self.c, numbers, shared)
        self.results[half].send_sums(tile, meeting, inbox, w, (maxima, sums, [Float32(1.0)] * 2))
        self.merge.run(tensors, numbers, tile, index, part, inbox, shared, meeting)
        cute.arch.cluster_wait()  # what this CTA has sent has come

    @cute.jit
    def _consume(
        self, half: cutlass.Constexpr, tensors: Tensors, numbers: Numbers, shared: Int32, meeting: Meeting,
        first: Int32, part: Int32,
    ):  # fmt: skip
        w = self.mainloops[half].fragments(shared)
        start, item = Start(Int32(0), Int32(0), Int32(0)), Int32(0)  # tiles and work tiles so far
        for index in cutlass.range(first, work_tiles(tensors, numbers), numbers.together, unroll=1):
            tile = work_tile(tensors, numbers, index)
            if const_expr(self.c.merge):  # each CTA has but one, so nobody is early
                load_query(self.c, tensors, tile, shared, meeting, THREADS * HALVES)
            meeting.query.wait(item)
            # Known to be the same in all lanes, or every descriptor of ``wgmma`` would be computed in each of them.
            tiles = cute.arch.make_warp_uniform(meeting.info(shared)[0])
            cute.arch.sync_warp()  # every lane has read it before one of them gives Q's place back
            self.mainloops[half].run(numbers, shared, meeting, w, start, tiles)
            if const_expr(self.c.merge):
                inbox = Inbox(self.c, numbers, shared)
                self.results[half].send(tile, shared, meeting, inbox, w)
                self.merge.run(tensors, numbers, tile, index, part, inbox, shared, meeting)
                cute.arch.cluster_wait()  # what this CTA has sent has come
            else:
                self.results[half].store(tensors, numbers, tile, shared, w)
            start = start.after(tiles)
            item += 1
        if const_expr(self.c.sides == SIDES):
            sync_cluster()  # no CTA may leave while the other side still tells it which places are free


def trace(arch: str, *, dtype: str, dim: int, **sizes: Any) -> tuple[Any, list[Any]]:
    """For rows of q that start at multiples of 16 bytes, as those of the caches do that hold numbers."""
    config = Config(fake.dtype(dtype), dim, **sizes)
    angles = None if config.fp4 is None else config.fp4[2]
    return Sparse(config), arguments(dtype, dim, config.row, config.align, angles)
