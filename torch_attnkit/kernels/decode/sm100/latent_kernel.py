"""What to compile for a decode step over latents on Blackwell."""

from __future__ import annotations

from .kernel import trace_tcgen05

__all__ = ["trace_tcgen05"]
