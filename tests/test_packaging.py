"""What a wheel carries, that C++ parts build into it, and that importing the package stays cheap."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import torch_attnkit
from torch_attnkit import paths

ROOT = Path(__file__).resolve().parent.parent
MODULE = """\
#include <pybind11/pybind11.h>
#include "answer.h"

PYBIND11_MODULE(_probe, m) {
    m.def("answer", [] { return ANSWER; });
}
"""


def python(code: str, cwd: Path, package: Path = ROOT, **environment: str) -> str:
    """What ``code`` prints in a process of its own that finds torch_attnkit in ``package`` first."""
    env = {**os.environ, "PYTHONPATH": str(package), **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, unpacked, of this tree plus one extension and one Metal source with a header.

    The simulators' C++ sources stay behind: they take minutes to compile, and the tests around this one run them.
    """
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("torch_attnkit", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.cpp"))
    (tree / "csrc/sim/probe").mkdir(parents=True)
    (tree / "csrc/sim/probe/probe.cpp").write_text(MODULE)
    (tree / "csrc/sim/probe/answer.h").write_text("#define ANSWER 42\n")
    (tree / "csrc/metal/include/attnkit").mkdir(parents=True, exist_ok=True)
    (tree / "csrc/metal/probe.metal").write_text("kernel void probe() {}\n")
    (tree / "csrc/metal/include/attnkit/probe.h").write_text("#pragma once\n")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    built = subprocess.run([*command, tree / "dist", tree], cwd=tree, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (archive,) = (tree / "dist").glob("*.whl")
    unpacked = tmp_path_factory.mktemp("wheel")
    zipfile.ZipFile(archive).extractall(unpacked)
    return unpacked


@pytest.mark.proof
def test_an_extension_and_a_metal_source_work_from_the_wheel(wheel: Path, tmp_path: Path):
    found = python(
        "import torch, torch_attnkit\n"
        "from torch_attnkit import paths\n"
        "from torch_attnkit.sim._probe import answer\n"
        "print(answer(), len(dir(torch.ops.attnkit)) > 0)\n"
        "print(torch_attnkit.__file__, paths.metal_source('probe'))\n"
        "print(paths.metal_include() / 'attnkit/probe.h')\n",
        tmp_path,
        package=wheel,
    ).split()
    assert found[:2] == ["42", "True"]
    assert [Path(p).relative_to(wheel).as_posix() for p in found[2:]] == [
        "torch_attnkit/__init__.py",
        "torch_attnkit/csrc/metal/probe.metal",
        "torch_attnkit/csrc/metal/include/attnkit/probe.h",
    ]
    assert Path(found[4]).is_file()


def test_the_wheel_carries_the_package_and_nothing_else(wheel: Path):
    def files(root: Path) -> set[str]:
        found = (p.relative_to(root).as_posix() for p in (root / "torch_attnkit").rglob("*") if p.is_file())
        return {p for p in found if "__pycache__" not in p and not p.endswith(".so")}

    top = {p.name for p in wheel.iterdir()}
    assert top == {"torch_attnkit", next(n for n in top if n.endswith(".dist-info"))}
    carried = {p for p in files(wheel) if not p.startswith("torch_attnkit/csrc/")}
    assert carried == files(ROOT)
    assert {p.suffix for p in (wheel / "torch_attnkit/csrc").rglob("*") if p.is_file()} == {".md", ".metal", ".h"}


def test_a_plain_install_needs_torch_and_a_command_line(wheel: Path):
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    fields = Parser().parsestr(metadata.read_text())
    plain = [r for r in fields.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert {re.match(r"[\w-]+", r)[0] for r in plain} == {"torch", "typer", "rich"}
    assert set(fields.get_all("Provides-Extra")) == {"cuda", "compile", "sim", "models", "docs", "wheel", "dev"}
    assert any(re.match(r"torch<[\d.]+,>=|torch>=[\d.]+,<", r) for r in plain), "torch has an upper bound"
    (scripts,) = wheel.glob("*.dist-info/entry_points.txt")
    assert "torch-attnkit = torch_attnkit.cli:app" in scripts.read_text()
    assert "[vllm.general_plugins]\ntorch_attnkit = torch_attnkit.integrations.vllm:register" in scripts.read_text()
    assert (wheel / "torch_attnkit/py.typed").is_file()
    assert fields["Version"] == torch_attnkit.__version__ and fields["License-Expression"] == "Apache-2.0"


def test_a_package_index_shows_no_address_that_only_a_checkout_has(wheel: Path):
    """No [project.urls] names a repository yet: no picture, and links are their words."""
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    message = Parser().parsestr(metadata.read_text())
    text = message.get_payload()
    assert message["Description-Content-Type"] == "text/markdown"
    assert text.startswith("# torch_attnkit") and "ROADMAP.md says" in text
    assert all(url.startswith("http") for url in re.findall(r"\]\(([^)]+)\)", text)) and "![" not in text


def test_on_macos_no_extra_asks_for_what_only_linux_has():
    from packaging.requirements import Requirement

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    mac = {"sys_platform": "darwin", "platform_system": "Darwin", "extra": ""}
    linux_alone = {"nvidia-cutlass-dsl", "apache-tvm-ffi", "pyelftools", "triton"}
    for name in ("cuda", "compile", "sim", "models", "dev"):
        wanted = (Requirement(r) for r in extras[name])
        assert not linux_alone & {r.name for r in wanted if r.marker is None or r.marker.evaluate(mac)}, name


def test_the_checkout_finds_its_own_sources():
    assert paths.csrc() == ROOT / "csrc"
    with pytest.raises(FileNotFoundError, match="no_such_op: no Metal source at .*no_such_op.metal"):
        paths.metal_source("no_such_op")


def test_import_brings_nothing_but_itself(tmp_path: Path):
    added = python(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import torch_attnkit\n"
        "print(*{m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names))\n",
        tmp_path,
    )
    assert set(added.split()) <= {"torch", "torch_attnkit"}


def test_import_costs_few_calls_beyond_torch(tmp_path: Path):
    """Every op is defined at import and pays here: 150,600 calls for 34, 0.1 to 0.2 s, and processors vary in speed.

    Bytecode is cached, as in every installation, even where the environment of the tests says to write none.
    """
    code = (
        "import sys, torch\ncalls = 0\ndef count(frame, event, what):\n    global calls\n"
        "    calls += event in ('call', 'c_call')\n"
        "sys.setprofile(count)\nimport torch_attnkit\nsys.setprofile(None)\nprint(calls)\n"
    )
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    python(code, tmp_path, **bytecode)
    assert int(python(code, tmp_path, **bytecode)) < 155_000
