"""Random signatures: sampled from a seed, written down as text, built to the same values anywhere.

``sample`` of an op's cases chooses the facts (``oracle/sampling.py``), here they become tensors in the layouts that the
facts name. ``<argument>.at`` holds words: ``off3``, three elements into its memory; ``pad5``, five elements between
rows; ``gap``, room between all axes; ``swap``, axes 1 and 2 the other way round in memory; ``x0``, one and the same
along axis 0. Around a tensor lies poison.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Call, Op
from torch_attnkit.oracle.sampling import DEFAULTS, Facts, Limits, Sampler, expanded

from .case import bound
from .guard import poison


@dataclass(frozen=True)
class Signature:
    """One call of an op. The same facts always give the same tensors."""

    op: str
    facts: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.facts)

    def given(self) -> Facts:
        return DEFAULTS | dict(self.facts)


def signature(op: str, facts: Mapping[str, Any]) -> Signature:
    """The signature of these facts, without those that have their default."""
    kept = {n: v for n, v in facts.items() if v != DEFAULTS.get(n, "")}
    return Signature(op, tuple(kept.items()))


def parse(op: str, text: str) -> Signature:
    """The signature that ``str`` wrote."""
    facts: Facts = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"repeat: {word!r} is no fact, accepted: words such as B=2, as a run prints them")
        facts[name] = _value(name, value)
        if name[0].isupper() and not (isinstance(facts[name], int) and facts[name] >= 0):
            raise ValueError(f"repeat: {name} is {value!r}, accepted: a size, an integer of at least 0")
    return signature(op, facts)


def _value(name: str, text: str) -> Any:
    for kind in () if isinstance(DEFAULTS.get(name), str) and name != "scale" else (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if name[:1].isupper() or isinstance(DEFAULTS.get(name), int | float):
        raise ValueError(f"repeat: {name} is {text!r}, accepted: a number")
    return text


@dataclass(frozen=True)
class Source:
    """Where the signatures of a run come from: its seed, the rows of ``ops`` on one arch, and how many kernels share.

    Signature ``index`` depends on these alone.
    """

    seed: str
    arch: str
    ops: tuple[str, ...]
    kernels: int
    limits: Limits
    schedules: int = 1  # of the simulator, of which signatures take turns

    def sample(self, index: int) -> Signature:
        shared = index % self.kernels
        op = OPS[self.ops[shared % len(self.ops)]]
        rows = [row for row in op.kernels if self.arch in row.archs]
        kernel = random.Random(f"{self.seed} {self.arch} kernel {shared}")
        row = rows[(shared // len(self.ops) + kernel.randrange(len(rows))) % len(rows)]
        call = random.Random(f"{self.seed} {self.arch} {' '.join(self.ops)} {self.kernels} call {index}")
        facts: Facts = op.module("cases").sample(Sampler(kernel, call, self.limits), row)
        facts |= dict(schedule=index % self.schedules)
        return signature(op.name, facts)


def build(chosen: Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments, on the CPU, every tensor where its facts put it."""
    op, facts = OPS[chosen.op], chosen.given()
    args, kwargs = op.module("cases").generate(facts, torch.Generator().manual_seed(facts["seed"]))
    laid: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor that is two arguments, or of one a part, stays so

    def at(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for whole, moved_whole in laid:
            if value is whole:
                return moved_whole
            if value._base is whole and (value.data_ptr(), value.stride()) == (whole.data_ptr(), whole.stride()):
                return moved_whole[..., : value.shape[-1]]
        laid.append((value, lay(value, facts.get(f"{name}.at", ""))))
        return laid[-1][1]

    return tuple(at(name, value) for name, value in zip(op.argnames, args, strict=False)), kwargs


def lay(t: torch.Tensor, at: str) -> torch.Tensor:
    """A tensor with the values of ``t``, along an expanded axis with its first, that lies in memory as ``at`` says."""
    if not at or t.dim() == 0:
        return t
    layout, shape = at.split("+"), t.shape
    for axis in expanded(at):
        t = t.narrow(axis, 0, min(1, t.shape[axis]))
    swap = "swap" in layout and t.dim() >= 4
    source = t.transpose(1, 2) if swap else t
    offset, pad = (sum(int(w[3:]) for w in layout if w.startswith(kind)) for kind in ("off", "pad"))
    limits = [*(n + ("gap" in layout) for n in source.shape[:-1]), source.shape[-1] + pad]
    elements = 1
    for n in limits:
        elements *= n
    view = poison((offset + elements,), t.dtype, "cpu")[offset:].view(limits)
    view = view[tuple(slice(0, n) for n in source.shape)].copy_(source)
    view = view.transpose(1, 2) if swap else view
    return view.expand(shape) if expanded(at) and t.numel() else view if view.shape == shape else t.new_empty(shape)


def storage(t: torch.Tensor) -> torch.Tensor:
    """All the memory behind ``t``, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def moved(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Copies on ``device`` that lie in memory as ``args`` do, poison around them included; what shares still does."""
    copies: dict[int, torch.Tensor] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = value.untyped_storage()._cdata
        if key not in copies:
            copies[key] = storage(value).to(device, copy=True)
        return copies[key].view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())

    return tuple(move(value) for value in args)


def refusal(op: Op, arch: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why no row of ``arch`` accepts the call, or None."""
    call: Call = bound(op, args, kwargs)
    reasons = [row.refusal(call) for row in op.kernels if arch in row.archs]
    return None if None in reasons else f"{op.name}: {'; '.join(str(r) for r in reasons)}"
