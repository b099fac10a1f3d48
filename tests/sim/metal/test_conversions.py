"""Vectors convert component by component, as in Metal, where clang would keep their bits, or make -1 of true."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
HEAD = """#include <metal_stdlib>
using namespace metal;
typedef float4 F4;
using H4 = vec<half, 4>;
typedef int I4x2[2];
struct Pair { int4 v; F4 asFloat() const thread { return (F4)v; } };
struct Typed { typedef float4 type; int4 list[2]; };
template <typename T, typename U> T made(U x) { return T(x); }
template <typename T, typename U> T cast(U x) { return (T)x; }
template <typename T, typename U> T braced(U x) { return T{(T)x}; }
template <typename T, typename U> T negated(U x) { return (T)-x; }
template <typename T> struct Inner { template <typename U> static T of(U x) { return made<T>(U(x)) + T(x) * 0; } };
template <typename T, typename U> struct Outer { T value; Outer(U x) : value(T(x)) {} };
template <typename T> float4 floats(T x) { return float4(x); }
template <typename T> auto below(T x, T y) { return x < y; }
template <typename T, int N> vec<T, N> widened(vec<int, N> x) { return vec<T, N>(x); }
#define CAST(T, x) (T)(x)
#define MAKE(T, x) T(x)
constant int4 table = int4(5, -6, 7, 70000);
"""
SIGNATURE = """kernel void k(device const int4* p [[buffer(0)]], device const float* x [[buffer(1)]],
              device float* o [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  int4 n = p[0], m = p[1];
  float4 f = float4(x[0], x[1], x[2], x[3]);
  bool yes = n.x > 0;
"""
N = torch.tensor([3, -7, 100000, -(2**31)], dtype=torch.int32)
M = torch.tensor([-1, -7, 65536, 2**31 - 1], dtype=torch.int32)
X = torch.tensor([0.5, -2.75, 1e4, 3.0])
UNSIGNED = (N.long() & 0xFFFFFFFF).float()
BITS = N.view(torch.float32)
LESS = (N < M).float()

# An expression of four components, of which the kernel stores float(v[j]) for each, and what they are.
RIGHT: dict[str, tuple[str, torch.Tensor]] = {
    "a pointer's int4": ("float4(*p)", N.float()),
    "a pointer's int4 by a cast": ("(float4)*p", N.float()),
    "an element by a cast": ("(float4)p[1]", M.float()),
    "a variable by a cast": ("(float4)n", N.float()),
    "a cast of a negation": ("(float4)-n", (-N).float()),
    "a cast of a complement": ("(float4)~n", (~N).float()),
    "a cast of a sum in parentheses": ("(float4)(n + m)", (N + M).float()),
    "a typedef": ("F4(n)", N.float()),
    "a typedef by a cast": ("(F4)n", N.float()),
    "vec": ("vec<float, 4>(n)", N.float()),
    "vec by a cast": ("(metal::vec<float, 4>)n", N.float()),
    "decltype": ("decltype(f)(n)", N.float()),
    "decltype by a cast": ("(decltype(f))n", N.float()),
    "a member type": ("Typed::type(n)", N.float()),
    "static_cast": ("static_cast<float4>(n)", N.float()),
    "static_cast of a product": ("static_cast<F4>(n * 2)", (N * 2).float()),
    "T(x) in a template": ("made<float4>(n)", N.float()),
    "(T)x in a template": ("cast<float4>(n)", N.float()),
    "T{x} in a template": ("braced<float4>(n)", N.float()),
    "(T)-x in a template": ("negated<float4>(n)", (-N).float()),
    "a template inside a template": ("Inner<float4>::of(n)", N.float()),
    "a member initialiser": ("Outer<float4, int4>(n).value", N.float()),
    "vec<T, N> in a template": ("widened<float>(n)", N.float()),
    "T(x) of scalars beside vectors": ("made<float4>(n) * made<float>(2)", N.float() * 2),
    "a cast of a cast": ("(float4)(int4)f", X.int().float()),
    "a cast through another type": ("(float4)(short4)(int4)f", X.int().float()),
    "a constructor of a cast": ("float4((int4)f)", X.int().float()),
    "int4 of float4": ("int4(f)", X.int().float()),
    "a cast of float4 to int4": ("(int4)f", X.int().float()),
    "uint4 of int4 keeps its bits": ("uint4(n)", UNSIGNED),
    "a cast of int4 to uint4": ("(float4)(uint4)n", UNSIGNED),
    "uint4 and back": ("int4(uint4(n))", N.float()),
    "half4 of float4": ("half4(f)", X.half().float()),
    "a cast to half4": ("(half4)f", X.half().float()),
    "a cast of half4": ("(float4)(half4)f", X.half().float()),
    "T(x) of a half4": ("made<float4>(H4(f))", X.half().float()),
    "(T)x to a half4": ("cast<H4>(f)", X.half().float()),
    "ushort4 of half4": ("ushort4(half4(abs(f)))", X.abs().half().int().float()),
    "half4 of ushort4": ("made<half4>(ushort4(abs(f)))", X.abs().int().float()),
    "a cast of short4 to half4": ("(half4)(short4)(int4)f", X.int().half().float()),
    "bfloat4 of float4": ("bfloat4(f)", X.bfloat16().float()),
    "a cast of half4 to bfloat4": ("(bfloat4)half4(f)", X.bfloat16().float()),
    "T(x) of half4 to bfloat4": ("made<bfloat4>(half4(f))", X.bfloat16().float()),
    "short4 of bfloat4": ("cast<short4>(bfloat4(f))", X.bfloat16().int().float()),
    "uchar4 of int4": ("uchar4(n)", (N & 255).float()),
    "char4 of a float4": ("made<char4>(f * 0.001f)", (X * 0.001).int().float()),
    "float4 of char4": ("(float4)char4(n)", N.to(torch.int8).float()),
    "char4 of uchar4": ("(char4)uchar4(n)", N.to(torch.int8).float()),
    "a product by a scalar": ("float4(*p * 2) * 0.5f", (N * 2).float() * 0.5),
    "a constant of the program": ("(float4)table", torch.tensor([5.0, -6, 7, 70000])),
    "a literal": ("(float4)int4(1, 2, 3, -4)", torch.tensor([1.0, 2, 3, -4])),
    "a literal in a template": ("made<F4>(int4(1, 2, 3, -4))", torch.tensor([1.0, 2, 3, -4])),
    "a swizzle": ("(float4)n.wzyx", N.float().flip(0)),
    "a swizzle made": ("F4(n.xxyy)", N.float()[[0, 0, 1, 1]]),
    "a member of a struct": ("Pair{n}.asFloat()", N.float()),
    "an array's element": ("(F4)(Typed{{n, m}}).list[1]", M.float()),
    "through a macro's cast": ("CAST(float4, n)", N.float()),
    "through a macro's constructor": ("MAKE(F4, *p)", N.float()),
    "a lambda": ("[](int4 v) { return F4(v); }(n)", N.float()),
    "a conditional": ("yes ? (float4)n : (float4)m", N.float()),
    "an argument": ("abs((float4)n)", N.float().abs()),
    "as_type": ("as_type<float4>(n)", BITS),
    "as_type in a template's cast": ("cast<float4>(as_type<int4>(f))", X.view(torch.int32).float()),
    "a pointer's cast": ("*(device const float4*)p", BITS),
    "a scalar to a vector": ("float4(n.y)", torch.full((4,), -7.0)),
    "a scalar by a cast": ("(float4)n.y", torch.full((4,), -7.0)),
    "a scalar to T": ("made<float4>(n.y)", torch.full((4,), -7.0)),
    "a bool to a vector": ("float4(yes)", torch.ones(4)),
    "a bool by a cast": ("(float4)yes", torch.ones(4)),
    "a bool to T": ("made<float4>(yes)", torch.ones(4)),
    "a bool to an int4": ("(int4)yes", torch.ones(4)),
    "a bool times a vector": ("f * yes", X),
    "a vector plus a comparison of scalars": ("n + (n.x > m.x)", (N + 1).float()),
    "float4 of bool4": ("float4(n < m)", LESS),
    "float4 of bool4 by a cast": ("(float4)(n < m)", LESS),
    "int4 of bool4": ("int4(n < m)", LESS),
    "int4 of bool4 by T": ("made<int4>(n < m)", LESS),
    "uchar4 of bool4": ("uchar4(n < m)", LESS),
    "half4 of bool4": ("half4(f < 1.0f)", (X < 1).float()),
    "a comparison of halves": ("float4(half4(f) == half4(0.5h))", (X == 0.5).float()),
    "a comparison in a template": ("floats(below(n, m))", LESS),
    "a comparison of comparisons": ("float4((n < m) == (f > 0.0f))", ((N < M) == (X > 0)).float()),
    "not": ("float4(!n)", (N == 0).float()),
    "and": ("float4(n < m && f > 0.0f)", ((N < M) & (X > 0)).float()),
    "or of comparisons": ("float4((n < m) | (f > 0.0f))", ((N < M) | (X > 0)).float()),
    "bool4 of int4": ("float4(bool4(n + 7))", (N != -7).float()),
    "bool4 by a cast": ("float4((bool4)(n + 7))", (N != -7).float()),
    "bool4 of float4": ("float4(bool4(f - 0.5f))", (X != 0.5).float()),
    "bool4 by T": ("float4(made<bool4>(f - 0.5f))", (X != 0.5).float()),
    "vec of bool": ("float4(vec<bool, 4>(n + 7))", (N != -7).float()),
    "select by a comparison": ("select(f, (float4)n, n < m)", torch.where(N < M, N.float(), X)),
    "select's result": ("(float4)select(n, m, n < m)", torch.where(N < M, M, N).float()),
    "a component of a comparison": ("float4((n < m).x, (n < m).y, -(n < m).z, 0)", LESS * torch.tensor([1, 1, -1, 0])),
    "any and all": ("float4(any(n < m), all(n < m), any(n != n), all(n == n))", torch.tensor([1.0, 0, 0, 1])),
    "a vector of three": ("float4((float3)p[0].xyz, 9)", torch.cat([N[:3].float(), torch.tensor([9.0])])),
    "T of a vector of three": ("float4(made<float3>(n.xyz), 9)", torch.cat([N[:3].float(), torch.tensor([9.0])])),
    "vectors of two": ("float4((float2)n.xy, made<float2>(n.zw))", N.float()),
    "bool3": ("float4(float3(n.xyz < m.xyz), 9)", torch.cat([LESS[:3], torch.tensor([9.0])])),
    "long2 and int4 are of one size": ("float4(made<float2>(long2(n.xy)), 0, 0)", N.float() * (torch.arange(4) < 2)),
}  # fmt: skip

# Statements that leave a vector of four in v.
STATEMENTS: dict[str, tuple[str, torch.Tensor]] = {
    "an array of vectors": ("F4 a[2] = {F4(p[0]), (F4)p[1]}; float4 v = a[0] + a[1];", N.float() + M.float()),
    "auto": ("auto w = (float4)*p; auto v = w * 2;", N.float() * 2),
    "auto of a comparison": ("auto w = n < m; float4 v = float4(w);", LESS),
    "a bool4 variable": ("bool4 w = n < m; w.x = !w.x; w = w && n < 5; float4 v = float4(w);",
                         (torch.tensor([True, False, False, True]) & (N < 5)).float()),
    "components by index": ("bool4 w = n == m; w[2] = true; float4 v = float4(w[0], w[1], w.z, w.w);",
                            torch.tensor([0.0, 1, 1, 0])),
    "a bool4 in memory": ("threadgroup uchar4 s[1]; s[0] = uchar4(n < m); float4 v = float4(s[0]);", LESS),
    "assignment by component": ("float4 v = 0; v.xy = (float2)n.xy; v.zw = made<float2>(m.zw);",
                                torch.cat([N[:2], M[2:]]).float()),
    "compound assignment": ("float4 v = f; v += (float4)n; v *= made<float4>(m);", (X + N) * M),
    "a vector over two lines": ("float4 v = (float4)\n  (n +\n  m);", (N + M).float()),
    "a bool as a value": ("float4 v = yes; v += yes;", torch.full((4,), 2.0)),
    "an alias in the function": ("using V = decltype(f); V v = V(n) + (V)m;", N.float() + M.float()),
    "one template for types of one size and of two": (
        "float4 v = made<float4>(H4(1, 2, 3, 4)); v += float4(made<half4>(ushort4(5, 6, 7, 8)));",
        torch.tensor([6.0, 8, 10, 12])),
    "a loop": ("float4 v = 0; for (int j = 0; j < 2; j++) v += (float4)p[j];", N.float() + M.float()),
}  # fmt: skip


def run(body: str, results: int = 1) -> torch.Tensor:
    out = torch.zeros(results, 4)
    metal.compile_shader(HEAD + SIGNATURE + body + "\n}\n").k(torch.stack([N, M]), X, out, threads=1)
    return out.squeeze(0)


def stored(number: int, statements: str) -> str:
    """A block that leaves the components of its v in the results of its number."""
    return f"{{ {statements} for (int j = 0; j < 4; j++) o[4 * {number} + j] = float(v[j]); }}\n"


@pytest.mark.sample(2)
# Eight at a time: a kernel takes half a second to compile, and an expression in it no time.
@pytest.mark.parametrize("first", range(0, len(RIGHT), 8))
def test_vectors_convert_component_by_component(first: int):
    some = dict(itertools.islice(RIGHT.items(), first, first + 8))
    blocks = (stored(n, f"auto v = {expression};") for n, (expression, _) in enumerate(some.values()))
    for got, (name, (_, expected)) in zip(run("".join(blocks), 8), some.items(), strict=False):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", STATEMENTS)
def test_vectors_convert_in_statements(name: str):
    body, expected = STATEMENTS[name]
    got = run(body + " for (int j = 0; j < 4; j++) o[j] = float(v[j]);")
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# What no rewriting covers is an error at its line, which is the sixth of the kernel: (body, message).
REFUSED: dict[str, tuple[str, str]] = {
    "reinterpret_cast": ("float4 v = reinterpret_cast<float4>(n);", "a vector would be reinterpreted here"),
    "an assignment": ("f = n;", "float4"),
    "an initialisation": ("float4 v = n;", "float4"),
    "an argument": ("float4 v = abs(f + n);", "float4"),
    "int4 to uint4 without a cast": ("uint4 v = n;", "uint4"),
    "two of the same size": ("long2 v = n;", "long2"),
    "another number of components": ("long2 v = (long2)n;", "a vector of this size from one of another"),
    "a scalar of a vector": ("long v = (long)n.xy;", "from vector 'int2' .* to scalar 'long'"),
    "a comparison as an int4": ("int4 v = n < m;", "bool4"),
    "a comparison as a condition": ("if (n < m) o[0] = 1;", "bool4"),
    "a matrix of conditions": ("float4 v = n < m ? f : f;", "bool4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_conversion_is_refused(name: str):
    body, message = REFUSED[name]
    line = (HEAD + SIGNATURE).count("\n") + 1
    with pytest.raises(SyntaxError, match=message) as got:
        run(body)
    assert "number of components" in name or f"program_source:{line}:" in str(got.value), str(got.value)


def test_vectors_of_bools_lie_in_memory_as_bytes():
    text = """kernel void k(device const bool4* b [[buffer(0)]], device bool2* c [[buffer(1)]],
              device int* o [[buffer(2)]]) {
  c[1].y = b[1].z && !b[0].x;
  o[0] = sizeof(bool2) * 100 + sizeof(bool3) * 10 + sizeof(bool4);
}"""
    b, c, o = (
        torch.tensor([False] * 6 + [True] * 2),
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(1, dtype=torch.int32),
    )
    metal.compile_shader(HEAD + text).k(b, c, o, threads=1)
    assert c.tolist() == [False, False, False, True] and o.item() == 244


def test_reinterpretation_in_a_dependent_vector_of_bools_in_memory_is_refused():
    text = """template <typename T> void f(device vec<T, 4>* p) { p[0] = vec<T, 4>(p[1]); }
kernel void k(device uchar* b [[buffer(0)]]) { f<bool>((device vec<bool, 4>*)b); }"""
    with pytest.raises(SyntaxError):
        metal.compile_shader(HEAD + text)


CONVERTERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda x: x.float(), "half": lambda x: x.half(), "bfloat": lambda x: x.bfloat16(),
    "int": lambda x: x.int(), "uint": lambda x: x.int() & 0x7FFFFFFF, "short": lambda x: x.to(torch.int16),
    "ushort": lambda x: x.int() & 0xFFFF, "char": lambda x: x.to(torch.int8), "uchar": lambda x: x.to(torch.uint8),
    "long": lambda x: x.long(),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("spelling", ["T(U(f))", "(T)(U)f", "made<T>(made<U>(f))", "static_cast<T>(U(f))"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_pair_of_types(spelling: str, width: int):
    """From small integers, which every type holds exactly, so that only a reinterpretation shows."""
    pairs = [(t, u) for t in CONVERTERS for u in CONVERTERS]
    lines = "".join(
        f"{{ typedef {t}{width} T; typedef {u}{width} U; auto v = {spelling}; for (int j = 0; j < {width}; j++) "
        f"o[{n * width} + j] = float(v[j]); }}\n"
        for n, (t, u) in enumerate(pairs)
    )
    x = torch.tensor([1.0, 7.0, 90.0, 127.0])[:width]
    text = (
        f"{HEAD}kernel void k(device const float* x [[buffer(0)]], device float* o [[buffer(1)]]) {{\n"
        f"float{width} f; for (int j = 0; j < {width}; j++) f[j] = x[j];\n{lines}}}\n"
    )
    out = torch.zeros(len(pairs), width)
    metal.compile_shader(text).k(x, out, threads=1)
    expected = torch.stack([CONVERTERS[t](CONVERTERS[u](x)).float() for t, u in pairs])
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
