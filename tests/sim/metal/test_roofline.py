"""The model of the cache, the bounds on time, and the bars against PyTorch's kernels, on small sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from typer.testing import CliRunner

from torch_attnkit.sim import metal
from torch_attnkit.sim.metal import bars, cli, roofline

pytestmark = pytest.mark.simulator
LINE, X = 128, 4096  # bytes
TEXT = """#include <metal_stdlib>
using namespace metal;
kernel void k(device const float* x, device float* o, uint t [[thread_index_in_threadgroup]]) {
  float s = 0;
  for (int n = 0; n < 1024 * PASSES; n += 32) {
    s += x[n % 1024 + t];
    threadgroup_barrier(mem_flags::mem_device);
  }
  o[t] = s;
}
"""


def count(cache: int, passes: int) -> metal.Report:
    """One threadgroup reads x, a line a step, several times over, and then writes a line."""
    library = metal.compile_shader(f"#define PASSES {passes}\n{TEXT}")
    with metal.counting() as reports, metal.settings(cache=cache):
        library.k(torch.ones(X // 4), torch.zeros(32), threads=32)
    assert reports[0].buffers == {"x": (passes * X, 0), "o": (0, LINE)}
    return reports[0]


@pytest.mark.parametrize(
    ("cache", "passes", "read"),
    [
        (X, 3, X),  # it holds all: every line comes once
        (X - LINE, 3, 3 * X),  # one line too few: the least recently used is always the next
        (0, 2, 2 * X),  # one line
        (1 << 20, 1, X),
    ],
)
def test_lines_that_pass_the_cache(cache: int, passes: int, read: int):
    r = count(cache, passes)
    assert (r.memory_read, r.memory_written) == (read, LINE)


EMPTY = metal.Report("k", {}, *[0] * 13, lines=())


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("memory", dict(memory_read=30_000, memory_written=38_250)),
        ("cache", dict(buffers={"x": (8 * 32 * 1278, 0)})),
        ("threadgroup memory", dict(threadgroup_read=8 * 32 * 1278, threadgroup_written=8 * 32 * 1278)),
        ("arithmetic", dict(flops=8 * 128 * 1278, matrix_flops=8 * 128 * 1278)),
        ("exponentials", dict(special=8 * 32 * 1278)),
    ],
)
def test_a_microsecond_of_an_m1(what: str, fields: dict[str, int]):
    report = dataclasses.replace(EMPTY, **fields)
    m1 = roofline.CHIPS[0]
    assert roofline.times(report, m1)[what] == pytest.approx(1.0)
    assert roofline.least([report, report], m1) == (pytest.approx(2.0), what)
    assert roofline.line([report]).startswith("modelled, not measured: M1 1 us (")


def test_published_rates_of_the_chips():
    tflops = [2 * 128 * chip.cycles / 1e6 for chip in roofline.CHIPS]
    assert [round(x, 1) for x in tflops] == [2.6, 16.2, 17.9]


def test_decode_moves_a_quarter_of_what_pytorchs_kernel_moves():
    p = bars.decode(keys=4096, heads=8, kv_heads=2)
    assert p.ours.total("device_bytes") <= 0.30 * p.torch.total("device_bytes")
    assert p.ours.memory <= 1.06 * p.least
    assert p.ours.error <= p.torch.error


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1)])
def test_prefill_does_less_of_everything_than_pytorchs_kernel(heads: int, kv_heads: int):
    p = bars.prefill(heads, kv_heads, queries=512)
    for count_of in ("device_bytes", "flops", "barriers", "special"):
        assert p.ours.total(count_of) <= p.torch.total(count_of), count_of
    assert p.ours.memory <= 1.02 * p.least
    assert p.ours.error <= p.torch.error


def test_the_command_prints_bars_counts_and_bounds(monkeypatch: pytest.MonkeyPatch):
    small = [bars.decode(keys=512, heads=4, kv_heads=1), bars.prefill(1, 1, queries=128)]
    monkeypatch.setattr(bars, "pairs", lambda: iter(small))
    monkeypatch.setattr(bars, "_ERROR_QUERIES", 64)
    monkeypatch.setattr(cli.console, "_width", 250)
    result = CliRunner().invoke(cli.app, ["metal", "--bars"])
    assert result.exit_code == 0, result.output
    for words in ("DecodeAttention.h's", "past a cache of 8 MiB", "modelled, not measured", "M4 Max", "M5 Max", "met"):
        assert words in result.output
    assert {b.verdict for b in bars.bars(small)} <= {"met", "MISSED", "-"}
    assert bars.Bar("x", 1.1, 1.0).verdict == "MISSED" and bars.Bar("x", 1.0, 1.0).verdict == "met"
