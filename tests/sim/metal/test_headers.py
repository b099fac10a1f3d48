"""The simulator's own headers convert vectors as Metal does, whatever types a program uses them with.

``conversions`` searches a program's part of clang's tree, in which what is precompiled is not. Here the whole of it is
searched, once the headers' templates have the types of a kernel.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_attnkit.sim.metal import compiler, conversions

pytestmark = pytest.mark.simulator
HEAD = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
TORCH = (
    f"{HEAD}#include <c10/metal/utils.h>\n#include <ATen/native/mps/kernels/DecodeAttention.h>\n"
    'template [[host_name("k")]] kernel void k_of<float4>(device float4*, uint);\n'
)
USED = """
template <class T> kernel void k_of(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  T a = x[i], b = x[i + 1];
  vec<int, 4> n = int4(a);
  a = select(a, b, a < b) + T(any(a > b)) + clamp(a, b, T(1)) + T(n) + as_type<T>(n) + simd_sum(a) + fma(a, b, exp(a));
  x[i] = a + T(simd_shuffle_xor(n, 1)) + T(sign(a)) + T(float4(half4(a)));
}
"""


def trees(text: str, work: Path) -> list[str]:
    """clang's tree of a program as it is compiled: without what is precompiled, and with it."""
    unit = compiler.translate(compiler.preprocess(compiler.embed(text), 310, work), work)
    flags = [["-fsyntax-only", "-Xclang", dump] for dump in ("-ast-dump", "-ast-dump-all")]
    return [compiler._compile(unit, compiler._instances(unit), flag, work) for flag in flags]


def test_no_header_reinterprets_a_vector(tmp_path):
    part, whole = trees(TORCH.replace("template [[", USED + "template [[", 1), tmp_path)
    assert len(whole) > len(part) + 5_000_000  # the headers
    assert "simd_shuffle_xor" in whole and not conversions.suspicious(whole)


def test_a_header_that_does_would_be_found(tmp_path, monkeypatch):
    cast = "template <class T> int4 kept(T x) { return (int4)x; }\n"
    here = tmp_path / "include"
    here.mkdir()
    for file in compiler.include().glob("*.h"):
        (here / file.name).write_text(file.read_text() + cast * (file.name == "msl_entry.h"))
    monkeypatch.setattr(compiler, "include", lambda: here)
    compiler._tools_key.cache_clear()
    try:
        program = "kernel void k(device float4* x [[buffer(0)]]) { x[0] = float4(kept(x[1])); }\n"
        part, whole = trees(HEAD + program, tmp_path)
    finally:
        compiler._tools_key.cache_clear()
    assert not conversions.suspicious(part) and conversions.suspicious(whole)
