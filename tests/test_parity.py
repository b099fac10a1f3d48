"""The one parity test: a sample of each op on every architecture that can run here, with ``--proof`` all of its cases.

Rows without evidence for the code that stands are run whole by ``python -m torch_attnkit parity --stale``.
"""

from __future__ import annotations

import itertools

import pytest

from torch_attnkit import parity
from torch_attnkit.core.support import support
from torch_attnkit.parity import command, places

SAMPLE = 1  # cases of an op on an architecture


def runs(proof: bool) -> list[tuple[places.Place, command.Run]]:
    """What can run here: every case, or of each op and place what lies evenly among its rows and shapes."""
    found = []
    for place in places.here(command.KNOWN):
        for _, rows in itertools.groupby(support(place.target.arch), lambda row: row[0].name):
            every = [run for row in rows for run in command.runs_of(place, row)]
            step = 1 if proof else max(1, len(every) // SAMPLE)
            # Not from the first on: the first case of every row is the smallest.
            found += [(place, run) for run in every[step // 2 :: step]]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        todo = runs(metafunc.config.getoption("--proof"))
        names = [f"{run[0].id}-{run[2]}-{run[3]}{'-simulated' * place.target.simulated}" for place, run in todo]
        metafunc.parametrize(("place", "run"), todo, ids=names)


def test_parity(place: places.Place, run: command.Run):
    case, device, layout, schedule = run
    with place.watching(schedule):
        if parity.run(case, device, layout) is None:
            pytest.skip("the row's needs exclude it")


def test_every_op_with_kernels_is_in_the_sample():
    wanted = {(op.name, place) for place in places.here(command.KNOWN) for op, *_ in support(place.target.arch)}
    assert {(run[0].op, place) for place, run in runs(proof=False)} == wanted


def test_a_wrong_kernel_is_caught(monkeypatch):
    """The parity run itself must be able to fail: values, borders, inputs and a kernel that never writes."""
    op, index, _, arch = next(r for r in support("cpu"))
    case = parity.cases(op, index, arch)[0]
    module = op.module(op.kernels[index].on)
    build = module.build

    def off_by_a_bit(call, target):
        launch = build(call, target)

        def run(*args):
            launch(*args)
            args[len(op.argnames)].mul_(1.01)

        return run

    def changes_input(call, target):
        launch = build(call, target)
        return lambda *args: (launch(*args), args[0].zero_())

    def writes_past_the_end(call, target):
        launch = build(call, target)

        def run(*args):
            launch(*args)
            out = args[len(op.argnames)]
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1)

        return run

    def never_writes(call, target):
        return lambda *args: None

    from torch_attnkit.core import dispatch

    for broken in (off_by_a_bit, changes_input, writes_past_the_end, never_writes):
        dispatch._PLANS[op.name].clear()
        monkeypatch.setattr(module, "build", broken)
        with pytest.raises(AssertionError):
            parity.run(case)
    dispatch._PLANS[op.name].clear()
