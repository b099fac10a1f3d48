"""gated_rmsnorm_backward: the gradients of gated_rmsnorm's y, z and w, from that of its output.

With r = rsqrt(mean(y^2) + eps), u = y r, s = sigmoid(z) and h = grad * w * z s:
``dy = r (h - u mean(h u))``, ``dz = grad * w * u * s (1 + z (1 - s))`` and ``dw``, the sum over all rows of
``grad * u * z s``. All of it is float32 with one rounding at the store; each gradient has the dtype of its tensor. The
sum over rows is taken in an order that the call's sizes and the device decide: the same call gives the same bits.
Autograd calls this op where gated_rmsnorm is differentiated. Any number of batch axes, none included, and any N.
Source: the derivative of ``gated_rmsnorm``; RMSNorm (arXiv 1910.07467).
"""

import math
from collections.abc import Callable

from torch_attnkit.core import Call, Kernel, Op
from torch_attnkit.core.op import Shards
from torch_attnkit.core.spec import short
from torch_attnkit.kernels import norm_backward
from torch_attnkit.oracle import meanings


def _like(name: str, spec: str) -> Callable[[Call], str | None]:
    """An entry of ``layouts``: a gradient has the dtype of its tensor, where that is not T."""

    def layout(c: Call) -> str | None:
        tensor = getattr(c.arg, name)
        return None if tensor is None or tensor.dtype == c.dtype else f"{spec}:{short(tensor.dtype)}"

    return layout


def _rows(c: Call) -> int:
    return math.prod(c.batch)


OP = Op(
    schema="gated_rmsnorm_backward(Tensor grad, Tensor y, Tensor z, Tensor w, *, float eps=1e-6)"
    " -> (Tensor dy, Tensor dz, Tensor dw)",
    dims={
        "grad": "... N",
        "y": "... N:f32|T",
        "z": "... N",
        "w": "N:T|f32",
        "dy": "... N",
        "dz": "... N",
        "dw": "N",
    },
    meaning=meanings.take(
        meanings.HEADS,
        "eps",
        grad="Gradient of gated_rmsnorm's out.",
        y="Rows that were normed, in float32 or the dtype of z.",
        z="Gate of each number, as it was given to gated_rmsnorm.",
        w="Weight of each channel, as it was given to gated_rmsnorm.",
        dy="Gradient of y, in its dtype.",
        dz="Gradient of z, in its dtype.",
        dw="Gradient of w, in its dtype: the sum over all rows, 0 where there are none.",
    ),
    axes=meanings.axes("N"),
    layouts={"dy": _like("y", "... N"), "dw": _like("w", "N")},
    where={
        "N must be at least 1": lambda c: c.dim["N"] > 0,
        "eps must be positive": lambda c: c.arg.eps > 0,
    },
    shards=(Shards("...", sums="dw"),),
    kernels=(
        Kernel(
            "cuda",
            "bf16 f16 f32",
            needs={"fewer than 2^31 rows": lambda c: _rows(c) < 2**31},
            launcher=norm_backward.NVIDIA,
        ),
        Kernel(
            "mps",
            "bf16 f16 f32",
            needs={"N must be below 2^31": lambda c: c.dim["N"] < 2**31},
            launcher=norm_backward.METAL,
        ),
    ),
)
