"""Operations between lanes (PTX ISA 9.7.9.6, 9.7.13.9 to 9.7.13.14)."""

from __future__ import annotations

import numpy as np
import pytest

from torch_attnkit.sim import _ptx

from .snippet import run
from .test_core_integer import edge, wrap

pytestmark = pytest.mark.simulator
LANES = range(32)
rng = np.random.default_rng(8)


def lanes(body: str, *inputs: np.ndarray, out: type = np.uint32, **options: object) -> np.ndarray:
    """Inputs arrive in %r1, %r2, ...; the result is taken from %r0."""
    result = np.zeros(32, out)
    loads = "".join(
        f"mad.wide.u32 %d2{i}, %tid, 4, %in{i}; ld.global.b32 %r{i}, [%d2{i}];" for i in range(1, len(inputs) + 1)
    )
    run(f"{loads} {body} mad.wide.u32 %d20, %tid, 4, %in0; st.global.b32 [%d20], %r0;", result, *inputs, **options)
    return result


def shuffled(mode: str, a: list[int], b: list[int], c: list[int]) -> tuple[list[int], list[int]]:
    """The semantics of PTX ISA 9.7.9.6, literally."""
    out, inside = [], []
    for lane in LANES:
        bval, cval, segment = b[lane] & 31, c[lane] & 31, c[lane] >> 8 & 31
        most, least = lane & segment | cval & ~segment, lane & segment
        j = {"up": lane - bval, "down": lane + bval, "bfly": lane ^ bval, "idx": least | bval & ~segment}[mode]
        ok = j >= most if mode == "up" else j <= most
        out.append(a[j if ok else lane])
        inside.append(int(ok))
    return out, inside


@pytest.mark.parametrize("c", [0x1F, 0x0, 0x181F, 0x1C1F, 0x1C00, 0x100F, None])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl(mode: str, c: int | None) -> None:
    a = edge("u32")[:32].copy()
    for b in (np.full(32, 1, np.uint32), np.full(32, 16, np.uint32), rng.integers(0, 40, 32).astype(np.uint32)):
        third = np.full(32, c, np.uint32) if c is not None else (rng.integers(0, 32, 32) << 8 | 0x1F).astype(np.uint32)
        value, ok = shuffled(mode, a.tolist(), b.tolist(), third.tolist())
        assert lanes(f"shfl.sync.{mode}.b32 %r0|%p0, %r1, %r2, %r3, -1;", a, b, third).tolist() == value
        got = lanes(f"shfl.sync.{mode}.b32 %r9|%p0, %r1, %r2, %r3, 0xFFFFFFFF; selp.b32 %r0, 1, 0, %p0;", a, b, third)
        assert got.tolist() == ok


def test_shfl_in_halves_of_a_warp_with_masks_of_their_own() -> None:
    a = np.arange(32, dtype=np.uint32)
    body = "setp.lt.u32 %p1, %tid, 16; selp.b32 %r5, 0xFFFF, 0xFFFF0000, %p1; shfl.sync.bfly.b32 %r0, %r1, 15, 31, %r5;"
    assert lanes(body, a).tolist() == [i ^ 15 for i in LANES]
    diverged = """
    setp.lt.u32 %p1, %tid, 16; @%p1 bra LOW;
    shfl.sync.idx.b32 %r0, %r1, 20, 31, 0xFFFF0000; bra DONE;
    LOW: shfl.sync.idx.b32 %r0, %r1, 3, 31, 0xFFFF; DONE:"""
    assert lanes(diverged, a).tolist() == [3] * 16 + [20] * 16


def test_shfl_waits_for_diverged_lanes() -> None:
    """Lanes arrive from both sides of a branch; the shuffle sees them all (PTX ISA 9.5)."""
    a = np.arange(32, dtype=np.uint32)
    body = """
    and.b32 %r5, %tid, 1; setp.eq.u32 %p1, %r5, 0; @%p1 bra EVEN;
    mul.lo.u32 %r1, %r1, 10; add.u32 %r1, %r1, 1; bra JOIN;
    EVEN: mul.lo.u32 %r1, %r1, 100;
    JOIN: shfl.sync.down.b32 %r0, %r1, 1, 31, -1;"""
    value = [i * 10 + 1 if i % 2 else i * 100 for i in LANES]
    assert lanes(body, a).tolist() == [*value[1:], value[31]]


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x0000FFFF, 0xF0F0F0F0])
def test_vote(mask: int) -> None:
    members = [i for i in LANES if mask >> i & 1]
    guard = f"""mov.b32 %r6, {mask}; mov.u32 %r7, %lanemask_eq; and.b32 %r7, %r6, %r7;
    setp.ne.u32 %p3, %r7, 0; mov.u32 %r0, 9; @!%p3 bra OUT;"""
    for a in (np.zeros(32), np.ones(32), np.arange(32) % 3, (np.arange(32) == 5)):
        a = a.astype(np.uint32)
        yes = [int(bool(a[i])) for i in members]
        cases = {"all": int(all(yes)), "any": int(any(yes)), "uni": int(len(set(yes)) == 1)}
        for mode, want in cases.items():
            got = lanes(
                f"{guard} setp.ne.u32 %p0, %r1, 0; vote.sync.{mode}.pred %p1, %p0, %r6; selp.b32 %r0, 1, 0, %p1; OUT:",
                a,
            )
            assert got.tolist() == [want if i in members else 9 for i in LANES]
        ballot = sum(1 << i for i in members if not a[i])
        got = lanes(f"{guard} setp.ne.u32 %p0, %r1, 0; vote.sync.ballot.b32 %r0, !%p0, %r6; OUT:", a)
        assert got.tolist() == [ballot if i in members else 9 for i in LANES]


