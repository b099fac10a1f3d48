"""PTX on disk, by the device code that it was assembled into, for packages that keep compiled functions as files.

CuTeDSL's object files hold device code and no PTX. What was compiled for the simulator is kept in the cache folder, so
that an object file which a package wrote in one process runs in the next.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

from torch_attnkit.core import cache, config


def device_code(data: bytes) -> Iterator[bytes]:
    """The device ELF images inside an object file, a library, or a cubin."""
    from elftools.common.exceptions import ELFParseError
    from elftools.common.utils import struct_parse
    from elftools.elf.structs import ELFStructs

    header = ELFStructs(little_endian=True, elfclass=64)
    header.create_basic_structs()
    stream, at = io.BytesIO(data), -1
    while (at := data.find(b"\x7fELF", at + 1)) >= 0:
        try:
            image = struct_parse(header.Elf_Ehdr, stream, at)
        except ELFParseError:  # the same four bytes, too near the end
            return
        if image.e_machine == "EM_CUDA":  # its tables of sections and segments come last
            sections = image.e_shoff + image.e_shentsize * image.e_shnum
            yield data[at : at + max(sections, image.e_phoff + image.e_phentsize * image.e_phnum)]


def _file(image: bytes) -> Path:
    return config.cache_dir() / "ptx" / f"{hashlib.sha256(image).hexdigest()}.ptx"


def save(cubin: bytes, ptx: str) -> None:
    """Keep the PTX of a cubin."""
    for image in device_code(cubin):
        file = _file(image)
        if cache.found(file) is None:
            cache.write(file, ptx)


def find(data: bytes) -> str | None:
    """The PTX of the device code in an object file, if all of it was compiled for the simulator."""
    files = [cache.found(_file(image)) for image in device_code(data)]
    return files[0].read_text() if len(files) == 1 and files[0] else None
