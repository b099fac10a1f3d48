"""One case of ``bench.serve`` in a process of its own: ``python -m bench.serve.served RUN``, RUN as JSON.

The engine runs in this process and is driven step by step; with several GPUs its workers are processes. The record is
written anew after each part, so that what was measured outlives a process that is killed.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_BEGAN = time.perf_counter()
import torch  # noqa: E402

from . import load, profiled, sameness, table  # noqa: E402
from .models import bytes_of  # noqa: E402

_SAFETY = 6 << 30  # bytes of a GPU that neither weights nor keys get
_SHARE = 0.9  # of a GPU's memory, for vLLM
# Sequences decode at these batch sizes in CUDA graphs, rounded up.
_CAPTURED = [1, 2, 4, 8, 16, 32, 64]


def environment(run: load.Run) -> dict[str, str]:
    """Variables of this process: what makes its case, and where nobody has set it one process, nothing from the
    network."""
    case = load.CASES[run.case]
    of_case = {
        "VLLM_PLUGINS": "torch_attnkit" if case.ours else "", "VLLM_BATCH_INVARIANT": "1" if case.invariant else "0",
    }  # fmt: skip
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    if importlib.util.find_spec("flashinfer") is None:  # else vLLM's sampler asks for it
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if run.device == "cpu":
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return variables | {name: os.environ[name] for name in variables if name in os.environ} | of_case


def arguments(run: load.Run) -> dict[str, Any]:
    """Of vLLM's LLM. What is not here is vLLM's default."""
    case, asked = load.CASES[run.case], run.load
    engine_options: dict[str, Any] = dict(
        model=str(Path(run.folder) / ("packed" if run.packed else "dense")), skip_tokenizer_init=True,
        load_format="drawn_by_name", model_loader_extra_config={"run": run.text()},
        worker_extension_cls="bench.serve.worker.Extension", dtype=run.dtype,
        max_model_len=asked.max_model_len(run.parts), max_num_seqs=asked.requests,
        max_num_batched_tokens=asked.chunk, tensor_parallel_size=run.tensor_parallel, seed=0,
    )  # fmt: skip
    if case.backend is not None:
        engine_options["attention_config"] = {"backend": case.backend}
    if case.experts and run.packed:
        engine_options["quantization"] = f"attnkit_{run.served.packing}"
    if case.drafts:
        engine_options["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": asked.drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
        }  # fmt: skip
    if run.kv_cache != "auto":
        engine_options["kv_cache_dtype"] = run.kv_cache
    if run.device != "cpu":
        engine_options["gpu_memory_utilization"] = _SHARE
    if run.eager:
        engine_options["enforce_eager"] = True
    else:
        tokens = 1 + asked.drafts if case.drafts else 1  # of a request in a step
        engine_options["compilation_config"] = {"cudagraph_capture_sizes": [n * tokens for n in _CAPTURED]}
    return engine_options


@dataclass
class Steps:
    """Steps that gave tokens: when each was over, in seconds, and how many requests got tokens in it; and the texts
    that they gave, by the requests' names."""

    began: float
    ends: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    texts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts.values()))

    def in_order(self) -> list[list[int]]:
        """The texts in the order in which the requests were added, which their names end with."""
        return [self.texts[name] for name in sorted(self.texts, key=lambda name: int(name.rpartition("-")[2]))]

    @property
    def seconds(self) -> float:
        return self.ends[-1] - self.began

    def whole(self, requests: int) -> list[float]:
        """Seconds of the steps in which so many requests decoded: they had a token in the one before, too."""
        pairs = itertools.pairwise(zip(self.ends, self.requests, strict=True))
        return [b - a for (a, m), (b, n) in pairs if m == n == requests]


