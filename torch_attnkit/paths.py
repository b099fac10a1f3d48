"""Where the sources that are not Python lie: inside the package in a wheel, beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def package() -> Path:
    """The folder of the package."""
    return _PACKAGE


def csrc() -> Path:
    """The csrc folder. An editable install has it where the checkout has, beside the package."""
    folders = (_PACKAGE / "csrc", _PACKAGE.parent / "csrc")
    for folder in folders:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"torch_attnkit is incomplete: no folder {' or '.join(map(str, folders))}")


def metal_source(op: str) -> Path:
    """The Metal source of an op."""
    path = csrc() / "metal" / f"{op}.metal"
    if not path.is_file():
        raise FileNotFoundError(f"{op}: no Metal source at {path}")
    return path


def metal_include() -> Path:
    """The folder that ``#include <attnkit/...>`` of a Metal source starts from."""
    return csrc() / "metal" / "include"
