"""The one parity test: a sample of each op on every architecture that can run here, with ``--proof`` all of its cases.

Rows without evidence for the code that stands are run whole by ``python -m torch_attnkit parity --stale``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from torch_attnkit import parity
from torch_attnkit.core import Op
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.support import support
from torch_attnkit.parity import command, runners
from torch_attnkit.parity.case import bound

SAMPLE = 1  # cases of an op on an architecture
# What these run is much the same code, cut for the same shared memory: an op's sample goes to one of them in its turn
# where they are simulated. All of them have all cases with --proof.
ROTATED = ("sm80", "sm89", "sm120")
# Of all cases of a row, which hardware runs, the share that a need of it excludes at most: as many as the op's shapes
# and options have of what the words rule out.
EXCLUDED = {
    "format must be 'none'": 0.49,  # an op of three or four formats, each with shapes of its own and a row of its own
    "format must be 'fp8'": 0.70,
    "format must be 'mxfp4'": 0.89,
    "format must be 'nvfp4' or 'mxfp4'": 0.19,
    "dtype must be bfloat16 or float16": 0.05,  # one case asks for float32
    "Dv must equal D": 0.15,  # one or two shapes of seven have another Dv
    "Ps must be a multiple of 8": 0.15,  # pages of 1 and of 5 keys, as vLLM never has them
    "Ps must be a multiple of 16": 0.18,
    "Ps must be 1 or a multiple of 16": 0.15,
    "N and M must be multiples of 32": 0.11,  # a shape for the blocks of 16
}


def runs(proof: bool) -> list[tuple[runners.Runner, command.Run]]:
    """What can run here: every case, or of each op and place what lies evenly among its rows and shapes."""
    found = []
    # The cases of a row are remembered: one process finds those of the first rows, the other of the last.
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        for runner in reversed(runners.here(command.KNOWN)):
            for row in reversed(support(runner.target.arch)):
                command.runs_of(runner, row)
    chosen = sampled_arch()
    for runner in runners.here(command.KNOWN):
        for op, rows in itertools.groupby(support(runner.target.arch), lambda row: row[0].name):
            if not proof and is_left_out(runner, op, chosen):
                continue
            every = [run for row in rows for run in command.runs_of(runner, row)]
            step = 1 if proof else max(1, len(every) // SAMPLE)
            # Not from the first on: the first case of every row is the smallest.
            found += [(runner, run) for run in every[step // 2 :: step]]
    return found


def sampled_arch() -> dict[str, str]:
    """Which of ``ROTATED`` an op's sample goes to, of those that have kernels of it."""
    having = {name: [a for a in ROTATED if any(a in row.archs for row in op.kernels)] for name, op in OPS.items()}
    return {name: archs[n % len(archs)] for n, (name, archs) in enumerate(sorted(having.items())) if archs}


def is_left_out(runner: runners.Runner, op: str, chosen: dict[str, str]) -> bool:
    return runner.target.simulated and runner.target.arch in ROTATED and chosen[op] != runner.target.arch


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "runner" in metafunc.fixturenames:
        todo = runs(metafunc.config.getoption("--proof"))
        names = [f"{run[0].id}-{run[2]}-{run[3]}{'-simulated' * runner.target.simulated}" for runner, run in todo]
        metafunc.parametrize(("runner", "run"), todo, ids=names)


def test_parity(runner: runners.Runner, run: command.Run):
    case, device, layout, schedule = run
    with runner.watching(schedule):
        if parity.run(case, device, layout) is None:
            assert not runner.target.simulated, "the row takes what covers it"
            pytest.skip("the row's needs exclude it")


def excluded(op: Op, index: int, arch: str, *, covering: bool) -> Iterator[str | None]:
    """For each case of a row the need that excludes it, or None."""
    row = op.kernels[index]
    for case in parity.cases(op, index, arch, covering=covering):
        with parity.ShapesOnly():
            why = row.refusal(bound(op, *parity.arguments(replace(case, extra=""))))
        yield why if why in row.needs else None


@pytest.mark.parametrize("arch", command.KNOWN)
def test_no_need_excludes_a_case_that_covers_its_row(arch: str):
    """So that nothing which a simulator runs, as evidence or here, is left out unseen. Rows without needs take all."""
    for op, index, row, _ in (r for r in support(arch) if r[2].archs[0] == arch):  # an arch changes nothing in it
        found = list(excluded(op, index, arch, covering=True)) if row.needs else [None]
        assert found and set(found) == {None}, (op.name, index)


@pytest.mark.proof
def test_needs_exclude_few_of_all_cases():
    """And each that excludes any is in the table, with its share: none stands there that does not."""
    most: dict[str, float] = {}
    for op, index, row, arch in support():
        if row.needs:
            found = list(excluded(op, index, arch, covering=False))
            for why in {why for why in found if why}:
                most[why] = max(most.get(why, 0.0), found.count(why) / len(found))
    assert most.keys() == EXCLUDED.keys()
    assert all(EXCLUDED[why] - 0.01 < share <= EXCLUDED[why] for why, share in most.items()), most


def test_every_op_with_kernels_is_in_the_sample():
    wanted = {(op.name, runner) for runner in runners.here(command.KNOWN) for op, *_ in support(runner.target.arch)}
    chosen = sampled_arch()
    left_out = {(op, runner) for op, runner in wanted if is_left_out(runner, op, chosen)}
    assert {(run[0].op, runner) for runner, run in runs(proof=False)} == wanted - left_out
    seen = {op for op, runner in wanted - left_out if runner.target.simulated and runner.target.arch in ROTATED}
    assert {op for op, _ in left_out} <= seen and set(chosen.values()) == set(ROTATED)


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