class Engine:
    """vLLM's engine, driven from here."""

    def __init__(self, run: load.Run) -> None:
        from vllm import LLM

        from . import worker

        worker.plug_in(run)
        self.run, self.llm = run, LLM(**arguments(run))
        self.request_ids, self.seeds = itertools.count(), itertools.count(1000)
        self.vocabulary = run.served.sizes["vocab_size"]

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts that were not there before: nothing of them is in vLLM's prefix cache."""
        return load.texts((length,) * count, self.vocabulary, next(self.seeds))

    def add(self, prompts: list[list[int]], new: int, choices: int = 0) -> list[str]:
        """Add requests of ``new`` greedy tokens each, of the first ``choices`` tokens if it is not 0; their names."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA,
            allowed_token_ids=list(range(choices)) or None,
        )  # fmt: skip
        names = [f"request-{next(self.request_ids)}" for _ in prompts]
        return [
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
            for name, prompt in zip(names, prompts, strict=True)
        ]

    def steps(self, steps: Steps) -> Iterator[int]:
        """Step until no request is left; after each step that gave tokens, how many requests got some."""
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            found = {one.request_id: one.outputs[0].token_ids for one in engine.step()}
            got = sum(len(tokens) > 0 for tokens in found.values())
            if got:
                steps.ends.append(time.perf_counter())
                steps.requests.append(got)
                for name, tokens in found.items():
                    steps.texts.setdefault(name, []).extend(tokens)
                yield got

    def serve(self, prompts: list[list[int]], new: int, most: int | None = None, choices: int = 0) -> Steps:
        """All of the requests to their end, or until all of them have decoded together for ``most`` steps."""
        names = self.add(prompts, new, choices)
        synchronize(self.run)
        steps = Steps(time.perf_counter())
        concurrent = 0
        for got in self.steps(steps):
            concurrent += got == len(prompts)
            if most is not None and concurrent > most:
                self.abort(names)
                break
        return steps

    def abort(self, names: list[str]) -> None:
        engine = self.llm.llm_engine
        engine.abort_request(names, internal=True)
        while engine.has_unfinished_requests() or engine.engine_core.engine_core.scheduler.has_requests():
            engine.step()

    def generate(self, prompts: list[list[int]], options: list[dict[str, Any]]) -> list[Any]:
        """vLLM's answers to prompts, each with options of its own."""
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **of_one) for of_one in options]
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def synchronize(run: load.Run) -> None:
    if run.device != "cpu":
        torch.accelerator.synchronize()


def decoding(steps: Steps, requests: int) -> dict[str, Any]:
    """What a part says of its steps in which all requests decoded."""
    whole = steps.whole(requests)
    return {
        "requests": requests, "steps": len(whole), "ms": statistics.median(whole) * 1e3,
        "ms_mean": statistics.fmean(whole) * 1e3, "tokens_s": requests / statistics.fmean(whole),
        "total_s": steps.seconds, "total_tokens": steps.tokens,
    }  # fmt: skip