@pytest.mark.parametrize("t", ["b32", "b64"])
def test_match(t: str) -> None:
    a = (np.arange(32) % 5 * 7).astype(np.uint32)
    source = "%r1" if t == "b32" else "%d1"
    widen = "" if t == "b32" else "cvt.u64.u32 %d1, %r1; shl.b64 %d1, %d1, 33;"
    want = [sum(1 << j for j in LANES if a[j] == a[i]) for i in LANES]
    assert lanes(f"{widen} match.any.sync.{t} %r0, {source}, -1;", a).tolist() == want
    assert lanes(f"{widen} match.all.sync.{t} %r0|%p0, {source}, -1;", a).tolist() == [0] * 32
    same = np.full(32, 3, np.uint32)
    assert lanes(f"{widen} match.all.sync.{t} %r0|%p0, {source}, -1;", same).tolist() == [0xFFFFFFFF] * 32
    for x, p in ((same, 1), (a, 0)):
        got = lanes(f"{widen} match.all.sync.{t} _|%p0, {source}, -1; selp.b32 %r0, 1, 0, %p0;", x)
        assert got.tolist() == [p] * 32


REDUCTIONS = {
    "add.u32": sum,
    "add.s32": sum,
    "min.u32": min,
    "max.u32": max,
    "min.s32": min,
    "max.s32": max,
    "and.b32": lambda v: __import__("functools").reduce(lambda x, y: x & y, v),
    "or.b32": lambda v: __import__("functools").reduce(lambda x, y: x | y, v),
    "xor.b32": lambda v: __import__("functools").reduce(lambda x, y: x ^ y, v),
}


@pytest.mark.parametrize("name", list(REDUCTIONS))
def test_redux(name: str) -> None:
    t = "s32" if name.endswith("s32") else "u32"
    a = edge(t)[:32].copy()
    assert lanes(f"redux.sync.{name} %r0, %r1, -1;", a).tolist() == [wrap(REDUCTIONS[name](a.tolist()), "u32")] * 32
    half = "setp.lt.u32 %p0, %tid, 16; selp.b32 %r5, 0xFFFF, 0xFFFF0000, %p0;"
    want = [wrap(REDUCTIONS[name](a[:16].tolist()), "u32")] * 16 + [wrap(REDUCTIONS[name](a[16:].tolist()), "u32")] * 16
    assert lanes(f"{half} redux.sync.{name} %r0, %r1, %r5;", a).tolist() == want


def test_redux_on_floats() -> None:
    """-0 is below +0; NaN is passed over, or wins with .NaN; .abs takes magnitudes first."""
    a = rng.normal(size=32).astype(np.float32)
    a[4], a[5] = 0.0, -0.0
    f = lambda name, x: lanes(f"redux.sync.{name}.f32 %r0, %r1, -1;", x.view(np.uint32)).view(np.float32)
    assert (f("max", a) == a.max()).all() and (f("min", a) == a.min()).all()
    assert (f("max.abs", a) == np.abs(a).max()).all() and (f("min.abs", a) == 0).all()
    holes = a.copy()
    holes[::2] = np.nan
    assert (f("max", holes) == np.nanmax(holes)).all() and (f("min", holes) == np.nanmin(holes)).all()
    assert (f("max.NaN", holes).view(np.uint32) == 0x7FFFFFFF).all() and (f("min.abs.NaN", a) == 0).all()
    assert (f("min", np.full(32, np.nan, np.float32)).view(np.uint32) == 0x7FFFFFFF).all()
    zeros = np.where(np.arange(32) % 2, 0.0, -0.0).astype(np.float32)
    assert (f("max", zeros).view(np.uint32) == 0).all() and (f("min", zeros).view(np.uint32) == 0x80000000).all()


def test_elect_and_activemask() -> None:
    got = lanes("elect.sync %r5|%p0, -1; selp.b32 %r6, 100, 0, %p0; add.u32 %r0, %r5, %r6;")
    assert got.tolist() == [100] + [0] * 31
    body = """mov.u32 %r0, 77; setp.lt.u32 %p1, %tid, 8; @%p1 bra OUT;
    elect.sync _|%p0, 0xFFFFFF00; selp.b32 %r0, 1, 0, %p0; OUT:"""
    assert lanes(body).tolist() == [77] * 8 + [1] + [0] * 23
    body = "mov.u32 %r0, 0; setp.lt.u32 %p1, %tid, 8; @%p1 activemask.b32 %r0;"
    assert lanes(body).tolist() == [0xFF] * 8 + [0] * 24


def test_exited_lanes_are_not_waited_for() -> None:
    out = np.zeros(32, np.uint32)
    run(
        """
    setp.ge.u32 %p0, %tid, 20; @%p0 exit;
    redux.sync.add.u32 %r0, %tid, -1; bar.warp.sync -1; vote.sync.ballot.b32 %r1, 1, -1; add.u32 %r0, %r0, %r1;
    mad.wide.u32 %d0, %tid, 4, %in0; st.global.u32 [%d0], %r0;""",
        out,
    )
    assert out.tolist() == [190 + (1 << 20) - 1] * 20 + [0] * 12


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("shfl.sync.idx.b32 %r0, %tid, 0, 31, 0xFF;", "the member mask is 0xff"),
        ("vote.sync.any.pred %p0, 1, 0xF0;", "the member mask is 0xf0"),
        (
            "setp.lt.u32 %p0, %tid, 8; @%p0 shfl.sync.idx.b32 %r0, %tid, 9, 31, 0xFF;",
            "lane 0 reads lane 9, which does not take part",
        ),
    ],
)
def test_lanes_outside_the_mask_are_refused(body: str, message: str) -> None:
    with pytest.raises(_ptx.PtxError, match=message):
        run(body)
