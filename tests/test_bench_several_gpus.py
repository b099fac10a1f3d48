"""The bench of several GPUs without one: results over gloo, counted bytes, and what all processes have to agree on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer

from bench import several_gpus, timing
from bench.inputs import Inputs
from tests import processes
from torch_attnkit.core.dispatch import OPS

WORLD = 2


def test_a_machine_without_two_gpus_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(typer.Exit) as left:
        several_gpus.main(gloo=False, processes=0, case="", json_file=None, prepare="")
    assert left.value.exit_code == 2
    assert "found 1 CUDA GPUs for 2 processes, accepted: two or more" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as left:
        several_gpus.main(gloo=True, processes=0, case="prefill", json_file=None, prepare="")
    assert left.value.exit_code == 2
    assert "no line has 'prefill' in its name, accepted: decode;" in capsys.readouterr().out


def test_what_is_compiled_is_known_without_a_gpu():
    """At real sizes, on tensors without data: so every call of the lines also has a row on both."""
    for arch in ("sm90", "sm100"):
        asked = " ".join(map(str, several_gpus.kernels(arch, WORLD)))
        assert all(
            name in asked for name in (f"decode_{'wgmma' if arch == 'sm90' else 'mma'}", "merge", "grouped_gemm")
        )


@pytest.mark.proof
def test_results_over_gloo_and_the_bytes_that_are_sent(tmp_path):
    with pytest.raises(typer.Exit) as left:
        several_gpus.main(gloo=True, processes=WORLD, case="", json_file=tmp_path / "record", prepare="")
    lines = {line["case"]: line for line in json.loads((tmp_path / "record").read_text())["lines"]}
    assert left.value.exit_code == 0 and list(lines) == list(several_gpus.LINES)
    for line in lines.values():
        assert 0 < line["error_of_tolerance_one"] <= 1 and 0 < line["error_of_tolerance_all"] <= 1
        assert not any(key.startswith(("us", "ratio")) for key in line), "what a CPU takes is nobody's concern"
    sent = {name: line["bytes_sent"] for name, line in lines.items()}
    assert sent["decode"] == 4 * 64 * 2 + 4 * 4  # out in bf16, lse in float32
    assert sent["experts-128"] == 8 * 64 * 2 and sent["experts-8192"] == 512 * 64 * 2  # of two, half of it twice
    assert [sent["experts-128-own"], sent["experts-8192-own"]] == [_own(8), _own(512)]


def _own(count: int) -> int:
    """The most that a process sends of rows, routes, results and counts."""
    dims = dict(Tq=count, N=64, M=64, E=4 * WORLD, K=3, blk=16, act=0, limit=10)
    indices = Inputs(OPS["fp4_moe"], torch.bfloat16, "cpu").first(dims)[0][2]  # (Tq, 3)
    abroad = [int((part // 4 == 1 - rank).any(1).sum()) for rank, part in enumerate(indices.chunk(WORLD))]
    return max(abroad[r] * (64 * 2 + 3 * 8) + abroad[1 - r] * 64 * 2 + 8 for r in range(WORLD))


class Event:
    """A CUDA event's stand-in, on the host's clock."""

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


def in_a_process(rank: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    here = several_gpus.Here(torch.device("cpu"), rank, WORLD, True)
    inputs = {op: Inputs(OPS[op], torch.bfloat16, "cpu") for op in ("sdpa_decode", "fp4_moe")}
    right = several_gpus.cp_decode
    if rank == 1:  # one process alone has something wrong
        several_gpus.cp_decode = lambda *args: tuple(1.1 * x for x in right(*args))
    wrong = several_gpus.line("decode", here, inputs)

    several_gpus.cp_decode = right
    torch.cuda.Event, torch.cuda.synchronize = Event, lambda: None

    def graph(calls: timing.Calls) -> timing.Run:
        if rank == 1 and timed:  # the second time
            raise RuntimeError("a graph that holds no such thing\nand more words")
        time.sleep(0.1 * rank)  # processes need not be equally fast, nor measure the same
        return timing.plain(calls)

    timing.graph = graph
    shared = several_gpus.decode(here, inputs)
    timed: list[dict[str, Any]] = []
    for _ in range(2):
        timed.append(several_gpus.timed(shared, here))
        dist.barrier()
    return wrong, *timed


@pytest.mark.proof
def test_processes_agree_on_errors_and_on_how_calls_are_issued():
    """Or they would wait for each other for ever. A wrong result is not timed."""
    (wrong_0, fast_0, slow_0), (wrong_1, fast_1, slow_1) = processes.run(WORLD, in_a_process)
    assert "sdpa_decode" in wrong_1["error"] and wrong_0["error"] == "another process says what"
    assert "us_one" not in wrong_0 and several_gpus.summary_line(wrong_1).startswith(
        "decode (192 keys): WRONG: AssertionError"
    )
    assert fast_0 == fast_1 and fast_0["ratio"] == fast_0["us_one"] / fast_0["us_all"] > 0
    assert fast_0["issued_one"] == fast_0["issued_all"] == "CUDA graph"
    assert slow_0["issued_all"] == "by the host, no CUDA graph in another process"
    assert slow_1["issued_all"] == "by the host, no CUDA graph: RuntimeError: a graph that holds no such thing"
