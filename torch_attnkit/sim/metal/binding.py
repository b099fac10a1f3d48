"""How a call's arguments become bytes in buffer slots: ``torch.mps``'s rules, and errors where Metal reads garbage.

Metal knows nothing of the type behind a slot. PyTorch binds a Python int as int64 and a float as float32 unless
``arg_casts`` says otherwise, so a kernel that declares something else reads other bytes than were meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import fresh
from .source import Parameter

MAX_BUFFERS, MAX_INLINE = 31, 4096
LISTED = 1000  # kListed of the machine: the tensors of a list have slots of their own, from LISTED * (slot + 1)
_CASTS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
# Element types by number, as in include/msl_types.h: Metal's name, bytes, a floating type's torch dtype.
_TYPES = [
    ("float", 4, torch.float32), ("half", 2, torch.float16), ("bfloat", 2, torch.bfloat16), ("int", 4, None),
    ("uint", 4, None), ("short", 2, None), ("ushort", 2, None), ("char", 1, None), ("uchar", 1, None),
    ("long", 8, None), ("ulong", 8, None), ("bool", 1, None),
]  # fmt: skip
_SIGNED = {3, 5, 7, 9}
_BOOL = 11
_BYTES = (torch.uint8, torch.int8, torch.bool)


@dataclass(frozen=True)
class Formal:
    """A kernel parameter with its type: pointer or reference (kind 1, 2), address space, pointee."""

    parameter: Parameter
    kind: int
    space: int
    const: bool
    size: int
    align: int
    type: int
    count: int

    @property
    def text(self) -> str:
        return f"[[buffer({self.parameter.slot})]] {self.parameter.text}"


@dataclass
class Bound:
    """One slot: host memory, its size, and the position of the device address modulo 16.

    ``pointers`` are bytes of it that take the device address of another slot.
    """

    slot: int
    address: int
    bytes: int
    residue: int
    granule: int
    writable: bool
    keep: torch.Tensor
    pointers: list[tuple[int, int]] = field(default_factory=list)


def cast_of(arg_casts: Any, index: int) -> str:
    if arg_casts is None:
        return ""
    if isinstance(arg_casts, str):
        return arg_casts
    if isinstance(arg_casts, dict):
        return str(arg_casts.get(index, ""))
    raise RuntimeError(f"Unexpected caster arg type {type(arg_casts).__name__}")


def span(t: torch.Tensor) -> int:
    """Bytes from the first to the last element of a tensor."""
    if t.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def _check_device(kernel: str, f: Formal, t: torch.Tensor) -> None:
    if t.device.type != "cpu":
        raise RuntimeError(f"{kernel}: {f.text} is given a tensor on {t.device}; the simulator takes cpu tensors")
    if t.dtype == torch.float64:
        raise TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
            "Please use float32 instead."
        )


def _tensor(kernel: str, f: Formal, t: torch.Tensor) -> Bound:
    _check_device(kernel, f, t)
    if f.space not in (1, 2):
        raise RuntimeError(f"{kernel}: {f.text} is neither a device nor a constant parameter")
    _check_dtype(kernel, f, t)
    offset = int(t.storage_offset()) * t.element_size()
    if offset % f.align:
        raise ValueError(
            f"{kernel}: {f.text} is given a tensor that begins at byte {offset} of its storage; "
            f"its elements must lie at multiples of {f.align} bytes"
        )
    if f.kind == 2 and span(t) < f.size:
        raise ValueError(f"{kernel}: {f.text} needs {f.size} bytes, the tensor has {span(t)}")
    return Bound(f.parameter.slot, t.data_ptr(), span(t), offset % 16, t.element_size(), not f.const, t)


def _check_dtype(kernel: str, f: Formal, t: torch.Tensor) -> None:
    """Raw bytes may be read as anything, and any dtype as integers in vectors or of its size; the rest is a mistake."""
    if f.type < 0:
        return
    name, size, floating = _TYPES[f.type]
    if floating is not None:
        fits = t.dtype == floating
    else:
        fits = t.dtype in _BYTES or f.count > 1 or size == t.element_size() or size == 1
    if not fits:
        given = str(t.dtype).removeprefix("torch.")
        raise TypeError(f"{kernel}: {f.text} is given a {given} tensor and reads it as {name}")


def _values(kernel: str, f: Formal, value: Any, cast: str) -> torch.Tensor:
    items = value
    if isinstance(value, list | tuple):
        if not value:
            raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
        if not isinstance(value[0], int | float):
            raise RuntimeError("Unexpected argument types")
    elif isinstance(value, int | float):
        items = [value]
    else:
        raise RuntimeError("Unsupported argument type")
    if cast and cast not in _CASTS:
        raise RuntimeError(f"Unsupported cast instruction {cast}")
    dtype = torch.float32 if isinstance(items[0], float) else torch.int64
    return torch.tensor(items, dtype=dtype).to(_CASTS[cast] if cast else dtype)


def _tensors(kernel: str, f: Formal, tensors: Sequence[Any]) -> list[Bound]:
    """A list of tensors is bound as their GPU addresses; the kernel says what they point to, and nothing checks it."""
    for t in tensors:
        if not isinstance(t, torch.Tensor):
            raise RuntimeError(f"{kernel}: {f.text} is given a list of tensors and {type(t).__name__}")
        _check_device(kernel, f, t)
    if not f.const:
        raise ValueError(f"{kernel}: {f.text} is given a list of tensors, and only tensors can be written to")
    if f.type >= 0 and _TYPES[f.type][0] != "ulong":
        raise TypeError(f"{kernel}: {f.text} is given a list of tensors, bound as addresses of 8 bytes")
    addresses = torch.zeros(len(tensors), dtype=torch.int64)
    if span(addresses) > MAX_INLINE:
        raise ValueError(f"{kernel}: {f.text} is given {span(addresses)} bytes of values, at most {MAX_INLINE} fit")
    if span(addresses) < f.size:
        raise ValueError(f"{kernel}: {f.text} needs {f.size} bytes, {len(tensors)} addresses have {span(addresses)}")
    slot = f.parameter.slot
    listed = [
        Bound(LISTED * (slot + 1) + i, t.data_ptr(), span(t), int(t.storage_offset()) * t.element_size() % 16,
              t.element_size(), True, t)
        for i, t in enumerate(tensors)
    ]  # fmt: skip
    pointers = [(8 * i, b.slot) for i, b in enumerate(listed)]
    return [Bound(slot, addresses.data_ptr(), span(addresses), 0, 8, False, addresses, pointers), *listed]


def _inline(kernel: str, f: Formal, value: Any, cast: str) -> Bound:
    t = _values(kernel, f, value, cast)
    if not f.const:
        raise ValueError(f"{kernel}: {f.text} is given the value {value!r}, and only tensors can be written to")
    if span(t) > MAX_INLINE:
        raise ValueError(f"{kernel}: {f.text} is given {span(t)} bytes of values, at most {MAX_INLINE} fit")
    if f.type >= 0:
        _check_values(kernel, f, t, value)
    if span(t) < f.size:
        raise ValueError(
            f"{kernel}: {f.text} needs {f.size} bytes, {value!r} is bound as {t.numel()} x "
            f"{str(t.dtype).removeprefix('torch.')}, {span(t)} bytes"
        )
    return Bound(f.parameter.slot, t.data_ptr(), span(t), 0, t.element_size(), False, t)


def _check_values(kernel: str, f: Formal, t: torch.Tensor, value: Any) -> None:
    name, size, floating = _TYPES[f.type]
    bound = str(t.dtype).removeprefix("torch.")
    wrong = f"{kernel}: {f.text} is given {value!r}, bound as {bound}, and reads {name}"
    if (floating or t.is_floating_point()) and t.dtype != floating:
        hint = "pass a float" if f.type == 0 else f"see arg_casts ({', '.join(_CASTS)})"
        raise TypeError(f"{wrong}: {hint}")
    if floating:
        return
    if size > t.element_size() or (size < t.element_size() and (t.numel() > 1 or f.count > 1)):
        raise TypeError(f"{wrong} of {size} bytes where {t.element_size()} were bound for each: see arg_casts")
    bits = 8 * size
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if f.type in _SIGNED else (0, (1 << bits) - 1)
    if f.type == _BOOL:
        low, high = 0, 1
    for v in t.tolist():  # the low bytes of a larger integer are its value only in this range
        if not low <= v <= high:
            raise ValueError(f"{wrong}, whose values are {low} to {high}")


def bind(
    kernel: str, formals: Sequence[Formal], args: Sequence[Any], arg_casts: Any,
    errors: tuple[int, torch.Tensor] | None, foreign: bool = False,
) -> list[Bound]:  # fmt: skip
    """Slots for a call's arguments; argument i goes to buffer(i), and every declared slot must be given.

    ``errors`` are the slot and the memory of the error buffer, which replaces what was bound there. In a ``foreign``
    library None leaves a slot empty: a hole among the numbers, or a buffer that the kernel does not touch this time.
    """
    if len(args) > MAX_BUFFERS:
        raise ValueError(f"{kernel}: {len(args)} arguments, Metal has {MAX_BUFFERS} buffer slots")
    by_slot = {f.parameter.slot: f for f in formals if f.kind in (1, 2) and f.parameter.slot < MAX_BUFFERS}
    out: list[Bound] = []
    for i, value in enumerate(args):
        if foreign and value is None:
            continue
        cast = cast_of(arg_casts, i)
        if i not in by_slot:
            kind = type(value).__name__
            raise ValueError(f"{kernel}: argument {i} ({kind}) belongs to no parameter: there is no buffer({i})")
        if isinstance(value, torch.Tensor):
            out.append(_tensor(kernel, by_slot[i], value))
        elif isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            out += _tensors(kernel, by_slot[i], value)
        else:
            out.append(_inline(kernel, by_slot[i], value, cast))
    given = set(range(len(args)))
    if errors is not None:
        slot, memory = errors
        if slot not in by_slot:
            raise ValueError(f"{kernel}: error_buf_idx is {slot}, but there is no buffer({slot})")
        out = [b for b in out if b.slot != slot] + [_tensor(kernel, by_slot[slot], memory)]
        given.add(slot)
    missing = [f.text for slot, f in sorted(by_slot.items()) if slot not in given and not f.parameter.optional]
    if missing:
        raise ValueError(
            f"{kernel}: nothing is bound to {', '.join(missing)}; Metal would keep an earlier launch's binding"
        )
    return out


@dataclass
class Region:
    """Host memory of slots that overlap: the machine gets it as a tuple."""

    address: int
    bytes: int
    residue: int
    writable: bool
    slots: list[tuple[int, int, int, int, bool]]  # number, offset, bytes, bytes of an element, may be written to
    pointers: list[tuple[int, int]]  # offset, number of the slot whose address belongs there
    written: int  # address of the mask of bytes that hold values, 0 if all do

    def astuple(self) -> tuple[Any, ...]:
        return (self.address, self.bytes, self.residue, self.writable, self.slots, self.pointers, self.written)


def _mask_of(b: Bound) -> int:
    found = fresh.mask(b.keep) if b.bytes else None
    return 0 if found is None else found.data_ptr() + b.address - b.keep.untyped_storage().data_ptr()


def regions(bound: Sequence[Bound]) -> list[tuple[Any, ...]]:
    """The memory behind the slots as tuples of Region, where overlapping tensors share one."""
    out: list[Region] = []
    for b in sorted(bound, key=lambda b: (b.address, b.bytes)):
        r = out[-1] if out else None
        if r is not None and b.bytes and b.address < r.address + r.bytes:
            r.slots.append((b.slot, b.address - r.address, b.bytes, b.granule, b.writable))
            r.bytes = max(r.bytes, b.address + b.bytes - r.address)
            r.writable = r.writable or b.writable
        else:
            slot = (b.slot, 0, b.bytes, b.granule, b.writable)
            out.append(Region(b.address, b.bytes, b.residue, b.writable, [slot], b.pointers, _mask_of(b)))
    return [r.astuple() for r in out]
