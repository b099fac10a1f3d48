"""Something to do once a module is imported, by whomever: for parts of PyTorch that most programs never load."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

Then = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Finds one module where everyone does, and has ``then`` called with it once it has run."""

    def __init__(self, name: str, then: Then):
        self.name, self.then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader, run = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                del loader.exec_module  # the loader's own again
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
                self.then(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, then: Then) -> None:
    """Call ``then`` with the module ``name`` once it has been imported."""
    if (module := sys.modules.get(name)) is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _Finder(name, then))
