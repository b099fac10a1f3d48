"""Which bytes of a tensor hold a value: ``torch.empty`` gives memory, and what was not written there is no number.

On a GPU such memory holds what the last tensor left, so that a kernel which reads it may look right for a long time.
While a Tracker is active, every CPU tensor that comes from ``torch.empty`` and its kin carries a mask with a byte for
each of its bytes. PyTorch's own writes fill it, and so do the kernels of a checked launch, which stop at a hole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ALLOCATE = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
_MASK = "_attnkit_written"  # a storage keeps its Python object, and with it attributes, for as long as it lives


def mask(tensor: torch.Tensor) -> torch.Tensor | None:
    """The mask of a tensor's storage, one bool a byte, or None if all of it holds values."""
    storage = tensor.untyped_storage()
    found: torch.Tensor | None = getattr(storage, _MASK, None)
    if found is not None and bool(found.all()):
        delattr(storage, _MASK)
        return None
    return found


def _allocated(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu" and storage.nbytes():
        setattr(storage, _MASK, torch.zeros(storage.nbytes(), dtype=torch.bool))


def _written(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or (found := getattr(tensor.untyped_storage(), _MASK, None)) is None:
        return
    size = tensor.element_size()
    steps = [s * size for s in tensor.stride()]
    for byte in range(size):
        found.as_strided(tensor.shape, steps, int(tensor.storage_offset()) * size + byte).fill_(True)


class Tracker(TorchDispatchMode):
    """Keeps the masks, of all that PyTorch does on this thread inside its ``with`` block."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if func.namespace == "attnkit" and tensors and all(t.device.type == "cpu" for t in tensors):
            with self:  # what the op allocates inside has to be seen, too
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        out = func(*args, **kwargs)
        if func.overloadpacket in _ALLOCATE:
            _allocated(out)
        elif func._schema.is_mutable:
            _each_written(func, args, kwargs, _written)
        return out


def _each_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], do: Callable[[torch.Tensor], None]) -> None:
    for i, formal in enumerate(func._schema.arguments):
        if formal.alias_info is not None and formal.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(formal.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    do(tensor)
