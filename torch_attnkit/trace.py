"""Which ops ran, how often, and on what: a context manager that costs nothing while it is not used."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from torch_attnkit.core import dispatch


class record(TorchDispatchMode):
    """Count calls of ``torch.ops.attnkit.*`` in this thread while the block runs.

    ``calls`` maps (op, where) to a number; ``where`` is ``reference``, a device's arch (``cpu``, ``metal``, ``sm80``,
    ``sm89``, ``sm90``, ``sm100``, ``sm120``) or an arch with ``(simulated)``.

    >>> with torch_attnkit.record() as ran:
    ...     model(ids)
    >>> ran.calls
    Counter({('sdpa_decode', 'reference'): 24})
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "attnkit":
            name = func._schema.name.split("::")[1]
            plan = dispatch.plan_of(name, *args, **kwargs)
            self.calls[name, plan.where if plan else "unknown"] += 1
        return out

    def __enter__(self) -> record:
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)


__all__ = ["record"]
