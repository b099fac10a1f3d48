"""Few combinations in which every two values of two columns meet: a pairwise covering array, found greedily."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Choice = tuple[Any, ...]
Pair = tuple[int, Any, int, Any]


def pairs(choice: Choice) -> list[Pair]:
    """The pairs of values that a choice of one value of each column holds."""
    return [(i, choice[i], j, choice[j]) for i, j in itertools.combinations(range(len(choice)), 2)]


def covering(columns: Sequence[Sequence[Any]], accepted: Callable[[Choice], bool], dear: int) -> list[Choice]:
    """Accepted choices that hold every pair which some accepted choice holds.

    The first ``dear`` columns decide what has to be compiled: no more of their combinations are used than hold their
    own pairs, unless what is accepted needs others. Ties go to the combination that was used least, then to values of
    the first and the last column that come in turns, since the last one has a part in what is compiled, too; then to
    the first, so that the same columns always give the same choices.
    """
    ties = {(a, b) for i, a in enumerate(columns[0]) for b in columns[-1][i :: len(columns[0])]}
    rest = list(itertools.product(*columns[dear:]))
    missing = set(itertools.chain(*map(pairs, itertools.product(*columns))))
    heads = itertools.product(*columns[:dear])
    few = _greedy(heads, _among(missing, dear), lambda head: any(accepted(head + tail) for tail in rest), dear, ties)
    chosen = _greedy([head + tail for head in few for tail in rest], missing, accepted, dear, ties)
    return chosen + _greedy(itertools.product(*columns), missing, accepted, dear, ties)


def _among(missing: set[Pair], dear: int) -> set[Pair]:
    return {pair for pair in missing if pair[2] < dear}


def _greedy(
    candidates: Iterable[Choice], missing: set[Pair], accepted: Callable[[Choice], bool], dear: int, ties: set[Choice]
) -> list[Choice]:
    """Of the candidates always the one that holds most of ``missing``, which loses what was found."""
    chosen: list[Choice] = []
    used: collections.Counter[Choice] = collections.Counter()
    left = {choice: set(pairs(choice)) & missing for choice in candidates}
    while left:
        best = max(left, key=lambda c: (len(left[c]), (c[0], c[-1]) in ties, -used[c[:dear]]))
        found = left.pop(best)
        if not found:
            break
        if accepted(best):
            chosen.append(best)
            used[best[:dear]] += 1
            missing -= found
            left = {choice: still for choice, open in left.items() if (still := open - found)}
    return chosen
