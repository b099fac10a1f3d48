"""The three environment variables of the package. Nothing else reads the environment."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``ATTNKIT_CACHE_DIR``, else ``~/.cache/torch_attnkit``."""
    return Path(os.environ.get("ATTNKIT_CACHE_DIR") or Path.home() / ".cache" / "torch_attnkit").absolute()


def simulated_arch(known: tuple[str, ...]) -> str | None:
    """The arch named by ``ATTNKIT_TARGET=sim:<arch>``: what CPU tensors run on when no ``simulate()`` is active."""
    return _target("sim", known)


def arch_on_gpu(known: tuple[str, ...]) -> str | None:
    """The arch named by ``ATTNKIT_TARGET=gpu:<arch>``: whose kernels calls on a CUDA device take, built for that GPU.

    A newer GPU thereby runs the code of an older one.
    """
    return _target("gpu", known)


def _target(wanted: str, known: tuple[str, ...]) -> str | None:
    value = os.environ.get("ATTNKIT_TARGET", "")
    kind, _, arch = value.partition(":")
    accepted = {"sim": known, "gpu": tuple(a for a in known if a.startswith("sm"))}
    if value and arch not in accepted.get(kind, ()):
        names = (f"{k}:{a}" for k, archs in accepted.items() for a in archs)
        raise ValueError(f"ATTNKIT_TARGET: got {value!r}, accepted: {', '.join(names)}")
    return arch if value and kind == wanted else None


def batch_invariant() -> bool:
    """``ATTNKIT_BATCH_INVARIANT``, 0 or 1: whether plans look at nothing but a sequence from the start."""
    value = os.environ.get("ATTNKIT_BATCH_INVARIANT", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"ATTNKIT_BATCH_INVARIANT: got {value!r}, accepted: 0, 1")
    return value == "1"
