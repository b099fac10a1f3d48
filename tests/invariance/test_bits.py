"""With ``batch_invariant`` a sequence has the same bits whatever else is in the batch, op by op and target by target.

Each sequence goes alone, first of three, last of 17 and among longer and shorter ones, with its pages elsewhere and
caches of other sizes; of blocks of queries also however a prompt is cut into calls. Where that changes bits without the
option the test asks for it: else it would say nothing.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from tests.invariance.subjects import E4M3, Results, made, ops, subjects
from tests.targets import TARGETS, needs, on
from torch_attnkit import batch_invariant, parity
from torch_attnkit.core import UnsupportedError
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.oracle.compare import check

BATCHES = (
    ([1], 0),
    ([7], 1),
    ([7, 0, 3], 2),
    ([1, 7, 9], 3),
    ([0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 1], 4),
    ([8, 1, 7, 19], 5),
)
MMA_SYNC = "sm80", "sm89", "sm120"
# There a row's sums are rescaled as the rows ask that share its tile: what the option promises is refused.
REFUSED = {"sdpa_multi", "flash_attention", "flash_attention_paged", "flash_attention_varlen"}
QUICK = {
    ("sm90", "sdpa_decode_paged"), ("sm90", "sdpa_decode, 16 heads of D 128"), ("sm90", "flash_attention_paged"),
    ("sm90", "flash_attention_paged, a window"), ("sm90", "fp4_moe, MXFP4"), ("sm90", "gated_rmsnorm of long rows"),
    ("sm100", "sdpa_decode"), ("metal", "sdpa_decode_paged"),
}  # fmt: skip


@functools.cache
def _subjects() -> dict[str, Any]:
    return subjects()


def _cases() -> list[Any]:
    found = []
    for target, name in itertools.product((*TARGETS, *MMA_SYNC), _subjects()):
        quick = target == "cpu" or (target, name) in QUICK
        marks = [] if target == "cpu" else [pytest.mark.simulator]
        found.append(pytest.param(target, name, marks=[*marks, *([] if quick else [pytest.mark.proof])]))
    return found


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def _differing(results: list[tuple[list[int], Results]]) -> set[int]:
    """The sequences that have other bits in one batch than in another."""
    known: dict[int, tuple[torch.Tensor, ...]] = {}
    found = set()
    for chosen, parts in results:
        for n, part in zip(chosen, parts, strict=True):
            first = known.setdefault(n, part)
            if not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(part, first, strict=True)):
                found.add(n)
    return found


def _ran(name: str) -> list[tuple[list[int], Results]]:
    return [(chosen, _subjects()[name].call(chosen, seed)) for chosen, seed in BATCHES]


def _right(name: str, target: str) -> None:
    """Of one batch: with the option, too, results are the op's."""
    packet, args, options = _subjects()[name].given(*BATCHES[3])
    op = OPS[packet.__name__]
    with batch_invariant():
        got = packet(*args, **options)
    arithmetic = parity.arithmetic_of(op, target, args, options)
    low = parity.reference_of(op, args, options, double=False, arithmetic=arithmetic)
    high = parity.reference_of(op, args, options, double=True)
    tuples = [t if isinstance(t, tuple) else (t,) for t in (got, low, high)]
    for out, *three in zip(op.outnames, *tuples, strict=True):
        check(f"{name}: {out}", *three)


@pytest.fixture
def two_threads():
    """Of a CPU: how rows are shared among threads follows from how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.seconds(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("target", "name"), _cases())
def test_a_sequence_has_the_same_bits_in_any_batch(target, name):
    needs(target)
    with on(target):
        try:
            with batch_invariant():
                ran = _ran(name)
        except UnsupportedError as error:
            if target in MMA_SYNC and name.partition(",")[0] in REFUSED:
                assert "outside of batch_invariant() it runs" in str(error)
                return
            if "E4M3" not in name:
                raise
            pytest.skip(str(error))  # no such row, with the option or without
        assert target not in MMA_SYNC or name.partition(",")[0] not in REFUSED
        assert _differing(ran) == set()
        _right(name, target)
        if target in _subjects()[name].varies.split():
            assert _differing(_ran(name)), "the batches of this test do not tell"


# Blocks of queries over pages: a row has the bits of its position, whichever rows go with it.


def _in_chunks(chunks: list[int], dim: int, group: int, dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, ...]:
    """The last 200 of 1300 tokens of a sequence, so many a call."""
    total, page, kv_heads, at, found = 1300, 16, 2, 1100, []
    pages = -(-total // page)
    k, v = (made(1, n, pages * page, kv_heads, dim, dtype=dtype).view(pages, page, kv_heads, dim) for n in "kv")
    q, table = made(1, "q", total, group * kv_heads, dim, dtype=dtype), torch.arange(pages, dtype=torch.int32)[None]
    for count in chunks:
        offsets, end = torch.tensor([0, count], dtype=torch.int32), torch.tensor([at + count], dtype=torch.int32)
        longest = 1 << (count - 1).bit_length()
        found.append(
            ops.flash_attention_paged(q[at : at + count], k, v, offsets, table, end, max_seqlen_q=longest, **options)
        )
        at += count
    assert at == total
    return tuple(torch.cat(t) for t in zip(*found, strict=True))


BF16 = torch.bfloat16
CHUNKED = {
    "D 64": (64, 4, BF16, {}),
    "D 128, one head": (128, 1, BF16, {}),
    "a window of GPT-OSS": (64, 8, BF16, dict(window=128)),
    "a wide window": (64, 4, BF16, dict(window=400)),
    "a wide window and soft caps": (128, 4, BF16, dict(window=1000, softcap=20.0)),
    "sink tokens": (64, 4, BF16, dict(window=100, sink_tokens=5)),
    "D 256": (256, 2, BF16, {}),
    "E4M3": (128, 4, E4M3, {}),
    "E4M3, a window": (128, 4, E4M3, dict(window=300)),
}


@pytest.mark.simulator
@pytest.mark.seconds(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("D 64", "a wide window") else [pytest.mark.proof]) for n in CHUNKED]
)
def test_a_token_has_the_same_bits_however_a_prompt_is_cut(name):
    """On Hopper: a prompt in one call, in chunks, and token by token as in decode."""
    needs("sm90")
    dim, group, dtype, options = CHUNKED[name]
    cuts = ([200], [1, 1, 62, 64, 7, 1, 64], [1] * 5 + [195])
    with on("sm90"):
        with batch_invariant():
            ran = [([0], [_in_chunks(cut, dim, group, dtype, **options)]) for cut in cuts]
        assert _differing(ran) == set()
        ran = [([0], [_in_chunks(cut, dim, group, dtype, **options)]) for cut in cuts]
        assert _differing(ran), "the cuts of this test do not tell"
