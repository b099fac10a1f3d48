"""Programmatic dependent launch where there is one: elsewhere a kernel begins when the one ahead has ended."""

from __future__ import annotations

import cutlass.cute as cute

from .limits import traced


def use() -> bool:
    """What ``use_pdl`` of a launch is."""
    return traced().pdl


def wait() -> None:
    """Until the kernels ahead have ended, whose results are then in memory."""
    if traced().pdl:
        cute.arch.griddepcontrol_wait()


def launch_dependents() -> None:
    """The kernel behind may begin once every CTA has said so or has ended."""
    if traced().pdl:
        cute.arch.griddepcontrol_launch_dependents()
