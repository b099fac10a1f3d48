"""``python -m torch_attnkit`` as a user types it, and the demo on a few sentences and tokens."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import torch_attnkit
from bench.__main__ import table
from torch_attnkit import UnsupportedError, cli, manual, report, warmup
from torch_attnkit.core import Target, runtimes, support
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.target import NVIDIA
from torch_attnkit.parity import command, random_run
from torch_attnkit.parity.runners import Runner
from torch_attnkit.served.calls import Asked

ROOT = Path(__file__).parent.parent

ACCEPTED = f"accepted: cpu, metal, {', '.join(NVIDIA)}"


def bare(text: str) -> str:
    """Without white space and frames, which break lines anywhere."""
    return re.sub(r"[\s\u2500-\u257f]", "", text)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(cli.console, "_width", 200)
    return lambda *argv: CliRunner().invoke(cli.app, argv)


def fits(output: str) -> bool:
    """Whether 80 columns hold it, with nothing cut off, and with every table's last column there."""
    return "\N{HORIZONTAL ELLIPSIS}" not in output and max(map(len, output.splitlines())) <= 80


def test_info_names_devices_what_is_missing_and_how_to_get_it(run, monkeypatch):
    monkeypatch.setattr(cli, "_version", lambda package: None)
    result = run("info")
    assert result.exit_code == 0
    installs = (f"pip install 'torch_attnkit[{extra}]'" for extra in ("cuda", "compile", "sim", "models"))
    for argv in ("cpu", "metal", *NVIDIA, *installs):
        assert argv in result.output


def test_tables_fit_80_columns(run, monkeypatch, capsys):
    monkeypatch.setattr(cli.console, "_width", 80)
    monkeypatch.setattr(cli, "_version", lambda package: None)
    monkeypatch.setattr(cli.config, "cache_dir", lambda: Path("/cache"))
    result = run("info")
    joined = "".join(result.output.split())  # a long word goes on in the next line
    assert fits(result.output) and "torch_attnkit[" in joined and "kernelsinthetable" in joined

    longest = max(OPS, key=len)
    runner = Runner("cpu", "CPU", Target("sm90", simulated=True))
    rows = [row for row in support.support("sm90") if row[0].name == longest]
    monkeypatch.setattr(command, "console", Console(width=80))
    monkeypatch.setattr(command, "runs_of", lambda runner, row: [])
    command.run_rows(runner, rows)
    output = capsys.readouterr().out
    assert fits(output) and "tolerance" in output and f"{longest}/sm90"[:20] in output

    Console(width=80).print(random_run._table(Target("sm100", simulated=True), (longest,), []))
    assert fits(output := capsys.readouterr().out) and longest in output

    peers = {name: {"us": 1.0, "ratio": 1.25} for name in ("cuDNN", "FA2", "FA3", "FA4")}
    measured = dict(us=12345.6, us_eager=12345.6, us_host=12345.6, rate="4.13 TB/s", fraction=1.0)
    line = measured | dict(case="causal-gptoss-full-4x4096", error_of_tolerance=0.5, peers=peers)
    Console(width=80).print(table("flash_attention", [line]))
    assert fits(output := capsys.readouterr().out) and output.count("1.25") == len(peers)


@pytest.mark.parametrize("op", OPS)
def test_explain_fits_80_columns_and_says_a_reason_once(run, op):
    axes = sorted({a.name for n in OPS[op].tensors for a in OPS[op].spec(n).axes if a.name})
    required = [f"{n}={OPS[op].choices.get(n, ('2',))[0]}" for n in OPS[op].argnames
                if n not in OPS[op].defaults and n not in OPS[op].tensors]  # fmt: skip
    for target in ("metal", "sm90", "sm120"):
        output = run("explain", op, *(f"{a}=32" for a in axes), *required, "--target", target).output
        rows = [line for line in output.splitlines() if line.startswith("row ")]
        assert fits(output) and len(set(rows)) == len(rows)


def test_support_prints_writes_and_checks(run, tmp_path):
    assert "| `sdpa_decode` |" in run("support").output
    file = tmp_path / "SUPPORT.md"
    assert run("support", "--write", str(file)).exit_code == 0
    assert file.read_text() == report.support_markdown()
    assert run("support", "--check", str(file)).exit_code == 0
    file.write_text("old")
    result = run("support", "--check", str(file))
    assert result.exit_code == 1 and "is stale" in result.output


