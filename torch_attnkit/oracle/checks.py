"""Checks of tensor contents for the references: typed errors that name op, argument, what was found and accepted.

They look at values, which on a device would cost a synchronisation, so only references call them; device kernels
clamp or mask instead and never read outside their buffers.
"""

from __future__ import annotations

import math

import torch


def in_range(op: str, name: str, t: torch.Tensor | None, low: int, high: int) -> None:
    """Every element of the integer tensor ``t`` must lie in [low, high]; None and empty tensors pass."""
    if t is None or t.numel() == 0:
        return
    bad = (t < low) | (t > high)
    if bool(bad.any()):
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{op}: {name}{list(at)} is {int(t[at])}, accepted: {low} to {high}")


def ordered(op: str, name: str, low: torch.Tensor, high_name: str, high: torch.Tensor) -> None:
    """``low <= high`` element by element."""
    bad = low > high
    if low.numel() and bool(bad.any()):
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{op}: {name}{list(at)} is {int(low[at])}, accepted: at most {high_name}{list(at)}={int(high[at])}"
        )


def distinct(op: str, name: str, t: torch.Tensor, ignore: int = -1) -> None:
    """No value but ``ignore`` may appear twice in the last axis of ``t``."""
    if t.numel() == 0:
        return
    s = t.sort(dim=-1).values
    twice = (s[..., 1:] == s[..., :-1]) & (s[..., 1:] != ignore)
    if bool(twice.any()):
        value = int(s[..., 1:][twice][0])
        raise ValueError(f"{op}: {name} holds {value} more than once, accepted: distinct values")


def cu_seqlens(op: str, name: str, t: torch.Tensor, total: int) -> None:
    """Offsets must start at 0, never fall, and end at or before ``total``."""
    values = t.tolist()
    if not values or values[0] != 0 or any(b < a for a, b in zip(values, values[1:], strict=False)):
        raise ValueError(f"{op}: {name} is {values}, accepted: offsets that start at 0 and never fall")
    if values[-1] > total:
        raise ValueError(f"{op}: {name} ends at {values[-1]}, accepted: at most the {total} tokens given")


def no_nan(op: str, name: str, t: torch.Tensor | None) -> None:
    if t is not None and bool(t.isnan().any()):
        raise ValueError(f"{op}: {name} holds nan, accepted: numbers")


def scales(op: str, seen: torch.Tensor, **given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The scales (B, Hkv) by argument name, in their order, each None or positive: those of the sequences that have a
    query which sees a key, by ``seen`` (B,). Of the others they may be anything."""
    for name, t in given.items():
        positive(op, name, None if t is None else t.masked_fill(~seen[:, None], 1.0))
    return tuple(given.values())


def pages(op: str, table: torch.Tensor, seen: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """The table (B, Mp) with page 0 for pages of which no query sees a key, by ``seen`` (B, Mp * Ps): there it may hold
    anything. The others must be pages of ``cache`` (Np, Ps, ...)."""
    Np, Ps = cache.shape[:2]
    used = seen.unflatten(1, (table.shape[1], Ps)).any(2)  # (B, Mp)
    if Np == 0 and bool(used.any()):
        raise ValueError(f"{op}: k_cache has no pages, accepted: a page for every key that a query sees")
    table = table.masked_fill(~used, 0)
    in_range(op, "block_table", table, 0, max(Np - 1, 0))
    return table


def positive(op: str, name: str, t: torch.Tensor | None, most: float = math.inf) -> None:
    """Every element of the float tensor ``t`` must be above 0, finite and at most ``most``; None passes."""
    if t is None or t.numel() == 0:
        return
    bad = ~((t > 0) & (t <= most) & t.isfinite())  # nan compares false
    if bool(bad.any()):
        at = tuple(bad.nonzero()[0].tolist())
        place, limit = list(at) if at else "", f" up to {most:.6g}" if math.isfinite(most) else ""
        raise ValueError(f"{op}: {name}{place} is {float(t[at]):.6g}, accepted: finite numbers above 0{limit}")
