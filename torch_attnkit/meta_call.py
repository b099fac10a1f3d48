"""A call in words, as ``python -m torch_attnkit explain`` takes them: tensors on the meta device and scalars.

``B=2`` is the size of an axis, ``window=128`` a scalar, ``sink`` an optional tensor that is passed, ``k_cache=f8e4m3``
the dtype of one tensor, which passes it too. ``dtype=f16`` is the argument ``dtype`` of an op that has one, else T, the
dtype of the model's tensors.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from .core.op import Call, Op
from .core.spec import DTYPES, Spec

_MODEL = torch.bfloat16  # T, unless ``dtype`` says another
_BOOLS = {"true": True, "false": False, "1": True, "0": False}
_INT64 = torch.iinfo(torch.int64)


@dataclass
class _Parsed:
    """The words by what they are about."""

    sizes: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.dtype | None] = field(default_factory=dict)
    model: torch.dtype = _MODEL


def meta_call(op: Op, words: list[str]) -> dict[str, Any]:
    """The arguments of a call of ``op`` by name, of ``words``.

    Raises ValueError for a word that is none of the above, a wrong value, or something that is missing, with the name
    of the argument, what was found and what is accepted. Whether the op takes the call is not asked here.
    """
    parsed = _Parsed()
    for word in words:
        _read(op, word, parsed)
    for a in op.parsed.arguments:
        if a.name not in op.tensors and a.name not in op.defaults and a.name not in parsed.scalars:
            raise ValueError(f"{op.name}: {a.name} is missing, accepted: {a.name}={_accepted(op, a.name, _kind(a))}")
    specs = _specs(op, parsed)
    sizes = _sizes(op, specs, parsed)
    tensors = {name: _empty(op, name, spec, sizes, parsed) for name, spec in specs.items()}
    return {name: tensors.get(name) for name in op.tensors} | parsed.scalars


def _read(op: Op, word: str, parsed: _Parsed) -> None:
    key, equals, text = word.partition("=")
    if key in parsed.sizes or key in parsed.scalars or key in parsed.tensors:
        raise ValueError(f"{op.name}: {key} is given twice")
    if key in op.tensors:
        parsed.tensors[key] = _dtype(op, key, text) if equals else None
    elif key in op.argnames and equals:
        (argument,) = (a for a in op.parsed.arguments if a.name == key)
        parsed.scalars[key] = _scalar(op, key, _kind(argument), text)
    elif key == "dtype" and equals:
        parsed.model = _dtype(op, key, text)
    elif key and equals:
        parsed.sizes[key] = text  # which axes there are depends on the other words
    else:
        raise ValueError(f"{op.name}: {word!r} is neither NAME=VALUE nor an optional tensor ({_optional(op)})")


def _optional(op: Op) -> str:
    return ", ".join(n for n in op.tensors if op.defaults.get(n, ...) is None) or "it has none"


def _kind(argument: Any) -> str:
    """The type of a scalar: int, float, bool or str, with a question mark where None is a value too."""
    kind = str(argument.type)
    optional = kind.startswith("Optional[")
    # The parser of schemas knows a dtype as an int.
    kind = "dtype" if argument.name == "dtype" else kind.removeprefix("Optional[").removesuffix("]")
    return kind + "?" * optional


def _accepted(op: Op, name: str, kind: str) -> str:
    words = {
        "int": "an integer of 64 bits", "float": "a number", "bool": "true or false", "dtype": "one of ",
        "str": "one of ",
    }[kind.removesuffix("?")]  # fmt: skip
    words += ", ".join(op.choices.get(name, ()) if kind == "str" else DTYPES) if words.endswith("of ") else ""
    return words + " or none" * kind.endswith("?")


def _scalar(op: Op, name: str, kind: str, text: str) -> Any:
    """The value that ``text`` says, of the type in the schema."""
    if kind.endswith("?") and text.lower() == "none":
        return None
    value: Any = None
    match kind.removesuffix("?"):
        case "int":
            value = _integer(text)
        case "float":
            value = _number(text)
        case "bool":
            value = _BOOLS.get(text.lower())
        case "dtype":
            value = DTYPES.get(text)
        case _:
            value = text if text in op.choices.get(name, (text,)) else None
    if value is None:
        raise ValueError(f"{op.name}: {name} is {text!r}, accepted: {_accepted(op, name, kind)}")
    return value


def _integer(text: str) -> int | None:
    # Python reads more as an int than a reader would: 1_000, digits of other scripts; and no more than 4300 of them.
    if re.fullmatch(r"[+-]?[0-9]{1,19}", text) is None:
        return None
    value = int(text)
    return value if _INT64.min <= value <= _INT64.max else None


def _number(text: str) -> float | None:
    try:
        return float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


def _dtype(op: Op, name: str, text: str) -> torch.dtype:
    if text not in DTYPES:
        raise ValueError(f"{op.name}: {name} is {text!r}, accepted: a dtype, one of {', '.join(DTYPES)}")
    return DTYPES[text]


def _specs(op: Op, parsed: _Parsed) -> dict[str, Spec]:
    """The tensors that are passed, as the scalars and the tensors beside them want them."""
    given = [n for n in op.tensors if op.defaults.get(n, ...) is not None or n in parsed.tensors]
    meta_tensors = {n: torch.empty(0, dtype=parsed.tensors.get(n) or parsed.model, device="meta") for n in given}
    values = {n: op.defaults.get(n) for n in op.argnames} | parsed.scalars | meta_tensors
    call = Call(op.name, {}, SimpleNamespace(**values), parsed.model, (), torch.device("meta"))
    return {n: op.spec(n, call) for n in given}


def _sizes(op: Op, specs: dict[str, Spec], parsed: _Parsed) -> dict[str, int]:
    """The sizes of axes, each of which tensors can have."""
    axes = {n: sorted({a.name for a in spec.axes if a.name}) for n, spec in specs.items()}
    others = {a.name for n in op.tensors for a in op.spec(n).axes if a.name}
    known, found = others.union(*axes.values()), {}
    for name, text in parsed.sizes.items():
        if name not in known:
            raise ValueError(
                f"{op.name}: {name!r} is no axis ({', '.join(sorted(known))}) and no argument "
                f"({', '.join(op.argnames)}{'' if 'dtype' in op.argnames else ', dtype'})"
            )
        size = _integer(text)
        if size is None or size < 0:
            raise ValueError(f"{op.name}: {name} is {text!r}, accepted: the size of an axis, an integer of at least 0")
        found[name] = size
    for name, spec in specs.items():
        if missing := [a for a in axes[name] if a not in found]:
            # As the table has them, so that the first one is the first axis.
            missing = [a.name for a in spec.axes if a.name in missing]
            words = ", ".join(dict.fromkeys(missing))
            raise ValueError(f"{op.name}: {name} needs the size of {words}, for example {missing[0]}=8")
        for axis in spec.axes:
            if axis.name and found[axis.name] % axis.div:
                raise ValueError(
                    f"{op.name}: {axis.name} is {found[axis.name]}, accepted: a multiple of {axis.div}, for {name} is "
                    f"{spec}"
                )
    return found


def _empty(op: Op, name: str, spec: Spec, sizes: dict[str, int], parsed: _Parsed) -> torch.Tensor:
    dtype = parsed.tensors.get(name) or DTYPES.get(spec.dtypes[0], parsed.model)
    shape = [axis.size(sizes) for axis in spec.axes]
    if math.prod(max(1, size) for size in shape) * dtype.itemsize > _INT64.max:  # strides count empty axes as 1
        raise ValueError(f"{op.name}: {name} is {spec} of sizes {shape}, accepted: fewer than 2^63 bytes")
    return torch.empty(shape, dtype=dtype, device="meta")
