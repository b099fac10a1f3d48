"""Judge random signatures: every one that a row accepts launches, and is right. What fails is made simpler.

The simplest signature that still fails is looked for fact by fact, in the facts themselves, so it takes no package that
a machine with the hardware may lack, and what it finds can be written down.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.core import dispatch
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.oracle.sampling import DEFAULTS, Limits
from torch_attnkit.sim.ptx.settings import settings as ptx_settings

from . import judge
from .signatures import Signature, Source, build, moved, refusal, signature, storage

# A simulator takes about 0.1 s for so many terms; on a GPU the references on the CPU take the time.
SIMULATED, HARDWARE = Limits(600, 20_000_000), Limits(20_000, 1_200_000_000)
_ALIKE = 8  # calls that differ in their numbers alone, on which a reference in doubt shows its error
_SECONDS = 60.0  # to make one failure simpler


@dataclass(frozen=True)
class Result:
    """What became of one signature. ``kind``: right, refused (by the table), wrong, or lost with its device."""

    signature: Signature
    kind: str
    error: float = 0.0  # largest, as a fraction of the tolerance
    message: str = ""

    @property
    def fault(self) -> str:
        """The message without its numbers and places: equal where the same thing is likely to be wrong."""
        return re.sub(r"\[[^\]]*\]|-?\d[\d.e+-]*", "", self.message.split(" got ")[0])[:100]


def sampled(source: Source, device: str, index: int) -> Result:
    """Signature ``index`` of ``source``, sampled and judged."""
    return judged(source.sample(index), source.arch, device)


def judged(chosen: Signature, arch: str, device: str) -> Result:
    """Run one signature and compare. Whatever an accepted one raises is a failure of it."""
    if _gone(device):
        return Result(chosen, "lost", message="an earlier signature of this process broke the device")
    op = OPS[chosen.op]
    args, kwargs = build(chosen)
    why = refusal(op, arch, args, kwargs)
    if why is not None:
        return Result(chosen, "refused", message=why)
    try:
        moved_args = moved(args, device)
        whole = [storage(t).clone() for t in _unwritten(chosen.op, moved_args)]
        with ptx_settings(seed=chosen.given()["schedule"]):
            try:
                error = judge.judge(chosen.op, op, arch, args, moved_args, kwargs)
            except AssertionError:  # it may be the reference that had luck
                if op.mutated:  # what was written over is not there for a second call
                    raise
                error = judge.judge(chosen.op, op, arch, args, moved_args, kwargs, _alike(chosen))
        if not all(map(torch.equal, whole, map(storage, _unwritten(chosen.op, moved_args)))):
            raise AssertionError(f"{chosen.op}: the call wrote into the memory around an input")
        return Result(chosen, "right", error)
    except Exception as raised:
        return Result(chosen, "wrong", message=f"{type(raised).__name__}: {str(raised).strip()}"[:2000])
    finally:
        dispatch._PLANS[chosen.op].clear()  # a plan may hold the tensors that it was made for


def _alike(chosen: Signature) -> Iterator[tuple[Any, ...]]:
    """The arguments of the same signature with other seeds."""
    for step in range(1, _ALIKE + 1):
        yield build(signature(chosen.op, dict(chosen.facts) | {"seed": chosen.given()["seed"] + step}))[0]


def _unwritten(op: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that share no memory with one that the op writes to."""
    record = OPS[op]
    written = {t.untyped_storage()._cdata for t in judge.mutated(record, args)}
    return [t for t in args if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in written]


def _gone(device: str) -> bool:
    """Whether a fault of an earlier kernel has made the GPU useless to this process."""
    if not device.startswith("cuda"):
        return False
    try:
        torch.cuda.synchronize(device)
        return False
    except RuntimeError:
        return True


def shrunk(failed: Signature, fails: Callable[[Signature], bool], seconds: float = _SECONDS) -> Signature:
    """A signature that fails like ``failed`` and of which no single fact can be simpler, as far as time allows."""
    end = time.monotonic() + seconds
    found: Signature | None = failed
    while found is not None:
        failed = found
        found = next((s for s in simpler(failed) if time.monotonic() < end and fails(s)), None)
    return failed


def simpler(chosen: Signature) -> Iterator[Signature]:
    """Signatures with one fact nearer to its default: the default itself, half of the way, one step."""
    facts = dict(chosen.facts)
    for name, value in chosen.facts:
        if name in ("dtype", "seed"):
            continue
        for other in _nearer(value, DEFAULTS.get(name, type(value)())):
            yield signature(chosen.op, facts | {name: other})


def _nearer(value: Any, goal: Any) -> Iterator[Any]:
    if value == goal:
        return
    yield goal
    if isinstance(value, int) and isinstance(goal, int):
        near = ((value + goal) // 2, value - 1 if value > goal else value + 1)
        yield from (n for n in dict.fromkeys(near) if n not in (goal, value))
    for separator in "+/":  # of words of a layout, of lengths
        parts = value.split(separator) if isinstance(value, str) else []
        if len(parts) > 1:
            yield from (separator.join(parts[:i] + parts[i + 1 :]) for i in range(len(parts)))


def simplest(result: Result, arch: str, device: str) -> Result:
    """The result of the simplest signature that fails as this one does, in the same way."""
    last = result

    def fails(candidate: Signature) -> bool:
        nonlocal last
        try:
            found = judged(candidate, arch, device)
        except Exception:  # simpler facts need not fit together
            return False
        if found.kind == "wrong" and found.fault == result.fault:
            last = found
            return True
        return False

    shrunk(result.signature, fails)
    return last
