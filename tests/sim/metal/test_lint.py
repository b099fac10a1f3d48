"""Sources that Apple's compiler refuses are found, and none that it accepts."""

from __future__ import annotations

import pytest

from torch_attnkit.sim.metal.lint import lint

pytestmark = pytest.mark.simulator
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
SIGNATURE = "kernel void k(device float* x [[buffer(0)]], constant int& n, uint i [[thread_position_in_grid]])"


def body(text: str) -> str:
    return f"{HEAD}{SIGNATURE} {{\n{text}\n}}\n"


# (source, line, a part of the message)
WRONG = {
    "non-ASCII in a comment": (HEAD + "// 2 \N{MULTIPLICATION SIGN} 2\n", 3, "non-ASCII"),
    "no include": ("using namespace metal;\n", 1, "metal_stdlib"),
    "goto": (body("a: if (x[i] > 0) goto a;"), 4, "goto"),
    "virtual": (HEAD + "struct S { virtual void f(); };", 3, "virtual"),
    "exception": (body("throw 1;"), 4, "exceptions"),
    "new": (body("thread int* p = new int;"), 4, "dynamic memory"),
    "typeid": (body("typeid(x);"), 4, "type information"),
    "assembly": (body('asm("nop");'), 4, "assembly"),
    "double": (body("double d = x[i]; x[i] = d;"), 4, "no double"),
    "long long": (body("long long d = n; x[i] = d;"), 4, "long long"),
    "std": (body("x[i] = std::max(x[i], 0.0f);"), 4, "std"),
    "host builtin": (body("x[i] = __builtin_sqrtf(x[i]);"), 4, "builtin"),
    "static local": (body("static int c = 0; x[i] = c;"), 4, "static local"),
    "register": (body("register int c = 0; x[i] = c;"), 4, "storage class"),
    "texture": (HEAD + "kernel void k(texture2d<float> t) {}", 3, "buffers only"),
    "pointer without a space": (HEAD + "float f(float* p) { return *p; }", 3, "pointer type must have explicit"),
    "reference without a space": (HEAD + "void f(int& p) { p = 1; }", 3, "reference type must have explicit"),
    "const pointer without a space": (body("const float* p = &x[i];"), 4, "explicit address space"),
    "pointer to a type parameter": (HEAD + "template <typename T> T f(T* p) { return *p; }", 3, "explicit address"),
    "pointer to a struct": (HEAD + "struct S { int a; }; int f(S* p) { return p->a; }", 3, "explicit address space"),
    "device to thread pointer": (body("thread float* p = x;"), 4, "of type 'device float *'"),
    "device pointer to a function of threadgroup": (
        HEAD + "void f(threadgroup float* p);\n" + SIGNATURE + "{\nf(x);\n}", 5, "no matching function"
    ),
    "write to constant": (body("n = 1;"), 4, "const"),
    "write through const device": (HEAD + "kernel void k(device const float* x) {\nx[0] = 1;\n}", 4, "read-only"),
    "implicit float to bfloat": (HEAD + "kernel void k(device bfloat* x) {\nx[0] = x[0] * 2.0f;\n}", 4, "bfloat"),
    "exp gives no bfloat": (HEAD + "kernel void k(device bfloat* x, device half* y) {\nx[0] = exp(*y); }", 4, "half"),
    "half from bfloat": (HEAD + "kernel void k(device half* x, device bfloat* y) {\nx[0] = y[0];\n}", 4, ""),
    "max of half and float": (body("x[i] = max(half(x[i]), x[i]);"), 4, "ambiguous"),
    "max of uint and int": (body("x[i] = max(i, n);"), 4, "ambiguous"),
    "exp of int": (body("x[i] = exp(n);"), 4, "ambiguous"),
    "vector of another type": (body("float4 v = int4(1); x[i] = v.x;"), 4, "float4"),
    "vector of another size": (body("float4 v = float3(1); x[i] = v.x;"), 4, ""),
    "too many components": (body("float2 v = float2(1, 2, 3); x[i] = v.x;"), None, "components"),
    "variable length array": (body("float a[n]; a[0] = 1; x[i] = a[0];"), 4, "variable length array"),
    "atomic on a plain pointer": (body("atomic_fetch_add_explicit(x, 1.0f, memory_order_relaxed);"), 4, "no matching"),
    "ordered atomic": (
        HEAD + "kernel void k(device atomic_int* x) {\natomic_store_explicit(x, 1, memory_order_seq_cst); }",
        4,
        "atomic_store_explicit",
    ),
    "threadgroup float atomic": (
        body("threadgroup atomic_float f; atomic_fetch_add_explicit(&f, 1.0f, memory_order_relaxed);"), None, "device"
    ),
    "simd operation on bfloat": (HEAD + "kernel void k(device bfloat* x) {\nx[0] = simd_sum(x[0]);\n}", None, "bfloat"),
    "simd operation on long": (HEAD + "kernel void k(device long* x) {\nx[0] = simd_sum(x[0]);\n}", None, "64-bit"),
    "matrix of another size": (body("simdgroup_matrix<float, 16, 16> m;"), None, "8x8"),
    "missing header": ("#include <vector>\n" + HEAD, 1, "file not found"),
    "function constant": (HEAD + "constant bool c [[function_constant(0)]];", 3, "no function constants"),
    "dynamic threadgroup memory": (
        HEAD + "kernel void k(threadgroup float* s [[threadgroup(0)]]) {}", 3, "no dynamic threadgroup memory"
    ),
    "unknown attribute": (HEAD + "kernel void k(device float* x [[bufer(0)]]) {}", 3, "bufer"),
    "parameter without an attribute": (HEAD + "kernel void k(device float* x, uint i) {}", 3, "needs an attribute"),
    "threadgroup variable outside a kernel": (HEAD + "void f() {\nthreadgroup float s[4];\n}", 4, "in a kernel"),
    "threadgroup variable with a value": (body("threadgroup float s = 1;"), 4, "cannot be initialised"),
    "kernel with a result": (HEAD + "kernel int k(device float* x) { return 1; }", 3, "must return void"),
    "buffer 31": (HEAD + "kernel void k(device float* x [[buffer(31)]]) {}", 3, "0 to 30"),
    "buffer twice": (HEAD + "kernel void k(device int* x [[buffer(0)]], device int* y [[buffer(0)]]) {}", 3, "twice"),
    "buffer in no memory": (HEAD + "kernel void k(thread float* x [[buffer(0)]]) {}", 3, "device or constant"),
    "signed grid value": (HEAD + "kernel void k(device float* x, int i [[thread_position_in_grid]]) {}", 3, "uint or"),
    "positions of two widths": (
        HEAD + "kernel void k(device float* x, uint i [[thread_position_in_grid]],\n"
        "uint3 g [[threadgroup_position_in_grid]]) {}", 3, "all scalars or all vectors"
    ),
    "recursion": (
        HEAD + "int f(int a) { return a ? f(a - 1) * f(a) : 0; }\n" + SIGNATURE + " { x[i] = f(n); }", 0, "recursion"
    ),
    "mutable variable of the program": (HEAD + "int c = 0;\n" + SIGNATURE + " { x[i] = c++; }", 0, "must be constant"),
    "lambda before 3.2": (body("auto f = [](float a) { return a; }; x[i] = f(x[i]);"), 4, "lambdas need Metal 3.2"),
    "if constexpr before 4": (body("if constexpr (true) x[i] = 1;"), 4, "constexpr if"),
    "structured binding before 4": (body("struct S { int a, b; }; auto [a, b] = S{1, 2}; x[i] = a + b;"), 4, "Metal 4"),
    "concept": (HEAD + "template <typename T> concept C = true;", 3, "C++20"),
    "uninitialised variable": (body("float a; x[i] = a;"), 4, "uninitialized"),
    "undeclared name": (body("x[i] = y;"), 4, "undeclared"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_found(name: str):
    text, line, message = WRONG[name]
    found = lint(text)
    assert any(message in f.message and line in (None, f.line) for f in found), found


def test_versions_gate_what_they_brought():
    lambdas, structured = WRONG["lambda before 3.2"][0], WRONG["structured binding before 4"][0]
    assert lint(lambdas, [310]) and not lint(lambdas, [320]) and not lint(lambdas, [400])
    assert lint(structured, [320]) and not lint(structured, [400])
    assert lint(body("#if __METAL_VERSION__ < 320\nnothing();\n#endif")) and not lint(
        body("#if __METAL_VERSION__ < 320\nnothing();\n#endif"), [320, 400]
    )


RIGHT = {
    "pointers with spaces": "device const float* p = x + i; thread float a = *p; thread float& r = a; x[i] = r;",
    "products that look like pointers": "uint a = i, b = 2; uint c = a * b; int m = n * n; x[i] = c & m;",
    "casts": "device const uint* p = (device const uint*)x; x[i] = as_type<float>(p[i]) + float(n);",
    "threadgroup memory": "threadgroup half4 s[8]; threadgroup half4* q = s + 1; q[0] = half4(1); x[i] = q[0].x;",
    "auto": "auto v = x[i]; const auto w = float2(v, 1); x[i] = w.x * 2.0;",
    "half conversions": "half h = x[i]; h = h * 2.0f; x[i] = float(h) + bfloat(x[i]);",
    "bfloat written out": "bfloat b = bfloat(x[i] * 2.0f); x[i] = b; x[i] = float(b) * 3;",
}


@pytest.mark.parametrize("name", RIGHT)
def test_accepted(name: str):
    assert lint(body(RIGHT[name])) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("header", ["DecodeAttention.h", "PrefillAttention.h"])
def test_torchs_own_kernels_are_accepted(header: str):
    includes = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
    assert lint(f"{includes}#include <c10/metal/utils.h>\n#include <ATen/native/mps/kernels/{header}>\n") == []
