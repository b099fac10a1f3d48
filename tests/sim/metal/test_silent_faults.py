"""What ran without a word and was wrong: refused where Metal refuses it, and else reported by a checked launch."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = "kernel void k(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {\n"


def run(body: str, before: str = "") -> torch.Tensor:
    out = torch.zeros(128)
    with metal.settings(mode="checked"):
        metal.compile_shader(f"{HEAD}{before}\n{KERNEL}{body}\n}}\n").k(out, threads=32)
    return out


CASTS = {
    "device to thread": "thread float* p = (thread float*)o; p[i] = 2;",
    "and to another type": "thread int* p = (thread int*)o; p[i] = 2;",
    "device to threadgroup": "threadgroup float* p = (threadgroup float*)o; p[i] = 2;",
    "device to constant": "constant float* p = (constant float*)o; o[i] = p[i];",
    "a reference": "device float& r = o[i]; thread float& p = (thread float&)r; p = 2;",
    "in a template": "o[i] = at(o);",
}


@pytest.mark.parametrize("name", CASTS)
def test_a_pointer_keeps_its_address_space(name: str):
    with pytest.raises(SyntaxError, match=r"program_source:[345]: error: .* cast into another address space"):
        run(CASTS[name], "template <class T> T at(device T* x) { thread T* p = (thread T*)x; return *p; }")


def test_a_thread_pointer_made_of_a_number_leads_elsewhere():
    with pytest.raises(metal.SimulationError, match=r"pointer to thread memory that leads elsewhere: byte 0 of buffer"):
        run("thread float* p = (thread float*)(ulong)o; p[i] = 2;")


SUM = "float sum(thread const float* p, int n) { float s = 0; for (int k = 0; k < n; k++) s += p[k]; return s; }\n"
PAIR = "struct Pair { float a[4]; float b; };"
# Name: (body, byte of the array that is touched).
PAST: dict[str, tuple[str, int]] = {
    "read": ("float a[4]; for (int n = 0; n < 4; n++) a[n] = n; thread float* p = a; o[i] = p[4];", 16),
    "read of initial values": ("float a[4] = {1, 2, 3, 4}; thread float* p = a; o[i] = p[i];", 16),
    "read in a function": ("float a[4] = {1, 2, 3, 4}; o[i] = sum(a, 5);", 16),
    "write": ("float a[4]; thread float* p = a; for (int k = 0; k <= 4; k++) p[k] = k; o[i] = a[1];", 16),
    "far behind": ("float a[4]; thread float* p = a; p[5] = 1; for (int n = 0; n < 4; n++) p[n] = n; o[i] = p[2];", 20),
    "before the begin": ("float a[4] = {1, 2, 3, 4}; thread float* p = a; p--; o[i] = *p;", -4),
    "one of two": (
        "float a[4] = {1, 2, 3, 4}, b[4] = {5, 6, 7, 8}; thread float* p = i % 2 ? a : b; o[i] = p[4];", 16,
    ),
    "vectors as floats": ("float4 a[2] = {float4(1), float4(2)}; thread float* p = (thread float*)a; o[i] = p[8];", 32),
    "a vector": ("float a[4] = {1, 2, 3, 4}; thread float4* p = (thread float4*)(a + 1); o[i] = p->w;", 16),
    "a vector's components": ("float4 x = 3; thread float* p = (thread float*)&x; o[i] = p[4];", 16),
    "a scalar's neighbour": ("float x = 3; thread float* p = &x; o[i] = p[1];", 4),
    "out of a structure": ("Pair s = {{1, 2, 3, 4}, 5}; thread float* p = s.a; o[i] = p[7];", 28),
}  # fmt: skip


@pytest.mark.parametrize("name", PAST)
def test_a_pointer_stays_in_its_array(name: str):
    body, byte = PAST[name]
    with pytest.raises(metal.SimulationError, match=rf"outside an array of \d+ bytes in thread memory: byte {byte} of"):
        run(body, SUM + PAIR)


def test_a_pointer_goes_to_an_arrays_end():
    body = """float a[4] = {1, 2, 3, 4}, b[3] = {5, 6, 7}; float4 x = 8; Pair s = {{1, 2, 3, 4}, 5};
    thread float* p = (thread float*)&x; thread float* q = i % 2 ? a : b; thread float* end = a + 4;
    thread float* r = s.a;
    o[i] = sum(a, 4) + p[3] + q[2] + end[-1] + r[i % 4];"""
    i = torch.arange(32)
    expected = 10 + 8 + torch.where(i % 2 == 1, 3, 7) + 4 + i % 4 + 1
    assert torch.equal(run(body, SUM + PAIR)[:32], expected.float())


MIXED = {
    "product": "o[i] = b * h;",
    "comparison": "o[i] = h > b;",
    "assignment": "h += b; o[i] = h;",
    "choice": "o[i] = i ? h : b;",
    "in a template": "o[i] = product(b, h);",
    "scalar and vector": "half4 v = 3; o[i] = (b * v).x;",
}


@pytest.mark.parametrize("name", MIXED)
def test_half_and_bfloat_have_no_common_type(name: str):
    with pytest.raises(SyntaxError, match="half and bfloat do not convert into one another"):
        run(
            "bfloat b = bfloat(2.0f); half h = 3; " + MIXED[name],
            "template <class A, class B> float product(A a, B b) { return a * b; }",
        )


MATRIX = {
    "load": (
        "simdgroup_load(m, o + i % 2, 8); simdgroup_store(m, o + 64, 8);",
        "lane 1 has byte 4 of .*, lane 0 byte 0",
    ),
    "origin": ("simdgroup_load(m, o, 8, ulong2(i == 31, 0)); simdgroup_store(m, o + 64, 8);", "lane 31 has byte 4"),
    "store": ("simdgroup_load(m, o, 8); simdgroup_store(m, o + i / 16 * 64, 8);", "lane 16 has byte 256"),
    "stride": ("simdgroup_load(m, o, 8 - i % 2); simdgroup_store(m, o + 64, 8);", "strides: 7 in lane 1, 8 in lane 0"),
    "threadgroup": (
        "threadgroup float s[128]; for (int n = 0; n < 4; n++) s[4 * i + n] = 1; "
        "threadgroup_barrier(mem_flags::mem_threadgroup); simdgroup_load(m, s + i % 2, 8); simdgroup_store(m, o, 8);",
        "lane 1 has byte 4 of threadgroup memory",
    ),
}


@pytest.mark.parametrize("name", MATRIX)
def test_all_lanes_name_one_matrix(name: str):
    body, why = MATRIX[name]
    with pytest.raises(metal.SimulationError, match=why):
        run("simdgroup_float8x8 m; " + body)


NOT_METAL = {
    "recursion": ("float f(int n) { return n < 2 ? 1 : n * f(n - 1); }", "o[i] = f(i);", "f: Metal has no recursion"),
    "tail call": ("float f(int n, float s) { return n < 2 ? s : f(n - 1, s * n); }", "o[i] = f(i, 1);", "no recursion"),
    "two functions": (
        "float g(int n); float f(int n) { return n < 2 ? 1.0f : n * g(n - 1); } float g(int n) { return f(n) + 1; }",
        "o[i] = f(i % 5);", "no recursion",
    ),
    "double": ("", "double d = i; o[i] = d * 2;", "double: Metal has no double"),
    "long double": ("", "o[i] = 2.0l;", "no long double"),
    "virtual": ("struct S { virtual float f() { return 2; } };", "S s; o[i] = s.f();", "no virtual functions"),
    "goto": ("", "o[i] = 1; if (i) goto end; o[i] = 2; end: return;", "no goto"),
    "static": ("", "static int count = 0; count++; o[i] = count;", "count: a variable of the program must be constant"),
    "variable": ("int count = 0;", "count++; o[i] = count;", "count: a variable of the program must be constant"),
    "long long": ("", "long long x = 2; o[i] = x;", "long has 64 bits"),
    "128 bits": ("", "__int128 x = 2; o[i] = (float)x;", "no integers of 128 bits"),
    "new": ("", "thread float* x = new float(2); o[i] = *x;", "no dynamic memory"),
    "register": ("", "register int x = 2; o[i] = x;", "no such storage class"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_METAL)
def test_what_metal_has_not_is_refused_without_the_lint(name: str):
    before, body, why = NOT_METAL[name]
    with pytest.raises(SyntaxError, match=why):
        run(body, before)
