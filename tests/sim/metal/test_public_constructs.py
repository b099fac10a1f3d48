"""What MLX's, ggml's, candle's and gpt-oss' kernels are written with, each in a text of our own."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.sim import metal
from torch_attnkit.sim.metal.lint import lint

pytestmark = pytest.mark.simulator
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = "kernel void k(device float* o [[buffer(0)]]) {\n"

# Name: (before the kernel, its body, what it writes).
ACCEPTED: dict[str, tuple[str, str, list[float]]] = {
    "vector in parentheses": (
        "constant float2 program(5, 6);",
        """float2 v(1, 2); const int2 a(3, 4), b(a.yx); half4 c(half2(5), 6, 7); metal::float2 m(8, 9);
        vec<float, 2> d(10, 11); bool2 t(true, false); float2 s(a); packed_float2 p(12, 13); float2 e = v, f(a.x, 15);
        float g(float2); float h(16), one = uint3(1).z;
        o[0] = v.x + v.y; o[1] = b.x; o[2] = c.x + c.z; o[3] = m.y; o[4] = d.y + t.x + 2 * t.y; o[5] = s.y + e.x;
        o[6] = p.y + f.y + h + one; o[7] = program.y;""",
        [3, 4, 11, 9, 12, 5, 45, 6],
    ),
    "vector of a template's type": (
        """struct Pair { float2 p; Pair(float a, float b) : p(a, b) {} };
        template <class T> T made(float a) { T v(a, 2); return v; }""",
        "o[0] = Pair(1, 3).p.y; o[1] = made<float2>(4).x; o[2] = made<half2>(4).y;",
        [3, 4, 2],
    ),
    "type in the namespace": ("", "metal::float4 z = metal::float4(1, 2, 3, 4); o[0] = z.w;", [4]),
    "list where a vector is wanted": (
        """template <typename I> I index(I e) { return e; }
        template <typename I> I index(uint3 e, I step) { return e.x + step * e.z; }""",
        "uint n = 2; o[0] = index<int>({n, n + 1, 2 * n}, 3); o[1] = index<int>(7);",
        [14, 7],
    ),
    "bools in braces": (
        "union Update { bool4 b; uint i; };",
        "Update u; u.b = {true, true, false, true}; u.b[0] = false; o[0] = u.i == 0x01000100u;",
        [1],
    ),
    "extent with a comparison": (
        "constant constexpr int N = 0;",
        "threadgroup float s[N == 0 ? 1 : N], t[N <= 1 ? 2 : 1]; s[0] = 3; t[1] = 4; o[0] = s[0] + t[1];",
        [7],
    ),
    "threadgroup memory of zeros": (
        "",
        "threadgroup float b[32] = {0}, c[2] = {}; b[3] = 1; c[1] = 2; o[0] = b[3] + c[1];",
        [3],
    ),
    "constructor in threadgroup memory": (
        """struct Sum { float a; constexpr Sum() threadgroup = default; constexpr Sum() thread = default;
        float twice() const { return 2 * a; } };""",
        "threadgroup Sum s[2]; Sum mine; mine.a = 3; s[1] = mine; o[0] = s[1].a + mine.twice();",
        [9],
    ),
    "constant of a class, of a function": (
        """template <class T> constexpr T next(T x) { return x + 1; }
        struct Complex { float re, im; constexpr Complex(float r, float i) : re(r), im(i) {} };
        template <class T> struct Limit { static constexpr constant T v = next(T(2)); };
        template <> struct Limit<Complex> { static constexpr constant Complex v = Complex(4, 5); };
        template <class T> struct Order { static constexpr constant T init = Limit<T>::v; };""",
        "o[0] = Order<float>::init + Order<int>::init; o[1] = Complex(Order<Complex>::init).im;",
        [6, 5],
    ),
    "comparison in a template's header": (
        """template <typename T, metal::enable_if_t<sizeof(T) < 8, bool> = true> float f(T x) { return 1; }
        template <typename T, metal::enable_if_t<sizeof(T) == 8, bool> = true> float f(T x) { return 2; }""",
        "o[0] = f(1.0f); o[1] = f(1l);",
        [1, 2],
    ),
    "product of matrices": (
        "",
        "simdgroup_float8x8 a(2), b(3), c = a * b; if (simd_is_first()) o[0] = c.thread_elements().x;",
        [6],
    ),
    "uniform values": ("", "constexpr const uniform<int> n = make_uniform(3); o[0] = n;", [3]),
    "elements of a type": ("", "o[0] = vec_elements<float3>::value + vec_elements<int>::value;", [4]),
    "fence": (
        "",
        "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device); o[0] = 1;",
        [1],
    ),
    "limits of a class": (
        """struct Indexed { int i; };
        template <> struct metal::_numeric_limits_impl<Indexed> { static constexpr Indexed max() { return {7}; } };""",
        "o[0] = numeric_limits<Indexed>::max().i;",
        [7],
    ),
    "half from bfloat": (
        "",
        "bfloat b = bfloat(2.5f); half h = half(b); bfloat c = (bfloat)h; o[0] = float(c) + h;",
        [5],
    ),
}


def written(lib: metal.Library, *arguments: object) -> list[float]:
    out = torch.zeros(8)
    with metal.settings(mode="checked"):
        lib.k(out, *arguments, threads=32 if "simdgroup" in lib._text else 1)
    return out.tolist()


@pytest.mark.parametrize("name", ACCEPTED)
def test_is_accepted(name: str):
    before, body, expected = ACCEPTED[name]
    out = written(metal.compile_shader(f"{HEAD}{before}\n{KERNEL}{body}\n}}\n"))
    assert out[: len(expected)] == expected


def test_array_parameters_of_a_kernel_are_buffers():
    text = """kernel void k(device float* o, constant const int64_t s[2], constant int t[][2] [[buffer(2)]],
                           constant const float u[3] [[buffer(3)]]) { o[0] = s[1] + t[1][1] + u[2]; }"""
    tensors = torch.tensor([1, 2]), torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), torch.tensor([5.0, 6.0, 7.0])
    assert written(metal.compile_shader(HEAD + text), *tensors)[0] == 2 + 4 + 7


def test_a_function_constant_may_be_called_constexpr():
    text = "constant constexpr const bool flag [[function_constant(0)]];\n" + KERNEL + "o[0] = flag ? 1 : 2; }"
    for value, expected in ((True, 1), (False, 2)):
        out = torch.zeros(1)
        metal.compile_foreign(HEAD + text).function("k", {0: value})(out, threads=1)
        assert out.item() == expected


def test_a_templates_arguments_may_follow_from_an_instances_parameters():
    text = """template <typename T, int N> struct Sizes { int n[N]; };
    template <typename T, int N> kernel void k(device T* o [[buffer(0)]], constant Sizes<T, N>& s [[buffer(1)]]) {
      o[0] = s.n[N - 1];
    }
    """
    for name, type_, n in (("one", "float", 1), ("two", "int", 2)):
        text += f"""template [[host_name("{name}")]] [[kernel]] void k(device {type_}* o [[buffer(0)]],
                    constant Sizes<{type_}, {n}>& s [[buffer(1)]]);\n"""
    lib, sizes = metal.compile_shader(HEAD + text), torch.tensor([3, 4], dtype=torch.int32)
    for name, dtype, expected in (("one", torch.float32, 3), ("two", torch.int32, 4)):
        out = torch.zeros(1, dtype=dtype)
        getattr(lib, name)(out, sizes, threads=1)
        assert out.item() == expected


LOG = (
    HEAD
    + """#include <metal_logging>
