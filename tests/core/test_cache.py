"""What others may have written is neither loaded nor read: by every part that keeps files."""

from __future__ import annotations

import ast
import atexit
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_attnkit.core import cache
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.cuda import compile, driver
from torch_attnkit.kernels.norm import launch as norm
from torch_attnkit.parity import chosen
from torch_attnkit.sim import metal
from torch_attnkit.sim.metal import compiler
from torch_attnkit.sim.ptx import library, runtime, store

PACKAGE = Path(compile.__file__).parents[1]
REQUEST = compile.Request.of("sm90", norm.trace, rank=2)
SHADER = "kernel void twice(device float* x, uint i [[thread_position_in_grid]]) { x[i] *= 2; }"
OTHER = 12345  # a user that is neither root nor this one
# Libraries that no other user of this machine's caches could have put there, each load by what it loads.
NOT_OF_THE_CACHE = {
    "cuda/driver.py": ["the launch library of nvidia-cutlass-dsl"],
    "cuda/repeat.py": ["tvm-ffi's library", "torch's", "the system's driver"],
    "sim/ptx/library.py": ["the renamed copy of a checked library, in a folder of this process alone"],
    "sim/ptx/runtime.py": ["an extension of this package"],
}
# What names the folder, and opens nothing in it.
NAMED = {
    "cli.py": "prints where it is",
    "warmup.py": "hands it to cuda/compile.py",
}

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file to another user")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "version", lambda package: "4.8.1")
    monkeypatch.setattr(compile, "_found", {})
    monkeypatch.setattr(compile, "_bundles", [])
    return tmp_path / "cache"


