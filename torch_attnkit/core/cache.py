"""Files that are kept between processes: the one place that says which of them are read, and how they are written.

What stands in ``cache_dir()`` and in bundles runs: shared libraries, PTX, texts that a compiler translates. So every
path goes through ``checked`` (or ``found``) before it is opened or loaded, and through ``folder``, ``keep`` or
``write`` when it is made. Nobody but this user and root may have been able to put it there.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(PermissionError):
    """A file or a folder that another user owns or can write to."""


def folder(path: Path) -> Path:
    """``path``, made if need be, once it is sure that nobody else can put a file there for us to load.

    Raises Untrusted if it or the folder around it belongs to another user, or others may write to it.
    """
    for directory in (path.parent, path):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_folders(path)
    return path


def checked(path: Path) -> Path:
    """``path``, a file or a folder, once it is sure that nobody else has written it. Load and open nothing else.

    Raises Untrusted if it or one of the two folders around it belongs to another user, if others may write to it, or if
    it is a symbolic link; FileNotFoundError if it is not there.
    """
    facts = path.lstat()
    if stat.S_ISLNK(facts.st_mode):
        raise Untrusted(
            f"{path}: a symbolic link, and what is kept there is loaded; accepted: a file of your own "
            f"(remove the link, or another ATTNKIT_CACHE_DIR)"
        )
    _check(path, facts, _OTHERS)
    _check_folders(path.parent)
    return path


def found(path: Path) -> Path | None:
    """``path``, checked, or None if it is not there."""
    try:
        return checked(path)
    except FileNotFoundError:
        return None


def keep(source: Path, target: Path) -> Path:
    """Move a finished file to where it is looked for, for nobody else to write to; nobody sees half of it."""
    private(source)
    os.replace(source, target)
    return target


def private(path: Path) -> None:
    """Take from others the right to write to ``path``, which this process has just made; its umask may give it."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS)


def write(path: Path, text: str) -> Path:
    """Keep ``text`` in ``path``, whole, in a folder that is made if need be."""
    with tempfile.NamedTemporaryFile("w", dir=folder(path.parent), delete=False) as file:
        file.write(text)
    return keep(Path(file.name), path)


def _check_folders(path: Path) -> None:
    _check(path, path.stat(), _OTHERS)
    around = path.parent.stat()
    # In a sticky folder, such as /tmp, others can add files, and rename or remove none of ours.
    _check(path.parent, around, 0 if around.st_mode & stat.S_ISVTX else _OTHERS)


def _check(path: Path, facts: os.stat_result, others: int) -> None:
    if facts.st_uid not in (0, os.getuid()) or facts.st_mode & others:
        raise Untrusted(
            f"{path}: others can write to it (owner {facts.st_uid}, mode {stat.filemode(facts.st_mode)}), and what is "
            f"kept there is loaded; accepted: what is your own and only you can write to (chmod go-w, or another "
            f"ATTNKIT_CACHE_DIR)"
        )
