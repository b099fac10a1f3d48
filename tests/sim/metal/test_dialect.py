"""What Apple's compiler takes beyond the C++ that clang takes: classes, matrices and packed vectors in every address
space, scalars beside vectors, quads, 64-bit atomics."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
HEAD = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
LANE = "uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]"


def one(body: str, x: torch.Tensor, out: torch.Tensor, threads: int = 1, head: str = "", mode: str = "checked"):
    """Run ``body`` on x and o."""
    kinds = {torch.float32: "float", torch.int32: "int", torch.int64: "ulong", torch.float16: "half"}
    text = (
        f"{HEAD}{head}\nkernel void k(device const {kinds[x.dtype]}* x [[buffer(0)]], "
        f"device {kinds[out.dtype]}* o [[buffer(1)]], {LANE}) {{\n{body}\n}}\n"
    )
    with metal.settings(mode=mode):
        metal.compile_shader(text).k(x, out, threads=threads, group_size=threads)
    return out


def test_a_scalar_beside_a_vector_is_spread():
    v = torch.tensor([-2.0, 0.5, 3.0, 9.0])
    body = """float4 v = ((device const float4*)x)[0];
    float4 r[8] = {fma(v, 3.0f, v), max(v, 1), min(2, v), clamp(v, 0, 4.0f), mix(v, 1.0f, 0.25f),
                   select(v, 7.0f, v > 1.0f), pow(abs(v), 2.0f), max3(v, 0, 1)};
    for (int k = 0; k < 8; k++) for (int c = 0; c < 4; c++) o[4 * k + c] = r[k][c];"""
    expected = [
        v * 4, v.clamp(min=1), v.clamp(max=2), v.clamp(0, 4), v + (1 - v) * 0.25,
        torch.where(v > 1, 7.0, v), v.abs() ** 2, v.clamp(min=1),
    ]  # fmt: skip
    assert torch.equal(one(body, v, torch.zeros(32)).view(8, 4), torch.stack(expected))


@pytest.mark.sample(3)
@pytest.mark.parametrize("call", ["max(half4(1), float4(1))", "fma(float4(1), float3(1), float4(1))", "max(v, 2u)"])
def test_vectors_of_two_kinds_have_no_overload(call: str):
    with pytest.raises(SyntaxError, match=r"no matching function|ambiguous"):
        one(f"int v = 1; auto r = {call}; o[0] = r.x;".replace("r.x", "r" if "2u" in call else "r.x"), torch.zeros(1),
            torch.zeros(1))  # fmt: skip


CLASSES = """struct P {
  int a; half b[3];
  int get() const thread { return a; }
  int get() const device { return a; }
  int get() const threadgroup { return a; }
  explicit operator float() const device { return a; }
};
P twice(P p) { p.a *= 2; return p; }
template <typename T> T second(const device T* p) { return p[1]; }
"""


def test_classes_are_copied_between_address_spaces():
    body = """const device P* p = (const device P*)x;
  device P* q = (device P*)o;
  threadgroup P t[4];
  P a = p[1];
  P b(p[0]);
  t[0] = a;
  t[1] = t[0];
  q[0] = t[1];
  q[1] = twice(p[1]);
  q[2] = P{7, {1, 2, 3}};
  P e[2] = {p[0], t[1]};
  q[3] = e[0];
  q[4].a = p[1].get() + p->get() + q->get() + t[1].get() + second(p).a + b.a;
  q[5].a = int(float(p[1]) * 2);"""
    x = torch.tensor([3, 0x3C003C00, 5, 4, 0x40004000, 6], dtype=torch.int32)
    got = one(body, x, torch.zeros(18, dtype=torch.int32), head=CLASSES).view(6, 3)
    assert torch.equal(got[0], x[3:]) and torch.equal(got[3], x[:3])
    assert got[1].tolist() == [8, *x[4:].tolist()] and got[2][0] == 7
    assert (got[4][0], got[5][0]) == (4 * 4 + 3 + 3, 8)


def test_a_copy_of_a_class_is_checked_like_any_access():
    with pytest.raises(metal.SimulationError, match=r"0 bytes past the end of buffer\(0\).*P a = p\[1\]"):
        one("const device P* p = (const device P*)x;\nP a = p[1];\no[0] = a.a;", torch.zeros(3, dtype=torch.int32),
            torch.zeros(1), head=CLASSES)  # fmt: skip
    with pytest.raises(metal.SimulationError, match="data race in threadgroup variable t"):
        one("threadgroup P t[1];\nt[0] = P{int(i), {0, 0, 0}};\no[i] = t[0].a;", torch.zeros(1), torch.zeros(64), 64,
            head=CLASSES)  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "use",
    ["o[0] = p->plain();", "q->set(3);", "o[0] = float(c->a);\no[1] = c->get();", "o[0] = c[0];"],
    ids=["no method for device", "a method that sets", "no method for constant", "no operator for constant"],
)
def test_methods_are_called_where_they_are_for(use: str):
    head = """struct S {
  int a;
  int plain() const { return a; }
  int get() const device { return a; }
  void set(int b) device { a = b; }
  operator float() const device { return a; }
};
"""
    body = "const device S* p = (const device S*)x; device S* q = (device S*)o; constant S* c = nullptr;\n"
    assert (
        one(f"{body} o[0] = p->get() + float(*p);", torch.tensor([3], dtype=torch.int32), torch.zeros(1), head=head)
        == 6
    )
    with pytest.raises(SyntaxError):
        one(body + use, torch.zeros(1), torch.zeros(1), head=head)


def test_methods_that_differ_in_more_than_the_address_space_are_refused():
    head = "struct S { int a; int get() const thread { return a; } int get() const device { return a + 1; } };"
    with pytest.raises(SyntaxError, match="another one in device memory"):
        one("o[0] = 1;", torch.zeros(1), torch.zeros(1), head=head)


def test_matrices_are_columns():
    a, b = torch.randn(3, 4), torch.randn(2, 3)  # float3x4: 3 columns of 4 rows; float2x3
    body = """device const float4* c = (device const float4*)x;
  float3x4 a = float3x4(c[0], c[1], c[2]);
  float2x3 b = float2x3(x[12], x[13], x[14], x[15], x[16], x[17]);
  float2x4 m = a * b;
  float4x2 t = transpose(m);
  float4 v = a * float3(1, 2, 3);
  float3 w = c[0] * a;
  device float3x3* d = (device float3x3*)(o + 32);
  d[0] = float3x3(2.0f);
  d[0][1][0] = 5;
  d[1] = d[0] * 2.0f - d[0];
  half3x3 h = half3x3(d[1]);
  for (int k = 0; k < 8; k++) o[k] = m[k / 4][k % 4], o[8 + k] = t[k / 2][k % 2];
  for (int k = 0; k < 4; k++) o[16 + k] = v[k];
  for (int k = 0; k < 3; k++) o[20 + k] = w[k];
  o[23] = determinant(d[0]) + h[1][0];"""
    got = one(body, torch.cat([a.flatten(), b.flatten()]), torch.zeros(64))
    m = b @ a  # rows here are columns there
    torch.testing.assert_close(got[:8].view(2, 4), m)
    torch.testing.assert_close(got[8:16].view(4, 2), m.T)
    torch.testing.assert_close(got[16:20], torch.tensor([1.0, 2, 3]) @ a)
    torch.testing.assert_close(got[20:23], a @ a[0])
    assert got[23] == 8 + 5 and got[32:44].view(3, 4)[:, :3].tolist() == [[2, 0, 0], [5, 2, 0], [0, 0, 2]]


def test_packed_vectors_of_three_lie_behind_each_other():
    body = """device const packed_float3* p = (device const packed_float3*)x;
  device packed_float3* q = (device packed_float3*)o;
  float3 f = p[1];
  q[0] = f * 2.0f;
  q[1] = float3(p[0]) + p[1] * 2 - p[1];
  q[2] = p[1];
  q[2][1] = p[0].z;
  packed_half3 h = packed_half3(1, 2, 3);
  o[9] = p[1][2] + sizeof(packed_float3) + h.y;"""
    got = one(body, torch.arange(1.0, 7), torch.zeros(10))
    assert got.tolist() == [8, 10, 12, 5, 7, 9, 4, 3, 6, 6 + 12 + 2]


def test_the_origin_of_a_transposed_matrix_is_a_place_in_memory():
    x, out = torch.randn(24, 32), torch.zeros(24, 32)
    body = """simdgroup_float8x8 a;
  simdgroup_load(a, x, 32, ulong2(16, 8), true);
  simdgroup_store(a, o, 32, ulong2(8, 16), false);
  simdgroup_store(a, o, 32, ulong2(24, 0), true);"""
    one(body, x, out, 32)
    tile = x[8:16, 16:24]
    assert torch.equal(out[16:, 8:16], tile.T) and torch.equal(out[:8, 24:], tile)


def test_atomics_of_64_bits():
    text = HEAD + (
        f"kernel void k(device const ulong* x, device atomic_ulong* o, {LANE}) {{\n"
        "atomic_max_explicit(o, x[i], memory_order_relaxed); atomic_min_explicit(o + 1, x[i], memory_order_relaxed); }"
    )
    x = torch.tensor([5, 1 << 62, 3, 1 << 40])
    out = torch.tensor([4, 1 << 50])
    metal.compile_shader(text).k(x, out, threads=4)
    assert out.tolist() == [1 << 62, 3]
    with pytest.raises(SyntaxError, match="no matching function"):
        metal.compile_shader(text.replace("device atomic_ulong", "device atomic_int"))


def test_quads():
    x = torch.arange(32) * 7 % 32 + 1
    body = """int v = x[i]; int l = i & 3;
  int r[16] = {quad_sum(v), quad_max(v), quad_min(v), quad_product(v & 3), quad_and(v), quad_or(v), quad_xor(v),
    quad_prefix_inclusive_sum(v), quad_prefix_exclusive_sum(v), quad_broadcast(v, 2), quad_shuffle_xor(v, 1),
    quad_shuffle_rotate_down(v, 1), quad_shuffle_and_fill_down(v, -v, 1),
    int(quad_vote::vote_t(quad_ballot(v > 9))),
    quad_all(v > 3) + 2 * quad_any(v > 29), quad_broadcast_first(v)};
  for (int k = 0; k < 16; k++) o[k * 32 + i] = r[k];"""
    got = one(body, x.int(), torch.zeros(16 * 32, dtype=torch.int32), 32).view(16, 8, 4).long()
    q = x.view(8, 4)
    bits = lambda f: torch.stack([torch.tensor(f(*row)) for row in q.tolist()])[:, None].expand(8, 4)
    fill = torch.cat([q[:, 1:], -q[:, :1]], 1)
    expected = [
        q.sum(1, True).expand(8, 4), q.amax(1, True).expand(8, 4), q.amin(1, True).expand(8, 4),
        (q & 3).prod(1, True).expand(8, 4), bits(lambda a, b, c, d: a & b & c & d),
        bits(lambda a, b, c, d: a | b | c | d), bits(lambda a, b, c, d: a ^ b ^ c ^ d),
        q.cumsum(1), q.cumsum(1) - q, q[:, 2:3].expand(8, 4), q[:, [1, 0, 3, 2]],
        q.roll(-1, 1), fill, ((q > 9) * torch.tensor([1, 2, 4, 8])).sum(1, True).expand(8, 4),
        ((q > 3).all(1, True) + 2 * (q > 29).any(1, True)).expand(8, 4), q[:, :1].expand(8, 4),
    ]  # fmt: skip
    for k, e in enumerate(expected):
        assert torch.equal(got[k], e), k
    past = one("o[i] = quad_shuffle_down(x[i], 1);", x.float(), torch.zeros(32), 32).view(8, 4)
    assert torch.equal(past[:, :3], q[:, 1:].float()) and past[:, 3].isnan().all()


def test_macros_in_unroll_and_arrays_as_parameters():
    head = """#define TWICE(n) (2 * (n))