def writable(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def of_another_user(path: Path) -> None:
    os.chown(path, OTHER, OTHER)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


SPOILED = [
    pytest.param(writable, id="writable"),
    pytest.param(of_another_user, id="of-another-user", marks=as_root),
    pytest.param(linked, id="linked"),
]


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("part", ["a/b/file", "a/b", "a"])
def test_what_others_could_have_written_is_refused(tmp_path: Path, part: str, spoil: Callable[[Path], None]):
    path = cache.write(tmp_path / "a/b/file", "text")
    assert cache.checked(path) == cache.found(path) == path and path.read_text() == "text"
    spoil(tmp_path / part)
    if spoil is linked and part != "a/b/file":  # a folder of one's own may stand elsewhere, on a larger disk
        assert cache.checked(path) == path
        return
    why = "a symbolic link" if spoil is linked else "others can write to it"
    for ask in (cache.checked, cache.found):
        with pytest.raises(cache.Untrusted, match=re.escape(str(tmp_path / part)) + f": {why}.*accepted: .*ATTNKIT_CA"):
            ask(path)
    if part != "a/b/file":
        with pytest.raises(cache.Untrusted, match="others can write to it"):
            cache.write(path, "again")


def test_a_sticky_folder_may_be_around_what_is_kept_and_is_no_place_to_keep_it(tmp_path: Path):
    path = cache.write(tmp_path / "tmp/own/file", "text")
    (tmp_path / "tmp").chmod(0o1777)
    assert cache.checked(path) == path
    (tmp_path / "tmp/file").touch(0o644)
    with pytest.raises(cache.Untrusted, match="tmp: others can write to it .*drwxrwxrwt"):
        cache.checked(tmp_path / "tmp/file")


def test_what_is_not_there_is_not_found(tmp_path: Path):
    assert cache.found(tmp_path / "none/file") is None
    with pytest.raises(FileNotFoundError):
        cache.checked(tmp_path / "file")


def test_what_is_kept_is_private_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        cache.folder(tmp_path / "new/cuda")
        (tmp_path / "made").write_text("text")
        path = cache.keep(tmp_path / "made", tmp_path / "new/cuda/kept")
    finally:
        os.umask(before)
    assert [(tmp_path / "new" / part).stat().st_mode & 0o777 for part in ("", "cuda")] == [0o700, 0o700]
    assert cache.checked(path).stat().st_mode & 0o777 == 0o644


# Each of these gives a file that the cache holds, and what reads it again as a new process would.
Reads = tuple[Path, Callable[[], Any]]


def _cuda(folder: Path, suffix: str = ".so") -> Reads:
    path = cache.write(folder / "cuda" / (REQUEST.file + suffix), "")
    return path, lambda: compile.get(REQUEST)


def a_cuda_library(folder: Path) -> Reads:
    return _cuda(folder)


def a_cuda_object(folder: Path) -> Reads:
    return _cuda(folder, ".o")


def a_bundle(folder: Path) -> Reads:
    path, ask = _cuda(folder.parent / "bundle")
    cache.write(path.with_suffix(".json"), "{}")
    compile.use_bundle(folder.parent / "bundle")
    return path, ask


def a_library_for_a_gpu(folder: Path) -> Reads:
    path, _ = _cuda(folder)
    return path, lambda: driver._load.__wrapped__(path, "symbol")


def _simulated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    path, _ = _cuda(folder)
    cache.write(path.with_suffix(".ptx"), "")
    return path, lambda: library._load.__wrapped__(path, path.with_suffix(".ptx"), "symbol", "sm90")


def a_library_for_the_ptx_simulator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    return _simulated(folder, monkeypatch)


def ptx_of_a_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    path, ask = _simulated(folder, monkeypatch)
    return path.with_suffix(".ptx"), ask


def ptx_of_other_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    monkeypatch.setattr(store, "device_code", lambda data: [data])
    store.save(b"image", "text")
    (path,) = (folder / "ptx").iterdir()
    assert store.find(b"image") == "text"
    return path, lambda: store.find(b"image")


@functools.cache
def _compiled() -> Path:
    """A cache with the kernel in it, whichever test needs it first."""
    folder = Path(tempfile.mkdtemp(prefix="attnkit-test-"))
    atexit.register(shutil.rmtree, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNKIT_CACHE_DIR", str(folder))
        compiler._stub.cache_clear()
        metal.compile_shader(SHADER).twice  # noqa: B018  compiles it
    return folder


def _of_metal(folder: Path, name: str) -> Path:
    shutil.copytree(_compiled(), folder)
    (path,) = (folder / "metal-simulator").glob(f"*/{name}")
    compiler._stub.cache_clear()
    return path


def a_metal_library(folder: Path) -> Reads:
    return _of_metal(folder, "kernel.so"), lambda: metal.compile_shader(SHADER).twice


def facts_of_a_metal_library(folder: Path) -> Reads:
    return _of_metal(folder, "kernel.json"), lambda: metal.compile_shader(SHADER).twice


def a_checked_metal_source(folder: Path) -> Reads:
    return _of_metal(folder, "unit.json"), lambda: metal.compile_shader(SHADER)


def what_metal_libraries_are_linked_with(folder: Path) -> Reads:
    return _of_metal(folder, "stub.o"), compiler._stub


def chosen_cases(folder: Path) -> Reads:
    op = OPS["gated_rmsnorm"]
    ask = lambda: chosen.remembered("row", op, list)
    assert ask() == []
    (path,) = (folder / "cases").iterdir()
    return path, ask


USERS = {
    "cuda/compile.py": [a_cuda_library, a_cuda_object, a_bundle],
    "cuda/driver.py": [a_library_for_a_gpu],
    "sim/ptx/library.py": [a_library_for_the_ptx_simulator, ptx_of_a_library],
    "sim/ptx/store.py": [ptx_of_other_packages],
    "sim/metal/compiler.py": [facts_of_a_metal_library, a_checked_metal_source, what_metal_libraries_are_linked_with],
    "sim/metal/library.py": [a_metal_library],
    "parity/chosen.py": [chosen_cases],
}


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("user", [user for users in USERS.values() for user in users])
def test_every_part_that_keeps_files_refuses_what_others_wrote(
    folder: Path, monkeypatch: pytest.MonkeyPatch, user: Callable[..., Reads], spoil: Callable[[Path], None]
):
    if user.__module__ == __name__ and "metal" in user.__name__:
        metal.require()
    monkeypatch.setattr(runtime, "require_compiler", lambda: None)
    path, ask = user(folder, monkeypatch) if user.__code__.co_argcount == 2 else user(folder)
    spoil(path)
    with pytest.raises(cache.Untrusted, match=re.escape(str(path))):
        ask()


@pytest.mark.parametrize("user", [a_cuda_library, a_bundle, ptx_of_other_packages, a_metal_library, chosen_cases])
def test_every_part_that_keeps_files_refuses_a_folder_that_others_can_write_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch, user: Callable[..., Reads]
):
    path, ask = user(folder, monkeypatch) if user.__code__.co_argcount == 2 else user(folder)
    writable(path.parent)
    with pytest.raises(cache.Untrusted, match=f"{re.escape(str(path.parent))}: others can write to it"):
        ask()


def _called(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield name, node


def _cache_users() -> Iterator[tuple[str, list[str]]]:
    """Each module that names the cache folder or loads a library, and its loads of paths that are not checked."""
    for file in sorted(PACKAGE.rglob("*.py")):
        calls = list(_called(ast.parse(file.read_text("utf-8"))))
        loads = [c for name, c in calls if name in ("CDLL", "PyDLL", "load_library", "load_module", "dlopen")]
        loads += [c for name, c in calls if name == "Kernel" and ast.unparse(c.func) == "machine().Kernel"]
        if loads or any(name == "cache_dir" for name, _ in calls):
            unchecked = [ast.unparse(c) for c in loads if "cache.checked(" not in ast.unparse(c)]
            yield file.relative_to(PACKAGE).as_posix(), unchecked


def test_every_user_of_the_cache_is_tried_here_and_loads_only_what_is_checked():
    users = dict(_cache_users())
    assert set(users) == {*USERS, *NOT_OF_THE_CACHE, *NAMED}
    assert {file: len(unchecked) for file, unchecked in users.items() if unchecked} == {
        file: len(why) for file, why in NOT_OF_THE_CACHE.items()
    }
