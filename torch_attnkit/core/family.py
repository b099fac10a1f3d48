"""What joins an op to a family of kernels: a call becomes a problem, and its tensors the operands of a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .op import Call
from .target import Target

Problem = TypeVar("Problem")
Operands = TypeVar("Operands")
Launcher = Callable[[Problem, Target], Callable[[Operands], None]]


def solved_by(
    launcher: Launcher[Problem, Operands], problem: Callable[[Call], Problem], operands: Callable[..., Operands]
) -> Callable[[Call, Target], Callable[..., None]]:
    """The ``build`` of an op whose calls a family solves.

    ``launcher`` and ``problem`` run once for each signature; what they give, on ``operands``, for every call.
    """

    def build(call: Call, target: Target) -> Callable[..., None]:
        run = launcher(problem(call), target)
        return lambda *arguments: run(operands(*arguments))

    return build
