"""The checker on global memory: order between CTAs through atomics and fences, and within one through barriers."""

from __future__ import annotations

import pytest

from .async_pieces import aligned
from .checked import Case, assert_case, parametrize, reports

pytestmark = pytest.mark.simulator

# CTA 0 writes 32 words and raises the flag at byte 1024; CTA 1 waits for it and reads.
PRODUCE = """
mul.wide.u32 %d1, %r2, 4;
add.u64 %d1, %in0, %d1;
mov.u32 %r5, %ctaid.x;
setp.eq.u32 %p2, %r5, 0;
@!%p2 bra CONSUME;
st.global.u32 [%d1], %r2;
"""
SPIN = """
CONSUME: ld.{order}.global.u32 %r6, [%in0 + 1024];
setp.eq.u32 %p3, %r6, 0;
@%p3 bra CONSUME;
"""
READ = """
ld.global.u32 %r7, [%d1];
ret;
"""

CASES = [
    Case(
        "release_and_acquire",
        r"data race \(read after write\)",
        PRODUCE
        + """
bar.warp.sync 0xffffffff;
@%p1 st.release.gpu.global.u32 [%in0 + 1024], 1; // needed
// wrong:@%p1 st.relaxed.gpu.global.u32 [%in0 + 1024], 1;
ret;
"""
        + SPIN.format(order="acquire.gpu")
        + READ,
        block=32,
        grid=2,
        arrays=(2048,),
    ),
    Case(
        "fence_and_relaxed",
        r"data race \(read after write\)",
        PRODUCE
        + """
bar.warp.sync 0xffffffff;
fence.acq_rel.gpu; // needed
@%p1 red.relaxed.gpu.global.add.u32 [%in0 + 1024], 1;
ret;
"""
        + SPIN.format(order="relaxed.gpu")
        + "fence.acq_rel.gpu;\n"
        + READ,
        block=32,
        grid=2,
        arrays=(2048,),
    ),
    Case(
        "acquire_of_a_narrow_scope",
        r"data race \(read after write\)",
        PRODUCE
        + """
bar.warp.sync 0xffffffff;
@%p1 st.release.gpu.global.u32 [%in0 + 1024], 1;
ret;
"""
        + SPIN.format(order="relaxed.gpu")
        + """
ld.acquire.gpu.global.u32 %r6, [%in0 + 1024]; // needed
// wrong:ld.acquire.cta.global.u32 %r6, [%in0 + 1024];
"""
        + READ,
        block=32,
        grid=2,
        arrays=(2048,),
    ),
    Case(
        "atomics_and_a_plain_load",
        r"data race",
        """
red.global.add.u32 [%in0], 1;
bar.sync 0; // needed
ld.global.u32 %r5, [%in0];
""",
        arrays=(128,),
    ),
    Case(
        "two_ctas_write_one_place",
        r"data race \(write after write\)",
        """
mov.u32 %r5, %ctaid.x;
mul.wide.u32 %d1, %r5, 128; // needed
// wrong:mov.u64 %d1, 0;
mul.wide.u32 %d2, %r2, 4;
add.u64 %d1, %d1, %d2;
add.u64 %d1, %in0, %d1;
st.global.u32 [%d1], %r5;
""",
        block=32,
        grid=2,
        arrays=(256,),
    ),
    Case(
        "bytes_next_to_each_other",
        r"data race \(write after write\)",
        """
mov.u32 %r5, %ctaid.x;
cvt.u64.u32 %d1, %r5; // needed
// wrong:mov.u64 %d1, 0;
mul.wide.u32 %d2, %r2, 2;
add.u64 %d1, %d1, %d2;
add.u64 %d1, %in0, %d1;
st.global.u8 [%d1], %r5;
""",
        block=32,
        grid=2,
        arrays=(256,),
    ),
    Case(
        "within_a_cta",
        r"data race \(read after write\)",
        """
mul.wide.u32 %d1, %r2, 4;
add.u64 %d1, %in0, %d1;
@%p0 st.global.u32 [%d1], %r2;
bar.sync 0; // needed
@!%p0 ld.global.u32 %r5, [%d1];
""",
        arrays=(256,),
    ),
]


@parametrize(CASES)
def test_case(case: Case) -> None:
    assert_case(case)


def test_a_report_names_the_array():
    body = """
mov.u32 %r5, %ctaid.x;
mul.wide.u32 %d1, %r2, 4;
add.u64 %d1, %in0, %d1;
st.global.u32 [%d1 + 64], %r5;
"""
    (report,) = reports(body, aligned(256), block=32, grid=2, target="sm_100a")
    assert report.startswith("data race (write after write), kernel k, global memory at byte 64 of a0")


def test_launches_do_not_race_with_each_other():
    data = aligned(128)
    body = "mul.wide.u32 %d1, %r2, 4;\nadd.u64 %d1, %in0, %d1;\nst.global.u32 [%d1], %r0;"
    assert reports(body, data, block=32, target="sm_100a") == []
    assert reports(body, data, block=32, target="sm_100a") == []
