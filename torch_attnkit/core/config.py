"""The two environment variables of the package. Nothing else reads the environment."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``ATTNKIT_CACHE_DIR``, else ``~/.cache/torch_attnkit``."""
    return Path(os.environ.get("ATTNKIT_CACHE_DIR") or Path.home() / ".cache" / "torch_attnkit").absolute()


def private(folder: Path) -> Path:
    """``folder``, made if need be, once it is sure that nobody else can put a library there for us to load.

    Raises PermissionError if it or the folder around it belongs to another user, or others may write to it.
    """
    for place in (folder.parent, folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.stat()
        if found.st_uid not in (0, os.getuid()) or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
            raise PermissionError(
                f"{place}: others can write to it (owner {found.st_uid}, mode {stat.filemode(found.st_mode)}), and "
                f"compiled kernels are loaded from there; accepted: a folder of your own that only you can write to "
                f"(chmod go-w, or another ATTNKIT_CACHE_DIR)"
            )
    return folder


def simulated_arch(known: tuple[str, ...]) -> str | None:
    """The arch named by ``ATTNKIT_TARGET=sim:<arch>``: what CPU tensors run on when no ``simulate()`` is active."""
    value = os.environ.get("ATTNKIT_TARGET", "")
    kind, _, arch = value.partition(":")
    if value and (kind != "sim" or arch not in known):
        raise ValueError(f"ATTNKIT_TARGET: got {value!r}, accepted: {', '.join(f'sim:{a}' for a in known)}")
    return arch or None
