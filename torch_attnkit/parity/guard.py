"""What surrounds a call's tensors while it is judged: poisoned buffers, strided views of them, guard bands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torch_attnkit.core import dispatch, native

LAYOUTS = ("contiguous", "embedded")
_GUARD = 256  # elements on either side of an output


def poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor whose values are wrong wherever they surface: nan, or a value no index or code should have."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    byte = 0xFF if dtype.is_floating_point else 0xA5  # the former is nan in every 8-bit float
    return (
        torch.full(shape, byte, dtype=torch.uint8, device=device).view(dtype)
        if dtype.itemsize == 1
        else torch.full(shape, -77, dtype=dtype, device=device)
    )


def embed(tensor: torch.Tensor, device: str, layout: str) -> torch.Tensor:
    """``tensor`` on the device; ``embedded``: as a strided view inside a poisoned buffer."""
    if layout == "contiguous" or tensor.dim() == 0:
        return tensor.to(device).clone()
    padded = tuple(s + 2 for s in tensor.shape[:-1]) + (tensor.shape[-1] + 32,)
    buffer = poison(padded, tensor.dtype, device)
    view = buffer[tuple(slice(1, 1 + s) for s in tensor.shape[:-1]) + (slice(16, 16 + tensor.shape[-1]),)]
    return view.copy_(tensor)


@dataclass
class Fence:
    """The buffer around one output, and what its borders must still hold."""

    buffer: torch.Tensor
    size: int
    before: torch.Tensor

    def check(self, name: str) -> None:
        now = self.buffer.view(torch.uint8)
        edge = _GUARD * self.buffer.element_size()
        inner = self.size * self.buffer.element_size()
        for side, part in (("before", slice(0, edge)), ("after", slice(edge + inner, None))):
            if not torch.equal(now[part], self.before[part]):
                raise AssertionError(f"{name}: wrote {side} the {self.size} elements of an output")


@contextlib.contextmanager
def guarded_outputs() -> Iterator[list[Fence]]:
    """Every output that an op allocates inside this block is poisoned and fenced; C++ would allocate its own."""
    fences: list[Fence] = []
    original = dispatch.allocate

    def allocate(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = 1
        for s in shape:
            size *= s
        buffer = poison((size + 2 * _GUARD,), dtype, device)
        fences.append(Fence(buffer, size, buffer.view(torch.uint8).clone()))
        return buffer[_GUARD : _GUARD + size].view(shape)

    dispatch.allocate = allocate
    try:
        with native.off():
            yield fences
    finally:
        dispatch.allocate = original
