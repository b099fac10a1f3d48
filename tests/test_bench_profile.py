"""What is profiled, and how what Nsight Compute writes becomes rows. Nothing is profiled here: ``ncu`` is a script."""

import json
import os
import sys
import time

import pytest
from typer.testing import CliRunner

from bench import ncu, peers, profile, profiled

NAMES = {
    name: metrics[0] for name, metrics in ncu.METRICS.items() if name in ("us", "dram_read", "dram", "tensor", "smem")
}
HEAD = ("ID", "Process ID", "Kernel Name", "Block Size", "Grid Size", *NAMES.values())
UNITS = ("", "", "", "", "", "ns", "byte", "%", "%", "Kbyte/block")
DECODE = "kernel_cutlass_decode_kernel_tensorptrbf16_0"
COMBINE = "void (anonymous namespace)::combine<float, 4>(float const*)"


def row(number, name, *values, block="(128, 1, 1)", grid="(132, 1, 1)"):
    return (str(number), "7", name, block, grid, *values)


def page(*rows):
    text = "\n".join(",".join(f'"{cell}"' for cell in cells) for cells in (HEAD, UNITS, *rows))
    return f"==PROF== Connected to process 7 (/usr/bin/python)\n==PROF== Disconnected\n{text}\n"


MARK = "void at::cuda::spin_kernel(long)"
TWO_CALLS = page(
    row(0, MARK, "2,000", "0", "0.1", "0", "0"),
    row(1, DECODE, "30,000", "3,000,000", "80", "10", "200.5"),
    row(2, COMBINE, "10,000", "1,000,000", "40", "50", "n/a", block="(32, 4, 1)"),
    row(3, MARK, "2,000", "0", "0.1", "0", "0"),
    row(
        4,
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<x, 3>>>(T1)",
        "5e3",
        "7",
        "1",
        "9",
        "1",
    ),
)


def test_launches_are_those_of_the_call_whose_mark_is_ahead():
    (decode, combine), (other,) = ncu.launches(TWO_CALLS, NAMES, profiled.MARK)
    assert decode == {
        "name": "decode_kernel", "grid": [132, 1, 1], "block": [128, 1, 1],
        "us": 30.0, "dram_read": 3e6, "dram": 80.0, "tensor": 10.0, "smem": 200500.0,
    }  # fmt: skip
    assert combine["name"] == "combine" and combine["block"] == [32, 4, 1] and "smem" not in combine
    assert other["name"] == "FlashAttnFwdSm90" and other["us"] == 5.0
    assert ncu.launches("==ERROR== no permission", NAMES, profiled.MARK) == []


def test_a_call_is_the_sum_of_its_launches_and_their_mean_over_time():
    total = ncu.summed(ncu.launches(TWO_CALLS, NAMES, profiled.MARK)[0])
    assert total["us"] == 40.0 and total["dram_read"] == 4e6
    assert total["dram"] == pytest.approx(70.0) and total["tensor"] == pytest.approx(20.0)
    assert total["nearest"] == "DRAM" and "xu" not in total


def test_of_several_names_the_first_that_ncu_lists_counts(tmp_path):
    tool = script(
        tmp_path,
        'print("Device X")\nprint("dram__bytes_read   Counter byte # of bytes")\nprint("gpu__time_duration  Counter")',
    )
    names = ncu.available(tool, ["sm__further.sum"])
    assert names["us"] == "gpu__time_duration.sum" and names["registers"] == "launch__registers_per_thread"
    assert "tensor" not in names and names["sm__further.sum"] == "sm__further.sum"
    nothing = ncu.available(script(tmp_path, 'print("==ERROR== no driver")'))
    assert nothing["tensor"] == ncu.METRICS["tensor"][0]


def test_the_lines_of_a_baseline_that_are_below_their_best_peer(tmp_path):
    file = tmp_path / "baseline.json"
    peers_of = lambda **us: {n: {"us": t, "ratio": t / 10.0} for n, t in us.items()}
    lines = [
        {"case": "ahead", "dtype": "bfloat16", "us": 10.0, "peers": peers_of(FA3=11.0)},
        {"case": "behind", "dtype": "bfloat16", "us": 10.0, "peers": peers_of(FA3=9.5, FA4=9.0) | {"none": {}}},
        {"case": "alone", "dtype": "bfloat16", "us": 10.0, "peers": {}},
        {"case": "wrong", "dtype": "bfloat16", "error": "AssertionError"},
    ]
    file.write_text(json.dumps({"ops": {"sdpa_decode": {"lines": lines}}}))
    assert profile.below(file) == {("sdpa_decode", "bfloat16", "behind"): {"ours": 10.0, "FA4": 9.0}}
    assert profile.below(file, ["sdpa_multi"]) == {}