def test_docs_writes_pages_and_tells_which_are_stale(run, tmp_path):
    assert run("docs").exit_code == 2
    folder = tmp_path / "ops"
    assert run("docs", "--check", str(folder)).exit_code == 1
    assert run("docs", "--write", str(folder)).exit_code == 0
    assert sorted(f.stem for f in folder.iterdir()) == sorted([*OPS, "index"])
    assert run("docs", "--check", str(folder)).exit_code == 0
    (folder / "gone.md").write_text("an op that is no more")
    (folder / "sdpa_multi.md").write_text("old")
    result = run("docs", "--check", str(folder))
    assert result.exit_code == 1 and "is stale (gone.md, sdpa_multi.md)" in result.output
    assert run("docs", "--write", str(folder)).exit_code == 0 and not (folder / "gone.md").exists()


def test_describe_prints_the_contract(run):
    assert run("describe", "sdpa_decode").output == torch_attnkit.describe("sdpa_decode")
    result = run("describe", "nonsense")
    assert result.exit_code == 2 and "no op 'nonsense'" in result.output


@pytest.mark.parametrize("op", OPS)
def test_explain_takes_every_op(run, op):
    axes = sorted({a.name for n in OPS[op].tensors for a in OPS[op].spec(n).axes if a.name})
    required = [f"{n}={OPS[op].choices.get(n, ('2',))[0]}" for n in OPS[op].argnames
                if n not in OPS[op].defaults and n not in OPS[op].tensors]  # fmt: skip
    result = run("explain", op, *(f"{a}=32" for a in axes), *required, "dtype=bf16", "--target", "sm90")
    assert result.output.startswith(f"{op}(")
    assert ("\nrefused: " if result.exit_code else "\nruns     ") in result.output


def test_explain_passes_scalars_and_optional_tensors(run):
    shape = "B=1 Hq=32 Hkv=8 S=1024 D=128 Dv=128".split()
    result = run("explain", "sdpa_decode", *shape, "sink", "window=128", "--target", "cpu")
    assert "features: gqa, sink, window" in result.output and "ops/sdpa_decode/cpu.py on cpu" in result.output


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("nonsense", "B=1"), "no op 'nonsense'"),
        (("sdpa_decode", "B=1"), "q needs the size of Hq, D"),
        (("sdpa_decode", "Q=1"), "'Q' is no axis"),
        (("sdpa_decode", "B=1", "--target", "sm75"), f"target is 'sm75', {ACCEPTED}"),
    ],
)
def test_explain_says_what_is_wrong_with_its_words(run, argv, expected):
    result = run("explain", *argv)
    assert result.exit_code == 2 and bare(expected) in bare(result.output)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("describe", "nonsense"), "no op 'nonsense'"),
        (("parity", "--op", "nonsense"), "no op 'nonsense'"),
        (("parity", "--target", "sm75"), f"arch is 'sm75', {ACCEPTED}"),
        (("warmup", "--target", "sm90", "--op", "nonsense"), "no op 'nonsense'"),
        (("sim", "metal", "--counters", "--op", "nonsense"), "no op 'nonsense'"),
        (("sim", "ptx", "--counters", "--op", "nonsense"), "no op 'nonsense'"),
        (("sim", "ptx", "--check", "--arch", "sm75"), "arch is 'sm75', accepted: sm80, sm89, sm90, sm100, sm120"),
    ],
)
def test_unknown_ops_and_targets_exit_with_2(run, argv, expected):
    result = run(*argv)
    assert result.exit_code == 2 and bare(expected) in bare(result.output), result.output


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("support --write {tmp}/none/x.md", "--write {tmp}/none/x.md: No such file or directory"),
        ("support --check {tmp}/none.md", "--check {tmp}/none.md: No such file or directory"),
        ("support --check {tmp}", "--check {tmp}: Is a directory"),
        ("docs --write {tmp}/file", "--write is {tmp}/file, accepted: a folder"),
        ("docs --check {tmp}/file", "--check is {tmp}/file, accepted: a folder"),
        ("docs --write {tmp}/file/pages", "--write {tmp}/file/pages: Not a directory"),
        ("warmup --target sm90 --out {tmp}/file", "{tmp}/file' is a file"),
        ("warmup --target sm90 --jobs -1", "'--jobs'"),
        ("warmup --target sm90 --models gpt-5", "there is no model 'gpt-5', accepted: all, gpt-oss-20b"),
        ("warmup --target sm90 --models all --dtypes f32", "dtype is 'f32', accepted: bf16, f16"),
        ("warmup --target sm90 --wheel {tmp}", "a wheel is of models' kernels, accepted: --wheel with --models"),
        ("demo --tokens 0", "'--tokens'"),
        ("demo --sentences -1", "'--sentences'"),
        ("parity --jobs 0", "'--jobs'"),
        ("parity --target metal --simulated --op merge_partials --repeat R=x", "R is 'x', accepted: a number"),
        ("parity --target metal --simulated --op merge_partials --repeat R=-1", "R is '-1', accepted: a size"),
        ("parity --target metal --simulated --op merge_partials --repeat R=1.5", "R is '1.5', accepted: a size"),
        ("parity --target metal --simulated --op merge_partials --repeat P=1/2", "P is '1/2', accepted: a number"),
        ("sim ptx --check --seeds -1", "'--seeds'"),
        ("sim ptx --seeds 3", "--seeds goes with --check"),
        ("sim ptx --op nonsense", "--op and --arch go with --check or --counters"),
        ("sim metal --op nonsense", "--op and --lines go with --counters"),
    ],
)
def test_a_wrong_value_of_an_option_exits_with_2_and_its_name(run, tmp_path, argv, expected):
    (tmp_path / "file").write_text("")
    result = run(*argv.format(tmp=tmp_path).split())
    assert result.exit_code == 2 and bare(expected.format(tmp=tmp_path)) in bare(result.output), result.output


