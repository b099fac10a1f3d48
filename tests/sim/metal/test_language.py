"""Metal's language on the CPU: rounding, vectors, what lanes do together, matrices, atomics, templates."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
NAMES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
DTYPES = pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
PRELUDE = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
LANES = "uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]"


def one(body: str, x: torch.Tensor, out: torch.Tensor, threads: int | None = None, head: str = "") -> torch.Tensor:
    """Run ``body`` on x and o, one thread an element."""
    kinds = {**NAMES, torch.int32: "int", torch.int64: "long", torch.int16: "short", torch.uint8: "uchar",
             torch.int8: "char", torch.bool: "bool"}  # fmt: skip
    text = (
        f"{PRELUDE}{head}\nkernel void k(device const {kinds[x.dtype]}* x [[buffer(0)]], "
        f"device {kinds[out.dtype]}* o [[buffer(1)]], {LANES}) {{\n{body}\n}}\n"
    )
    metal.compile_shader(text).k(x, out, threads=threads or out.numel(), group_size=min(out.numel(), 1024))
    return out


def random_bits(dtype: torch.dtype, n: int = 4096) -> torch.Tensor:
    """Finite values of every magnitude: random bit patterns."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    x = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, (n,), dtype=bits).view(dtype)
    return torch.where(x.isfinite() & (x.abs() < 1e4), x, torch.rand(n).to(dtype))


@pytest.mark.sample(2)
@DTYPES
@pytest.mark.parametrize("op", ["a + b", "a - b", "a * b", "a / b", "a * a * b - a", "a * b + a * a"])
def test_every_operation_rounds_once_as_in_torch(dtype: torch.dtype, op: str):
    a, b = random_bits(dtype), random_bits(dtype)
    expected = eval(op, {"a": a, "b": b})
    kind = NAMES[dtype]
    got = one(f"{kind} a = x[2 * i], b = x[2 * i + 1]; o[i] = {op};", torch.stack([a, b], 1), torch.zeros_like(a))
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat"])
def test_conversions_from_float_round_to_nearest_even(dtype: torch.dtype):
    x = random_bits(torch.float32)
    ties = torch.arange(1, 2, 2**-12)  # halfway between neighbours, in both formats
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 65519.99, 65520.0, 1e-8, 6e-8, -0.0])
    x = torch.cat([x, ties, special])
    got = one(f"o[i] = {NAMES[dtype]}(x[i]);", x, torch.zeros(x.numel(), dtype=dtype))
    torch.testing.assert_close(got, x.to(dtype), rtol=0, atol=0, equal_nan=True)


FUNCTIONS = [
    "exp",
    "exp2",
    "log",
    "log2",
    "sin",
    "cos",
    "tanh",
    "sqrt",
    "rsqrt",
    "floor",
    "ceil",
    "trunc",
    "round",
    "abs",
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_correctly_rounded(name: str):
    """The nearest float to the double result, but for cases that double precision itself cannot decide."""
    x = torch.rand(4096) * 40 - (0 if name in ("log", "log2", "sqrt", "rsqrt") else 20)
    reference = (lambda t: torch.sign(t) * torch.floor(t.abs() + 0.5)) if name == "round" else getattr(torch, name)
    expected = reference(x.double()).float()
    got = one(f"o[i] = {name}(x[i]);", x, torch.zeros_like(x))
    assert (got != expected).float().mean() < 1e-3
    torch.testing.assert_close(got, expected, rtol=2**-23, atol=0)
    for space in ("metal::precise", "fast"):
        if name not in ("floor", "ceil", "trunc", "round", "abs"):
            assert torch.equal(one(f"o[i] = {space}::{name}(x[i]);", x, torch.zeros_like(x)), got)


def test_vectors_convert_and_swizzle_by_component():
    x = torch.arange(8.0) + 0.75
    body = """float4 v = float4(x[0], float2(x[1], x[2]), x[3]); int4 n = int4(v); half4 h = half4(n);
    float4 w = static_cast<float4>(n) + float4(h.wzyx) * 2.0;
    o[i] = w[i] + dot(v.xy, v.zw) + float2(3).y + vec<float, 3>(i).z;"""
    expected = torch.tensor([6.0, 5.0, 4.0, 3.0]) + (0.75 * 2.75 + 1.75 * 3.75) + 3 + torch.arange(4.0)
    assert torch.equal(one(body, x, torch.zeros(4)), expected)


def test_literals_are_floats_not_doubles():
    x = torch.tensor([1.0, 3.0])
    assert torch.equal(
        one("o[i] = x[i] * 0.1 + 1e-8 * (0.5h + (float)1.0bf);", x, torch.zeros(2)), x * torch.tensor(0.1) + 1.5e-8
    )


REDUCTIONS = {
    "simd_sum": lambda x: x.sum(1), "simd_product": lambda x: x.prod(1), "simd_max": lambda x: x.amax(1),
    "simd_min": lambda x: x.amin(1),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int16, torch.int8])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: torch.dtype):
    """Small integers, so that no order of additions rounds; the second simdgroup is not full."""
    x = torch.randint(1, 3, (56,)).to(dtype) if name != "simd_product" else torch.ones(56, dtype=dtype)
    x[5], x[40] = 3, 3
    parts = [x[:32], x[32:]]
    expected = torch.cat([REDUCTIONS[name](p[None]).to(dtype).expand(len(p)) for p in parts])
    assert torch.equal(one(f"o[i] = {name}(x[i]);", x, torch.zeros_like(x)), expected)


