"""How far a peer's results are from ours, as one number that is 0 where both computed the same.

Most results are compared as they are, by the norm of their difference. Three ops leave a peer free to answer otherwise:
where indexer_scores has -inf a peer that is told the lengths need not write, and entries that indexer_topk chooses may
come in any order and, where scores are equal, be others. indexer_select shows no scores, so entries themselves count.
"""

from __future__ import annotations

from typing import Any

import torch


def difference(op: str, args: tuple[Any, ...], ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the norm of ours, but of choices the share of rows, or of entries, that are wrong."""
    ours = ours.reshape(theirs.shape)
    if op == "indexer_topk":
        return _wrong_rows(args[0], ours, theirs)
    if op == "indexer_select":
        return _not_chosen(ours, theirs)
    if op == "indexer_scores":
        seen = ours.isfinite()
        ours, theirs = ours[seen], theirs[seen]
    ours, theirs = ours.float(), theirs.float()
    return float((theirs - ours).norm() / ours.norm().clamp(min=torch.finfo(torch.float32).tiny))


def _wrong_rows(scores: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Of the rows of ``scores`` (Tq, S) the share for which ``theirs`` (Tq, K) does not choose scores like ``ours``."""
    chosen = theirs.long().sort(-1).values
    wrong = (chosen >= scores.shape[1]).any(-1)
    wrong |= ((chosen[:, 1:] == chosen[:, :-1]) & (chosen[:, 1:] >= 0)).any(-1)
    wrong |= (_values(scores, ours) != _values(scores, theirs)).any(-1)
    return float(wrong.float().mean()) if len(wrong) else 0.0


def _not_chosen(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Of the entries that ``ours`` (Tq, K) chooses the share that ``theirs`` (Tq, K) does not."""
    theirs = theirs.sort(-1).values
    position = torch.searchsorted(theirs, ours.to(theirs.dtype)).clamp(max=theirs.shape[1] - 1)
    missed = (theirs.gather(-1, position) != ours) & (ours >= 0)
    return float(missed.sum() / (ours >= 0).sum().clamp(min=1))


def _values(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The scores at ``index`` (Tq, K) in order, -inf where it is negative."""
    if scores.shape[1] == 0:
        return torch.full(index.shape, -torch.inf, device=scores.device)
    found = scores.float().gather(-1, index.long().clamp(0, scores.shape[1] - 1))
    return found.masked_fill(index < 0, -torch.inf).sort(-1).values
