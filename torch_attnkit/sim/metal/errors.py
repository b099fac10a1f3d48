"""The exceptions of the simulator: SyntaxError for a source, SimulationError for a launch, as messages of one form.

Also the error buffer, to which a kernel reports with TORCH_REPORT_ERROR (``c10/metal/error.h``): a count, then 30
messages of file, function, text and line.
"""

from __future__ import annotations

import torch

_MESSAGES = 30
_FILE, _FUNCTION, _TEXT, _LINE, _BYTES = 0, 128, 256, 508, 512  # offsets in a message, and its size


class SimulationError(RuntimeError):
    """A kernel did something that Metal leaves undefined or forbids.

    The message says what happened, where in the source, in which thread, and what the other side of it is.
    """


# What torch.mps raises at its next synchronisation for an error that a kernel reported; a RuntimeError everywhere.
ReportedError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)


def refuse(message: str, line: int | None = None) -> SyntaxError:
    """What ``torch.mps`` raises for a source that does not compile, in the compiler's words."""
    return SyntaxError(f"program_source{f':{line}' if line else ''}: error: {message}")


def buffer() -> torch.Tensor:
    """An error buffer without errors."""
    return torch.zeros(4 + _MESSAGES * _BYTES, dtype=torch.uint8)


def raise_reported(memory: torch.Tensor) -> None:
    """Raise the first error that is in the buffer, if there is one, as ``torch.mps`` does: the others are dropped."""
    raw = memory.numpy().tobytes()
    if not int.from_bytes(raw[:4], "little"):
        return
    first = raw[4 : 4 + _BYTES]
    text = lambda begin, end: first[begin:end].split(b"\0")[0].decode("ascii", "replace")
    line = int.from_bytes(first[_LINE : _LINE + 4], "little")
    where = f"{text(_FUNCTION, _TEXT)} at {text(_FILE, _FUNCTION)}:{line}"
    raise ReportedError(f"{text(_TEXT, _LINE)} ({where})")