def test_reductions_ignore_nan_and_work_on_vectors():
    x = torch.arange(64.0)
    x[3] = float("nan")
    assert one("o[i] = simd_max(x[i]);", x[:32], torch.zeros(32)).eq(31).all()
    got = one("float2 s = simd_sum(float2(x[i], 1)); o[i] = s.x + 100 * s.y;", torch.arange(32.0), torch.zeros(32))
    assert got.eq(496 + 3200).all()


L = torch.arange(32)
SHUFFLES = {
    "simd_broadcast(x[i], 5)": L * 0 + 5,
    "simd_broadcast_first(x[i])": L * 0,
    "simd_shuffle(x[i], ushort(31 - lane))": 31 - L,
    "simd_shuffle_xor(x[i], 9)": L ^ 9,
    "simd_shuffle_rotate_down(x[i], 3)": (L + 3) % 32,
    "simd_shuffle_rotate_up(x[i], 3)": (L - 3) % 32,
    "lane < 29 ? simd_shuffle_down(x[i], 0) : x[i]": L,
    "quad_shuffle_xor(x[i], 1)": L ^ 1,
    "quad_broadcast(x[i], 2)": L // 4 * 4 + 2,
    "quad_sum(x[i])": L // 4 * 16 + 6,
    "simd_shuffle_and_fill_down(x[i], -x[i], 2)": torch.cat([L[2:], -L[:2]]),
    "simd_shuffle_and_fill_up(x[i], -x[i], 2)": torch.cat([-L[30:], L[:30]]),
    "simd_prefix_inclusive_sum(x[i])": L.cumsum(0),
    "simd_prefix_exclusive_sum(x[i])": L.cumsum(0) - L,
    "simd_prefix_inclusive_product(1.0f + (lane == 3))": 1 + (L >= 3).int(),
    "simd_and(uint(x[i]) | 64u)": L * 0 + 64,
    "simd_or(uint(x[i]))": L * 0 + 31,
    "simd_xor(lane < 3 ? lane + 1 : 0u)": L * 0,
    "simd_all(x[i] >= 0)": L * 0 + 1,
    "simd_any(x[i] > 30)": L * 0 + 1,
    "simd_is_first()": (L == 0).int(),
    "uint(ulong(simd_ballot(x[i] >= 28)) >> 28)": L * 0 + 15,
    "popcount(uint(ulong(simd_active_threads_mask())))": L * 0 + 32,
}


@pytest.mark.parametrize("expression", SHUFFLES)
def test_lanes_exchange_values(expression: str):
    assert torch.equal(one(f"o[i] = {expression};", torch.arange(32.0), torch.zeros(32)), SHUFFLES[expression].float())


