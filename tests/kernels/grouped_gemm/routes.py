"""Which expert each token chooses, in tests of routed experts: changes of ``indices`` (tokens, choices), in place."""

from __future__ import annotations

import torch


def as_sampled(indices: torch.Tensor) -> None:
    """Of a tenth of the choices there is no expert."""


def ragged(indices: torch.Tensor) -> None:
    """Three experts have tokens: most, one, and 33; some tokens have none."""
    indices.fill_(-1)
    indices[: len(indices) * 3 // 4, 0] = 1
    indices[0, 1] = 0
    indices[-40:-7, 1] = 2


def no_expert(indices: torch.Tensor) -> None:
    indices.fill_(-1)
