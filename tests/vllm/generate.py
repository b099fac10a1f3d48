"""python generate.py FOLDER BACKEND RESULT OPTIONS [TEXTS]: what vLLM generates from the checkpoint in FOLDER.

Four requests at once whose prompts are longer than a step (chunked prefill), then four that begin like the longest of
them (prefix cache). RESULT gets JSON: tokens, log-probabilities, how many prompt tokens the cache had, and which ops of
ours ran in this process. OPTIONS are further arguments of LLM, as JSON. TEXTS is a file of texts, each with how many
of its last tokens are asked for: RESULT then also has the log-probabilities of the whole vocabulary at their places.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from torch_attnkit.integrations.vllm import steps

STEP, PAGE, VOCABULARY = 64, 32, 512
PAGE_OF_MLA = 16  # CPU_MLA has no other
LENGTHS = (17, 40, 190, 33)


def main(folder: str, backend: str, result: str, options: str, texts: str | None = None) -> None:
    gen = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 500, (n,), generator=gen).tolist() for n in LENGTHS]
    longest = max(prompts, key=len)
    later = [longest[:n] + torch.randint(3, 500, (n // 8,), generator=gen).tolist() for n in (64, 100, 150, 190)]
    steps.ops = ran = Counted()
    quantization = None
    config = json.loads(Path(folder, "config.json").read_text())
    published, latent = config.get("quantization_config"), "kv_lora_rank" in config
    if published is not None:
        from torch_attnkit.integrations.vllm import experts
        from torch_attnkit.integrations.vllm import quantization as names

        experts.ops = ran
        quantization = names.MXFP4 if published["quant_method"] == "mxfp4" else names.NVFP4
    if latent:
        keep_chunks()
    llm = LLM(
        model=folder, attention_config={"backend": backend}, quantization=quantization, skip_tokenizer_init=True,
        enforce_eager=True, max_logprobs=VOCABULARY, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=STEP,
        block_size=PAGE_OF_MLA if latent else PAGE, enable_chunked_prefill=True, enable_prefix_caching=True, seed=0,
        **json.loads(options),
    )  # fmt: skip
    rounds = [generate(llm, prompts), generate(llm, later)]
    calls = dict(ran.calls)
    scored = [logprobs_of(llm, *text) for text in json.loads(Path(texts).read_text())] if texts else []
    Path(result).write_text(json.dumps({"rounds": rounds, "calls": calls, "told": scored}))


def keep_chunks() -> None:
    """On a CPU without AMX vLLM turns chunked prefill and prefix caching off for MLA, which CPU_MLA can do; here it
    keeps what it is asked for."""
    from vllm.platforms.cpu import CpuPlatform

    own = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: type, config: Any) -> None:
        own(config)
        config.scheduler_config.enable_chunked_prefill = config.cache_config.enable_prefix_caching = True
        config.scheduler_config.max_num_batched_tokens = STEP

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


class Counted:
    """torch.ops.attnkit, whose calls are counted. torch_attnkit.record sees none of them: to a dispatch mode vLLM's
    attention is one operator."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(torch.ops.attnkit, name)


def generate(llm: LLM, prompts: list[list[int]]) -> list[dict[str, Any]]:
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=5, detokenize=False)
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
    return [
        {
            "prompt": list(request.prompt_token_ids),
            "tokens": list(request.outputs[0].token_ids),
            "logprobs": [{str(t): p.logprob for t, p in entry.items()} for entry in request.outputs[0].logprobs],
            "cached": request.num_cached_tokens,
        }
        for request in found
    ]


def logprobs_of(llm: LLM, tokens: list[int], last: int) -> list[list[float]]:
    """The log-probabilities of all tokens at the ``last`` places of a text."""
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCABULARY, detokenize=False)
    (found,) = llm.generate([{"prompt_token_ids": tokens}], asked, use_tqdm=False)
    return [[entry[t].logprob for t in range(VOCABULARY)] for entry in found.prompt_logprobs[-last:]]


if __name__ == "__main__":
    main(*sys.argv[1:])
