"""sdpa_decode over latents on Hopper and Blackwell, which parity judges as one tensor, too."""

from __future__ import annotations

from typing import Any

from torch_attnkit.core.family import solved_by
from torch_attnkit.kernels.decode.launch import launcher

from .problem import operands, problem

build = solved_by(launcher, problem, operands)


def shared(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A case's arguments with the first columns of k_cache as v_cache, on which parity judges these rows, too."""
    return (*args[:2], args[1][..., : args[2].shape[-1]], *args[3:])