def test_jobs_hold_few_cases_of_one_op_and_what_takes_long_compiles_first():
    chosen = {("a", "bfloat16", str(i)): ("ours", "FlashInfer" if i == 4 else "FA3") for i in range(5)}
    chosen["b", "bfloat16", "0"] = ("ours", "FA4")
    assert [(j.op, list(j.cases)) for j in profile.jobs(chosen, 3)] == [
        ("a", ["0", "1", "2"]),
        ("a", ["3", "4"]),
        ("b", ["0"]),
    ]
    first, second, *ours = profile.preparing(chosen)
    assert (first.cases, second.cases) == ({"4": ("FlashInfer",)}, {"0": ("FA4",)})
    assert all(names == ("ours",) for job in ours for names in job.cases.values())
    assert set(profile._COMPILING) <= {p.name for p in peers.ALL}


def script(folder, text):
    file = folder / "ncu"
    file.write_text(f"#!{sys.executable}\nimport json, sys\n{text}\n")
    file.chmod(0o700)
    return str(file)


def test_a_call_that_failed_has_no_launches():
    """Its own may be there in part, but nobody adds them up."""
    call = {"op": "fp4_moe", "case": "few", "dtype": "bfloat16", "marked": True}
    calls = [call | {"contender": "Marlin", "missing": "unknown error"}, call | {"contender": "ours"}]
    failed, ours = profile.records(calls, ncu.launches(TWO_CALLS, NAMES, profiled.MARK))
    assert failed["missing"] == "unknown error" and "launches" not in failed and "us" not in failed
    assert ours["us"] == 5.0 and "missing" not in ours


def test_the_profiler_stops_when_a_call_fails(monkeypatch):
    events = []
    runtime = type("Runtime", (), {f"cudaProfiler{x}": lambda self, x=x: events.append(x) for x in ("Start", "Stop")})()
    monkeypatch.setattr(profiled.torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(profiled.torch.cuda, "_sleep", lambda cycles: events.append("mark"))
    monkeypatch.setattr(profiled.torch.cuda, "synchronize", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        profiled.profiled(lambda: events.append("call"))
    assert events == ["Start", "mark", "call", "Stop"]


def test_a_run_keeps_the_order_of_calls_and_names_what_is_missing(tmp_path):
    call = {"op": "sdpa_decode", "case": "1x1024", "dtype": "bfloat16", "marked": True}
    calls = [call | {"contender": "ours"}, call | {"contender": "FA4", "marked": False, "missing": "no such kernel"}]
    calls += [call | {"case": "1x8192", "contender": "ours"}]
    text = f"asked = json.load(open(sys.argv[-1]))\nopen(asked['calls'], 'w').write({lines(calls)!r})\n"
    text += f"open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({TWO_CALLS!r})\nprint('killed')"
    runner = profile.Runner(tmp_path, time.time() + 60, script(tmp_path, text), NAMES)
    job = profile.Job("sdpa_decode", "bfloat16", {"1x1024": ("ours", "FA4"), "1x8192": ("ours", "FA3")})
    (found,) = profile.each([job], ["0"], 2, runner.run)
    assert [(c["case"], c["contender"], c.get("us"), c.get("missing")) for c in found] == [
        ("1x1024", "ours", 40.0, None),
        ("1x1024", "FA4", None, "no such kernel"),
        ("1x8192", "ours", 5.0, None),
        ("1x8192", "FA3", None, "killed"),
    ]
    assert profile.describe(found[0]) == "sdpa_decode 1x1024 ours: 2 launches, 40.0 us, DRAM 70 %"
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"calls": found}))
    shown = CliRunner().invoke(cli(), ["--show", str(file)]).output
    assert "decode_kernel 132 x 128" in shown and "combine 132 x 32*4" in shown and "no such kernel" in shown


def lines(calls):
    return "".join(json.dumps(call) + "\n" for call in calls)


def cli():
    import typer

    app = typer.Typer()
    app.command()(profile.main)
    return app


def test_a_process_that_hangs_is_stopped_with_its_children():
    began = time.time()
    events = profile._output(
        [sys.executable, "-c", "print('on', flush=True); import time; time.sleep(60)"], dict(os.environ), 2
    )
    assert time.time() - began < 30 and "on" in events and "stopped after 2 s" in events


@pytest.mark.parametrize(
    "given", [["nothing"], ["sdpa_decode", "--peer", "nobody"], [], ["--below", "--case", "no such"]]
)
def test_what_is_not_there_is_named(given):
    assert CliRunner().invoke(cli(), given).exit_code == 2


def test_the_baseline_has_cases_that_are_still_there():
    from torch_attnkit.core.dispatch import OPS

    chosen, timed = profile.choose([], True, profile.BASELINE, "", [])
    assert chosen and all(case in OPS[op].module("cases").BENCH for op, _, case in chosen)
    assert all(us["ours"] > min(us.values()) for us in timed.values())
