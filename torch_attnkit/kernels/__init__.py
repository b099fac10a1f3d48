"""Kernel families: what several ops share to solve one problem. A family knows its ``Problem``, no op and no call."""
