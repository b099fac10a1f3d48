"""How many cores a GPU has: what a plan divides its threadgroups among."""

from __future__ import annotations

import torch

from torch_attnkit.core.target import Target

_MODELLED = 40  # of an M4 Max: the chip that docs/lab/ models, and that a simulated call is planned for


def cores_of(target: Target) -> int:
    """Cores of the GPU that ``target`` runs on; those of an M4 Max if it is simulated, or PyTorch does not say."""
    ask = None if target.simulated else getattr(torch._C, "_mps_get_core_count", None)
    return max(1, int(ask())) if ask else _MODELLED
