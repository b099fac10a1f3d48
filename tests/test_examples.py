"""Every script in examples/ runs to its end on this machine, where its own comparison stands, and says what it says.

Those that start processes of their own, or do at length what other tests do, wait for ``make proof``.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {
    "deepseek_v4_layer": "the projection in NVFP4 is off by",
    "find_a_race": "fixed, checked runs that are right: 9 of 9",
    "find_a_race_in_metal": "with the barrier, checked, the sum is right: True",
    "generate_with_transformers": "all 24 tokens are those of transformers' own code",
    "paged_prefix_sharing": "14 pages of 16 keys are in use, 20 without sharing",
    "mxfp4_checkpoint": "the experts hold the bytes of the file: True",
    "two_processes": "experts shared, own tokens: off by",
}
LONG = ("find_a_race_in_metal", "mxfp4_checkpoint", "two_processes")
NEEDS = {
    "find_a_race": ("cutlass", "torch_attnkit.sim._ptx"),  # CuTeDSL exists for Linux alone
    "find_a_race_in_metal": ("ziglang", "torch_attnkit.sim._metal"),
    "generate_with_transformers": ("transformers",),
    "mxfp4_checkpoint": ("transformers",),
}
PROCESSES = {"two_processes": 2}  # started by torchrun


def test_every_script_is_run():
    assert sorted(p.stem for p in (ROOT / "examples").glob("*.py")) == sorted(EXAMPLES)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.proof] * (n in LONG)) for n in EXAMPLES])
def test_example(name: str, capsys: pytest.CaptureFixture[str]):
    script = ROOT / "examples" / f"{name}.py"
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    if name in PROCESSES:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [*torchrun, str(PROCESSES[name]), script]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        output = done.stdout
    else:
        runpy.run_path(str(script), run_name="__main__")
        output = capsys.readouterr().out
    assert EXAMPLES[name] in output


def test_the_page_about_a_kernel_of_ones_own_quotes_the_example():
    script = (ROOT / "examples" / "find_a_race.py").read_text("utf-8")
    quoted = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_kernel.md").read_text("utf-8"), re.S)
    assert len(quoted) == 2 and all(text in script for text in quoted)
    for line, phrase in (
        (40, "parts[0] + parts[1]"),
        (36, "parts[thread // LANES] = part"),
    ):  # as the page's report says
        assert phrase in script.splitlines()[line - 1]
