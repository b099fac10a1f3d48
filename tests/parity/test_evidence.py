"""Evidence belongs to the code it was seen with, and the command that makes it runs what it says."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from torch_attnkit import cli, report
from torch_attnkit.core import Target, UnsupportedError
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.support import support
from torch_attnkit.parity import command, evidence, judge, runners

CPU = runners.Runner("cpu", "some processor", Target("cpu"))
ROW = next(found for found in support("cpu") if found[0].name == "gated_rmsnorm")  # few cases, and short ones


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder without evidence, and of the CPU's rows one alone: it is enough, and others take their time."""
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    for module in (evidence, command):
        monkeypatch.setattr(module, "support", lambda arch: [ROW] if arch == "cpu" else support(arch))
    return tmp_path


@pytest.fixture
def changed(monkeypatch):
    """A function after which the code of every row counts as another."""
    real = evidence.sources_of
    return lambda: monkeypatch.setattr(evidence, "sources_of", lambda *key: real(*key)[::-1])


def run(*argv: str):
    return CliRunner().invoke(cli.app, ["parity", *argv], env={"COLUMNS": "200"})


def seen() -> list[str]:
    return [str(s) for s in evidence.seen(ROW, evidence.load())]


def test_what_recording_lacks_is_said_before_cases_run(folder, monkeypatch):
    """Of a GPU's cases their launches are recorded in its simulator, which may lack a package."""
    ran = []
    monkeypatch.setattr(command, "outcome", lambda *run: ran.append(run))

    def lacking(arch: str) -> None:
        raise UnsupportedError(f"{arch} needs the package pyelftools")

    monkeypatch.setattr(evidence.runtimes, "require_simulator", lacking)
    gpu = runners.Runner("cuda", "some GPU", Target("sm90"))
    row = next(found for found in support("sm90") if found[0].name == "linear_decode")
    with pytest.raises(UnsupportedError, match="pyelftools"):
        command.run_rows(gpu, [row], record=True)
    assert not ran
    command.run_rows(CPU, [ROW], record=True)
    assert ran


def test_evidence_counts_as_old_once_the_code_has_changed(folder, changed):
    command.keep(CPU, [evidence.Outcome(ROW, 10, 2, 0)])
    assert seen() == [f"on {CPU.evidence}"]
    assert evidence.stale(CPU.target, CPU.evidence) == []
    changed()
    assert seen() == [f"on {CPU.evidence} (older code)"]
    assert evidence.stale(CPU.target, CPU.evidence) == [ROW]
    assert f"| on {CPU.evidence} (older code) |" in report.support_markdown()


@pytest.fixture
def rerun(monkeypatch):
    """A function after which the cases of every row run something else."""
    real = evidence.runs_of
    return lambda: monkeypatch.setattr(evidence, "runs_of", lambda *key: real(*key)[::-1])


def test_evidence_is_carried_over_to_other_sources_that_run_the_same(folder, changed):
    command.keep(CPU, [evidence.Outcome(ROW, 10, 2, 0)])
    changed()
    result = run("--resign", "--arch", "cpu")
    assert result.exit_code == 0 and "carried over" in result.output
    assert seen() == [f"on {CPU.evidence}"]
    assert "carried over" not in run("--resign", "--arch", "cpu").output


def test_evidence_of_other_code_stays_old(folder, changed, rerun):
    command.keep(CPU, [evidence.Outcome(ROW, 10, 2, 0)])
    changed()
    rerun()
    result = run("--resign", "--arch", "cpu")
    assert result.exit_code == 1 and "of other code" in result.output
    assert seen() == [f"on {CPU.evidence} (older code)"]


@pytest.mark.parametrize("later", [False, True])
def test_evidence_from_before_there_was_a_digest_of_runs_gets_one_while_its_sources_stand(folder, changed, later):
    command.keep(CPU, [evidence.Outcome(ROW, 10, 2, 0)])
    (file,) = folder.glob("*.json")
    whole = json.loads(file.read_text())
    known = whole["runs"][0]["rows"][0].pop("runs")
    file.write_text(json.dumps(whole))
    if later:
        changed()
    assert run("--resign", "--arch", "cpu").exit_code == int(later)
    assert json.loads(file.read_text())["runs"][0]["rows"][0].get("runs") == (None if later else known)


@pytest.mark.parametrize("outcome", [evidence.Outcome(ROW, 10, 0, 1), evidence.Outcome(ROW, 0, 10, 0)])
def test_a_row_that_failed_or_ran_nothing_has_no_evidence(folder, outcome):
    command.keep(CPU, [evidence.Outcome(ROW, 10, 0, 0)])
    command.keep(CPU, [outcome])
    assert seen() == [] and evidence.stale(CPU.target, CPU.evidence) == [ROW]


def test_a_wider_row_starts_from_nothing(folder, monkeypatch):
    command.keep(CPU, [evidence.Outcome(ROW, 10, 0, 0)])
    monkeypatch.setattr(evidence, "row_title", lambda op, row: "another wording, or another need")
    assert seen() == []


