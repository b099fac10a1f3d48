"""The indexer's selection on Metal: scores into memory of the call's own, and a selection that reads them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_attnkit.core.target import Target

from ..topk import metal as topk
from ..topk import problem as rows
from . import metal as scores
from .select import Operands, Selection


def launcher(source: str, problem: Selection, steps: scores.Steps, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` with the kernels of ``csrc/metal/<source>.metal``."""
    p = problem.scores
    score = scores.launcher(source, p, steps, target, defines=dict(CHOOSES=False))
    row = rows.Problem(p.device, torch.float32, p.tokens, p.entries, problem.topk, p.entries, ragged=True)
    choose = topk.launcher(source, row, target, defines=dict(CHOOSES=True))

    def launch(o: Operands) -> None:
        made = torch.empty(p.tokens, p.entries, dtype=torch.float32, device=o.indices.device)  # (T, S)
        score(o.given._replace(scores=made))
        choose(rows.Operands(made, o.given.k_len, o.indices))

    return launch
