"""Compiled kernels that are installed as a package, for machines that have no compiler.

Such a wheel (``served/wheel.py`` writes it) is a folder without code, named by an entry point of the group
``torch_attnkit.kernels``: libraries, the ``.json`` of each, and ``about.json``, which says what they were made from.
The name of a kernel holds the digest of its sources, so that those of other sources are not found, and the rest of a
wheel of another version still serves. Libraries are trusted as the Python code beside them is: what is installed runs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from torch_attnkit import digest

GROUP, ABOUT = "torch_attnkit.kernels", "about.json"


@dataclass(frozen=True)
class Wheel:
    """An installed wheel of kernels for ``arch``; ``sources`` is the digest of what ``traces`` made them of."""

    name: str
    version: str
    folder: Path
    arch: str
    traces: tuple[str, ...]  # module:function; none of a wheel from before kernels were asked for so
    sources: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def kernels(self) -> list[str]:
        """The names of its kernels, as ``compile.Request.file`` has them."""
        return sorted(path.stem for path in self.folder.glob("*.so"))

    @property
    def current(self) -> bool:
        """Whether it was made from the sources that run here."""
        return sources_of(self.traces, self.arch) == self.sources


@functools.cache
def wheels() -> tuple[Wheel, ...]:
    """The wheels that are installed. Imports nothing of them."""
    found = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        spec = importlib.util.find_spec(entry.value)
        folders = (spec.submodule_search_locations if spec else None) or ()
        for folder in map(Path, folders):
            if (folder / ABOUT).is_file() and entry.dist is not None:
                about = json.loads((folder / ABOUT).read_text("utf-8"))
                facts = about["arch"], tuple(about.get("traces", ())), about["sources"]
                found.append(Wheel(entry.dist.name, entry.dist.version, folder, *facts))
    return tuple(found)


def find(arch: str, file: str) -> tuple[Wheel, Path] | None:
    """The wheel that holds the kernel of this name, and its library."""
    for wheel in wheels():
        if wheel.arch == arch and (path := wheel.folder / f"{file}.so").is_file():
            return wheel, path
    return None


def sources_of(traces: tuple[str, ...], arch: str) -> str:
    """The digest of what functions ``module:function`` trace, "" where one is no more."""
    try:
        return digest.of(*(digest.of_definitions(*trace.split(":"), arch=arch) for trace in traces))
    except (KeyError, ValueError):
        return ""