def test_a_run_keeps_other_rows_as_they_were_seen_and_drops_those_that_left_the_table(folder, monkeypatch):
    target = Target("sm100", simulated=True)
    rows = support("sm100")[:3]
    monkeypatch.setattr(evidence, "runs_of", lambda *key: "of nobody's interest here")
    evidence.record(target, "sm100", {"date": "then"}, [evidence.Outcome(r, 5, 0, 0) for r in rows])
    file = evidence.record(target, "sm100", {"date": "now"}, [evidence.Outcome(rows[0], 6, 0, 0)])
    found = json.loads(file.read_text())
    assert [(r["date"], [e["passed"] for e in r["rows"]]) for r in found["runs"]] == [("then", [5, 5]), ("now", [6])]
    found["runs"][0]["rows"][0]["row"] = "an op of old"
    file.write_text(json.dumps(found))
    evidence.record(target, "sm100", {"date": "later"}, [])
    assert "an op of old" not in file.read_text()


def test_hardware_and_simulator_have_digests_of_their_own():
    op, index, _, _ = support("sm90")[0]
    assert evidence.sources_of(op.name, index, Target("sm90")) != evidence.sources_of(
        op.name, index, Target("sm90", simulated=True)
    )


def test_rows_of_a_target_are_worded_apart():
    for arch in command.KNOWN:
        names = [evidence.row_title(op.name, row) for op, _, row, _ in support(arch)]
        assert len(set(names)) == len(names)


def test_the_command_runs_rows_and_records_them(folder):
    result = run("--op", ROW[0].name, "--arch", "cpu", "--record")
    assert result.exit_code == 0 and f"{ROW[0].name}/cpu" in result.output
    assert seen() == [f"on {CPU.evidence}"]
    result = run("--arch", "cpu", "--stale")
    assert result.exit_code == 0 and "nothing to run" in result.output


def test_stale_rows_are_run_and_recorded_unless_told_otherwise(folder):
    assert run("--arch", "cpu", "--stale", "--no-record").exit_code == 0
    assert seen() == []
    assert run("--arch", "cpu", "--stale").exit_code == 0
    assert seen() == [f"on {CPU.evidence}"]


def test_a_sample_is_a_share_of_what_is_not_stale_and_its_seed_draws_it(folder, monkeypatch):
    ran = []
    monkeypatch.setattr(judge, "run", lambda case, device, layout: ran.append((case.id, layout)) or 0.0)
    assert "nothing to run" in run("--arch", "cpu", "--sample", "0.1").output
    command.keep(CPU, [evidence.Outcome(ROW, 10, 0, 0)])
    sampled = []
    for seed in ("a", "a", "b"):
        ran.clear()
        assert run("--arch", "cpu", "--sample", "0.1", "--seed", seed).exit_code == 0
        sampled.append(list(ran))
    every = len(command.runs_of(CPU, ROW))
    assert sampled[0] == sampled[1] != sampled[2] and 0.03 * every < len(sampled[0]) < 0.2 * every


def test_failures_give_an_exit_code_and_unknown_names_another(folder, monkeypatch):
    def wrong(*args):
        raise AssertionError("row is wrong")

    monkeypatch.setattr(judge, "run", wrong)
    result = run("--op", ROW[0].name, "--arch", "cpu", "--record")
    assert result.exit_code == 1 and "row is wrong" in result.output
    assert seen() == []
    for argv, expected in (
        (("--arch", "sm75"), "accepted: cpu, metal, sm80, sm89, sm90, sm100, sm120"),
        (("--op", "foo"), f"no op 'foo'; there are {next(iter(OPS))}"),
        (("--sample", "2"), "accepted: a share between 0 and 1"),
    ):
        result = run(*argv)
        assert result.exit_code == 2 and expected in " ".join(result.output.replace("│", " ").split())


def test_refused_cases_are_counted_apart(folder, monkeypatch):
    monkeypatch.setattr(judge, "run", lambda case, device, layout: None if layout == "embedded" else 0.0)
    assert run("--arch", "cpu", "--record").exit_code == 0
    (entry,) = json.loads(next(folder.glob("*.json")).read_text())["runs"][0]["rows"]
    assert entry["refused"] == entry["passed"] > 0 == entry["failed"]


def test_of_stale_rows_that_are_not_recorded_a_bounded_number_of_cases_runs(folder, monkeypatch):
    ran = []
    monkeypatch.setattr(judge, "run", lambda case, device, layout: ran.append(case.id) or 0.0)
    monkeypatch.setattr(command, "MOST_STALE", 40)
    result = run("--arch", "cpu", "--stale", "--no-record")
    every = len(command.runs_of(CPU, ROW))
    assert result.exit_code == 0 and f"of {every} cases" in result.output
    assert 20 < len(ran) < 60 < every
    ran.clear()
    assert run("--arch", "cpu", "--stale").exit_code == 0 and len(ran) == every
