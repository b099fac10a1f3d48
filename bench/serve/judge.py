"""How far log-probabilities of served cases are from float32: ``python -m bench.serve.judge RUN CASES``, RUN as JSON.

The same model in float32 is transformers' own decoder layers with eager attention, one at a time, whose weights are
drawn as those that were served: of a model one layer is in memory, and the hidden states of all texts.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import load
from .models import Model, generate

_ROWS = 256  # of logits at once


@torch.no_grad()
def hidden(model: Model, texts: list[list[int]], device: torch.device) -> list[torch.Tensor]:
    """The last hidden states (T, N) of each text, which the head takes, in float32."""
    config = model.config()
    config._attn_implementation = config._experts_implementation = "eager"
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    shapes = model.shapes()

    def of(name: str) -> torch.Tensor:
        return model.generate(name, shapes[name], device).float()

    def filled(made: Any, prefix: str) -> Any:
        made = made.to_empty(device=device).float().eval()
        for name, p in made.named_parameters():
            p.copy_(of(prefix + name))
        return made

    rotary = getattr(module, f"{model.family}RotaryEmbedding")(config).to(device)
    embedding = of("model.embed_tokens.weight")
    states = [embedding[torch.tensor(text, device=device)][None] for text in texts]  # (1, T, N)
    del embedding
    for i in range(config.num_hidden_layers):
        with torch.device("meta"):
            layer = getattr(module, f"{model.family}DecoderLayer")(config, i)
        layer = filled(layer, f"model.layers.{i}.")
        window = config.sliding_window if _slides(config, i) else None
        for j, x in enumerate(states):
            positions = torch.arange(x.shape[1], device=device)[None]
            done = layer(
                x, attention_mask=_mask(x.shape[1], window, device), position_ids=positions,
                position_embeddings=rotary(x, positions),
            )  # fmt: skip
            states[j] = done[0] if isinstance(done, tuple) else done
        del layer
    with torch.device("meta"):
        norm = getattr(module, f"{model.family}RMSNorm")(config.hidden_size, config.rms_norm_eps)
    norm = filled(norm, "model.norm.")
    return [norm(x)[0] for x in states]


def _slides(config: Any, layer: int) -> bool:
    kinds = getattr(config, "layer_types", None)
    return bool(kinds) and kinds[layer] == "sliding_attention"


def _mask(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """What is added to scores (1, 1, T, T); ``window`` counts the token itself."""
    back = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    masked = (back < 0) | (back >= (window or length))
    return torch.zeros(back.shape, device=device).masked_fill_(masked, -torch.inf)[None, None]


def log_probabilities(model: Model, states: torch.Tensor, head: torch.Tensor) -> Iterator[torch.Tensor]:
    """Of hidden states (T, N), some rows (R, V) at a time."""
    for rows in states.split(_ROWS):
        yield (rows @ head.T).log_softmax(-1)


def wanted(judged: dict[str, Any], prompts: list[list[int]]) -> list[tuple[list[int], int, list[dict[str, float]]]]:
    """Of a case's generated texts: all tokens, the first place that is told of, and what is told there."""
    return [
        (prompt + scored["tokens"][:-1], len(prompt) - 1, scored["logprobs"])
        for prompt, scored in zip(prompts, judged["generated"], strict=True)
    ]


@torch.no_grad()
def judge(model: Model, asked: load.Load, cases: dict[str, dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """``cases`` are what ``served.judged`` found; of each the distances of given and of generated tokens."""
    vocabulary = model.sizes["vocab_size"]
    prompts, given = load.texts(asked.judged, vocabulary, 1), load.texts(asked.given, vocabulary, 2)
    generated = {name: wanted(found, prompts) for name, found in cases.items()}
    texts = [text for scored in generated.values() for text, _, _ in scored]
    with _without_tf32():
        states = hidden(model, texts + given, device)
        head = generate("lm_head.weight", model.shapes()["lm_head.weight"], device).float()
        exact = [_of_text(model, text, x, head) for text, x in zip(given, states[len(texts) :], strict=True)]
        rest = iter(states)
        return {
            name: {"given": _distances(exact, cases[name]["given"])} | _of_generated(model, generated[name], rest, head)
            for name in cases
        }


class _without_tf32:
    """float32 products are float32 products."""

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *error: Any) -> None:
        torch.set_float32_matmul_precision(self.before)


def _of_text(model: Model, text: list[int], states: torch.Tensor, head: torch.Tensor) -> list[float]:
    tokens = torch.tensor(text[1:], device=states.device).split(_ROWS)
    rows = log_probabilities(model, states[:-1], head)
    return [x for t, row in zip(tokens, rows, strict=True) for x in row.gather(1, t[:, None])[:, 0].tolist()]


def _of_generated(
    model: Model, scored: list[tuple[list[int], int, list[dict[str, float]]]], states: Iterator[torch.Tensor],
    head: torch.Tensor,
) -> dict[str, Any]:  # fmt: skip
    exact: list[list[float]] = []
    found: list[list[float]] = []
    first, compared = 0, 0
    for (_, begin, logprobs), x in zip(scored, states, strict=False):
        rows = torch.cat(list(log_probabilities(model, x[begin : begin + len(logprobs)], head)))
        for row, entry in zip(rows, logprobs, strict=True):
            exact.append(row[torch.tensor([int(t) for t in entry], device=row.device)].tolist())
            found.append(list(entry.values()))
            first += int(max(entry, key=lambda t: entry[t])) == int(row.argmax())
            compared += 1
    return {"generated": _distances(exact, found), "first": first, "places": compared}


def _distances(exact: list[list[float]], found: list[list[float]]) -> dict[str, Any]:
    apart = [abs(a - b) for x, y in zip(exact, found, strict=True) for a, b in zip(x, y, strict=True)]
    return {"mean": statistics.fmean(apart), "max": max(apart), "count": len(apart)}


def main(run: load.Run, cases: list[str]) -> None:
    began, folder = time.perf_counter(), Path(run.folder)
    found = {name: json.loads((folder / f"{name}.json").read_text())["judged"] for name in cases}
    judged = judge(run.served, run.load, found, torch.device(run.device))
    record = {"judged": judged, "total_s": time.perf_counter() - began}
    (folder / "judge.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(load.Run.of(sys.argv[1]), sys.argv[2].split(","))
