"""What pyproject.toml cannot say: csrc/ in the wheel, one C++ extension for each folder of csrc/sim/, one for csrc/cpu,
csrc/dispatch for the torch that is installed, and the README as a package index shows it."""

import importlib.util
import re
import sys
import tomllib
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


def cpu(folder: Path) -> list[Pybind11Extension]:
    """csrc/cpu as torch_attnkit.cpu._kernels, an option: without it rows of the CPU are PyTorch's operators alone."""
    sources = sorted(p.as_posix() for p in folder.glob("*.cpp"))
    if not sources:
        return []
    return [
        Pybind11Extension(
            "torch_attnkit.cpu._kernels",
            sources,
            depends=sorted(p.as_posix() for p in folder.glob("*.h")),
            cxx_std=17,
            # NaN and infinities stay as they are. What is given up is errno, and traps, which nobody sets.
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
        )
    ]


def dispatch(folder: Path) -> list[Pybind11Extension]:
    """csrc/dispatch as torch_attnkit.core._dispatch_<minor version of torch>; nothing where it cannot be built.

    It is an option: without it eager calls are planned and launched by Python alone.
    """
    missing = [name for name in ("torch", "tvm_ffi") if importlib.util.find_spec(name) is None]
    sources = sorted(p.as_posix() for p in folder.glob("*.cpp"))
    if sys.platform != "linux" or missing or not sources:
        print(f"csrc/dispatch is not built: it needs Linux, torch and apache-tvm-ffi (missing: {missing or 'none'})")
        return []
    import torch
    import tvm_ffi.libinfo
    from torch.utils.cpp_extension import include_paths, library_paths

    major, minor = torch.__version__.split(".")[:2]
    name = f"_dispatch_{major}_{minor}"
    return [
        Pybind11Extension(
            f"torch_attnkit.core.{name}",
            sources,
            include_dirs=[
                *include_paths(),
                tvm_ffi.libinfo.find_include_path(),
                tvm_ffi.libinfo.find_dlpack_include_path(),
            ],
            library_dirs=library_paths(),
            libraries=["c10", "torch_cpu", "torch_python"],
            define_macros=[
                ("TORCH_EXTENSION_NAME", name),
                ("_GLIBCXX_USE_CXX11_ABI", str(int(torch._C._GLIBCXX_USE_CXX11_ABI))),
            ],
            depends=[*sorted(p.as_posix() for p in folder.glob("*.h")), "csrc/cpu/ready.h"],
            cxx_std=20 if (int(major), int(minor)) >= (2, 12) else 17,  # what its headers need
            extra_compile_args=["-O2"],
            optional=True,
        )
    ]


def long_description() -> str:
    """The README without addresses that only a checkout can follow.

    They become those of the repository, if [project.urls] names one; else pictures are left out, and links are their
    words.
    """
    text = Path("README.md").read_text("utf-8")
    urls = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"].get("urls", {})

    def absolute(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        if "Repository" in urls:
            return f"{picture}[{words}]({urls['Repository']}/{'raw' if picture else 'blob'}/HEAD/{path})"
        return "" if picture else words

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?://)([^)]+)\)", absolute, text)


ParallelCompile(default=0).install()
setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["torch_attnkit", "torch_attnkit.*"]), "torch_attnkit.csrc"],
    package_dir={"torch_attnkit.csrc": "csrc"},
    package_data={
        "torch_attnkit": ["py.typed", "evidence/*.json"],
        "torch_attnkit.csrc": ["README.md", "metal/**/*", "sim/metal/include/*"],
    },
    ext_modules=[*(simulator(f) for f in FOLDERS), *cpu(Path("csrc/cpu")), *dispatch(Path("csrc/dispatch"))],
)
