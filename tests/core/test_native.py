"""Which build of csrc/dispatch is loaded, and what is said where none is."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import native


def test_a_build_for_another_torch_is_not_loaded(tmp_path):
    (tmp_path / "_dispatch_2_1.cpython-311-x86_64-linux-gnu.so").write_bytes(b"not even a library")
    with pytest.warns(
        RuntimeWarning, match=r"stay in Python: csrc/dispatch is built for torch 2\.1, and this is 2\.9\.0"
    ):
        found, word = native._load(tmp_path, "2.9.0+cpu")
    assert found is None and word.startswith("Python (csrc/dispatch is built for torch 2.1")


def test_a_build_that_does_not_load_is_named(tmp_path):
    (tmp_path / "_dispatch_0_0.cpython-311-x86_64-linux-gnu.so").write_bytes(b"not even a library")
    with pytest.warns(RuntimeWarning, match=r"eager calls stay in Python: csrc/dispatch does not load: "):
        found, word = native._load(tmp_path, "0.0.1")
    assert found is None and word.startswith("Python (csrc/dispatch does not load")


def test_no_build_is_no_fault(tmp_path):
    assert native._load(tmp_path, torch.__version__) == (None, "Python (csrc/dispatch is not built)")


def test_explain_tells_who_runs_eager_calls():
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device="meta")
    text = torch_attnkit.explain("nvfp4_quantize", x, target="sm90")
    assert f"host     {native.word}" in text and "host" not in torch_attnkit.explain(
        "nvfp4_quantize", x, target="metal"
    )


def test_off_is_there_without_an_extension(monkeypatch):
    monkeypatch.setattr(native, "extension", None)
    with native.off(), native.off():
        assert torch.ops.attnkit.nvfp4_quantize(torch.ones(2, 16))[0].shape == (2, 8)
