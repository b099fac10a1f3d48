"""A module that calls the ops, exported and compiled ahead of time, gives what it gives as it is."""

from __future__ import annotations

import shutil

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core.dispatch import OPS

# Ops whose keywords are of every kind: int, float, bool, str, dtype; optional tensors; one that writes in place.
NAMES = ("sdpa_decode", "flash_attention", "route_softmax", "mxfp4_quantize", "merge_partials", "kv_cache_write")


def _inputs(name: str):
    op = OPS[name]
    shapes = list(op.module("cases").PARITY)
    args, kwargs = parity.inputs(op, shapes[min(1, len(shapes) - 1)], torch.float32, ())
    defaults = {n: v for n, v in op.defaults.items() if n in kwargs and kwargs[n] == v}
    return args, {n: v for n, v in kwargs.items() if n not in defaults}  # what has a default keeps it


class Calls(torch.nn.Module):
    """Every op of ``NAMES`` on its own inputs, between plain torch."""

    def __init__(self, kwargs) -> None:
        super().__init__()
        self.kwargs = kwargs

    def forward(self, inputs):
        found = []
        for name, args in inputs.items():
            op = OPS[name]
            args = [a.clone() if n in op.mutated else a for n, a in zip(op.argnames, args, strict=False)]
            out = getattr(torch.ops.attnkit, name)(args[0] + 0, *args[1:], **self.kwargs[name])
            found += [args[op.argnames.index(n)] for n in op.mutated]
            found += [] if out is None else [out] if isinstance(out, torch.Tensor) else list(out)
        return [f * 2 if f.is_floating_point() else f for f in found]


@pytest.fixture(scope="module")
def program():
    made = {name: _inputs(name) for name in NAMES}
    module = Calls({name: kwargs for name, (_, kwargs) in made.items()})
    inputs = {name: args for name, (args, _) in made.items()}
    with torch.no_grad():
        return module, inputs, torch.export.export(module, (inputs,))


def _same(got, want) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        assert torch.equal(g.nan_to_num(), w.nan_to_num()) if w.is_floating_point() else torch.equal(g, w)


def test_an_exported_program_gives_the_same(program):
    module, inputs, exported = program
    _same(exported.module()(inputs), module(inputs))


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs g++")
def test_a_program_compiled_ahead_of_time_gives_the_same(program, tmp_path):
    module, inputs, exported = program
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "calls.pt2"))
        _same(torch._inductor.aoti_load_package(package)(inputs), module(inputs))
