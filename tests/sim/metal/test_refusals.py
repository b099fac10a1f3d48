"""What Metal leaves undefined is refused with the place, the thread and the other side."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
HEADER = """#include <metal_stdlib>
using namespace metal;
kernel void k(device const float* x [[buffer(0)]], device float* o [[buffer(1)]],
              uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]],
              uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
"""
FENCE = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def run(body: str, mode: str, threads: int = 64, **settings) -> torch.Tensor:
    """The output of a kernel whose body begins at line 6."""
    library = metal.compile_shader(HEADER + body + "\n}\n")
    x, out = torch.arange(64.0), torch.full((64,), -1.0)
    with metal.settings(mode=mode, **settings):
        library.k(x, out, threads=threads, group_size=min(threads, 1024))
    return out


# name: (body, message in fast mode, message in checked mode); None where the mode does not see it.
WRONG: dict[str, tuple[str, str | None, str | None]] = {
    "read past the end": (
        "o[i] = x[i + 1];",
        r"k: read of 4 bytes out of bounds: 0 bytes past the end of buffer\(0\) of 256 bytes at line 6 "
        r"\(o\[i\] = x\[i \+ 1\];\) \[threadgroup \(0, 0, 0\), thread 63 = simdgroup 1 lane 31\]",
        r"0 bytes past the end of buffer\(0\) of 256 bytes at line 6",
    ),
    "write far outside": (
        "o[i * 1000] = 1;",
        r"write of 4 bytes out of bounds: 3744 bytes past .* thread 1 ",
        r"thread 1 ",
    ),
    "write just past the end": ("o[i + 1] = 1;", r"write of 4 bytes out of bounds: 0 bytes past", r"0 bytes past"),
    "read before the start": (
        "o[i] = x[int(i) - 1];",
        None,
        r"read of 4 bytes out of bounds: 4 bytes before buffer\(0\)",
    ),
    "write before the start": (
        "o[int(i) - 1] = 1;",
        r"write of 4 bytes out of bounds: 4 bytes before buffer\(1\) of 256 bytes at line 6 .*thread 0 ",
        r"4 bytes before buffer\(1\)",
    ),
    "threadgroup array overrun": (
        "threadgroup float s[32]; s[t] = x[i];\n" + FENCE + " o[i] = s[t & 31];",
        r"k: array index out of bounds at line 6 \(threadgroup float s.*thread 32 = simdgroup 1 lane 0\]",
        r"array index out of bounds at line 6",
    ),
    "thread array overrun": (
        "float a[4] = {1, 2, 3, 4};\no[i] = a[t & 7];",
        r"array index out of bounds at line 7 .*thread 4 ",
        r"array index out of bounds at line 7",
    ),
    "missing barrier": (
        "threadgroup float s[64];\ns[t] = x[i];\no[i] = s[63 - t];",
        None,
        # The slots that the second simdgroup fills are still unwritten when the first one reads them.
        r"read of threadgroup variable s, byte \d+, which no thread of this threadgroup has written at line 8",
    ),
    "race of read after write": (
        "threadgroup float s[64];\ns[t] = 0; " + FENCE + "\ns[t] = x[i];\no[i] = s[63 - t];",
        None,
        r"k: data race in threadgroup variable s, byte 0: write here, read by thread 63 at line 9 "
        r"\(o\[i\] = s\[63 - t\];\), no barrier between them at line 8 \(s\[t\] = x\[i\];\) .*thread 0 ",
    ),
    "second iteration overwrites what others still read": (
        "threadgroup float s[64];\nfor (int j = 0; j < 2; j++) {\ns[t] = x[i] + j;\n"
        + FENCE
        + "\no[i] = s[63 - t];\n}",
        None,
        r"data race in threadgroup variable s.*: read here, write by thread 63 at line 8 .* at line 10 .*thread 0 ",
    ),
    "simdgroup_barrier across simdgroups": (
        "threadgroup float s[64];\ns[t] = 0;\n" + FENCE + "s[t] = x[i];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[t ^ 32];",
        None,
        r"data race in threadgroup variable s",
    ),
    "barrier that orders no memory": (
        "threadgroup float s[64];\ns[t] = x[i];\nthreadgroup_barrier(mem_flags::mem_none); o[i] = s[63 - t];",
        None,
        r"data race in threadgroup variable s.*: read here, write by thread 0 at line 7 .* at line 8 ",
    ),
    "barrier orders the other memory": (
        "o[i] = x[i];\n" + FENCE + "\nif (t == 0) o[63] = 1;",
        None,
        r"data race in buffer\(1\), byte 252: write here, write by thread 63 at line 6 .* at line 8 ",
    ),
    "all threads write one element": (
        "o[0] = x[i];",
        None,
        r"data race in buffer\(1\), byte 0: write here, write by thread 0",
    ),
    "barrier in a branch": (
        "if (t < 32) {\n" + FENCE + "\n}\no[i] = x[i];",
        r"threadgroup_barrier is reached by 32 of 64 threads: thread 32 returned without it at line 7 ",
        r"reached by 32 of 64 threads",
    ),
    "two barriers in two branches": (
        "if (t < 32) {\n" + FENCE + "\n} else {\n" + FENCE + "\n}\no[i] = x[i];",
        r"threads wait at different barriers: thread \d+ at this one, thread \d+ at the one at line [79] ",
        r"different barriers",
    ),
    "return before a barrier": (
        "if (t == 5) return;\n" + FENCE + "\no[i] = x[i];",
        r"reached by 63 of 64 threads: thread 5 returned without it at line 7 ",
        r"thread 5 returned without it",
    ),
    "endless loop": (
        "for (uint j = 0; j < 64; j += uint(x[0])) o[i] += 1;",
        r"k: still running after 100000 turns of loops in one threadgroup: an endless loop\? at line 6 .*thread 0 ",
        r"still running after 100000 turns",
    ),
    "shuffle from an inactive lane": (
        "float r = 0;\nif (lane < 16) r = simd_shuffle(x[i], ushort(lane + 8));\no[i] = r;",
        r"simd_shuffle: lane 8 reads lane 16, which is not active \(active lanes: 0x0000ffff\) at line 7 .*thread 8 ",
        r"which is not active",
    ),
    "shuffle outside the simdgroup": (
        "o[i] = simd_shuffle(x[i], 32);",
        r"lane 0 reads lane 32, outside the simdgroup",
        "outside",
    ),
    "broadcast of lanes that differ": (
        "o[i] = simd_broadcast(x[i], ushort(lane & 1));",
        r"simd_broadcast with lane 1 here and lane 0 elsewhere in the simdgroup at line 6",
        "elsewhere",
    ),
    "matrix operation without all lanes": (
        "if (lane < 16) { simdgroup_float8x8 a(1.0f), b(1.0f), c(0.0f);\nsimdgroup_multiply_accumulate(c, a, b, c); }",
        r"simdgroup matrix multiplication needs all 32 lanes, active are 0x0000ffff at line 7 ",
        "needs all 32 lanes",
    ),
    "an assertion that does not hold": (
        "assert(x[i] < 5);",
        r"an assertion does not hold at line 6 \(assert\(x\[i\] < 5\);\) .*thread 5 ",
        "an assertion does not hold",
    ),
    "misaligned vector": (
        "device const float4* p = (device const float4*)(x + 1);\no[i] = p[i & 7].x + p[i & 7].y;",
        None,
        r"k: misaligned read of 4 bytes|"
        r"misaligned read of 16 bytes: byte 4 of buffer\(0\) of 256 bytes is not a multiple of 16",
    ),
    "threadgroup memory that nobody wrote": (
        "threadgroup float s[64];\no[i] = s[t];",
        None,
        r"read of threadgroup variable s, byte 0, which no thread of this threadgroup has written at line 7 ",
    ),
    "thread memory overflow": (
        "float a[80000];\nfor (int j = 0; j < 80000; j++) a[j] = x[(i + j) & 63];\no[i] = a[int(x[i] * 1000)];",
        r"thread memory overflow \(a large array, or recursion\)",
        r"thread memory overflow",
    ),
}


@pytest.mark.parametrize("mode", ["fast", "checked"])
@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str, mode: str):
    body, *messages = WRONG[name]
    message = messages[mode == "checked"]
    if message is None:
        run(body, mode)
        return
    with pytest.raises(metal.SimulationError, match=message):
        run(body, mode, turns=100000 if name.startswith("endless") else 1 << 30)


RIGHT = {
    "barrier": ("threadgroup float s[64]; s[t] = x[i];\n" + FENCE + " o[i] = s[63 - t];", lambda x: x.flip(0)),
    "simdgroup_barrier within a simdgroup": (
        "threadgroup float s[64]; s[t] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[t ^ 1];",
        lambda x: x.view(-1, 2).flip(1).flatten(),
    ),
    "device memory behind its own barrier": (
        "o[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); float v = o[63 - t];\n"
        "threadgroup_barrier(mem_flags::mem_device); o[i] = v;",
        lambda x: x.flip(0),
    ),
    "both memories behind one barrier": (
        "threadgroup float s[64]; o[i] = x[i]; s[t] = 1; threadgroup_barrier(mem_flags::mem_device | "
        "mem_flags::mem_threadgroup);\n"
        "float v = o[63 - t] + s[63 - t]; threadgroup_barrier(mem_flags::mem_device); o[i] = v;",
        lambda x: x.flip(0) + 1,
    ),
    "trip counts that differ between lanes": (
        "float r = 0; for (uint j = 0; j < lane % 4 + 1; j++) r += simd_sum(1.0f);\no[i] = r + simd_max(0.0f);",
        lambda x: (torch.tensor([32.0, 56, 72, 80])).repeat(16),
    ),
    "both branches have a collective": (
        "float r;\nif (lane < 8) r = simd_sum(1.0f);\nelse r = simd_sum(2.0f);\no[i] = r;",
        lambda x: torch.cat([torch.full((8,), 8.0), torch.full((24,), 48.0)]).repeat(2),
    ),
    "break out of a loop": (
        "float r = 0; for (int j = 0; j < 8; j++) { if (j > int(lane & 3)) break; r += simd_sum(1.0f); }\n"
        "simdgroup_barrier(mem_flags::mem_none); o[i] = r;",
        lambda x: torch.tensor([32.0, 56, 72, 80]).repeat(16),
    ),
}


@pytest.mark.parametrize("mode", metal.library.MODES)
@pytest.mark.parametrize("name", RIGHT)
def test_accepted(name: str, mode: str):
    body, expected = RIGHT[name]
    torch.testing.assert_close(run(body, mode), expected(torch.arange(64.0)), rtol=0, atol=0)


def test_an_error_leaves_every_tensor_as_it_was():
    library = metal.compile_shader(HEADER + "o[i] = 5; if (i == 63) o[64] = 1;\n}\n")
    x, out = torch.arange(64.0), torch.full((64,), -1.0)
    with pytest.raises(metal.SimulationError, match="past the end"):
        library.k(x, out)
    assert out.eq(-1).all()


def test_unwritten_threadgroup_memory_is_nan():
    assert run("threadgroup float s[64]; o[i] = s[t];", "fast").isnan().all()


def test_a_race_between_threadgroups_names_both():
    library = metal.compile_shader(HEADER + "o[i & 31] = x[i];\n}\n")
    with (
        metal.settings(mode="checked"),
        pytest.raises(
            metal.SimulationError,
            match=r"data race in buffer\(1\), byte 0: write here, write by thread 0 of threadgroup \(0, 0, 0\) "
            r"at line 6 .*, nothing orders threadgroups of one launch at line 6 .*\[threadgroup \(1, 0, 0\), thread 0 ",
        ),
    ):
        library.k(torch.arange(64.0), torch.zeros(64), threads=64, group_size=32)


def test_a_function_called_from_two_branches_does_not_meet_itself():
    """A collective is known by its whole path of calls: on hardware the branches run one after the other."""
    text = """#include <metal_stdlib>
