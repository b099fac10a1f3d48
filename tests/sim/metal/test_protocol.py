"""The interface of torch.mps.compile_shader: objects, messages, and how arguments become bytes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from torch_attnkit import UnsupportedError
from torch_attnkit.core import config
from torch_attnkit.sim import metal
from torch_attnkit.sim.metal import compiler

pytestmark = pytest.mark.simulator
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
FULL = "kernel void full(device float* out, constant float& val, uint i [[thread_position_in_grid]]) { out[i] = val; }"


def library(parameter: str, body: str = "o[i] = float(p);") -> metal.Library:
    """A kernel k(o, p) whose second parameter is written as given."""
    return metal.compile_shader(
        f"{HEAD}struct Pair {{ int a; float b; }};\nkernel void k(device float* o [[buffer(0)]], {parameter}, "
        f"uint i [[thread_position_in_grid]]) {{ {body} }}"
    )


def test_the_example_of_torch():
    x = torch.zeros(16)
    lib = metal.compile_shader(FULL)
    lib.full(x, 3.14)
    assert x.eq(3.14).all() and dir(lib) == ["full"]
    kernel = lib.full
    assert (kernel.max_threads_per_threadgroup, kernel.thread_execution_width) == (1024, 32)
    assert kernel.static_thread_group_memory_length == 0


def test_static_threadgroup_memory_counts_what_is_used():
    lib = library("constant float& p", "threadgroup half a[5]; threadgroup float b; a[i] = 1; b = 2; o[i] = a[i] + b;")
    assert lib.k.static_thread_group_memory_length == 16 + 4


def test_an_unknown_kernel():
    with pytest.raises(RuntimeError, match="^Failed to create function state object for: nothing$"):
        _ = metal.compile_shader(FULL).nothing


def test_a_source_that_does_not_compile():
    with pytest.raises(SyntaxError, match=r"program_source:3:\d+: error: use of undeclared identifier 'y'"):
        metal.compile_shader(HEAD + "kernel void k(device float* x) { x[0] = y; }")


def test_a_template_is_compiled_for_every_instance():
    text = "template <typename T> kernel void k(device T* x) { x[0] = x[0].nothing; }\n"
    metal.compile_shader(HEAD + text)
    with pytest.raises(SyntaxError, match=r"program_source:3:\d+: error: "):
        metal.compile_shader(HEAD + text + 'template [[host_name("k_int")]] kernel void k<int>(device int*);')


def test_default_threads_and_groups():
    text = (
        HEAD
        + """kernel void k(device float* o, uint3 g [[threads_per_threadgroup]], uint3 n [[threads_per_grid]],
      uint3 i [[thread_position_in_grid]]) {
      if (i.x + i.y == 0) { o[0] = n.x; o[1] = n.y; o[2] = g.x; o[3] = g.y; } }"""
    )
    k = metal.compile_shader(text).k
    for threads, group, expected in (
        (None, None, [2000, 1, 1024, 1]),
        (100, None, [100, 1, 100, 1]),
        ([3000, 2], None, [3000, 2, 1024, 1]),
        ((64, 4), (8, 2), [64, 4, 8, 2]),
    ):
        out = torch.zeros(2000)
        k(out, threads=threads, group_size=group)
        assert out[:4].tolist() == expected
    with pytest.raises(RuntimeError, match="Number of threads is undefined or has wrong dimension"):
        metal.compile_shader(FULL.replace("device float* out, ", "").replace("out[i] = val;", "")).full(1.0)
    with pytest.raises(RuntimeError, match="Number of threads is undefined or has wrong dimension"):
        k(torch.zeros(4), threads=(1, 1, 1, 1))
    with pytest.raises(RuntimeError, match="threads has 2 dimensions and group_size 1"):
        k(torch.zeros(4), threads=(1, 1), group_size=1)
    with pytest.raises(ValueError, match=r"group_size is \(0,\): every dimension must be at least 1"):
        k(torch.zeros(4), threads=1, group_size=0)


def test_no_threads_run_nothing():
    x, empty = torch.zeros(3), torch.zeros(0)
    full = metal.compile_shader(FULL).full
    with metal.counting() as reports:
        full(empty, 1.0)
        full(x, 1.0, threads=0)
        assert x.eq(0).all()
        full(x, 1.0, threads=2)
    assert x.tolist() == [1, 1, 0] and [r.device_bytes for r in reports if r.device_bytes] == [8]


# parameter, body, value, arg_casts, result
BOUND = [
    ("constant float& p", "o[i] = p;", 2.5, None, 2.5),
    ("constant int& p", "o[i] = p;", -3, None, -3),
    ("constant uint& p", "o[i] = p;", 4000000000, None, 4e9),
    ("constant long& p", "o[i] = p;", -(2**40), None, -(2.0**40)),
    ("constant ushort& p", "o[i] = p;", 65535, None, 65535),
    ("constant bool& p", "o[i] = p;", True, None, 1),
    ("constant half& p", "o[i] = p;", 1.5, "fp16", 1.5),
    ("constant bfloat& p", "o[i] = p;", 1.5, {1: "bf16"}, 1.5),
    ("constant float* p", "o[i] = p[0] + p[2];", [1.0, 2.0, 3.0], None, 4),
    ("constant long* p", "o[i] = p[0] + p[2];", (1, 2, 3), None, 4),
    ("constant uint3& p", "o[i] = p.x + p.z;", [1, 2, 3, 0], "int32", 4),
    ("constant char* p", "o[i] = p[1];", [1, -2], "int8", -2),
    ("constant uchar& p", "o[i] = p;", 200, {1: "uint8"}, 200),
    ("constant Pair& p", "o[i] = p.a + p.b;", torch.tensor([5, 0x40000000], dtype=torch.int32), None, 7),
    ("device const uint4* p", "o[i] = p[0].y >> 8;", torch.arange(16, dtype=torch.uint8), None, 0x070605),
    ("device const ushort* p", "o[i] = p[0];", torch.tensor([1.0], dtype=torch.bfloat16), None, 0x3F80),
    ("device const bool* p", "o[i] = p[1];", torch.tensor([False, True]), None, 1),
    ("device const float* p", "o[i] = p[1];", torch.arange(9.0)[3:], None, 4),
]


@pytest.mark.parametrize(("parameter", "body", "value", "casts", "expected"), BOUND)
def test_bound(parameter, body, value, casts, expected):
    out = torch.zeros(2)
    library(f"{parameter} [[buffer(1)]]", body).k(out, value, arg_casts=casts)
    assert out.tolist() == [expected, expected]


# parameter, value, arg_casts, exception, message
HALF, LONG, DOUBLE = (torch.zeros(4, dtype=d) for d in (torch.float16, torch.int64, torch.float64))
REFUSED = [
    ("constant float& p", 2, None, TypeError, "p is given 2, bound as int64, and reads float: pass a float"),
    ("constant uint& p", 2.0, None, TypeError, "bound as float32, and reads uint"),
    ("constant half& p", 2.0, None, TypeError, r"bound as float32, and reads half: see arg_casts \(fp16, bf16"),
    ("constant uint& p", -1, None, ValueError, "bound as int64, and reads uint, whose values are 0 to 4294967295"),
    ("constant int& p", 2**31, None, ValueError, "whose values are -2147483648 to 2147483647"),
    ("constant bool& p", 2, None, ValueError, "whose values are 0 to 1"),
    ("constant uint3& p", [1, 2, 3], None, TypeError, "reads uint of 4 bytes where 8 were bound for each"),
    ("constant uint3& p", [1, 2, 3], "int32", ValueError, "needs 16 bytes, .* is bound as 3 x int32, 12 bytes"),
    ("constant long& p", 1, "int32", TypeError, "reads long of 8 bytes where 4 were bound"),
    ("constant int* p", [1, 2], None, TypeError, "reads int of 4 bytes where 8 were bound for each"),
    ("constant Pair& p", 1, "int32", ValueError, "needs 8 bytes, 1 is bound as 1 x int32, 4 bytes"),
    ("device float* p", 1.0, None, ValueError, "is given the value 1.0, and only tensors can be written to"),
    ("constant float* p", [0.5] * 1025, None, ValueError, "is given 4100 bytes of values, at most 4096 fit"),
    ("constant float* p", [], None, RuntimeError, "^Empty list/tuple can not be an argument to metal kernel$"),
    ("constant float* p", ["x"], None, RuntimeError, "^Unexpected argument types$"),
    ("constant float& p", "x", None, RuntimeError, "^Unsupported argument type$"),
    ("constant float& p", 1.0, "fp8", RuntimeError, "^Unsupported cast instruction fp8$"),
    ("constant float& p", 1.0, 3, RuntimeError, "^Unexpected caster arg type int$"),
    ("device ulong* p", [torch.zeros(1)], None, ValueError, "a list of tensors, and only tensors can be written to"),
    ("constant float* p", [torch.zeros(1)], None, TypeError, "a list of tensors, bound as addresses of 8 bytes"),
    ("constant ulong2& p", [torch.zeros(1)], None, ValueError, "needs 16 bytes, 1 addresses have 8"),
    ("constant ulong* p", [torch.zeros(1), 2], None, RuntimeError, "given a list of tensors and int"),
    ("device const float* p", HALF, None, TypeError, "is given a float16 tensor and reads it as float"),
    ("device const int* p", LONG, None, TypeError, "is given a int64 tensor and reads it as int"),
    ("device const float* p", DOUBLE, None, TypeError, "MPS framework doesn't support float64"),
    ("device const float* p", torch.zeros(4, device="meta"), None, RuntimeError, "on meta; the simulator takes cpu"),
    ("device const float4* p", torch.zeros(9)[1:], None, ValueError, "begins at byte 4 of .* multiples of 16 bytes"),
    ("constant Pair& p", torch.zeros(1), None, ValueError, "needs 8 bytes, the tensor has 4"),
]  # fmt: skip


@pytest.mark.parametrize(("parameter", "value", "casts", "error", "message"), REFUSED)
def test_refused(parameter, value, casts, error, message):
    kernel = library(f"{parameter} [[buffer(1)]]", "o[i] = 0;").k
    with pytest.raises(error, match=message):
        kernel(torch.zeros(2), value, arg_casts=casts)


def test_every_slot_must_be_bound_and_no_other():
    kernel = metal.compile_shader(FULL).full
    with pytest.raises(ValueError, match=r"full: nothing is bound to \[\[buffer\(1\)\]\] constant float& val"):
        kernel(torch.zeros(2))
    with pytest.raises(ValueError, match=r"full: argument 2 \(int\) belongs to no parameter: there is no buffer\(2\)"):
        kernel(torch.zeros(2), 1.0, 5)
    with pytest.raises(ValueError, match=r"full: error_buf_idx is 2, but there is no buffer\(2\)"):
        kernel(torch.zeros(2), 1.0, error_buf_idx=2)
    with pytest.raises(ValueError, match="32 arguments, Metal has 31 buffer slots"):
        kernel(torch.zeros(2), *[1.0] * 31)


def test_slots_without_numbers_are_filled_in_order():
    text = HEAD + "kernel void k(constant float& a [[buffer(1)]], device float* o, constant float& b) { o[0] = a - b; }"
    out = torch.zeros(1)
    metal.compile_shader(text).k(out, 5.0, 3.0)
    assert out.item() == 2


def test_tensors_that_share_memory_stay_shared():
    text = (
        HEAD
        + """kernel void k(device const float* a, device float* b, uint i [[thread_position_in_grid]]) {
      b[i] = a[i] + 1; }"""
    )
    x = torch.arange(8.0)
    metal.compile_shader(text).k(x[:4], x[2:6], threads=1)
    metal.compile_shader(text).k(x[4:], x[4:])
    assert x.tolist() == [0, 1, 1, 3, 5, 6, 7, 8]


def test_an_expanded_tensor_is_one_element():
    text = (
        HEAD
        + "kernel void k(device float* o, device const float* a, uint i [[thread_position_in_grid]]) { o[i] = a[0]; }"
    )
    out = torch.zeros(4)
    metal.compile_shader(text).k(out, torch.tensor(7.0).expand(4))
    assert out.eq(7).all()


def test_headers_of_torch_are_embedded():
    text = (
        "#include <c10/metal/common.h>\n" + HEAD + "kernel void k(device int* o) { o[0] = c10::metal::ceil_div(7, 2); }"
    )
    out = torch.zeros(1, dtype=torch.int32)
    metal.compile_shader(text).k(out)
    assert out.item() == 4


def test_kernels_are_compiled_once_for_all_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    assert config.cache_dir() == tmp_path
    x = torch.zeros(2)
    metal.compile_shader(FULL).full(x, 2.0)
    built = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    script = """import sys, torch
