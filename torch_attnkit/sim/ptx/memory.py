"""CPU tensors as device tensors: what compiled host code is given, and what a simulated kernel may touch.

Kernels see host addresses. They may read and write the storages of the tensors of the call, and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

ALIGNMENT = 512  # of what torch allocates on a GPU
_CUDA = 2  # kDLCUDA in DLDeviceType
_DEVICE_TYPE = 8  # its offset in DLTensor, after the data pointer


class _Capsule:
    """A DLPack capsule that can be asked for once."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


@functools.cache
def _pointer_of() -> Any:
    function = ctypes.pythonapi.PyCapsule_GetPointer
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return function


def capsule(tensor: torch.Tensor) -> _Capsule:
    """DLPack's description of a CPU tensor, with the device of CUDA tensors."""
    made = torch.utils.dlpack.to_dlpack(tensor.detach())  # type: ignore[attr-defined]
    ctypes.c_int32.from_address(_pointer_of()(made, b"dltensor") + _DEVICE_TYPE).value = _CUDA
    return _Capsule(made)


_current: ContextVar[tuple[torch.Tensor, ...]] = ContextVar("attnkit_ptx_memory", default=())
_lasting: list[weakref.ref[Any]] = []  # holders of tensors that stay visible as long as the holder lives


@contextmanager
def visible(*tensors: torch.Tensor) -> Iterator[None]:
    """Kernels may also touch the storages of ``tensors`` inside this block: those of which host code passes addresses,
    as ``cute.runtime.make_ptr(dtype, tensor.data_ptr(), ...)`` does."""
    token = _current.set(_current.get() + tensors)
    try:
        yield
    finally:
        _current.reset(token)


def hold(holder: Any, tensor: torch.Tensor) -> None:
    """Kernels may touch the storage of ``tensor`` while ``holder`` lives, which keeps it as ``_attnkit_tensor``."""
    holder._attnkit_tensor = tensor
    _lasting.append(weakref.ref(holder))


def ranges() -> list[tuple[int, int, bool, str]]:
    """(begin, end, writable, name) of all visible storages, sorted; what overlaps is one range."""
    holders = [h for h in (ref() for ref in _lasting) if h is not None]
    _lasting[:] = [weakref.ref(h) for h in holders]
    named = [(t, f"argument {i}") for i, t in enumerate(_current.get())]
    named += [(h._attnkit_tensor, "a tensor made with from_dlpack") for h in holders]
    found: list[tuple[int, int, bool, str]] = []
    for begin, end, name in sorted({(*_extent(t), name) for t, name in named}):
        if found and begin < found[-1][1]:
            last = found.pop()
            name = last[3] if name in last[3].split(", ") else f"{last[3]}, {name}"
            begin, end = last[0], max(last[1], end)
        if begin < end:
            found.append((begin, end, True, name))
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


class Aligned:
    """Copies of tensors as torch would have placed them on a GPU, their storages on multiples of ALIGNMENT.

    Tensors that share a storage share its copy. ``write_back`` puts into the originals what a kernel has written.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by address: bytes of original and copy

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        begin, end = _extent(tensor)
        if begin % ALIGNMENT == 0:
            return tensor
        if begin not in self._copies:
            original = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            buffer = torch.empty(end - begin + ALIGNMENT, dtype=torch.uint8)
            start = -buffer.data_ptr() % ALIGNMENT
            self._copies[begin] = original, buffer[start : start + end - begin].copy_(original)
        copy = self._copies[begin][1]
        at = copy.storage_offset() + tensor.storage_offset() * tensor.element_size()
        placed = torch.empty(0, dtype=tensor.dtype)
        return placed.set_(copy.untyped_storage(), at // tensor.element_size(), tensor.shape, tensor.stride())

    def write_back(self) -> None:
        for original, copy in self._copies.values():
            original.copy_(copy)


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """The CPU tensors among arguments, also those inside tuples, lists and dicts."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(list(value.values()))
    return found
