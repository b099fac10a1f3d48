"""Faults that a checked launch reports, each beside the kernel without the fault, which is not reported."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
HEADER = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
constant float table[4] = {10, 11, 12, 13};
constant float beside[4] = {20, 21, 22, 23};
struct Row { float w[3]; int n; };
float at(thread const float* p, int i) { return p[i]; }
void fill(thread float* p, int n) { for (int j = 0; j < n; j++) p[j] = j; }
kernel void k(device const float* x [[buffer(0)]], device float* o [[buffer(1)]], device const int* n [[buffer(2)]],
              uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]],
              uint lane [[thread_index_in_simdgroup]]) {
"""
LINE = HEADER.count("\n") + 1
FENCE = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MATRIX = "simdgroup_float8x8 a(1.0f), b(1.0f), c(0.0f), d;"
VALUES = [0, 1, 2, 3, 4, 7, -1, -(2**31)]


def run(body: str, mode: str, threads: int = 32, **settings) -> torch.Tensor:
    library = metal.compile_shader(HEADER + body + "\n}\n")
    x, out = torch.arange(64.0), torch.full((64,), -1.0)
    with metal.settings(mode=mode, **settings):
        library.k(x, out, torch.tensor(VALUES, dtype=torch.int32), threads=threads, group_size=threads)
    return out


