"""``python -m torch_attnkit sim ptx``."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from torch_attnkit import cli, parity
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.sim.ptx.settings import current

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore")]
OP = "route_hash"  # few kernels, which compile fast
WORDS = ("--op", OP, "--arch", "sm100")


def run(*words):
    result = CliRunner().invoke(cli.app, ["sim", "ptx", *words], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_it_says_whether_it_works_here():
    assert run() == (0, "fast: ok\nchecked: ok\n")


def test_every_case_runs_checked_under_each_schedule():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    code, text = run("--check", "--seeds", "1", *WORDS)
    index = next(i for i, row in enumerate(OPS[OP].kernels) if "sm100" in row.archs)
    cases = parity.cases(OPS[OP], index, "sm100", covering=True)
    lines = text.splitlines()
    assert code == 0 and lines[-1] == "0 failures"
    assert [line.split(": ")[0] for line in lines[:-1]] == [f"{c.id} schedule {s}" for c in cases for s in (0, 1)]


def test_what_is_waived_is_printed_with_every_case():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    code, text = run("--check", "--waive", "exited", "--waive", "uninitialised", *WORDS)
    *lines, last = text.splitlines()
    assert code == 0 and last == "0 failures" and lines
    words = "; waived: uninitialised (seen 0 times), exited (seen 0 times)"
    launched = [line for line in lines if "-empty]" not in line]
    assert launched and all(line.endswith(words) for line in launched), text


def test_a_failure_is_counted(monkeypatch):
    def wrong(case):
        assert current().check
        raise AssertionError(f"{case.id} is wrong")

    monkeypatch.setattr(parity, "run", wrong)
    code, text = run("--check", *WORDS)
    assert code == 1 and "is wrong" in text and "0 failures" not in text


def test_counters_come_with_a_model_that_says_so():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    code, text = run("--counters", *WORDS)
    assert code == 0 and f"{OP}[sm100-" in text and "warp instructions" in text
    assert "modelled, not measured" in text and "on a B200" in text


def test_wrong_words_are_refused():
    code, text = run("--check", "--op", "no_such_op")
    assert code == 2 and "no op 'no_such_op'" in text
    code, text = run("--counters", "--arch", "sm75")
    assert code == 2 and "accepted: sm80, sm89, sm90, sm100, sm120" in text
    code, text = run("--check", "--waive", "races")
    assert code == 2 and "waive has 'races', accepted: read_after_write, " in " ".join(text.split())
    code, text = run("--counters", "--waive", "exited")
    assert code == 2 and "--waive goes with --check" in text
