"""What may not depend on how a text was made: the part ``invariant``, and texts with and without drafts.

``invariant`` serves prompts one by one, then among others of other lengths, and then once more behind what vLLM's
prefix cache has of them. With VLLM_BATCH_INVARIANT every token and every log-probability has the same bits each time.
Without it some have not, which says that the comparison sees what it is for.
"""

from __future__ import annotations

from typing import Any

from . import load

_LIKELIEST = 5  # log-probabilities of a generated token


def invariant(engine: Any) -> dict[str, Any]:
    """How many of the tokens and log-probabilities differ from those of each prompt alone."""
    asked = engine.run.load
    prompts = load.texts(asked.judged, engine.vocabulary, 1)
    alone = [answer for prompt in prompts for answer in _answers(engine, [prompt])]
    engine.llm.reset_prefix_cache()
    among = _answers(engine, prompts, load.spread(asked.others, asked.others_longest))
    cached = _answers(engine, prompts, scored=False)
    for_cached = [answer | {"prompt": []} for answer in alone]
    return {"among others": differing(alone, among), "behind its own cache": differing(for_cached, cached)}


def _answers(
    engine: Any, prompts: list[list[int]], others: tuple[int, ...] = (), *, scored: bool = True
) -> list[dict[str, list[Any]]]:
    """Of each prompt the greedy tokens and their log-probabilities, and where ``scored`` those of the prompt's own
    tokens, which vLLM then computes anew. ``others`` are lengths of prompts that are served at the same time, half of
    them before, in vLLM's queue."""
    asked = engine.run.load
    wanted: dict[str, Any] = dict(max_tokens=asked.judged_new, logprobs=_LIKELIEST)
    wanted |= {"prompt_logprobs": 0} if scored else {}
    beside = [prompt for length in others for prompt in engine.prompts(1, length)]
    half = len(beside) // 2
    texts = beside[:half] + prompts + beside[half:]
    options = [wanted if half <= i < half + len(prompts) else {"max_tokens": 1 + i} for i in range(len(texts))]
    found = engine.generate(texts, options)[half : half + len(prompts)]
    return [
        {
            "prompt": _scored(prompt[1:], answer.prompt_logprobs[1:]) if scored else [],
            "tokens": list(answer.outputs[0].token_ids),
            "likeliest": [{t: p.logprob for t, p in entry.items()} for entry in answer.outputs[0].logprobs],
        }
        for prompt, answer in zip(prompts, found, strict=True)
    ]


def _scored(tokens: list[int], entries: list[Any]) -> list[float]:
    return [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]


def differing(a: list[dict[str, list[Any]]], b: list[dict[str, list[Any]]]) -> dict[str, Any]:
    """Places of requests and how many of them differ in a bit: tokens of prompts by their log-probability, generated
    ones by themselves and by those of the likeliest. ``largest`` is the largest difference of a log-probability."""
    pairs = list(zip(a, b, strict=True))
    prompt = [(x, y) for p, q in pairs for x, y in zip(p["prompt"], q["prompt"], strict=True)]
    tokens = [(x, y) for p, q in pairs for x, y in zip(p["tokens"], q["tokens"], strict=True)]
    likeliest = [(x, y) for p, q in pairs for x, y in zip(p["likeliest"], q["likeliest"], strict=True)]
    apart = [abs(x - y) for x, y in prompt] + [abs(x[t] - y[t]) for x, y in likeliest for t in x.keys() & y.keys()]
    return {
        "requests": len(pairs), "prompt": len(prompt), "prompt_differ": sum(x != y for x, y in prompt),
        "tokens": len(tokens), "tokens_differ": sum(x != y for x, y in tokens),
        "likeliest_differ": sum(x != y for x, y in likeliest), "largest": max(apart, default=0.0),
    }  # fmt: skip


def of_drafts(drafted: list[list[int]], plain: list[list[int]]) -> dict[str, int]:
    """Texts with and without drafts: how many are equal, and how many tokens are before the first that is another."""
    same = 0
    for a, b in zip(drafted, plain, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    equal = sum(a == b for a, b in zip(drafted, plain, strict=True))
    return {"requests": len(plain), "equal": equal, "tokens": sum(map(len, plain)), "same": same}