def decode(engine: Engine) -> dict[str, Any]:
    asked = engine.run.load
    # Prompts are read a few a step: the last ones begin to decode some steps after the first.
    warm = min(asked.new, 2 * asked.requests * asked.prompt // asked.chunk + 4)
    engine.serve(engine.prompts(asked.requests, asked.prompt), warm)
    return decoding(engine.serve(engine.prompts(asked.requests, asked.prompt), asked.new), asked.requests)


def single(engine: Engine) -> dict[str, Any]:
    asked = engine.run.load
    engine.serve(engine.prompts(1, asked.prompt), 4)
    return decoding(engine.serve(engine.prompts(1, asked.prompt), asked.new_alone), 1)


def prefill(engine: Engine) -> dict[str, Any]:
    asked = engine.run.load
    engine.serve(engine.prompts(max(1, asked.prefills // 8), asked.prefill), 1)
    steps = engine.serve(engine.prompts(asked.prefills, asked.prefill), 1)
    total = asked.prefills * asked.prefill
    return {"requests": asked.prefills, "tokens": total, "total_s": steps.seconds, "tokens_s": total / steps.seconds}


def behind(engine: Engine, prompts: load.Behind) -> dict[str, Any]:
    """As many of the requests as have their keys in memory at once."""
    asked, run = engine.run.load, engine.run
    count, new = prompts.requests, asked.new_behind(prompts)
    if run.device != "cpu":
        weights, keys = (n // run.tensor_parallel for n in bytes_of(run.served))
        keys //= 2 if run.kv_cache.startswith("fp8") else 1
        left = _SHARE * torch.cuda.get_device_properties(0).total_memory - weights - _SAFETY
        count = max(1, min(count, int(left // (keys * (prompts.prompt + new)))))
    engine.serve(engine.prompts(min(2, count), prompts.prompt), new, most=4)
    steps = engine.serve(engine.prompts(count, prompts.prompt), new, most=asked.steps_behind)
    return decoding(steps, count)


def repeated(engine: Engine) -> dict[str, Any]:
    """Texts that come to repeat themselves, and what a request gets a step: more than one token where drafts are
    taken. The time is that of all of it, prompts too, which are short."""
    asked = engine.run.load.repeated

    def prompts() -> list[list[int]]:
        return load.texts((asked.prompt,) * asked.requests, asked.choices, next(engine.seeds))

    engine.serve(prompts(), asked.new // 4, choices=asked.choices)
    steps = engine.serve(prompts(), asked.new, choices=asked.choices)
    iterations = sum(steps.requests)
    return {
        "requests": asked.requests, "tokens": steps.tokens, "total_s": steps.seconds,
        "tokens_s": steps.tokens / steps.seconds, "steps": len(steps.ends), "tokens_a_step": steps.tokens / iterations,
        "taken": steps.tokens - iterations, "texts": steps.in_order(),
    }  # fmt: skip


PARTS: dict[str, Callable[[Engine], dict[str, Any]]] = {
    "decode": decode,
    "single": single,
    "prefill": prefill,
    "behind": lambda engine: behind(engine, engine.run.load.behind),
    "long": lambda engine: behind(engine, engine.run.load.long),
    "repeated": repeated,
    "invariant": sameness.invariant,
}


def judged(engine: Engine) -> dict[str, Any]:
    """Greedy tokens with the log-probabilities of the five likeliest, and those of the tokens of given texts."""
    asked, vocabulary = engine.run.load, engine.vocabulary
    prompts, given = load.texts(asked.judged, vocabulary, 1), load.texts(asked.given, vocabulary, 2)
    generated = [
        {
            "tokens": list(found.outputs[0].token_ids),
            "logprobs": [{str(t): p.logprob for t, p in entry.items()} for entry in found.outputs[0].logprobs],
        }
        for found in engine.generate(prompts, [dict(max_tokens=asked.judged_new, logprobs=5)] * len(prompts))
    ]
    scored = engine.generate(given, [dict(max_tokens=1, prompt_logprobs=0)] * len(given))
    return {
        "generated": generated,
        "given": [
            [entry[t].logprob for t, entry in zip(text[1:], found.prompt_logprobs[1:], strict=True)]
            for text, found in zip(given, scored, strict=True)
        ],
    }


def described(engine: Engine) -> dict[str, Any]:
    config = engine.llm.llm_engine.vllm_config
    return {
        **engine.llm.collective_rpc("chosen")[0],
        "graphs": config.compilation_config.cudagraph_mode.name,
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT") == "1",
        "drafts": getattr(config.speculative_config, "num_speculative_tokens", 0),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "page": config.cache_config.block_size,
        "max_model_len": config.model_config.max_model_len,
    }


def main(run: load.Run) -> None:
    os.environ.update(environment(run))
    file = Path(run.folder) / f"{run.case}.json"
    record: dict[str, Any] = {"run": asdict(run) | {"folder": ""}, "parts": {}}

    def log(message: str) -> None:
        file.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{time.perf_counter() - _BEGAN:.1f} s: {message}", flush=True)

    engine = Engine(run)
    record["start_s"] = time.perf_counter() - _BEGAN
    record["engine"] = described(engine)
    log(f"started, {record['engine']}")
    for name in run.parts:
        record["parts"][name] = PARTS[name](engine)
        log(f"{name}: {table.without_texts(record['parts'][name])}")
    if run.judge:
        record["judged"] = judged(engine)
        log("log-probabilities")
    if run.profile:
        record["profile"] = {}
        for name, part in profiled.parts(engine):
            record["profile"][name] = part
            log(f"profile of {name}")
    from . import facts

    record["facts"] = facts.of(run.device)
    record["total_s"] = time.perf_counter() - _BEGAN
    log("done")


if __name__ == "__main__":
    main(load.Run.of(sys.argv[1]))