@pytest.mark.parametrize(
    ("module", "argv", "expected"),
    [
        ("bench.__main__", "sdpa_decode --dtype half", "dtype is 'half', accepted: bf16, f16, f32, f8e4m3"),
        ("bench.__main__", "nonsense", "no op 'nonsense'"),
        (
            "bench.__main__",
            "sdpa_decode --case nonsense",
            "no case of sdpa_decode has 'nonsense' in its name; there are",
        ),
        ("bench.models", "--batches 1,x", "--batches is '1,x', accepted: numbers"),
        ("bench.models", "--layers 0", "'--layers'"),
        ("bench.layers", "--batches 0", "--batches is '0', accepted: numbers"),
        ("bench.layers", "--sizes flash,huge", "--sizes names 'huge', accepted: flash, pro"),
        ("bench.layers", "--kinds all", "--kinds names 'all', accepted: window, csa, hca"),
    ],
)
def test_so_does_the_bench_before_it_asks_for_a_gpu(module, argv, expected):
    app = typer.Typer()
    app.command()(importlib.import_module(module).main)
    result = CliRunner().invoke(app, argv.split())
    assert result.exit_code == 2 and bare(expected) in bare(result.output), result.output


def test_docs_outside_a_checkout_exits_with_2(run, monkeypatch, tmp_path):
    monkeypatch.setattr(manual.paths, "package", lambda: tmp_path / "torch_attnkit")
    result = run("docs", "--write", str(tmp_path))
    assert result.exit_code == 2 and "accepted: a checkout" in " ".join(result.output.split())


def test_warmup_refuses_unknown_targets_and_a_missing_compiler(run, monkeypatch):
    from torch_attnkit.cuda import compile

    result = run("warmup", "--target", "sm75")
    assert result.exit_code == 2
    assert bare(f"target is 'sm75', accepted: {', '.join(NVIDIA)}") in bare(result.output)

    def missing(package):
        raise compile.UnsupportedError(f"CUDA kernels need the package {package}, which is not installed")

    monkeypatch.setattr(compile, "version", missing)
    result = run("warmup", "--target", "sm90")
    assert result.exit_code == 2 and "nvidia-cutlass-dsl" in result.output


@pytest.fixture
def nothing_compiled(monkeypatch, tmp_path):
    """Warmup's folder, and what it would compile."""
    asked = []
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warmup, "fill", lambda wanted, *more: asked.extend(wanted) or 0)
    monkeypatch.setattr(warmup.compile, "version", lambda package: "0")
    return asked


