"""What a case runs, by what it does: launches, what they are given, and nothing of what things are called."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import Target
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.support import support
from torch_attnkit.parity import cases, launched
from torch_attnkit.paths import csrc

ARCHS = ("metal", "sm90")


def first(op: str, arch: str):
    index = next(i for o, i, _, _ in support(arch) if o.name == op)
    return cases(OPS[op], index, arch, covering=True)[0]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_case_runs_the_same_whatever_ran_before_and_another_case_something_else(arch):
    case, target = first("gated_rmsnorm", arch), Target(arch, simulated=True)
    before = launched.by(case, target)
    assert launched.by(dataclasses.replace(case, shape=list(OPS[case.op].module("cases").PARITY)[-1]), target) != before
    assert launched.by(case, target) == before


@pytest.mark.parametrize("arch", ARCHS)
def test_scalars_and_layouts_that_a_kernel_is_given_count(arch):
    case, target = first("gated_rmsnorm", arch), Target(arch, simulated=True)
    args, kwargs = torch_attnkit.parity.arguments(case)
    run = lambda args, **changed: launched._launched(OPS[case.op], args, kwargs | changed, target)
    assert run(args) == run(tuple(a.clone() for a in args))
    assert run(args, eps=1e-3) != run(args)
    wide = torch.empty(args[0].shape[0], args[0].shape[-1] + 8, dtype=args[0].dtype)[:, : args[0].shape[-1]]
    assert args[0].dim() != 2 or run((wide, *args[1:])) != run(args)


RENAMED = {  # a module, a class, a constant, functions of the plan and of the cases
    "kernels/norm/plan.py": "kernels/norm/tiles.py",
    "from .plan import Config": "from .tiles import Config",
    "from .plan import configure": "from .tiles import tile_of",
    "configure(": "tile_of(",
    "_Resident": "_InRegisters",
    "_FLAT": "_SATURATED",
    "_count(dims": "_elements(dims",
}
FLAT = {"_FLAT = 200.0": "_FLAT = 199.0"}  # a constant of the kernel
RUNS = """
import sys
from torch_attnkit.core import Target
from torch_attnkit.core.support import support
from torch_attnkit.parity import evidence
for op, index, _, _ in support("sm90"):
    if op.name in sys.argv[1:]:
        key = op.name, index, Target("sm90", simulated=True)
        print(op.name, evidence.sources_of(*key), evidence.runs_of(*key))
"""


def digests(home: Path, *ops: str) -> dict[str, list[str]]:
    """(sources, runs) of ``ops`` by the package in ``home``, in a process of its own."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(home), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", RUNS, *ops], cwd=home, env=env, capture_output=True, text=True, check=True
    )
    return {op: found for op, *found in map(str.split, done.stdout.splitlines())}


def edited(home: Path, changes: dict[str, str]) -> Path:
    """A copy of the package in ``home``, in whose norm kernels texts and names of files are changed."""
    package = Path(torch_attnkit.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "evidence")
    shutil.copytree(package, home / "torch_attnkit", ignore=ignored)
    shutil.copytree(csrc(), home / "csrc")
    for folder in ("kernels/norm", "ops/gated_rmsnorm"):
        for file in (home / "torch_attnkit" / folder).glob("*.py"):
            text = file.read_text()
            for old, new in changes.items():
                text = text.replace(old, new)
            file.write_text(text)
            name = file.relative_to(home / "torch_attnkit").as_posix()
            file.rename(home / "torch_attnkit" / changes.get(name, name))
    return home


@pytest.mark.proof
@pytest.mark.seconds(240)
def test_a_rename_makes_nothing_old(tmp_path):
    before = digests(Path(torch_attnkit.__file__).parent.parent, "gated_rmsnorm")
    after = digests(edited(tmp_path / "renamed", RENAMED), "gated_rmsnorm")
    assert before["gated_rmsnorm"][0] != after["gated_rmsnorm"][0]
    assert before["gated_rmsnorm"][1] == after["gated_rmsnorm"][1]


@pytest.mark.proof
@pytest.mark.seconds(240)
def test_a_changed_constant_of_a_kernel_makes_its_rows_old_and_no_others(tmp_path):
    ops = ("gated_rmsnorm", "merge_partials")
    before = digests(Path(torch_attnkit.__file__).parent.parent, *ops)
    after = digests(edited(tmp_path / "changed", FLAT), *ops)
    assert before["gated_rmsnorm"][1] != after["gated_rmsnorm"][1]
    assert before["merge_partials"] == after["merge_partials"]
