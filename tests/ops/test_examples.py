"""The example of an op, which its page shows, runs: it compares with something that can be read beside it."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest
import torch

from torch_attnkit.core.dispatch import OPS


@pytest.mark.parametrize("name", OPS)
def test_example(name: str):
    script = Path(OPS[name].module("op").__file__).parent / "example.py"
    torch.manual_seed(0)
    runpy.run_path(str(script), run_name="__main__")
    tree = ast.parse(script.read_text())
    called = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    judged = any(isinstance(n, ast.Assert) for n in ast.walk(tree)) or "assert_close" in called
    assert ast.get_docstring(tree) and name in called and judged
