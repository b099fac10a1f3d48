"""The one exception type that is ours. Everything else is a ValueError or a TypeError."""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """No row of the table accepts this call on this target (the message has every row's reason), or no such target."""