# name: (faulty body, message of a checked launch, what to replace for it to be right)
MUTANTS: dict[str, tuple[str, str, tuple[str, str]]] = {
    "division by zero": ("o[i] = n[7] / n[0];", "k: division of an integer by zero", ("n[0]", "n[1]")),
    "remainder by zero": ("o[i] = uint(n[5]) % uint(n[0]);", "division of an integer by zero", ("n[0]", "n[1]")),
    "division of longs": ("o[i] = long(n[5]) / long(n[0]);", "division of an integer by zero", ("n[0]", "n[1]")),
    "division of shorts": ("o[i] = short(n[5]) / short(n[0]);", "division of an integer by zero", ("n[0]", "n[1]")),
    "division in a vector": (
        "int4 q = int4(n[5]) / int4(n[1], n[2], n[0], n[3]); o[i] = q.z;", "division of an integer by zero",
        ("n[0]", "n[1]"),
    ),
    "division that overflows": ("o[i] = n[7] / n[6];", "division of the smallest integer by -1", ("n[6]", "n[1]")),
    "division by a literal zero": ("int z = 0; o[i] = n[5] / z;", "division of an integer by zero", ("= 0", "= 2")),
    "past a threadgroup array, into the next": (
        "threadgroup float s[8], r[64]; threadgroup float* p = s; r[t] = x[i]; s[t & 7] = 0;\n" + FENCE +
        " p += n[5]; o[i] = p[1];", r"read of 4 bytes outside threadgroup variable s: byte 32 of 32", ("p[1]", "p[0]"),
    ),
    "before a threadgroup array, in a loop": (
        "threadgroup float r[8], s[64]; s[t] = x[i]; r[t & 7] = 0;\n" + FENCE +
        " float sum = 0; threadgroup float* b = s;\n"
        "for (threadgroup float* p = b + n[3]; p >= b - n[1]; p--) sum += *p; o[i] = sum;",
        r"outside threadgroup variable s: byte -4 of 256", ("b - n[1]", "b"),
    ),
    "a write into the next threadgroup array": (
        "threadgroup float s[8], r[64]; threadgroup float* p = s; r[t] = 0; if (t == 0) p[n[5] + 1] = 1;\n" + FENCE +
        " o[i] = r[t];", r"write of 4 bytes outside threadgroup variable s", ("n[5] + 1", "n[5]"),
    ),
    "an element that was not written": (
        "float a[8];\nfor (int j = 0; j < n[5]; j++) a[j] = j;\no[i] = a[n[5]];",
        r"read of an array's element in thread memory that nothing has been written to at line " + str(LINE + 2),
        ("a[n[5]];", "a[n[4]];"),
    ),
    "an element that was not written, in registers": (
        "float a[4]; a[0] = x[i]; a[1] = 1; a[2] = 2; o[i] = a[3];", "read of an array's element", ("a[3]", "a[2]"),
    ),
    "an array that is declared anew in a loop": (
        "float s = 0; for (int j = 0; j < 2; j++) { float a[2]; if (j == 0) a[1] = 1; a[0] = 2; s += a[1]; } o[i] = s;",
        "read of an array's element", ("if (j == 0)", ""),
    ),
    "an array that a function fills": (
        "float a[8]; fill(a, n[5]); o[i] = at(a, n[5]);", "read of an array's element", ("at(a, n[5])", "at(a, 0)"),
    ),
    "an array in a structure": (
        "Row r; r.n = 3; r.w[n[1]] = 2; o[i] = r.w[n[2]] + r.n;", "read of an array's element", ("n[2]", "n[1]"),
    ),
    "a copy of a structure": (
        "Row r; r.n = 3; r.w[n[1]] = 2; Row q = r; o[i] = q.w[n[2]] + q.n;", "read of an array's element",
        ("n[2]", "n[1]"),
    ),
    "an array of vectors": (
        "float4 v[2]; v[0].x = x[i]; v[0].yzw = float3(1); o[i] = v[n[1]].y;", "read of an array's element",
        ("v[n[1]]", "v[n[0]]"),
    ),
    "an array that is stored": (
        "float a[4]; for (int j = 0; j < n[3]; j++) a[j] = 1; if (i == 0) for (int j = 0; j < 4; j++) o[j] = a[j];",
        "read of an array's element", ("n[3]", "n[4]"),
    ),
    "past a table of constants": (
        "constant float* p = table; o[i] = p[n[4]];", r"read of 4 bytes outside a constant of 16 bytes: byte 16 of it",
        ("n[4]", "n[3]"),
    ),
    "before a table of constants": (
        "constant float* p = beside + n[0]; o[i] = p[n[6]];", "outside a constant of 16 bytes: byte -4 of it",
        ("n[6]", "n[1]"),
    ),
    "a vector past a table of constants": (
        "constant float* p = table + n[4]; o[i] = ((constant float2*)p)[0].y;",
        "outside a constant of 16 bytes: byte 20 of it", ("n[4]", "n[2]"),
    ),
    "simdgroup_load by part of a simdgroup": (
        MATRIX + " if (lane < 16)\nsimdgroup_load(a, x, 8);\no[i] = a.thread_elements()[0];",
        rf"simdgroup_load or simdgroup_store needs all 32 lanes, active are 0x0000ffff at line {LINE + 1} ",
        ("lane < 16", "lane < 99"),
    ),
    "simdgroup_store by part of a simdgroup": (
        MATRIX + " if (lane > 3)\nsimdgroup_store(a, o, 8);", "needs all 32 lanes, active are 0xfffffff0",
        ("lane > 3", "lane < 99"),
    ),
    "simdgroup_store where others have returned": (
        MATRIX + " if (lane > 30) return;\nsimdgroup_store(a, o, 8);", "needs all 32 lanes, active are 0x7fffffff",
        ("lane > 30", "lane > 31"),
    ),
    "a matrix that nobody has set": (
        MATRIX + " simdgroup_multiply_accumulate(c, a, d, c); simdgroup_store(c, o, 8);",
        "simdgroup matrix multiplication of a matrix that nobody has set: operand 2", ("a, d, c", "a, b, c"),
    ),
    "an accumulator that nobody has set": (
        "simdgroup_half8x8 a(1.0h), b(1.0h), c; simdgroup_multiply_accumulate(c, a, b, c);\n"
        "o[i] = c.thread_elements()[0];", "nobody has set: operand 3", ("c; ", "c(0.0h); "),
    ),
    "an array of matrices": (
        "simdgroup_bfloat8x8 m[2]; m[0] = simdgroup_bfloat8x8(bfloat(1)); simdgroup_float8x8 c(0.0f);\n"
        "simdgroup_multiply_accumulate(c, m[0], m[n[1]], c); o[i] = c.thread_elements()[0];",
        "nobody has set: operand 2", ("m[n[1]]", "m[n[0]]"),
    ),
    "a store of a matrix that nobody has set": (
        MATRIX + " simdgroup_store(d, o, 8);", "simdgroup_store of a matrix that nobody has set", ("(d, ", "(a, "),
    ),
    "a write through a cast": (
        "device float* p = (device float*)x; p[i] = 1;",
        r"write of 4 bytes in buffer\(0\), which the kernel declares const",
        ("(device float*)x", "o"),
    ),
    "a write through const_cast": (
        "const_cast<device float*>(x)[i] = 1;", r"in buffer\(0\), which the kernel declares const",
        ("const_cast<device float*>(x)", "o"),
    ),
    "an atomic on what is const": (
        "atomic_fetch_add_explicit((device atomic_int*)n, 1, memory_order_relaxed);",
        r"atomic write of 4 bytes in buffer\(2\)",
        ("(device atomic_int*)n", "(device atomic_int*)o"),
    ),
    "endless": ("float s = 0; for (int j = n[0]; j < 4; j += n[0]) s += 1; o[i] = s;",
                f"still running after 5000 turns of loops in one threadgroup: an endless loop. at line {LINE} ",
                ("j += n[0]", "j += n[1]")),
    "endless without a trace": ("while (n[1]) {}", "an endless loop", ("n[1]", "n[0]")),
    "endless with a collective": (
        "float s = 0; while (s >= 0) s = simd_sum(x[i]); o[i] = s;", "an endless loop", ("s >= 0", "s < 0"),
    ),
    "endless with a barrier": (
        "for (int j = n[1]; j; j = n[1]) { " + FENCE + " } o[i] = 1;", "an endless loop",
        ("int j = n[1]", "int j = n[0]"),
    ),
    "endless in two loops": (
        "int s = 0; for (int j = 0; j < 4;) for (int l = 0; l < 4; l++) s += l; o[i] = s;", "an endless loop",
        ("j < 4;)", "j < 4; j++)"),
    ),
    "endless by continue": (
        "int j = 0; do { if (x[j] < 5) continue; j++; } while (j < 9); o[i] = j;", "an endless loop",
        ("if (x[j] < 5) continue; j++;", "j++; if (x[j] < 5) continue;"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_reported(name: str):
    body, message, _ = MUTANTS[name]
    with pytest.raises(metal.SimulationError, match=message):
        run(body, "checked", turns=5000)


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=[] if m == "checked" else pytest.mark.proof) for m in metal.library.MODES]
)
def test_nothing_else_is_reported(mode: str):
    """All kernels without their faults in one source, which also is as fast as a library of kernels is."""
    for body, _, (wrong, right) in MUTANTS.values():
        assert body.count(wrong) >= 1
        run(body.replace(wrong, right), mode, turns=5000)


