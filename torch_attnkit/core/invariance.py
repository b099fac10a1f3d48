"""Whether plans may look at the batch: the option under which they do not, for a block, a process, or by environment.

What is in a batch decides how kernels split keys and which tiles they take, and so in which order numbers are added up.
With the option a sequence's results have the same bits whatever else is in the batch, and a token's whatever other
tokens there are. It is part of what a plan is kept by (``target.setting``). Rows that do not keep it are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from . import config, native

_of_process = config.batch_invariant()
_active: ContextVar[bool | None] = ContextVar("attnkit_batch_invariant", default=None)
if _of_process:
    native.setting_matters()


def is_on() -> bool:
    """Whether the option is on here: by the innermost block, else by the process."""
    active = _active.get()
    return _of_process if active is None else active


@contextlib.contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """Inside this block ops give a sequence, or a token, the same bits whatever else is in the batch.

    What cannot raises UnsupportedError. The choice belongs to the current thread and asyncio task; blocks nest, and
    ``batch_invariant(False)`` switches it off. CUDA graphs keep what they were captured with.
    """
    native.setting_matters()
    token = _active.set(bool(on))
    try:
        yield
    finally:
        _active.reset(token)


def set_batch_invariant(on: bool) -> None:
    """The same for the whole process, outside of such blocks; at first ``ATTNKIT_BATCH_INVARIANT`` (0 or 1) says it."""
    global _of_process
    native.setting_matters()
    _of_process = bool(on)