def test_shuffling_past_the_end_gives_nan():
    got = one("o[i] = simd_shuffle_down(x[i], 4);", torch.arange(32.0), torch.zeros(32))
    assert torch.equal(got[:28], torch.arange(4.0, 32)) and got[28:].isnan().all()


@DTYPES
def test_matrix_product_and_its_lane_map(dtype: torch.dtype):
    """Operands of any type are multiplied and added in float; lane l holds two neighbours of one row."""
    a, b, c = (torch.randn(8, 8).to(dtype) for _ in range(3))
    kind = NAMES[dtype]
    head = """template <typename T> void body(device const T* x, device float* o, uint lane) {
  simdgroup_matrix<T, 8, 8> a, b, c; simdgroup_float8x8 d;
  simdgroup_load(a, x, 8); simdgroup_load(b, x + 64, 8, ulong2(0, 0), true); simdgroup_load(c, x, 8, ulong2(0, 16));
  simdgroup_multiply_accumulate(d, a, b, c);
  simdgroup_store(d, o, 8);
  d.thread_elements()[0] = lane; d.thread_elements().y = lane + 0.5;
  simdgroup_store(d, o + 64, 8);
  simdgroup_multiply(d, a, b);
  simdgroup_store(d, o + 128, 8, ulong2(0, 0), true);
}"""
    out = torch.zeros(192)
    x = torch.cat([a, b, c])
    text = f"{PRELUDE}{head}\nkernel void k(device const {kind}* x, device float* o, {LANES}) {{ body(x, o, lane); }}"
    metal.compile_shader(text).k(x, out, threads=32)
    exact = a.double() @ b.double().T
    # Eight products and nine summands, each rounded to float32: at most nine halves of an eps of what they sum up to.
    near = 9 / 2 * torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs().T + c.double().abs())
    assert ((out[:64].view(8, 8).double() - exact - c.double()).abs() <= near).all()
    assert ((out[128:].view(8, 8).T.double() - exact).abs() <= near).all()
    lane = torch.arange(32)
    row, column = (lane // 4 & 4) + lane // 2 % 4, (lane // 4 & 2) * 2 + lane % 2 * 2
    assert torch.equal(out[64:128].view(8, 8)[row, column], lane.float())
    assert torch.equal(out[64:128].view(8, 8)[row, column + 1], lane + 0.5)


def test_a_matrix_from_one_value_is_diagonal():
    body = """simdgroup_float8x8 m(3.0f); simdgroup_store(m, o, 8);
    simdgroup_store(make_filled_simdgroup_matrix<float, 8, 8>(2.0f), o + 64, 8);"""
    out = one(body, torch.zeros(1), torch.zeros(128), threads=32)
    assert torch.equal(out[:64].view(8, 8), 3 * torch.eye(8)) and out[64:].eq(2).all()


def test_atomics():
    text = f"""{PRELUDE}
constant memory_order order = memory_order_relaxed;
kernel void k(device atomic_uint* u [[buffer(0)]], device atomic_int* s [[buffer(1)]],
              device atomic_float* f [[buffer(2)]], device uint* old [[buffer(3)]],
              uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {{
  threadgroup atomic_uint count;
  if (t == 0) atomic_store_explicit(&count, 0u, order);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  old[i] = atomic_fetch_add_explicit(u, 2u, order);
  atomic_fetch_max_explicit(s, int(i), order);
  atomic_fetch_min_explicit(s + 1, -int(i), order);
  atomic_fetch_or_explicit(u + 1, 1u << (i & 31), order);
  atomic_fetch_add_explicit(f, 0.5f, order);
  atomic_fetch_add_explicit(&count, 1u, order);
  uint seen = 7u;
  while (!atomic_compare_exchange_weak_explicit(u + 2, &seen, seen + 3u, order, order)) {{}}
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0) atomic_fetch_add_explicit(u + 3, atomic_load_explicit(&count, order), order);
}}"""
    u, s, f = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(1)
    old = torch.zeros(96, dtype=torch.int32)
    with metal.settings(mode="checked"):
        metal.compile_shader(text).k(u, s, f, old, threads=96, group_size=48)
    assert u.tolist() == [192, -1, 288, 96] and s.tolist() == [95, -95] and f.item() == 48
    assert sorted(old.tolist()) == list(range(0, 192, 2))


def test_templates_become_kernels_by_host_name():
    text = f"""{PRELUDE}
template <typename T, int N = 2>
[[kernel, max_total_threads_per_threadgroup(N * 32)]]
void scale(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {{
  x[i] = static_cast<T>(x[i] * T(N));
}}
#define make(name, ...) \\
  template [[host_name("scale_" name)]] [[kernel]] decltype(scale<__VA_ARGS__>) scale<__VA_ARGS__>;
make("half_3", half, 3)
make("float", float)
template [[host_name("scale_int_" "9")]] kernel void
scale<int, 9>(device int* x [[buffer(0)]], uint i [[thread_position_in_grid]]);
kernel void plain(device float* x, uint3 i [[thread_position_in_grid]]) {{ x[i.x] = 1; }}
"""
    library = metal.compile_shader(text)
    assert sorted(dir(library)) == ["plain", "scale_float", "scale_half_3", "scale_int_9"]
    for name, x, factor, limit in (
        ("scale_half_3", torch.ones(5, dtype=torch.float16), 3, 96),
        ("scale_float", torch.ones(5), 2, 64),
        ("scale_int_9", torch.ones(5, dtype=torch.int32), 9, 288),
    ):
        kernel = getattr(library, name)
        kernel(x)
        assert x.eq(factor).all() and kernel.max_threads_per_threadgroup == limit
    with pytest.raises(ValueError, match="^Threadgroup size exceeds 64 limit$"):
        library.scale_float(torch.ones(65), group_size=65)


def test_grid_values_of_a_ragged_grid():
    names = {
        "thread_position_in_grid": 3, "thread_position_in_threadgroup": 3, "threadgroup_position_in_grid": 3,
        "threads_per_threadgroup": 3, "dispatch_threads_per_threadgroup": 3, "threads_per_grid": 3,
        "threadgroups_per_grid": 3, "thread_index_in_threadgroup": 1, "thread_index_in_simdgroup": 1,
        "simdgroup_index_in_threadgroup": 1, "simdgroups_per_threadgroup": 1, "threads_per_simdgroup": 1,
    }  # fmt: skip
    parameters = ", ".join(
        f"{'ushort3' if n == 3 else 'uint'} v{j} [[{name}]]" for j, (name, n) in enumerate(names.items())
    )
    stores = "".join(
        f"o[at++] = v{j}.{c};" if n == 3 else f"o[at++] = v{j};"
        for j, n in enumerate(names.values())
        for c in "xyz"[:n]
    )
    width = sum(names.values())
    at = f"uint at = (v0.x + 5 * (v0.y + 3 * v0.z)) * {width};"
    text = f"{PRELUDE}kernel void k(device int* o, {parameters}) {{ {at} {stores} }}"
    out = torch.zeros(5 * 3 * 2, width, dtype=torch.int32)
    metal.compile_shader(text).k(out, threads=(5, 3, 2), group_size=(4, 2, 2))
    x, y, z = 4, 2, 1  # the last thread: a threadgroup of 1 x 1 x 2
    assert out[-1].tolist() == [x, y, z, 0, 0, 1, 1, 1, 0, 1, 1, 2, 4, 2, 2, 5, 3, 2, 2, 2, 1, 1, 1, 0, 1, 32]
    x, y, z = 2, 1, 1  # in a full threadgroup of 4 x 2 x 2
    assert out[x + 5 * (y + 3 * z)].tolist() == [
        2,
        1,
        1,
        2,
        1,
        1,
        0,
        0,
        0,
        4,
        2,
        2,
        4,
        2,
        2,
        5,
        3,
        2,
        2,
        2,
        1,
        14,
        14,
        0,
        1,
        32,
    ]