from torch_attnkit.sim import metal
metal.compile_shader(sys.argv[1]).full(torch.zeros(2), 1.0)"""
    subprocess.run([sys.executable, "-c", script, FULL], check=True)
    assert built == sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()) and x.eq(2).all()
    metal.compile_shader(FULL + "\n").full(x, 2.0)
    assert len(list(tmp_path.rglob("kernel.so"))) == 2


@pytest.mark.parametrize(
    ("parameter", "pointer"),
    [("device const float* constant* p", "p[j]"), ("constant ulong* p", "((device const float*)p[j])")],
)
@pytest.mark.parametrize("mode", metal.library.MODES)
def test_a_list_of_tensors_is_bound_as_their_addresses(parameter: str, pointer: str, mode: str):
    body = f"float s = 0; for (int j = 0; j < 3; j++) s += {pointer}[i]; o[i] = s;"
    kernel = library(f"{parameter} [[buffer(1)]]", body).k
    tensors = [torch.arange(4.0) * scale for scale in (1, 10, 100)]
    out = torch.zeros(4)
    with metal.counting() as reports, metal.settings(mode=mode):
        kernel(out, tensors)
    assert out.tolist() == [0, 111, 222, 333]
    if mode == "counting":
        assert reports[0].buffers == {"o": (0, 16)} | {f"p[{j}]": (16, 0) for j in range(3)}
    tensors[1] = torch.zeros(0)
    with (
        metal.settings(mode=mode),
        pytest.raises(metal.SimulationError, match=r"0 bytes past the end of buffer\(1\)\[1\] of 0 bytes .*thread 0 "),
    ):
        kernel(out, tensors)


def test_tensors_of_a_list_can_be_written_to():
    text = HEAD + "kernel void k(device float* constant* p, uint i [[thread_position_in_grid]]) { p[i][1] = i + 5; }"
    tensors = [torch.zeros(2) for _ in range(40)]
    metal.compile_shader(text).k(tensors, threads=40)
    assert torch.stack(tensors)[:, 1].tolist() == [5.0 + i for i in range(40)]


REPORTS = """#include <c10/metal/error.h>
kernel void pick(device float* o, device const float* x, device const long* index, constant long& size,
                 device ::c10::metal::ErrorMessages* errors, uint i [[thread_position_in_grid]]) {
  long j = index[i];
  if (j < 0 || j >= size) {
    TORCH_REPORT_ERROR(errors, "index ", j, " out of range [0, ", size, ")");
    return;
  }
  o[i] = x[j];
}
"""


@pytest.mark.parametrize("mode", ["fast", "checked"])
def test_what_a_kernel_reports_to_the_error_buffer_is_raised(mode: str):
    kernel = metal.compile_shader(HEAD + REPORTS).pick
    out, x = torch.zeros(4), torch.arange(8.0)
    call = lambda *index: kernel(out, x, torch.tensor(index), 8, threads=4, error_buf_idx=4)
    with metal.settings(mode=mode):
        call(3, 1, 2, 0)
        assert out.tolist() == [3, 1, 2, 0]
        with pytest.raises(
            RuntimeError, match=r"^index -12 out of range \[0, 8\) \(pick at program_source:\d+\)$"
        ) as got:
            call(7, -12, 6, 8)
        assert isinstance(got.value, getattr(torch, "AcceleratorError", RuntimeError))
        assert out.tolist() == [7, 1, 6, 0]  # as on a GPU, the other threads have run
        call(0, 0, 0, 0)  # and the next launch has an empty buffer


def test_strings_lie_in_constant_memory():
    text = """
constant const char* name(int i) {
  static_assert(sizeof(int) == 4, "of 32 bits");
  return i == 0 ? "ab" : __func__;
}
kernel void k(device int* o, uint i [[thread_position_in_grid]]) { o[i] = name(i)[1]; }"""
    out = torch.zeros(2, dtype=torch.int32)
    metal.compile_shader(HEAD + text).k(out)
    assert bytes(out.tolist()) == b"ba"


def test_a_source_without_the_package_of_the_compiler(monkeypatch):
    """By the simulator's own interface, which does not pass simulate()."""
    for cached in (compiler._zig, compiler._tools_key):
        monkeypatch.setattr(compiler, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    with pytest.raises(UnsupportedError, match=r"the package ziglang .* pip install 'torch_attnkit\[sim\]'$"):
        metal.compile_shader(FULL)
