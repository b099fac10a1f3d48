"""Shared fixtures. Every test starts from the same seed and leaves no simulated target behind."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit.*


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two test processes share two cores
