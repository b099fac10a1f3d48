"""A wheel of compiled kernels: ``warmup --wheel FOLDER`` writes it, ``cuda/installed.py`` finds what is in it.

It holds the library and the ``.json`` of each kernel, and no code: no PTX, which a simulator alone runs, and nothing of
NVIDIA's. Its libraries call the runtime of nvidia-cutlass-dsl, which vLLM, flash-attn-4 and FlashInfer bring, and
apache-tvm-ffi, and no C library, so that any Linux of the processor will do. Of equal kernels the file is the same.
Source: the binary distribution format of the Python Packaging User Guide.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import zipfile
from pathlib import Path

import torch_attnkit
from torch_attnkit.core.errors import UnsupportedError
from torch_attnkit.cuda import compile, installed

_LICENCE = "Apache-2.0"
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # of a file in a zip: the day it was made says nothing


def write(requests: list[compile.Request], kernels: Path, out: Path, made_for: str) -> Path:
    """The wheel of ``requests``, compiled in the folder ``kernels``, in ``out``. ``made_for``: the models, in words.

    Raises:
        UnsupportedError: a kernel is an object, for want of a linker: loading it would need the compiler.
    """
    (arch,) = {request.arch for request in requests}
    files = sorted(request.file for request in requests)
    if missing := [file for file in files if not (kernels / f"{file}.so").is_file()]:
        raise UnsupportedError(
            f"a wheel holds linked kernels: {kernels}/{missing[0]}.so is not there (cc, gcc or clang)"
        )
    traces = tuple(sorted({f"{request.module}:{request.trace}" for request in requests}))
    sources = installed.sources_of(traces, arch)
    about = dict(arch=arch, traces=traces, sources=sources, package=torch_attnkit.__version__, made_for=made_for)
    package = f"torch_attnkit_kernels_{arch}"
    version = f"{torch_attnkit.__version__}+{sources[:8]}"
    contents = {f"{package}/{installed.ABOUT}": (json.dumps(about, indent=1) + "\n").encode()}
    for file in files:
        contents |= {f"{package}/{file}{end}": (kernels / f"{file}{end}").read_bytes() for end in (".so", ".json")}
    return _packed(out, package, version, contents, f"Compiled kernels of torch_attnkit for {arch}: {made_for}")


def _packed(out: Path, package: str, version: str, contents: dict[str, bytes], summary: str) -> Path:
    """The wheel with ``contents`` and what describes them."""
    tag = f"py3-none-manylinux_2_17_{platform.machine()}"
    info = f"{package}-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.4\nName: {package.replace('_', '-')}\nVersion: {version}\nSummary: {summary}\n"
        f"License-Expression: {_LICENCE}\nRequires-Python: >=3.11\n"
        f"Requires-Dist: torch-attnkit=={torch_attnkit.__version__}\nRequires-Dist: apache-tvm-ffi>=0.1.11,<0.2\n"
    )
    contents = contents | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: torch_attnkit\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        f"{info}/entry_points.txt": f"[{installed.GROUP}]\n{package.rpartition('_')[2]} = {package}\n".encode(),
    }
    lines = [f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in contents.items()]
    contents[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{package}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            file.writestr(entry, data)
    return path


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
