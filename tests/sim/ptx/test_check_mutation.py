"""How much of a kernel's synchronisation the simulator misses when it is missing.

Every instruction that synchronises is taken out of an attention forward, one at a time; a run under the checker, with
three schedules, has to deadlock, be reported, or give a wrong result. Of ours (sm90, head dim 128, causal) all are
taken out here: 53 of 56 are noticed. Of FlashAttention-4's (sm100, head dim 128, causal, dynamic scheduler) every third
is; ``python tests/sim/ptx/mutation.py flash_attention_4`` takes out all: 143 of the 169 that are executed are noticed.
What is not noticed is named below with the reason, and has to be exactly that; nearly all of it can go at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import mutation

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]

OURS = {
    "wgmma.fence 2": "of the scores, in the loop over masked blocks, which a causal tile enters once at most: between "
    "two uses of these registers there is always the fence of a tile's first product",
    "wgmma.fence 3": "of the output, there: nothing uses its registers after wgmma.fence 2",
    "wgmma.fence 5": "of the output, in the loop over whole blocks: nothing uses its registers after wgmma.fence 4",
}
_UNUSED = "nobody arrives at, or waits on, this barrier of a pipeline that is used in one direction only"
_ALIGNED = "between tcgen05.wait::st.sync.aligned, which the lanes execute together, and an elected lane's arrival"
_TAIL = (
    "a wait before a warp exits, for arrivals that nothing depends on: they come from this CTA; commits that may then "
    "arrive after its exit are a note of the checker's, not a finding, because FlashAttention-4's backward exits so"
)
FLASH_ATTENTION_4 = {
    **{f"mbarrier.init {n}": _UNUSED for n in (17, 18, 21, 22, 23, 24)},
    "fence 1": "fence.mbarrier_init: the same thread executes fence 2 before anyone has used a barrier",
    "fence 2": "fence.mbarrier_init: after fence 1 only the scheduler's barriers are made, for this CTA alone, used "
    "through the generic proxy",
    "bar.sync 1": "there is another barrier of the whole CTA, bar.sync 2, before anyone has used a barrier",
    "fence 6": "the tensor warp's proxy fence after reading the scheduler's answer: warps that wait for its products "
    "read that answer too, fence, and release it later (a fence orders all that was known where it stands)",
    "mbarrier.try_wait 8": "for the first Q: the wait for the second one, which is committed later in the same pipe",
    "mbarrier.try_wait 9": "for the second Q: the wait for the first one; both are committed after the last product",
    "mbarrier.try_wait 10": "for the first V's place: the wait for the second Q, committed later in the same pipe",
    "mbarrier.try_wait 33": "softmax's statistics: the scores that it has waited for are multiplied after the "
    "correction warps have arrived with the output, and so after they have read the statistics before",
    "mbarrier.try_wait 35": "the same, in the loop",
    "mbarrier.arrive 13": "an arrive.expect_tx with the last wait of the loading warp, for a copy that never comes",
    **{f"bar.warp {n}": _ALIGNED for n in (1, 2, 3)},
    **{f"mbarrier.try_wait {n}": _TAIL for n in (6, 14, 15, 16, 17, 41, 47)},
}


@pytest.fixture(scope="module")
def ours() -> Iterator[mutation.Study]:
    with mutation.ours() as study:
        yield study


@pytest.fixture(scope="module")
def flash_attention_4() -> Iterator[mutation.Study]:
    pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
    with mutation.flash_attention_4() as study:
        yield study


def survivors(study: mutation.Study, removals: list[mutation.Removal]) -> set[str]:
    return {r.name for r in removals if study.executed[r.indices[0]] and not study.caught(r)}


def named(study: mutation.Study, names: set[str]) -> list[mutation.Removal]:
    return [r for r in study.removals if r.name in names]


def test_ours(ours):
    assert all(ours.executed[r.indices[0]] for r in ours.removals)
    assert survivors(ours, ours.removals) == OURS.keys()
    assert len(OURS) <= 0.1 * len(ours.removals)


def test_what_survives_in_ours_is_redundant(ours):
    assert not ours.caught(*named(ours, {"wgmma.fence 3", "wgmma.fence 5"}))
    assert ours.caught(*named(ours, {"wgmma.fence 2", "wgmma.fence 3"}))
    assert ours.caught(*named(ours, {"wgmma.fence 4", "wgmma.fence 5"}))


@pytest.mark.proof
def test_flash_attention_4(flash_attention_4):
    sample = flash_attention_4.removals[::3]
    expected = FLASH_ATTENTION_4.keys() & {r.name for r in sample}
    assert survivors(flash_attention_4, sample) == expected


@pytest.mark.proof
def test_what_survives_in_flash_attention_4_is_redundant(flash_attention_4):
    """All at once can go, but for one of each pair and a fence, and the results stay right under every schedule."""
    pairs = [{"mbarrier.try_wait 8", "mbarrier.try_wait 9"}, {"fence 1", "fence 2"}]
    # fence 6 can go while the lanes that read the answer meet by one of the other instructions.
    kept = {"mbarrier.try_wait 8", "fence 2", "fence 6"}
    assert not flash_attention_4.caught(*named(flash_attention_4, FLASH_ATTENTION_4.keys() - kept))
    for pair in pairs:
        assert flash_attention_4.caught(*named(flash_attention_4, pair))
