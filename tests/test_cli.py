"""``python -m torch_attnkit`` as a user types it, and the demo on a few sentences and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import torch_attnkit
from torch_attnkit import cli, report
from torch_attnkit.core.dispatch import OPS

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(cli.console, "_width", 200)
    return lambda *words: CliRunner().invoke(cli.app, words)


def test_info_names_devices_what_is_missing_and_how_to_get_it(run, monkeypatch):
    monkeypatch.setattr(cli, "_version", lambda package: None)
    result = run("info")
    assert result.exit_code == 0
    for words in ("cpu", "metal", "sm90", "sm100", "pip install 'torch_attnkit[cuda]'", "torch_attnkit[models]"):
        assert words in result.output


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
    result = run("explain", op, *(f"{a}=16" for a in axes), *required, "dtype=bf16", "--target", "sm90")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{op}(")
    assert "refused: " in result.output or "runs     " in result.output


def test_explain_passes_scalars_and_optional_tensors(run):
    shape = "B=1 Hq=32 Hkv=8 S=1024 D=128 Dv=128".split()
    result = run("explain", "sdpa_decode", *shape, "sink", "window=128", "--target", "cpu")
    assert "features: gqa, sink, window" in result.output and "reference.py on cpu" in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nonsense", "B=1"), "no op 'nonsense'"),
        (("sdpa_decode", "B=1"), "q needs the size of Hq, D"),
        (("sdpa_decode", "Q=1"), "'Q=1' is no axis"),
    ],
)
def test_explain_says_what_is_wrong_with_its_words(run, words, expected):
    result = run("explain", *words)
    assert result.exit_code == 2 and expected in result.output


def test_warmup_refuses_unknown_targets_and_a_missing_compiler(run, monkeypatch):
    from torch_attnkit.cuda import compile

    result = run("warmup", "--target", "sm80")
    assert result.exit_code == 2 and "target is 'sm80', accepted: sm90, sm100" in result.output

    def missing(package):
        raise compile.UnsupportedError(f"CUDA kernels need the package {package}, which is not installed")

    monkeypatch.setattr(compile, "version", missing)
    result = run("warmup", "--target", "sm90")
    assert result.exit_code == 2 and "nvidia-cutlass-dsl" in result.output


def test_demo_runs_every_model_and_agrees_with_eager(run):
    result = run("demo", "--tokens", "3", "--sentences", "12")
    assert result.exit_code == 0, result.output
    assert result.output.count("equal to eager") == 4 and "DIFFERS" not in result.output
    for op in ("flash_attention", "sdpa_decode", "fp4_moe", "gated_rmsnorm", "sparse_fmha_with_swa", "route_hash"):
        assert f"{op} " in result.output


def test_demo_says_what_it_needs(run, monkeypatch):
    monkeypatch.setattr(cli, "_version", lambda package: None)
    result = run("demo")
    assert result.exit_code == 2 and "pip install 'torch_attnkit[models]'" in result.output
