"""grouped_output_projection on the CPU: PyTorch's product of a batch of matrices, one a group, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core import Call, Target

from .problem import operands


def build(call: Call, target: Target) -> Callable[..., None]:
    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        a, w = o.x.transpose(0, 1).float(), o.weight.mT.float()  # (G, Tq, K), (G, K, R)
        o.out.copy_(torch.bmm(a, w).transpose(0, 1))

    return launch
