"""What the parser and the decoder refuse, always with the line and its text; and that every opcode has a test."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from torch_attnkit.sim import _ptx

from .snippet import kernel

pytestmark = pytest.mark.simulator

REFUSED = {
    # opcodes, modifiers, types
    "frobnicate.u32 %r0, %r1": "unknown opcode 'frobnicate'",
    "add.fast.u32 %r0, %r1, %r2": "modifier '.fast' is not supported here",
    "add.sat.u32 %r0, %r1, %r2": "'.sat' is for .s32",
    "add %r0, %r1, %r2": "a type is missing",
    "mul.u32 %r0, %r1, %r2": "one of .lo .hi .wide is missing",
    "mul.wide.u64 %d0, %d1, %d2": "'.wide' is for 16 and 32 bits",
    "and.u32 %r0, %r1, %r2": "not one of 'and'",
    "popc.u32 %r0, %r1": "not one of 'popc'",
    "fma.f32 %r0, %r1, %r2, %r3": "a rounding modifier is required",
    "fma.rn.relu.f32 %r0, %r1, %r2, %r3": "'.relu' is for fma in half precision",
    "add.rz.f16 %h0, %h1, %h2": "'.rz' is not one of half precision",
    "add.ftz.f64 %d0, %d1, %d2": "'.ftz' is not one of this type",
    "add.sat.f32x2 %d0, %d1, %d2": "'.sat' is not one of this type",
    "min.abs.f32 %r0, %r1, %r2": "'.xorsign.abs' go together",
    "ex2.f32 %r0, %r1": "one of .approx is missing",
    "ex2.approx.bf16 %h0, %h1": "not one of 'ex2'",
    "div.approx.f64 %d0, %d1, %d2": "'.approx', '.full' and '.ftz' are for .f32",
    "setp.foo.u32 %p0, %r1, %r2": "one of .eq .ne",
    "setp.lo.s32 %p0, %r1, %r2": "comparison '.lo' is not one of this type",
    "setp.num.u32 %p0, %r1, %r2": "comparison '.num' is not one of this type",
    "cvt.f16.f32 %h0, %r1": "a narrowing conversion needs .rn",
    "cvt.rn.f32.f16 %r0, %h1": "no rounding where nothing is lost",
    "cvt.s32.f32 %r0, %r1": "a float becomes an integer with .rni",
    "cvt.f32.s32 %r0, %r1": "an integer becomes a float with .rn",
    "cvt.rn.e4m3x2.f32 %h0, %r1, %r2": "'.satfinite' is required",
    "cvt.rs.f16x2.f32 %r0, %r1, %r2, %r3": "one of .rn .rz .rna .rp .rs|stochastic rounding",
    "cvt.rna.bf16x2.f32 %r0, %r1, %r2": "'.rna' is for .tf32",
    "cvt.rz.bf16x2.s2f6x2 %r0, %h1": "'.rz' is not for this conversion",
    "cvt.rn.f16x2.s2f6x2 %r0, %h1": "no conversion between these types",
    "cvt.rn.scaled::n2::ue8m0.bf16x2.s2f6x2 %r0, %h1": "2 operands, expected 3",
    "cvt.rn.scaled::n2::ue8m0.bf16x2.ue8m0x2 %r0, %h1, %h2": "'.scaled::n2::ue8m0' is not for this conversion",
    "prmt.b32.f4f %r0, %r1, %r2, %r3": "modifier '.f4f' is not supported here",
    "ld.global.f16x2 %r0, [%in0]": "no type of a load or store",
    "ld.texture.b32 %r0, [%in0]": "modifier '.texture' is not supported here",
    "ld.relaxed.global.b32 %r0, [%in0]": "one of .cta .cluster .gpu .sys is missing",
    "ld.global.v8.b64 {%d0,%d1,%d2,%d3,%d4,%d5,%d6,%d7}, [%in0]": "vectors have at most 32 bytes",
    "atom.global.add.f16 %h0, [%in0], %h1": "'.noftz' goes with half precision",
    "red.global.cas.b32 [%in0], %r1, %r2": "red has no .cas",
    "atom.local.add.u32 %r0, [%in0], %r1": "atomics are for .global and .shared",
    "shfl.idx.b32 %r0, %r1, 0, 31": "one of .sync is missing",
    "redux.sync.and.u32 %r0, %r1, -1": "'.and' is not for .u32",
    "setmaxnreg.inc.sync.aligned.u32 25": "a multiple of 8 from 24 to 256",
    "fence.sc.warp": "one of .cta .cluster .gpu .sys is missing",
    "bar.sync.aligned 0": "modifier '.aligned' is not supported here",
    # operands
    "add.u32 %r0, %r1": "2 operands, expected 3",
    "add.u32 %r0, %r1, %r2, %r3": "4 operands, expected 3",
    "add.u32 %d0, %r1, %r2": "'%d0' has 64 bits, 32 are expected",
    "add.u64 %d0, %d1, %r2": "'%r2' has 32 bits, 64 are expected",
    "add.u16 %h0, %h1, %r2": "'%r2' has 32 bits, 16 are expected",
    "add.u32 %p0, %r1, %r2": "'%p0' is a predicate",
    "selp.u32 %r0, %r1, %r2, %r3": "a predicate is expected here",
    "and.pred %p0, %p1, %r2": "a predicate is expected here",
    "add.u32 %r0, !%r1, %r2": "'!' is for predicates",
    "add.u32 5, %r1, %r2": "a register is expected as the destination",
    "mov.u32 %r0, %tid.w": "unknown special register '%tid.w'",
    "mov.u32 %r0, %nonsense": "unknown special register '%nonsense'",
    "add.u32 %r0, %clock, %r1": "one that only mov reads",
    "mov.u32 %r0, nowhere": "unknown symbol 'nowhere'",
    "bra nowhere": "unknown symbol 'nowhere'",
    "bra smem": "a label is expected",
    "ld.global.b32 %r0, [smem]": "does not live in the state space",
    "ld.shared.b32 %r0, [p0]": "does not live in the state space",
    "ld.global.b32 %r0, [%r1]": "an address of 32 bits reaches shared memory only",
    "ld.global.b32 %r0, %in0": "an address in brackets is expected",
    "ld.global.v2.b32 {%r0, %r1, %r2}, [%in0]": "a vector of 2 is expected",
    "ld.global.v2.b32 {%r0, %d1}, [%in0]": "the registers of a vector differ in width",
    "ld.global.b64 %r0, [%in0]": "a register of 32 bits for 64",
    "st.const.b32 [%in0], %r0": "this state space cannot be written",
    "lop3.b32 %r0, %r1, %r2, %r3, 256": "an immediate of 0 to 255",
    "call.uni nothing": "unknown symbol 'nothing'",
    "elect.sync %r0, -1": "'d|p' is expected",
    "mov.b64 {%r0, %r1, %r2}, %d0": "vectors of mov have 2 or 4 elements",
    "mov.b128 %q0, 5": "an immediate of 128 bits",
    "@%r0 add.u32 %r0, %r1, %r2": "'%r0' is no predicate register",
}


@pytest.mark.parametrize("statement", list(REFUSED))
def test_statements_that_are_refused(statement: str) -> None:
    """The message quotes the statement and its line."""
    with pytest.raises(_ptx.PtxError) as e:
        _ptx.Module(kernel(f"mov.u32 %r0, 0;\n{statement};", 1)).kernel("snippet")
    text = str(e.value)
    assert re.search(r"line 1[0-9]|line 2[0-9]", text) and statement in text, text
    assert any(part in text for part in REFUSED[statement].split("|")) or REFUSED[statement] in text, text


MODULES = {
    ".version 9.0 .target sm_100a .address_size 32": "only 64 is supported",
    ".version 9.0 .target sm_100a .address_size 64 .surprise 3": "unknown directive '.surprise'",
    ".version 9.0 .target sm_100a .global .b99 x;": "unknown type '.b99'",
    ".version 9.0 .target sm_100a .global .u8 x[2] = {1, 2, 3};": "more initial values than elements",
    ".version 9.0 .target sm_100a .entry k() .maxfun 3 { ret; }": "unknown directive '.maxfun'",
    ".version 9.0 .target sm_100a .entry k() { .reg .b12 %r; ret; }": "unknown type",
    ".version 9.0 .target sm_100a .entry k() { .reg .b32 %r; .reg .b32 %r; ret; }": "declared twice",
    ".version 9.0 .target sm_100a .entry k() { A: A: ret; }": "declared twice",
    ".version 9.0 .target sm_100a .entry k() { ret; ": "the text ends",
    ".version 9.0 .target sm_100a .entry k() { ret ": "the text ends",
    ".version 9.0 .target sm_100a .entry k() { mov.u32 %r0, %r1)); }": "unbalanced",
    ".version 9.0 .target sm_100a .entry k() { .magic 3; ret; }": "unknown directive '.magic' in a function",
}


@pytest.mark.parametrize("text", list(MODULES))
def test_modules_that_are_refused(text: str) -> None:
    with pytest.raises(_ptx.PtxError, match="line 1: ") as e:
        _ptx.Module(text)
    assert MODULES[text] in str(e.value)


def test_names_of_kernels() -> None:
    m = _ptx.Module(kernel("", 0))
    assert m.kernels == ["snippet"] and m.target == "sm_100a"
    with pytest.raises(_ptx.PtxError, match="no kernel named 'other'; the module has: snippet"):
        m.kernel("other")


def test_source_lines() -> None:
    """.file and .loc: a message names the line of the source that the compiler noted."""
    text = kernel(".loc 1 34 7\ntrap;\n.loc 1 35 0, function_name $info, inlined_at 1 20 3\nadd.u32 %r0, %r1, %r2;", 0)
    text = text.replace(".extern .shared", '.file 1 "/somewhere/kernel.py"\n.extern .shared')
    k = _ptx.Module(text).kernel("snippet")
    assert [(s[1], s[2], s[3]) for s in k.statements if s[3]][:2] == [
        ("trap", "/somewhere/kernel.py", 34),
        ("add.u32 %r0, %r1, %r2", "/somewhere/kernel.py", 35),
    ]
    with pytest.raises(_ptx.PtxError, match=r"'trap' \(/somewhere/kernel.py:34\)"):
        k.launch(grid=(1,), block=(32,))


def test_comments_and_odd_spacing() -> None:
    text = kernel(
        "add.u32 /* a ; b */ %r0 , %r1,\n\t%r2 ; // end ; {\n@ %p0 bra X ;\nX : ret ;".replace("@ %p0", "@%p0"), 0
    )
    assert len(_ptx.Module(text).kernel("snippet").statements) == 5


@cache
def strings() -> str:
    """All string constants of the instruction tests: the PTX that they run."""
    out = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        tree = ast.parse(path.read_text())
        out += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n".join(out)


@pytest.mark.parametrize("root", _ptx.opcode_roots())
def test_every_opcode_of_the_table_has_an_instruction_test(root: str) -> None:
    assert re.search(rf"(?<![\w.%]){root}(\.|;|\s|$)", strings()), f"no test in tests/sim/ptx names '{root}'"
