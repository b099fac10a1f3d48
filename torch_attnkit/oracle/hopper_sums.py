"""References of attention over E4M3 with the sums of Hopper's tensor cores: what a tolerance is derived from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import tensor_cores

# The two products of ``attention.attend``.
_SCORES, _OUTPUT = "bthgd,bshd->bthgs", "bthgs,bshd->bthgd"
_PROMOTED = 128  # keys whose sum is the tensor cores'; sums of these are float32's


class TensorCoreSums(TorchFunctionMode):
    """Inside, ``attention.attend`` adds products up as Hopper's tensor cores do, those of E4M3 numbers.

    The other oracles of E4M3 have exact sums, as Blackwell has them in float32. With Hopper's a score is off by up to
    2^-13 of its largest terms, and so is ``lse``. Where a kernel adds blocks of keys up in float32, as
    ``prefill/sm90/mainloop_fp8.py`` does up to 128 columns, so does this; where it does not, its sums may be off by
    more than these, which P's rounding hides.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.einsum and args[0] == _SCORES:
            return _scores(*args[1:])
        if func is torch.einsum and args[0] == _OUTPUT:
            return _output(*args[1:])
        return func(*args, **(kwargs or {}))


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q (B, T, H, G, D) and k (B, S, H, D) -> (B, T, H, G, S)."""
    return _each(q, k, lambda rows, keys: tensor_cores.products(rows, keys))


def _output(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """p (B, T, H, G, S) and v (B, S, H, Dv) -> (B, T, H, G, Dv)."""

    def of_head(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        total = weights.new_zeros(*weights.shape[:-1], values.shape[1])
        if not len(values):
            return total
        for some, theirs in zip(weights.split(_PROMOTED, -1), values.split(_PROMOTED), strict=True):
            total += tensor_cores.products(some, theirs.T)
        return total

    return _each(p, v, of_head)


def _each(
    rows: torch.Tensor, keys: torch.Tensor, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``product`` of the rows of each sequence and KV head (T, G, ...) and its keys (S, ...)."""
    heads = [
        torch.stack([product(rows[b, :, h], keys[b, :, h]) for h in range(keys.shape[2])], 1) for b in range(len(keys))
    ]  # (T, H, G, ...) each
    if heads and keys.shape[2]:
        return torch.stack(heads)
    return rows.new_zeros(*rows.shape[:-1], keys.shape[1] if rows.shape[-1] == keys.shape[-1] else keys.shape[-1])
