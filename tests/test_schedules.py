"""Every kernel of CuTeDSL in the PTX simulator, checked, under each schedule: a sample, with ``--proof`` everything.

In ``test_parity`` the cases of a row take the schedules in turn, as evidence does. Here each case meets all of them:
the plain one, in which what is asynchronous completes at once, and three hostile ones. ``-k sm100`` is one target.
"""

from __future__ import annotations

import itertools

import pytest

from torch_attnkit import parity
from torch_attnkit.core.support import support
from torch_attnkit.parity import runners

ARCHS = ("sm90", "sm100")
MOST = 150  # cases of an op that all meet every schedule; of more, one of each row and set of features
Run = tuple[runners.Runner, parity.Case, int]


def cases(runner: runners.Runner) -> list[parity.Case]:
    """Those of a simulator's rows. Attention has hundreds, as each head size is a row."""
    found = []
    for _, rows in itertools.groupby(support(runner.target.arch), lambda row: row[0].name):
        every = [c for op, index, _, arch in rows for c in parity.cases(op, index, arch, covering=True)]
        alike: dict[tuple[int, tuple[str, ...]], list[parity.Case]] = {}
        for case in every:
            alike.setdefault((case.row, case.features), []).append(case)
        # Not the first, which is the smallest.
        found += every if len(every) <= MOST else [some[len(some) // 2] for some in alike.values()]
    return found


def runs(proof: bool) -> list[Run]:
    """What the simulators here can run, or one case of each, under every schedule."""
    found: list[Run] = []
    for runner in runners.here(ARCHS):
        if runner.target.simulated:
            some = cases(runner) if proof else cases(runner)[-1:]
            found += [(runner, case, schedule) for case in some for schedule in range(runners.SCHEDULES)]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule" in metafunc.fixturenames:
        todo = runs(metafunc.config.getoption("--proof"))
        names = [f"{case.id}-schedule{schedule}" for _, case, schedule in todo]
        metafunc.parametrize(("runner", "case", "schedule"), todo, ids=names)


@pytest.mark.simulator
@pytest.mark.filterwarnings("default")
def test_a_case_is_right_under_a_schedule(runner: runners.Runner, case: parity.Case, schedule: int):
    with runner.watching(schedule):
        assert parity.run(case) is not None, "the row takes what covers it"


def test_every_row_meets_every_schedule():
    """With every set of features that its cases have."""
    every, some = runs(proof=True), runs(proof=False)
    assert len(set(every)) == len(every) and set(some) <= set(every)
    for runner in {runner for runner, *_ in every}:
        covered = {(case.op, case.row, case.features, schedule) for at, case, schedule in every if at == runner}
        rows = support(runner.target.arch)
        wanted = {(c.op, c.row, c.features) for o, i, _, a in rows for c in parity.cases(o, i, a, covering=True)}
        assert covered == {(*one, schedule) for one in wanted for schedule in range(runners.SCHEDULES)}
        assert {schedule for at, _, schedule in some if at == runner} == set(range(runners.SCHEDULES))
