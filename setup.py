"""What pyproject.toml cannot say: csrc/ in the wheel, and one C++ extension for each folder of csrc/sim/."""

import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup

# CuTeDSL, whose output these two run, exists for Linux alone.
FOLDERS = [
    f for f in sorted(Path("csrc/sim").glob("*"))
    if any(f.rglob("*.cpp")) and (sys.platform == "linux" or not f.name.startswith("ptx"))
]  # fmt: skip


def simulator(folder: Path) -> Pybind11Extension:
    """csrc/sim/<name>/**/*.cpp as torch_attnkit.sim._<name>."""
    return Pybind11Extension(
        f"torch_attnkit.sim._{folder.name}",
        sorted(p.as_posix() for p in folder.rglob("*.cpp")),
        include_dirs=[folder.as_posix()],
        depends=sorted(p.as_posix() for p in folder.rglob("*.h")),
        cxx_std=17,
        # No contraction: on arm64 a * b + c would be fused, and a simulator gives the same bits everywhere.
        extra_compile_args=["-O2", "-ffp-contract=off"],
    )


ParallelCompile(default=0).install()
setup(
    packages=[*find_packages(include=["torch_attnkit", "torch_attnkit.*"]), "torch_attnkit.csrc"],
    package_dir={"torch_attnkit.csrc": "csrc"},
    package_data={
        "torch_attnkit": ["py.typed", "evidence/*.json"],
        "torch_attnkit.csrc": ["README.md", "metal/**/*", "sim/metal/include/*"],
    },
    ext_modules=[simulator(f) for f in FOLDERS],
)
