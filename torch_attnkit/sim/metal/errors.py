"""The exceptions of the simulator: SyntaxError for a source, SimulationError for a launch, as messages of one form."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """A kernel did something that Metal leaves undefined or forbids.

    The message says what happened, where in the source, in which thread, and what the other side of it is.
    """


def refuse(message: str, line: int | None = None) -> SyntaxError:
    """What ``torch.mps`` raises for a source that does not compile, in the compiler's words."""
    return SyntaxError(f"program_source{f':{line}' if line else ''}: error: {message}")
