"""How a tensor is described in the table: ``"B Hkv S D:f16|bf16"``, named axes and accepted dtypes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2, "f8e8m0": torch.float8_e8m0fnu,
    "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MODEL_DTYPES = tuple(DTYPES[n] for n in ("f32", "bf16", "f16", "f64"))  # what the letter T may stand for


@dataclass(frozen=True)
class Axis:
    """One axis: a name, a literal size, or a name divided (``K/2``) or increased (``B+1``) by a literal."""

    name: str | None
    div: int = 1
    add: int = 0

    def size(self, dim: dict[str, int]) -> int:
        """The axis' size in a tensor, given the values of the names."""
        return self.add if self.name is None else dim[self.name] // self.div + self.add

    def value(self, size: int) -> int:
        """The value of the name, given the axis' size in a tensor."""
        return (size - self.add) * self.div

    def __str__(self) -> str:
        add = f"+{self.add}" if self.add else ""
        return str(self.add) if self.name is None else self.name + (f"/{self.div}" if self.div > 1 else "") + add


@dataclass(frozen=True)
class Spec:
    """A tensor's axes and accepted dtypes (names of ``DTYPES``, ``T``, ``T8`` or ``@dtype``).

    ``cast`` are dtypes that are taken, too, and become the first of ``dtypes`` before a launch; ``spread`` says that
    one number without axes may stand for all.
    """

    batch: bool
    axes: tuple[Axis, ...]
    dtypes: tuple[str, ...]
    cast: tuple[str, ...] = ()
    spread: bool = False

    def __str__(self) -> str:
        axes = "(" + ", ".join((["..."] if self.batch else []) + [str(a) for a in self.axes]) + ")"
        return f"{axes} or ()" if self.spread else axes

    @property
    def small(self) -> bool:
        """Whether a kernel may get a copy of what it cannot read as it lies."""
        return self.spread or bool(self.cast)

    def explicit(self) -> tuple[torch.dtype, ...]:
        """The accepted dtypes that do not depend on the call."""
        return tuple(DTYPES[d] for d in (*self.dtypes, *self.cast) if d in DTYPES)

    def model(self) -> tuple[torch.dtype, ...]:
        """What T may stand for in this tensor: where it is written T8, E4M3 too."""
        return MODEL_DTYPES if "T" in self.dtypes else (*MODEL_DTYPES, DTYPES["f8e4m3"]) if "T8" in self.dtypes else ()


def _axis(token: str) -> Axis:
    if token.isdigit():
        return Axis(None, add=int(token))
    name, div, add = re.fullmatch(r"(\w+)(?:/(\d+))?(?:\+(\d+))?", token).groups()  # type: ignore[union-attr]
    return Axis(name, int(div or 1), int(add or 0))


@cache
def parse(text: str) -> Spec:
    """``"... K/2:u8"`` to its Spec; the dtype defaults to ``T``, the op's model dtype.

    ``"[B Hkv]:f32<bf16|f16"`` is one number or (B, Hkv), float32 or what is cast to it.
    """
    shape, _, dtypes = text.partition(":")
    spread = shape.startswith("[") and shape.endswith("]")
    tokens = shape.strip("[]").split()
    batch = bool(tokens) and tokens[0] == "..."
    accepted, cast = (tuple(d.strip() for d in part.split("|") if d) for part in dtypes.partition("<")[::2])
    if unknown := {*accepted, *cast} - {*DTYPES, "T", "T8", "@dtype"}:
        raise ValueError(f"spec {text!r}: unknown dtype {unknown.pop()!r}")
    return Spec(batch, tuple(_axis(t) for t in tokens[batch:]), accepted or ("T",), cast, spread)


def short(dtype: torch.dtype) -> str:
    """The table's name of a dtype: ``bf16`` for ``torch.bfloat16``."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))
