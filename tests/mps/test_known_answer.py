"""A GPU that computes wrongly is told from one that can be trusted, and the report file says which it was."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bench import mps as bench
from torch_attnkit import cli, parity, simulate
from torch_attnkit.core import dispatch
from torch_attnkit.core.support import support
from torch_attnkit.core.target import Target
from torch_attnkit.mps import known_answer, library, report
from torch_attnkit.parity import command, judge, runners
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
METAL = Target("metal", simulated=True)


@pytest.mark.parametrize("mode", metal.library.MODES)
def test_the_simulator_knows_the_answer(mode: str):
    with metal.settings(mode=mode, strict=True):
        assert known_answer.wrong(METAL, "cpu") == []


BROKEN = {
    "threadgroup memory behind a barrier": ("shared[127 - t]", "shared[t]"),
    "simd_sum": ("simd_sum(mine)", "mine"),
    "simd_max": ("simd_max(mine)", "mine"),
    "simd_shuffle_xor": ("ushort(5)", "ushort(4)"),
    "8x8 product, even columns": ("out[4 * n + i] = sum.x", "out[4 * n + i] = 0"),
    "8x8 product, odd columns": ("out[5 * n + i] = sum.y", "out[5 * n + i] = sum.x"),
    "rounding to half": ("float(half(mine * scale))", "mine * scale"),
    "rounding to bfloat": ("float(bfloat(mine * scale))", "float(half(mine * scale))"),
    "64-bit arguments": ("shape.large / (i + 1)", "long(int(shape.large)) / (i + 1)"),
    "exp": ("exp(mine * scale)", "exp(mine * scale) * 1.00001f"),
    "8x8 product of bfloat, even columns": ("out[10 * n + i] = wide.thread_elements()[0]", "out[10 * n + i] = mine"),
    "8x8 product of bfloat, odd columns": ("out[11 * n + i] = wide.thread_elements()[1]", "out[11 * n + i] = mine"),
    "product of bfloat numbers in float": ("float(small) * float(small) + mine", "float(small * small) + mine"),
}


@pytest.mark.parametrize("answer", BROKEN)
def test_each_answer_is_one_that_a_broken_gpu_can_miss(answer: str, monkeypatch: pytest.MonkeyPatch):
    original, (right, wrong) = library.source, BROKEN[answer]
    assert original("known_answer", {}).count(right) == 1
    monkeypatch.setattr(library, "source", lambda *a: original(*a).replace(right, wrong))
    (found,) = known_answer.wrong(METAL, "cpu")
    assert re.match(rf"{re.escape(answer)}: \d+ of 384 are wrong, thread \d+ has \S+ for \S+$", found)


def test_every_answer_has_its_defect():
    assert tuple(BROKEN) == known_answer.ANSWERS


class SilentGpu:
    """Compiles everything, runs nothing, and says nothing."""

    max_threads_per_threadgroup = 1024

    def compile_shader(self, source: str) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **how: Any) -> None:
        pass


class NoGpu:
    def compile_shader(self, source: str) -> Any:
        raise RuntimeError("MPS is not available")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Puts something in the place of Metal's runtime; its tensors lie on the CPU."""

    def put(backend: Any) -> None:
        monkeypatch.setattr(library.runtimes, "of", lambda arch, simulated: backend)
        library._compile.cache_clear()
        known_answer.wrong.__globals__["library"]._compile.cache_clear()

    yield put
    library._compile.cache_clear()


def test_a_gpu_that_does_nothing(gpu):
    gpu(SilentGpu())
    found = known_answer.wrong(Target("metal"), "cpu")
    assert len(found) == len(known_answer.ANSWERS) and "thread 0 has nan for -65" in found[0]


def test_a_gpu_that_does_not_compile(gpu):
    gpu(NoGpu())
    assert known_answer.wrong(Target("metal"), "cpu") == ["the kernel did not run: RuntimeError: MPS is not available"]


