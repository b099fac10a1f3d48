"""A wheel in an environment of its own: ``python tests/fresh.py WHEEL``; without WHEEL, where it is installed already.

With a wheel it makes a virtual environment, installs the wheel and what it requires, and starts itself there with a
PATH that has no compiler. Then the README's first example runs, the C++ parts of both simulators and of the CPU are
imported, and what was installed beside torch and what torch requires is counted: less than MOST bytes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 200_000_000
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "zig")


def example() -> str:
    """The first Python block of the README."""
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[1]


def install(wheel: Path) -> None:
    """A new environment with ``wheel``, and this file run in it."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        pip = [python, "-m", "pip", "-q", "--disable-pip-version-check", "install", "-c", ROOT / "constraints.txt"]
        subprocess.run([*pip, "--only-binary", ":all:", "torch"], check=True)
        subprocess.run([*pip, "--only-binary", ":all:", wheel.resolve()], check=True)
        environment = {"PATH": f"{folder}/bin", "HOME": folder, "OMP_NUM_THREADS": "1"}
        subprocess.run([python, Path(__file__).resolve()], check=True, cwd=folder, env=environment)


def _closure(name: str) -> set[str]:
    """What is installed for the distribution ``name``, itself included."""
    found, left = set(), [name]
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        left += [re.match(r"[\w.-]+", r)[0] for r in requires if "extra ==" not in r]
    return found


def _size(name: str) -> int:
    files = importlib.metadata.files(name) or []
    return sum(path.stat().st_size for path in (Path(f.locate()) for f in files) if path.is_file())


def check() -> None:
    """Raises if anything that the wheel promises is not so."""
    found = [c for c in COMPILERS if shutil.which(c)]
    assert not found or "CIBUILDWHEEL" in os.environ, f"compilers on the PATH: {found}"
    sizes = {name: _size(name) for name in _closure("torch-attnkit") - _closure("torch")}
    assert sum(sizes.values()) < MOST, sizes
    exec(compile(example(), "README.md", "exec"), {})
    parts = ["sim._metal", "cpu._kernels"] + ["sim._ptx", "sim._ptx_runtime"] * (sys.platform == "linux")
    for part in parts:
        module = importlib.import_module(f"torch_attnkit.{part}")
        assert ROOT not in Path(module.__file__).parents, "the checkout's, not the wheel's"
    listing = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sorted(sizes.items()))
    print(f"the README's example ran; {', '.join(parts)}; beside torch {listing}")


if __name__ == "__main__":
    install(Path(sys.argv[1])) if len(sys.argv) > 1 else check()
