"""Compiled kernels that are installed as a wheel: found, searched before the cache, and run without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from torch_attnkit import cli, explain
from torch_attnkit.cuda import compile, driver, installed
from torch_attnkit.kernels.norm import launch as norm
from torch_attnkit.served import wheel

ROOT = Path(__file__).resolve().parents[2]
REQUEST = compile.Request.of(
    "sm90", norm.trace, dtypes=("bf16", "bf16", "bf16"), rank=2, groups=1, config=(8, 16, 1, 512, 1, False), even=True
)


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A folder of installed packages with the wheel of one kernel, whose library is empty; no cache yet."""
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "_build", lambda *args: pytest.fail("compiled"))
    monkeypatch.setattr(compile, "_found", {})
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    for end in (".so", ".json"):
        (kernels / f"{REQUEST.file}{end}").write_text("{}")
    path = wheel.write([REQUEST], kernels, tmp_path / "dist", "a-model in bf16")
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    installed.wheels.cache_clear()
    yield tmp_path / "site"
    installed.wheels.cache_clear()


def test_a_kernel_of_a_wheel_is_used_before_the_cache(site, tmp_path):
    (tmp_path / "cache" / "cuda").mkdir(parents=True, mode=0o700)
    (tmp_path / "cache" / "cuda" / f"{REQUEST.file}.so").touch()
    (site / "torch_attnkit_kernels_sm90").chmod(0o775)  # as installed with a umask of 002: it is as the code beside it
    found = compile.get(REQUEST)
    assert found.installed and found.library == site / "torch_attnkit_kernels_sm90" / f"{REQUEST.file}.so"
    assert compile.origin(REQUEST).startswith("wheel torch-attnkit-kernels-sm90 0.1.0+")
    assert "torch_attnkit_kernels_sm90" not in sys.modules


def test_a_simulator_which_needs_ptx_passes_wheels_over(site, monkeypatch):
    monkeypatch.setattr(compile, "_build", lambda request, folder, simulated: compile.Compiled(request, folder / "new"))
    assert compile.get(REQUEST, simulated=True).library.name == "new"


@pytest.mark.parametrize("key", ["traces", "modules"])  # modules: as the first wheels had it
def test_a_wheel_of_other_sources_is_told_and_its_kernels_are_not_used(site, monkeypatch, key):
    (found,) = installed.wheels()
    assert found.current and found.kernels == [REQUEST.file]
    words = lambda: next(iter(cli._kernels()))
    assert words().endswith(f"{found}, for sm90: 1, made from the sources that run here")
    about = site / "torch_attnkit_kernels_sm90" / installed.ABOUT
    others = json.loads(about.read_text()) | {"sources": "another"}
    del others["traces"]
    about.write_text(json.dumps(others | {key: ["torch_attnkit.x:trace"]}))
    installed.wheels.cache_clear()
    assert "made from other sources than run here: kernels whose sources are the same are used" in words()
    monkeypatch.setattr(compile.digest, "of_definitions", lambda *names, arch: "other sources")
    other = compile.Request(*(getattr(REQUEST, name) for name in ("arch", "module", "trace", "signature")))
    assert installed.find("sm90", other.file) is None
    if compile.importlib.util.find_spec("nvidia_cutlass_dsl"):
        assert compile.origin(other).startswith("would be compiled, about ")
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: None)
    assert compile.origin(other).endswith("there is no compiler: pip install 'torch_attnkit[compile]'")


def test_explain_says_where_each_kernel_comes_from(site):
    tensors = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((4, 128), (4, 128), (128,))]
    lines = explain("gated_rmsnorm", *tensors, target="sm90").splitlines()
    assert any(line.startswith("kernel   norm: w") for line in lines)
    assert not any(
        line.startswith("kernel ") for line in explain("gated_rmsnorm", *tensors, target="metal").splitlines()
    )


def test_a_wheel_holds_what_the_format_asks_for_and_is_the_same_each_time(site, tmp_path):
    (first,) = (tmp_path / "dist").iterdir()
    again = wheel.write([REQUEST], tmp_path / "kernels", tmp_path / "again", "a-model in bf16")
    assert first.read_bytes() == again.read_bytes() and first.name.endswith("-py3-none-manylinux_2_17_x86_64.whl")
    with zipfile.ZipFile(first) as file:
        names = file.namelist()
        (record,) = (name for name in names if name.endswith("/RECORD"))
        lines = [line.split(",") for line in file.read(record).decode().splitlines()]
        assert [name for name, *_ in lines] == names
        assert all(wheel._hash(file.read(name)) == digest.removeprefix("sha256=") for name, digest, _ in lines[:-1])
    with pytest.raises(compile.UnsupportedError, match=r"a wheel holds linked kernels: .*\.so is not there"):
        wheel.write([REQUEST], tmp_path, tmp_path, "")


def test_the_runtime_is_found_without_an_import(tmp_path, monkeypatch):
    """Of any installation of CuTeDSL, the one for torch's CUDA version first; a missing one is named with its cure."""
    loaded = []
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda path, mode: loaded.append(path))
    for folder in ("cu12", "cu13"):
        (tmp_path / "nvidia_cutlass_dsl" / folder / "lib").mkdir(parents=True)
        (tmp_path / "nvidia_cutlass_dsl" / folder / "lib" / "libcute_dsl_runtime.so").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere"), str(tmp_path)])
    for cuda, folder in (("12.9", "cu12"), (None, "cu13")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        driver._load_runtime.__wrapped__()
        assert loaded.pop() == str(tmp_path / "nvidia_cutlass_dsl" / folder / "lib" / "libcute_dsl_runtime.so")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(compile.UnsupportedError, match=r"runtime of nvidia-cutlass-dsl.*torch_attnkit\[compile\]"):
        driver._load_runtime.__wrapped__()


EVERY_OP = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
            raise ImportError(f"{name} is not there")

import torch  # which looks for cutlass itself

sys.meta_path.insert(0, Blocked())
from pathlib import Path
from torch_attnkit import parity
from torch_attnkit.core.dispatch import OPS, build
from torch_attnkit.core.memory import empty
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver, installed, workspace
from torch_attnkit.warmup import _bind

library, launched = Path("kernel.so"), []
installed.find = lambda arch, file: (None, library)
driver._load = lambda path, symbol, installed: lambda *args: launched.append((symbol, path, installed))
for op in OPS.values():
    for index, row in enumerate(op.kernels):
        if "sm90" not in row.archs:
            continue
        case = next(iter(parity.cases(op, index, "sm90")))
        args, kwargs = parity.arguments(case)
        call = _bind(op, tuple(args), kwargs)
        launch, before = build(op, call, Target("sm90")), len(launched)
        outs = [torch.empty(shape, dtype=dtype) for shape, dtype in op.outputs(call)]
        launch(*vars(call.arg).values(), *outs)
        assert len(launched) > before, case
assert all(installed and path == library for _, path, installed in launched)
assert not any(name.split(".")[0] == "cutlass" for name in sys.modules)
print(len({symbol for symbol, *_ in launched}))
"""


def test_a_process_that_cannot_import_cutlass_runs_every_op(tmp_path):
    """Launches are recorded here; ``test_compile`` loads a library, and a GPU runs it."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "ATTNKIT_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", EVERY_OP], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15 and not (tmp_path / "cuda").exists()
