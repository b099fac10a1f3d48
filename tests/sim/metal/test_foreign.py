"""Sources that another runtime than torch.mps compiles and launches; the same words stay refused everywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_attnkit.sim import metal
from torch_attnkit.sim.metal.lint import lint

pytestmark = pytest.mark.simulator
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
CONSTANTS = (
    HEAD
    + """constant int count [[function_constant(3)]];
constant float factor [[function_constant(5 + 2)]];
constant bool has_bias [[function_constant(8)]];
constant int twice = 2 * count;
constant int other = is_function_constant_defined(count) ? twice : -1;
kernel void k(device const float* x [[buffer(0)]], device const float* bias [[buffer(2), function_constant(has_bias)]],
              device float* o [[buffer(5)]], uint i [[thread_position_in_grid]]) {
  float s = 0;
  for (int n = 0; n < count; n++) s += x[i] * factor;
  if (has_bias) s += bias[i];
  o[i] = s + 1000 * other;
}
"""
)
MEMORY = (
    HEAD
    + """kernel void k(device const float* x [[buffer(0)]], device float* o [[buffer(1)]],
              threadgroup float* a [[threadgroup(0)]], threadgroup int* b [[threadgroup(2)]],
              uint i [[thread_position_in_threadgroup]], uint n [[threads_per_threadgroup]]) {
  threadgroup float mine[4];
  a[i] = x[i];
  b[n - 1 - i] = i;
  if (i < 4) mine[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = a[b[i]] + mine[i % 4];
}
"""
)


def test_function_constants_are_given_to_a_function():
    lib = metal.compile_foreign(CONSTANTS)
    x, bias, out = torch.arange(4.0), torch.full((4,), 100.0), torch.zeros(4)
    lib.function("k", {3: 2, 7: 0.5, 8: True})(x, None, bias, None, None, out)
    assert torch.equal(out, x + 100 + 4000)
    lib.function("k", {3: 3, 7: 2.0})(x, None, None, None, None, out)
    assert torch.equal(out, 6 * x + 6000)
    lib.k(x, None, None, None, None, out)
    assert torch.equal(out, torch.full((4,), -1000.0))
    with pytest.raises(ValueError, match=r"no function_constant\(9\)"):
        lib.function("k", {9: 1})


@pytest.mark.proof
def test_a_buffer_that_is_not_bound_is_no_memory():
    kernel = metal.compile_foreign(CONSTANTS).function("k", {8: True})
    with metal.settings(mode="checked"), pytest.raises(metal.SimulationError, match="read of 4 bytes out of bounds"):
        kernel(torch.zeros(4), None, None, None, None, torch.zeros(4))


def test_a_function_constant_is_no_constant_expression():
    with pytest.raises(SyntaxError, match="variable length array"):
        metal.compile_foreign(CONSTANTS.replace("float s = 0;", "float a[count]; a[0] = 0; float s = a[0];"))


def test_threadgroup_memory_is_given_to_a_launch():
    kernel = metal.compile_foreign(MEMORY).k
    x, out = torch.arange(64.0), torch.zeros(64)
    for mode in ("fast", "checked", "counting"):
        with metal.settings(mode=mode):
            kernel(x, out.zero_(), threads=64, group_size=64, threadgroup={0: 256, 2: 256})
        assert torch.equal(out, x.flip(0) + torch.arange(4.0).repeat(16))
    with metal.settings(mode="checked"), pytest.raises(metal.SimulationError, match=r"outside threadgroup variable a"):
        kernel(x, out, threads=64, group_size=64, threadgroup={0: 128, 2: 256})
    for given, why in (
        ({0: 256}, "is given for"),
        ({0: 256, 2: 100}, "multiple of 16"),
        ({0: 32768, 2: 16}, "at most"),
    ):
        with pytest.raises(ValueError, match=why):
            kernel(x, out, threads=64, group_size=64, threadgroup=given)


@pytest.mark.parametrize(
    ("text", "why"),
    [(CONSTANTS, "no function constants"), (MEMORY, "no dynamic threadgroup memory")],
    ids=["constants", "memory"],
)
def test_torch_mps_has_neither(text: str, why: str):
    with pytest.raises(SyntaxError, match=why):
        metal.compile_shader(text)
    assert any(why in f.message for f in lint(text))


def test_arguments_of_torch_mps_leave_nothing_out():
    lib = metal.compile_shader(HEAD + "kernel void k(device float* o [[buffer(1)]]) { o[0] = 1; }")
    with pytest.raises(ValueError, match=r"argument 0 \(NoneType\) belongs to no parameter"):
        lib.k(None, torch.zeros(1), threads=1)


def test_headers_macros_and_a_choice_of_kernels(tmp_path: Path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "part.h").write_text(
        "#pragma once\n// \N{COPYRIGHT SIGN}\nfloat part(float x) { return x * TIMES; }\n"
    )
    text = (
        HEAD
        + '#include "inner/part.h"\n#include "inner/part.h"\n'
        + "template <typename T> kernel void k(device T* o, uint i [[thread_position_in_grid]]) "
        + "{ o[i] = part(o[i]); }\n"
        + "".join(f'template [[host_name("k_{t}")]] [[kernel]] decltype(k<{t}>) k<{t}>;\n' for t in ("float", "half"))
        + "typedef decltype(k<float>) named;\n"
        + 'template [[host_name("k_again")]] kernel named k<float>;\n'
    )
    lib = metal.compile_foreign(text, folders=[str(tmp_path)], macros={"TIMES": "3"}, kernels=["k_float", "k_again"])
    assert set(dir(lib)) == {"k_float", "k_again"}
    o = torch.ones(4)
    lib.k_float(o)
    lib.k_again(o)
    assert o.tolist() == [9] * 4


LOCKSTEP = (
    HEAD
    + """kernel void k(device const float* x [[buffer(0)]], device float* o [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  threadgroup float s[32];
  s[i] = x[i];
  float total = simd_sum(x[i]);
  o[i] = s[31 - i] + total;
}
"""
)


def test_lockstep_is_asked_for():
    x, out = torch.arange(32.0), torch.zeros(32)
    kernel = metal.compile_shader(LOCKSTEP).k
    with (
        metal.settings(mode="checked"),
        pytest.raises(metal.SimulationError, match="data race in threadgroup variable s"),
    ):
        kernel(x, out)
    for mode in ("fast", "checked"):
        with metal.settings(mode=mode, lockstep=True):
            kernel(x, out.zero_())
        assert torch.equal(out, x.flip(0) + x.sum())
    without = metal.compile_shader(LOCKSTEP.replace("simd_sum(x[i])", "x[i]")).k
    with (
        metal.settings(mode="checked", lockstep=True),
        pytest.raises(metal.SimulationError, match="threadgroup variable s"),
    ):
        without(x, out)


@pytest.mark.proof
def test_names_inside_apples_library_are_for_others_alone():
    text = (
        HEAD
        + "kernel void k(device float* o, uint i [[thread_position_in_grid]]) { o[i] = __metal_exp2(o[i], false); }"
    )
    o = torch.arange(4.0)
    metal.compile_foreign(text).k(o)
    assert o.tolist() == [1, 2, 4, 8]
    with pytest.raises(SyntaxError, match="__metal_exp2"):
        metal.compile_shader(text)