def test_warmup_names_what_a_target_has_no_kernel_of(run, nothing_compiled, monkeypatch):
    result = run("warmup", "--target", "sm120", "--op", "merge_partials")
    assert result.exit_code == 0 and nothing_compiled and "no kernel" not in result.output
    assert {request.arch for request in nothing_compiled} == {"sm120"}
    ops = {name: OPS[name] for name in ("fp4_moe", "merge_partials")}
    ops["fp4_moe"] = replace(OPS["fp4_moe"], kernels=tuple(r for r in OPS["fp4_moe"].kernels if r.on == "sm90"))
    monkeypatch.setattr(warmup, "OPS", ops)
    result = run("warmup", "--target", "sm80", "--op", "fp4_moe")
    assert result.exit_code == 2 and bare("sm80 has no kernel of fp4_moe, accepted: merge") in bare(result.output)
    result = run("warmup", "--target", "sm89")
    assert result.exit_code == 0 and "sm89 has no kernel of fp4_moe: UnsupportedError" in result.output


def test_warmup_names_the_calls_of_models_that_no_row_takes(run, nothing_compiled, monkeypatch):
    x = torch.empty(8, 32, dtype=torch.bfloat16)
    calls = [Asked("mxfp4_quantize", (x,), {}), Asked("mxfp4_quantize", (x[:, :31],), {}), Asked("fp4_moe", (), {})]
    monkeypatch.setattr(warmup.calls, "of_models", lambda *given: calls)
    result = run("warmup", "--target", "sm80", "--models", "gpt-oss-20b")
    assert result.exit_code == 0 and len(nothing_compiled) == 1
    assert "sm80 has no kernel of mxfp4_quantize (1 of 2 calls), fp4_moe: UnsupportedError" in result.output


@pytest.mark.proof
def test_demo_runs_every_model_and_agrees_with_eager(run):
    result = run("demo", "--tokens", "3", "--sentences", "12")
    assert result.exit_code == 0, result.output
    assert result.output.count("equal to eager") == 5 and "DIFFERS" not in result.output
    assert result.output.count("time over eager's: attention ") == 3 and ", gated norms " in result.output
    for op in ("flash_attention", "sdpa_decode", "fp4_moe", "gated_rmsnorm", "sparse_fmha_with_swa", "route_hash"):
        assert f"{op} " in result.output
    on_metal = result.output.partition("GPT-OSS, random weights, mxfp4 experts, on the kernels of metal (simulated)")[2]
    assert "6 layers, calls on kernels: 54 of 54" in on_metal and "tokens equal: 6 of 6" in on_metal
    assert on_metal.count(" calls on metal (simulated)") == 4 and "tokens/s" not in on_metal


@pytest.mark.proof
def test_demo_goes_on_without_a_simulator_and_says_so(run, monkeypatch):
    from torch_attnkit.demo import models

    def missing(arch):
        raise UnsupportedError(f"no simulator for {arch}")

    monkeypatch.setattr(runtimes, "require_simulator", missing)
    monkeypatch.setattr(models, "ARCHITECTURES", {})
    result = run("demo", "--sentences", "2")
    assert result.exit_code == 0, result.output
    assert result.output.count("equal to eager") == 1
    assert "left out, GPT-OSS on metal kernels in the simulator: no simulator for metal" in result.output


def test_a_simulated_model_is_right_only_if_every_call_ran_on_a_kernel():
    from torch_attnkit.demo import decoders

    calls = Counter({("sdpa_decode", "metal (simulated)"): 3})
    measured = dict(
        per_second=1.0, eager_per_second=1.0, slower={}, tokens=4, tokens_equal=4, logit_difference=0, logit_scale=1
    )
    metal = Target("metal", simulated=True)
    result = decoders.DecoderResult("GPT-OSS", "mxfp4", 6, metal, calls=calls, **measured)
    assert result.right
    calls["fp4_moe", "reference"] += 1
    assert not result.right


def test_demo_says_what_it_needs(run, monkeypatch):
    monkeypatch.setattr(cli, "_version", lambda package: None)
    result = run("demo")
    assert result.exit_code == 2 and "pip install 'torch_attnkit[models]'" in result.output