@pytest.fixture
def mac(gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine whose mps device is the simulator: everything above the runtime runs as it would on a Mac."""
    monkeypatch.chdir(tmp_path)
    original = judge.run

    def run(case: parity.Case, device: str, layout: str) -> float:
        assert device == "mps"
        return original(case, "cpu", layout)

    monkeypatch.setattr(command, "here", lambda archs: [runners.Runner("mps", "Apple M1", Target("metal"))])
    monkeypatch.setattr(command, "simulators", dict)
    monkeypatch.setattr(judge, "run", run)
    monkeypatch.setattr(command, "covering_first", lambda runner, row: covering_first(runner, row)[:3])
    wrong = known_answer.wrong
    monkeypatch.setattr(known_answer, "wrong", lambda target, device: wrong(target, "cpu"))
    monkeypatch.setattr(report, "sysctl", lambda name: {"hw.model": "MacBookPro17,1"}.get(name, "unknown"))
    return tmp_path


covering_first = command.covering_first


def test_parity_on_a_mac_writes_a_report(mac: Path, gpu):
    gpu(metal)
    with simulate("metal"):
        result = CliRunner().invoke(cli.app, ["parity", "--op", "gated_rmsnorm", "--report", "here.json"])
    assert result.exit_code == 0, result.output
    found = json.loads((mac / "here.json").read_text())
    assert found["known_answer_wrong"] == [] and found["machine"]["model"] == "MacBookPro17,1"
    assert found["machine"]["versions"]["torch"] == torch.__version__ and found["format"] == report.FORMAT
    (row,) = found["parity"]
    assert row["row"].startswith("gated_rmsnorm/mps") and (row["passed"], row["failed"]) == (3, 0)
    assert 0 < row["error_of_tolerance"] <= 1 and row["messages"] == [] and row["left_out"] == 0
    assert '"parity on ' in result.output.replace("\n", " ") and "docs/mac.md" in result.output.replace("\n", " ")


def test_every_row_of_a_report_has_its_share_of_the_time(mac: Path, gpu, monkeypatch: pytest.MonkeyPatch):
    """A case takes five minutes here: each row has one, and a report that says how many had no time."""
    gpu(metal)
    now = iter(range(0, 10**6, 300))
    monkeypatch.setattr(command.time, "monotonic", lambda: next(now))
    with simulate("metal"):
        result = CliRunner().invoke(cli.app, ["parity", "--op", "grouped_output_projection", "--report", "here.json"])
    assert result.exit_code == 0, result.output
    found = json.loads((mac / "here.json").read_text())["parity"]
    assert [(row["passed"] + row["refused"], row["left_out"]) for row in found] == [(1, 2), (1, 2)]


def test_a_report_begins_with_the_cases_that_a_simulator_runs():
    op, index, kernel, arch = next(r for r in support("metal") if r[0].name == "sdpa_decode")
    runner = runners.Runner("mps", "Apple M1", Target("metal"))
    found = covering_first(runner, (op, index, kernel, arch))
    first = parity.cases(op, index, arch, covering=True)
    assert [run[0] for run in found[: 2 * len(first) : 2]] == first
    assert {run[0] for run in found} == {*parity.cases(op, index, arch), *first}


def test_parity_on_a_broken_gpu_runs_no_case(mac: Path, gpu):
    gpu(SilentGpu())
    result = CliRunner().invoke(cli.app, ["parity"])
    assert result.exit_code == 1 and "gets a known answer wrong, so no case was run" in result.output.replace("\n", " ")
    (file,) = mac.glob("torch_attnkit-parity-*.json")
    found = json.loads(file.read_text())
    assert "parity" not in found and len(found["known_answer_wrong"]) == len(known_answer.ANSWERS)


def test_a_virtual_machine_is_named():
    found = {"known_answer_wrong": ["exp: wrong"], "machine": {"virtual": "1"}}
    assert "It is a virtual machine's. exp: wrong" in report.trusted(found)


class Clock:
    """Stands in for the stream of a GPU: a call takes a microsecond, and calls are counted."""

    def __init__(self) -> None:
        self.runs = 0

    def timed(self, work: Any) -> float:
        work()
        self.runs += 1
        return 0.1

    def memory(self) -> int:
        return 8 << 20


def test_the_bench_times_both_sides_by_turns_and_writes_a_report(gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    op, clock, file = dispatch.OPS["sdpa_decode"], Clock(), tmp_path / "bench.json"
    small = {"small": dict(B=1, Hq=4, Hkv=2, S=64, D=64, Dv=64), "large": dict(B=9, Hq=4, Hkv=2, S=65536, D=64, Dv=64)}
    monkeypatch.setattr(op.module("cases"), "BENCH", small)
    monkeypatch.setattr(bench, "_MOST_SETS", 2)
    console = Console(record=True, width=200)
    with simulate("metal"):
        failed = bench.main(op, torch.float16, "", file, console, device="cpu", target=METAL, stream=clock)
    assert failed == 0
    found = json.loads(file.read_text())
    first, second = found["bench"]
    assert set(first["us"]) == {"ours", "PyTorch SDPA"}
    assert first["peer_difference"] <= torch.finfo(torch.float16).eps  # both round results to half once
    assert first["error_of_tolerance"] <= 1 and first["input_sets"] == 2
    assert first["us"]["ours"] == pytest.approx(0.1 / 2 * 1e6) and clock.runs == 2 * (bench._REPEATS + 1)
    assert "of memory" in second["skipped"] and "us" not in second
    text = console.export_text()
    assert "PyTorch's / ours" in text and "bench.json" in text


def test_the_bench_on_a_broken_gpu_times_nothing(gpu, tmp_path: Path):
    gpu(SilentGpu())
    op, console = dispatch.OPS["gated_rmsnorm"], Console(record=True)
    failed = bench.main(op, torch.float16, "", tmp_path / "b.json", console, device="cpu", stream=Clock())
    assert failed == 1 and "bench" not in json.loads((tmp_path / "b.json").read_text())


def test_the_cases_of_a_model_are_in_one_report(gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for cases in bench.MODELS.values():
        assert all(set(names) <= dispatch.OPS[op].module("cases").BENCH.keys() for op, names in cases.items())
    monkeypatch.setitem(bench.MODELS, "small", {"route_softmax": ("gptoss20b-1",), "kv_cache_write": ("fp8-1",)})
    monkeypatch.setattr(bench, "_MOST_SETS", 2)
    how = dict(device="cpu", target=METAL, stream=Clock())
    with simulate("metal"):
        assert bench.model("small", torch.bfloat16, tmp_path / "b.json", Console(record=True), **how) == 0
    found = json.loads((tmp_path / "b.json").read_text())
    assert [(line["op"], line["us"]["ours"] > 0) for line in found["bench"]] == [
        ("route_softmax", True), ("kv_cache_write", True),
    ]  # fmt: skip


def test_a_wrong_result_gets_no_time(gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    op = dispatch.OPS["gated_rmsnorm"]
    monkeypatch.setattr(op.module("cases"), "BENCH", {"small": dict(R=4, H=1, N=64, y32=0, w32=0)})

    def refuse(*args: Any, **kwargs: Any) -> float:
        raise AssertionError("out is wrong")

    monkeypatch.setattr(bench.gate, "gate", refuse)
    with simulate("metal"):
        failed = bench.main(
            op, torch.float32, "", tmp_path / "b.json", Console(record=True), device="cpu", target=METAL, stream=Clock()
        )
    (line,) = json.loads((tmp_path / "b.json").read_text())["bench"]
    assert failed == 1 and line["error"] == "AssertionError: out is wrong" and "us" not in line
