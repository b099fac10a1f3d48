"""PTX on disk, by the device code that it was assembled into, for packages that keep compiled functions as files.

CuTeDSL's object files hold device code and no PTX. What was compiled for the simulator is kept in the cache folder, so
that an object file which a package wrote in one process runs in the next.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch_attnkit.core import config

_EM_CUDA = 190  # e_machine in an ELF header


def device_code(data: bytes) -> Iterator[bytes]:
    """The device ELF images inside an object file, a library, or a cubin."""
    at = data.find(b"\x7fELF")
    while at >= 0:
        machine = struct.unpack_from("<H", data, at + 18)[0] if at + 64 <= len(data) else 0
        if machine == _EM_CUDA:
            segments, sections = struct.unpack_from("<QQ", data, at + 32)
            _, segment, count, section, number, _ = struct.unpack_from("<6H", data, at + 52)
            yield data[at : at + max(segments + segment * count, sections + section * number)]
        at = data.find(b"\x7fELF", at + 4)


def _file(image: bytes) -> Path:
    return config.cache_dir() / "ptx" / f"{hashlib.sha256(image).hexdigest()}.ptx"


def save(cubin: bytes, ptx: str) -> None:
    """Keep the PTX of a cubin."""
    for image in device_code(cubin):
        file = _file(image)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=file.parent)
            with open(handle, "w") as out:
                out.write(ptx)
            os.replace(name, file)


def find(data: bytes) -> str | None:
    """The PTX of the device code in an object file, if all of it was compiled for the simulator."""
    files = [_file(image) for image in device_code(data)]
    return files[0].read_text() if len(files) == 1 and files[0].exists() else None
