"""Encoded rows that come whole, by bulk copies, to memory of their own, and are decoded from there.

    tile n       its rows -> staging, a copy a row, of which an mbarrier for each warp counts the bytes
    tile n - 1   staging -> registers -> eight numbers -> the ring, when there is a place

A bulk copy is a multiple of 16 bytes from a multiple of 16 on. Of a row of FP8 that starts 8 bytes behind one the first
8 bytes are copied by themselves, of one that starts there the scales, as those of all rows are: nothing beside a row
is read.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.smem import CHUNK

from .coded import CodedTiles, Codes, copy_8_async
from .config import HALVES, LOADERS, STAGED, Config
from .meeting import Meeting
from .places import warp_of_producer
from .schedule import Row

_WORD = 4  # bytes
_ODD = 8  # bytes by which a row may start behind a multiple of 16


@dsl_user_op
def _bring(shared: Int32, source: Int64, nbytes: int, barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """A bulk copy of device memory to shared memory, which ``barrier`` counts."""
    text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {nbytes}, [$2];"
    asm(None, [shared, source, barrier], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def _words_if(count: int, address: Int32, valid: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """1 or 2 aligned words of shared memory; ``valid`` 0 reads nothing and gives zeros."""
    outs = ",".join(f"${i}" for i in range(count))
    zeros = "".join(f"mov.b32 ${i}, 0; " for i in range(count))
    form = f"ld.shared.v{count}.b32 {{{outs}}}" if count > 1 else "ld.shared.b32 $0"
    text = f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros}@p {form}, [${count}]; }}"
    return asm([Int32] * count, [address, valid], text, memory=True, loc=loc, ip=ip)


class StagedTiles(CodedTiles):
    """A row is a warp's: half of one has as many chunks as a warp has lanes."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.nbytes = self.layout.size // CHUNK * CHUNK  # of a bulk copy

    @cute.jit
    def _copy_tile(self, row: Row, shared: Int32, meeting: Meeting, n: Int32):
        warp, lane, counts = warp_of_producer(), cute.arch.lane_idx(), self.places.counts(row)
        address, own = self.delivery.own(row.address, counts)
        odd = cute.arch.vote_ballot_sync((address & _ODD) != 0)
        self._copy_scales(address, own, self._scales(shared, meeting, n, warp))
        come = meeting.staged + (n % STAGED * LOADERS + warp)
        mine = (lane < self.delivery.rows) & ((own >> lane) & 1 != 0)
        many = cute.arch.popc(cute.arch.vote_ballot_sync(mine))
        if lane == 0:
            sent = self._sent(shared, n)
            sent[0], sent[1], sent[2] = counts, own, odd
            cute.arch.mbarrier_arrive_and_expect_tx(come, Int32(many) * self.nbytes)
        if mine:
            behind = Int32(address) & _ODD
            slot = self._slot(shared, n, lane * LOADERS + warp)
            if behind != 0:
                copy_8_async(slot + _ODD, address, Int32(_ODD))
            _bring(slot + 2 * behind, address + behind, self.nbytes, come.toint())
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _decode_tile(self, divisor: Any, shared: Int32, meeting: Meeting, n: Int32):
        warp = warp_of_producer()
        cute.arch.sync_warp()  # what other lanes have copied is there
        cute.arch.mbarrier_wait(meeting.staged + (n % STAGED * LOADERS + warp), n // STAGED & 1)
        for half in cutlass.range_constexpr(HALVES):
            meeting.tiles.await_empty(n * HALVES + half)
            if (half == 0) & (cute.arch.lane_idx() == 0):
                self.places.set_mask(shared, meeting, n * HALVES, self._sent(shared, n)[0])
            self._decode_half(divisor, half, shared, meeting, n)

    def _read_row(self, half: int, shared: Int32, meeting: Meeting, place: Int32, n: Int32, i: Int32) -> Codes:
        key, sent, chunk = i * LOADERS + warp_of_producer(), self._sent(shared, n), self._chunk(half)
        there, nope, code_words = (sent[1] >> i) & 1, self._is_nope(half), self.code_bytes // _WORD
        row = self._slot(shared, n, key) + ((sent[2] >> i) & 1) * _ODD
        at, byte = row + chunk * self.code_bytes, Int32(0)
        if nope is not True:
            rope = row + (self.layout.rope + (chunk - self.nope_chunks) * CHUNK)
            at = rope if nope is False else cutlass.select_(nope, at, rope)
        words = list(_words_if(code_words, at, there))
        if nope is not True:
            pairs = there if nope is False else cutlass.select_(nope, Int32(0), there)
            for offset in range(self.code_bytes, CHUNK, self.code_bytes):
                words += list(_words_if(code_words, at + offset, pairs))
        if nope is not False:
            last = cutlass.min(chunk, self.nope_chunks - 1)
            byte = self._scale_byte(self._scales(shared, meeting, n, key), last)
        return Codes(nope, self.places.chunk_at(place, key), words, byte)

    def _sent(self, shared: Int32, n: Int32) -> cute.Tensor:
        """Of this warp's rows of tile n: which of the tile's count, which of its own, and which start oddly."""
        at = self.c.shared.sent.at(shared) + (n % STAGED * LOADERS + warp_of_producer()) * CHUNK
        return cute.make_tensor(cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=16), cute.make_layout(4))

    def _slot(self, shared: Int32, n: Int32, key: Int32) -> Int32:
        """Where own row ``key`` of tile n comes to."""
        own = self.c.keys // self.c.sides
        return self.c.shared.staging.at(shared) + (n % STAGED * own + key) * self.c.slot_bytes