#define COUNT TWICE(2)
float total(device const float x[4], constant const int* n) { return x[0] + x[3]; }
float row(device const float* const x) {
  float s = 0;
#pragma unroll(COUNT)
  for (int k = 0; k < 4; k++) s += x[k];
#pragma clang loop unroll_count(TWICE(1))  // a comment
  for (int k = 0; k < 4; k++) s += x[k];
  return s;
}"""
    got = one("o[0] = row(x); o[1] = total(x, nullptr);", torch.arange(1.0, 5), torch.zeros(2), head=head)
    assert got.tolist() == [20, 5]


@pytest.mark.proof
def test_functions_that_were_missing():
    x = torch.tensor([0.7, -3.5, 1e-40, 65536.0])
    body = """int e; o[i] = frexp(x[i], e); o[4 + i] = e; o[8 + i] = nextafter(x[i], 0.0f);
    o[12 + i] = smoothstep(0.0f, 2.0f, x[i]); o[16 + i] = tanpi(x[i] / 8);"""
    got = one(body, x, torch.zeros(20), 4).view(5, 4)
    mantissa, exponent = torch.frexp(x)
    assert torch.equal(got[0], mantissa) and torch.equal(got[1], exponent.float())
    assert torch.equal(got[2], torch.nextafter(x, torch.zeros(4)))
    t = (x / 2).clamp(0, 1)
    torch.testing.assert_close(got[3], t * t * (3 - 2 * t))
    torch.testing.assert_close(got[4, :2], torch.tan(x[:2].double() / 8 * torch.pi).float())


@pytest.mark.proof
def test_filling_shuffles_within_groups_of_lanes():
    x = torch.arange(32.0)
    body = (
        "o[i] = simd_shuffle_and_fill_down(x[i], -x[i], 1, 8); o[32 + i] = simd_shuffle_and_fill_up(x[i], -x[i], 3, 8);"
    )
    got = one(body, x, torch.zeros(64), 32).view(2, 4, 8)
    g = x.view(4, 8)
    assert torch.equal(got[0], torch.cat([g[:, 1:], -g[:, :1]], 1))
    assert torch.equal(got[1], torch.cat([-g[:, 5:], g[:, :5]], 1))
