"""Connects an op to a family of kernels: a call becomes a problem, its tensors the operands of a launch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .target import Target

if TYPE_CHECKING:
    from .op import Call

Problem = TypeVar("Problem")
Operands = TypeVar("Operands")
Solve = Callable[[Problem, Target], Callable[[Operands], None]]


@dataclass(frozen=True)
class Launcher:
    """The function of a family that solves problems, by name: a row has one, and the table imports none of them.

    ``function(problem, target)`` gives what launches on operands. With ``of_op`` the function takes the op's name
    first: on Metal, where the text that is compiled is the op's. ``narrow_sums`` says that the kernels add up products
    of E4M3 in the bits of Hopper's tensor cores, which are fewer than float32 has.
    """

    module: str
    function: str = "launcher"
    of_op: bool = False
    narrow_sums: bool = False

    def of(self, op: str) -> Solve[Any, Any]:
        """The function, as the calls of ``op`` need it."""
        found: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)
        return partial(found, op) if self.of_op else found


def solved_by(
    solve: Solve[Problem, Operands], problem: Callable[[Call], Problem], operands: Callable[..., Operands]
) -> Callable[[Call, Target], Callable[..., None]]:
    """The ``build`` of an op whose calls a family solves.

    ``solve`` and ``problem`` run once for each signature; what they give, on ``operands``, for every call.
    """

    def build(call: Call, target: Target) -> Callable[..., None]:
        run = solve(problem(call), target)
        return lambda *arguments: run(operands(*arguments))

    return build