# In fast mode too, where it costs nothing.
@pytest.mark.parametrize(
    "name", [n for n in MUTANTS if n.startswith(("endless", "a write through", "an accumulator", "a matrix"))]
)
def test_reported_in_fast_mode(name: str):
    body, message, _ = MUTANTS[name]
    with pytest.raises(metal.SimulationError, match=message):
        run(body, "fast", turns=5000)


def test_division_by_zero_has_a_value_in_fast_mode():
    """Metal leaves it undefined; what matters is that others of the same kernel are right, and that it ends."""
    body = """int d = n[i & 7], q = n[5] / d, r = n[5] % d;
    uint4 v = uint4(n[5]) / uint4(uint(d), 1u, 2u, 3u);
    long w = long(n[7]) * 4294967296l / long(n[6]);
    o[i] = q * 1000 + r * 100 + int(v.z) + int(w == 1) * 0;"""
    out = run(body, "fast", threads=8)
    for i, d in enumerate(VALUES):
        if d:
            quotient = int(7 / d)
            assert out[i] == quotient * 1000 + (7 - quotient * d) * 100 + 3
    assert out[0].isfinite()


def test_the_smallest_integer_by_minus_one_in_fast_mode():
    assert run("o[i] = (n[7] / n[6]) % n[6];", "fast")[0].isfinite()


def test_turns_are_counted_for_each_threadgroup_and_bounded_by_the_setting():
    """By work, so that a busy machine changes nothing: 32 threads of 100 turns are 3200, whoever else is running."""
    body = "float s = 0; for (int j = 0; j < 100 * n[1]; j++) s += x[j & 63]; o[i] = s;"
    run(body, "fast", turns=3200)
    with pytest.raises(metal.SimulationError, match="still running after 3000 turns"):
        run(body, "fast", turns=3000)


def test_strict_mode_refuses_a_collective_where_other_lanes_have_returned():
    body = "if (lane >= 16) return;\no[i] = simd_sum(x[i]);"
    for mode in ("fast", "checked"):
        assert run(body, mode)[0] == 120
        with pytest.raises(
            metal.SimulationError,
            match=r"simd_sum runs on the lanes 0x0000ffff only, while lanes 0xffff0000 have returned at line "
            rf"{LINE + 1} ",
        ):
            run(body, mode, strict=True)
    run(
        "o[i] = simd_sum(x[i]);", "checked", threads=40, strict=True
    )  # the lanes of the last simdgroup never were there


def test_tensors_that_are_const_and_not_may_share_memory():
    text = HEADER + "o[i] = x[i] + 1;\n}\n"
    x = torch.arange(32.0)
    for mode in ("fast", "checked"):
        with metal.settings(mode=mode):
            metal.compile_shader(text).k(x, x, torch.zeros(8, dtype=torch.int32))
    assert torch.equal(x, torch.arange(32.0) + 2)