using namespace metal;
float total(float v) { return simd_sum(v); }
kernel void k(device float* o, uint i [[thread_position_in_grid]]) {
  if (i < 8) o[i] = total(1.0f);
  else o[i] = total(2.0f);
}"""
    out = torch.zeros(32)
    metal.compile_shader(text).k(out)
    assert out.tolist() == [8.0] * 8 + [48.0] * 24


def test_equal_values_may_be_stored_by_all_threads_unless_strict():
    body = "o[i] = 0; threadgroup_barrier(mem_flags::mem_device); o[0] = 7;"
    assert run(body, "checked")[0] == 7
    with pytest.raises(metal.SimulationError, match=r"data race in buffer\(1\), byte 0: write here, write by thread"):
        run(body, "checked", strict=True)


def test_strict_mode_refuses_a_collective_on_some_lanes():
    body = "float r = 0;\nif (lane < 16) r = simd_sum(x[i]);\nr += simd_max(x[i]);\no[i] = r;"
    run(body, "fast")
    with pytest.raises(
        metal.SimulationError,
        match=r"simd_sum runs on the lanes 0x0000ffff only, while lanes 0xffff0000 are at simd_max at line 8 ",
    ):
        run(body, "fast", strict=True)


def test_an_error_inside_a_function_names_the_call():
    text = """#include <metal_stdlib>
using namespace metal;
float get(device const float* p, int j) {
  return p[j];
}
kernel void k(device const float* x, device float* o, uint i [[thread_position_in_grid]]) {
  o[i] = get(x, i + 1);
}"""
    with pytest.raises(metal.SimulationError, match=r"at line 4 \(return p\[j\];\), called from line 7 "):
        metal.compile_shader(text).k(torch.zeros(4), torch.zeros(4))


def test_too_much_threadgroup_memory():
    library = metal.compile_shader(HEADER + "threadgroup float s[8193]; s[t] = x[i];\n" + FENCE + "o[i] = s[t];\n}\n")
    with pytest.raises(RuntimeError, match=r"threadgroup memory size \(32772\) exceeds the maximum .* \(32768\)"):
        _ = library.k
    assert metal.compile_shader(HEADER + "threadgroup float s[8192]; s[t] = x[i]; o[i] = s[t];\n}\n").k


def test_too_many_threads_in_a_group():
    with pytest.raises(ValueError, match="^Threadgroup size exceeds 1024 limit$"):
        metal.compile_shader(HEADER + "o[0] = 1;\n}\n").k(torch.zeros(1), torch.zeros(1), threads=2048, group_size=2048)