namespace mine { using os_log = metal::os_log; }
constant mine::os_log logger("subsystem", "category");
"""
    + KERNEL
    + 'o[0] = 1; logger.log_debug("%d", 3); }'
)


def test_logging_came_with_metal_3_2():
    assert written(metal.compile_shader(LOG))[0] == 1
    assert not lint(LOG, [320])
    assert any("metal_logging" in f.message for f in lint(LOG, [310]))


@pytest.mark.parametrize("initial", ["= {1}", "= {0, 1}", "= 0.0f"])
def test_threadgroup_memory_begins_without_values(initial: str):
    extent = "" if "{" not in initial else "[2]"
    with pytest.raises(SyntaxError, match="threadgroup variable cannot be initialised"):
        metal.compile_shader(HEAD + KERNEL + f"threadgroup float b{extent} {initial}; o[0] = 0; }}")
    if initial == "= {1}":  # what stands for zeros writes none: Metal does not say that it does
        out = torch.zeros(1)
        metal.compile_shader(HEAD + KERNEL + "threadgroup float b[2] = {0}; o[0] = b[1]; }").k(out, threads=1)
        assert out.isnan().item()


def test_an_atomic_has_no_order():
    text = "kernel void k(device atomic_int* o) { atomic_store_explicit(o, 1, memory_order_seq_cst); }"
    with pytest.raises(SyntaxError, match="atomic_store_explicit"):
        metal.compile_shader(HEAD + text)
