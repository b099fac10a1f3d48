"""Three decoder architectures generate with the ops and with transformers' own eager code, from the same weights."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import torch_attnkit
from torch_attnkit import Target
from torch_attnkit.demo import clock
from torch_attnkit.demo.models import ARCHITECTURES, build
from torch_attnkit.integrations.transformers import attnkit_model, round_experts_to_fp4


@dataclass
class DecoderResult:
    """How far the ops are from eager on one model, and what ran."""

    name: str
    experts: str
    layers: int
    target: Target | None  # whose kernels ran in its simulator; None: whatever runs on a CPU
    per_second: float
    eager_per_second: float
    slower: dict[str, float]  # time with the ops over eager's, of the parts of the model that have ops
    tokens: int
    tokens_equal: int
    logit_difference: float
    logit_scale: float
    calls: Counter[tuple[str, str]]

    @property
    def on_kernels(self) -> int:
        """Calls that ran on kernels of the target."""
        return sum(n for (_, where), n in self.calls.items() if where == str(self.target))

    @property
    def right(self) -> bool:
        """All tokens equal, and logits that differ by what float32 loses in two different orders of summation.

        In a simulator also: every call on a kernel of the target.
        """
        if self.target is not None and not 0 < self.on_kernels == self.calls.total():
            return False
        return self.tokens_equal == self.tokens and self.logit_difference <= 1e-3 * self.logit_scale


class _Advance(StoppingCriteria):
    """Never stops; tells the progress bar that a token is done."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.advance(1)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _generate(model: Any, prompt: dict[str, torch.Tensor], tokens: int, advance: Callable[[int], None]) -> Any:
    """(generated ids (B, tokens), logits (tokens, B, vocab), seconds)."""
    start = time.perf_counter()
    out = model.generate(
        **prompt,
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([_Advance(advance)]),
    )
    seconds = time.perf_counter() - start
    return out.sequences[:, prompt["input_ids"].shape[1] :], torch.stack(out.logits), seconds


def _timed(
    model: Any, prompt: dict[str, torch.Tensor], tokens: int, advance: Callable[[int], None]
) -> tuple[float, Mapping[str, float]]:
    """Seconds that a model takes that has generated before, and those of its parts in a step."""
    parts = clock.ModuleClock(model)
    _, _, seconds = _generate(model, prompt, tokens, advance)
    return seconds, parts.step()


@torch.no_grad()
def run(
    name: str, prompt: dict[str, torch.Tensor], tokens: int, advance: Callable[[int], None], arch: str | None = None
) -> DecoderResult:
    """Generate ``tokens`` greedily after ``prompt`` with both; ``advance(1)`` is called for every token of either.

    Each generates twice, and the second time is timed; in a simulator, whose time says nothing, once.

    Expert weights are rounded to FP4 in both models: packed for the ops, as ordinary numbers for eager. With ``arch``
    the ops run on the kernels of that architecture, in its simulator.
    """
    experts = ARCHITECTURES[name][1]
    eager = round_experts_to_fp4(build(name), experts)
    want, want_logits, eager_seconds = _generate(eager, prompt, tokens, advance)
    eager_parts: Mapping[str, float] = {}
    if arch is None:
        eager_seconds, eager_parts = _timed(eager, prompt, tokens, advance)
    del eager
    model = attnkit_model(build(name), experts=experts)
    simulated = contextlib.nullcontext() if arch is None else torch_attnkit.simulate(arch)
    with simulated as target, torch_attnkit.record() as ran:
        got, logits, seconds = _generate(model, prompt, tokens, advance)
    parts: Mapping[str, float] = {}
    if arch is None:  # record() sees every operation of the model and would be most of a small op's time
        seconds, parts = _timed(model, prompt, tokens, advance)
    return DecoderResult(
        name=name,
        experts=experts,
        layers=model.config.num_hidden_layers,
        target=target,
        per_second=got.numel() / seconds,
        eager_per_second=got.numel() / eager_seconds,
        slower=clock.ratios(parts, eager_parts),
        tokens=got.numel(),
        tokens_equal=int((got == want).sum()),
        logit_difference=float((logits - want_logits).abs().max()),
        logit_scale=float(want_logits.abs().max()),
        calls=ran.calls,
    )
