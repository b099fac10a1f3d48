"""Hopper's kernel has a part for each axis: what a call's kernel depends on, and that no name stands for two things."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from torch_attnkit import digest, paths
from torch_attnkit.kernels.prefill.sm90 import launch

FAMILY = "torch_attnkit.kernels.prefill."


def reached(trace) -> set[str]:
    """Files of the family that a kernel depends on."""
    modules = digest.reach(f"{launch.__name__}:{trace.__name__}", arch="sm90")
    return {name.removeprefix(FAMILY) for name in modules if name.startswith(FAMILY)}


def test_a_dense_kernel_depends_on_few_files():
    found = reached(launch.trace)
    assert len(found) <= 14
    others = ("load_paged", "transpose_v", "mainloop_fp8", "mainloop_hdim512", "split_kv_scheduler", "combine")
    assert not found & {f"sm90.{name}" for name in others}


@pytest.mark.parametrize("trace", [launch.trace_cached, launch.trace_paged])
def test_kernels_do_not_depend_on_plans(trace):
    assert not reached(trace) & {"launch", "sm90.plan"}


def test_no_class_has_the_name_of_another():
    folder = paths.package() / "kernels" / "prefill"
    files = [*folder.glob("*.py"), *(folder / "sm90").glob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
