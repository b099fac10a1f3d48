"""Counters are exact and repeat, and the model of memory traffic is the stated one."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from torch_attnkit.sim import metal
from torch_attnkit.sim.metal import cli

pytestmark = pytest.mark.simulator
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
GRID = "uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]"


def count(body: str, *tensors: torch.Tensor, threads: int = 64) -> metal.Report:
    parameters = "".join(f"device float* b{n} [[buffer({n})]], " for n in range(len(tensors)))
    library = metal.compile_shader(f"{HEAD}kernel void k({parameters}{GRID}) {{\n{body}\n}}\n")
    with metal.counting() as reports:
        library.k(*tensors, threads=threads, group_size=min(threads, 64))
    (report,) = reports
    return report


def test_bytes_flops_and_calls():
    r = count("b1[i] = exp(b0[i]) * 2.0f + fma(b0[i + 64], 3.0f, sqrt(b0[i])) - 1.0f;", torch.ones(128), torch.ones(64))
    assert r.buffers == {"b0": (512, 0), "b1": (0, 256)} and r.device_bytes == 768
    assert (r.flops, r.special, r.matrix_flops) == (64 * 5, 64 * 2, 0)


def test_one_tensor_behind_two_parameters_is_counted_once():
    x = torch.ones(64)
    assert count("b1[i] = b0[i] + 1.0f;", x, x).buffers == {"b0=b1": (256, 256)}


def test_only_what_runs_is_counted():
    r = count("if (i < 10) b0[i] = b0[i] * 2.0f;", torch.ones(64))
    assert r.buffers == {"b0": (40, 40)} and r.flops == 10


def test_a_value_is_loaded_once_around_an_exchange_between_lanes():
    r = count(
        "float s = 0; for (int j = 0; j < 4; j++) s += simd_sum(b0[i]); b1[i] = s;", torch.ones(64), torch.ones(64)
    )
    assert r.buffers["b0"] == (256, 0) and r.collectives == 2 * 4


def test_barriers_collectives_atomics_and_matrices():
    body = """threadgroup float s[64]; s[t] = b0[i]; threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_barrier(mem_flags::mem_none); float v = simd_sum(s[63 - t]);
    if (t < 16) v += simd_max(v);
    simdgroup_float8x8 a(1.0f), b(1.0f), c(0.0f); simdgroup_multiply_accumulate(c, a, b, c);
    atomic_fetch_add_explicit((device atomic_float*)b0 + 128, v + c.thread_elements()[0], memory_order_relaxed);"""
    r = count(body, torch.ones(130), threads=128)
    assert (r.barriers, r.simdgroup_barriers, r.matrix_flops, r.atomics) == (2, 4, 4 * 1024, 128)
    assert (r.collectives, r.divergent) == (4 + 2 + 4, 2)
    assert (r.threadgroup_written, r.threadgroup_read) == (128 * 4, 128 * 4)


@pytest.mark.parametrize(
    ("index", "transactions", "ideal"), [("i", 4, 4), ("i * 4", 16, 4), ("i * 16", 64, 4), ("0", 2, 2)]
)
def test_device_lines(index: str, transactions: int, ideal: int):
    """64 lanes of 4 bytes in lines of 64: neighbours share one, a stride of 16 floats takes one each."""
    r = count(f"float v = b0[{index}];\nb1[i] = v;", torch.ones(1024), torch.ones(64))
    (line,) = (x for x in r.lines if x.line == 4 and x.space == "device")
    assert (line.instructions, line.transactions, line.ideal) == (2, transactions, ideal)


@pytest.mark.parametrize(("stride", "worst"), [(1, 1), (2, 2), (32, 32), (33, 1), (0, 1)])
def test_threadgroup_banks(stride: int, worst: int):
    body = f"threadgroup float s[32 * 33];\ns[t * {stride}] = b0[i]; b0[i] = 0;"
    if stride == 0:  # many lanes may read one word at once, but not write it
        body = "threadgroup float s; if (t == 0) s = 1; simdgroup_barrier(mem_flags::mem_threadgroup);\nb0[i] = s;"
    library = metal.compile_shader(f"{HEAD}kernel void k(device float* b0, {GRID}) {{\n{body}\n}}\n")
    with metal.counting() as reports:
        library.k(torch.ones(32))
    (line,) = (x for x in reports[0].lines if x.space == "threadgroup" and x.line == 5)
    assert (line.instructions, line.worst, line.transactions) == (1, worst, worst)


def test_counters_repeat_and_do_not_change_results():
    x, y = torch.randn(64), torch.zeros(64)
    body = "b1[i] = simd_sum(exp(b0[i]) * 3.0f);"
    first = count(body, x, y)
    counted = y.clone()
    assert count(body, x, y) == first
    library = metal.compile_shader(f"{HEAD}kernel void k(device float* b0, device float* b1, {GRID}) {{\n{body}\n}}\n")
    for mode in metal.library.MODES:
        with metal.settings(mode=mode):
            library.k(x, y)
        assert torch.equal(y, counted)


def test_the_command_checks_itself_and_prints_a_table(monkeypatch):
    result = CliRunner().invoke(cli.app, ["metal"])
    assert result.exit_code == 0 and result.output.split() == ["fast:", "ok", "checked:", "ok", "counting:", "ok"]
    report = count("b0[i] = b0[i] + 1.0f;", torch.ones(64))
    monkeypatch.setattr(cli.console, "_width", 250)
    with cli.console.capture() as printed:
        cli.print_counters({"case": [report]}, by_line=True)
    assert "b0 256+256" in printed.get() and "b0[i] = b0[i] + 1.0f;" in printed.get()
