"""Arguments, outputs and axes of ops as a reader wants them: for ``help``, ``describe`` and the pages of docs/ops.

Every import writes the docstrings of all ops, so this goes by the texts of the table and parses none of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from torch_attnkit.core.op import Op

# Of what is the same for all ops, and so in no sentence of theirs.
CONTENTS = """\
What a tensor must hold is looked at on a CPU, where anything else raises ValueError. A GPU kernel cannot look before it
runs: it clamps or masks indices and lengths, and never reads or writes outside of its tensors. A float argument is 0 or
a number that float32 holds, of 1.18e-38 or more in magnitude; infinity and NaN are refused on every device.
"""


class Argument(NamedTuple):
    """An argument or an output: shape and dtypes of a tensor or type of a scalar, and a sentence on what it is."""

    name: str
    what: str
    default: str  # "" if it must be given
    meaning: str


def shape(text: str) -> str:
    """The axes of an entry of ``dims``: ``"B Hkv S D:T8"`` is ``"(B, Hkv, S, D)"``."""
    axes = text.partition(":")[0]
    names = axes.strip("[]").replace(" ", ", ")
    found = f"({names})" if not names or "," in names else f"({names},)"
    return f"{found} or ()" if axes.startswith("[") else found


def dtypes(text: str) -> str:
    """The dtypes of an entry of ``dims``, in words."""
    accepted, _, cast = text.partition(":")[2].partition("<")
    named = accepted.replace("T8|f8e4m3", "T8").replace("T8", "T or f8e4m3").replace("@dtype", "`dtype`, else T")
    taken = f" (or {cast.replace('|', ' or ')}, cast on the device)" if cast else ""
    return f"{named.replace('|', ' or ') or 'T'}{taken}"


@cache
def _tensor(text: str) -> str:
    return f"{shape(text)} {dtypes(text)}"


def _scalar(op: Op, name: str, type: Any) -> str:
    if name == "dtype":  # the parser of schemas knows it as an int
        return "torch.dtype"
    choices = ", ".join(map(repr, op.choices.get(name, ())))
    return f"one of {choices}" if choices else str(type).removeprefix("Optional[").rstrip("]?")


def arguments(op: Op) -> list[Argument]:
    """The arguments in the order of the schema."""
    defaults = {name: f"{v:g}" if type(v) is float else f"{v!r}" for name, v in op.defaults.items()}
    types = {name: _tensor(text) for name, text in op.dims.items()}
    for a in op.parsed.arguments:
        if (name := a.name) not in types:
            types[name] = _scalar(op, name, a.type)
    types |= {name: f"{types[name]}, written to" for name in op.mutated}
    return [Argument(n, types[n], defaults[n] if n in defaults else "", op.meaning[n]) for n in op.argnames]


def outputs(op: Op) -> list[Argument]:
    """The outputs in the order of the schema."""
    empty = {name: "; empty unless it is asked for" for name in op.unless}
    return [Argument(n, f"{_tensor(op.dims[n])}{empty.get(n, '')}", "", op.meaning[n]) for n in op.outnames]


def listed(op: Op) -> str:
    """Arguments, outputs and axes as lines of a docstring."""
    given = [
        f"  {a.name}: {a.what}{f', default {a.default}' * bool(a.default)}\n      {a.meaning}" for a in arguments(op)
    ]
    returned = [f"  {a.name}: {a.what}\n      {a.meaning}" for a in outputs(op)]
    axes = [f"  {axis}: {counted}" for axis, counted in op.axes.items()]
    return "\n".join(["Arguments", *given, *(["Returns", *returned] if returned else []), "Axes", *axes])
