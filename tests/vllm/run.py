"""python tests/vllm/run.py [MODEL ...]: vLLM on our attention backend beside vLLM on its own, on this machine's CPU.

Each of the tiny checkpoints of models.py generates in processes of their own. In float32 tokens have to be equal and
log-probabilities within 1e-4. In bfloat16, and over caches in FP8, both are judged by their run in float32 at the same
tokens: ours may be no farther from it than theirs. Over FP8 that is said of log-probabilities alone: how far tokens are
behind the likeliest is the mean of the few that are not it. The cache has to have served prefixes, and ours has to have
run our ops and theirs none.
``make vllm`` makes the environment and runs this there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import models
import torch

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-4  # of a log-probability
# In bfloat16 the means of both runs are those of some hundred places with roundings of their own.
AS_GOOD = 1.1
ROUNDING = 2.0**-9  # of bfloat16, of a number of about one
# One process, one thread, nothing from the network, and a cache of 1 GiB.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip
NAN = float("nan")
# Beside one process: how weights of models with packed experts are shared by two.
SHARED = {
    "heads and rows of experts in two processes": {"tensor_parallel_size": 2},
    "heads and experts in two processes": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
LATENT = {
    "heads in two processes": {"tensor_parallel_size": 2},
    "drafts of three tokens": {"speculative_config": DRAFTS},
}
# What is judged by float32. vLLM's own backend attends FP8 on CPUs with AVX-512 alone, MLA's on none.
ROUNDED = {"in bfloat16": {"dtype": "bfloat16"}, "over caches in FP8": {"dtype": "float32", "kv_cache_dtype": "fp8"}}
PROBABILITIES = "log-probabilities off by"
FP8 = "AVX512" in torch.backends.cpu.get_cpu_capability()
OPS = {"paged_kv_cache_write", "flash_attention_paged_out", "sdpa_decode_paged_out"}
OPS_OF_MLA = {"paged_kv_cache_write", "flash_attention_varlen", "sdpa_decode_paged"}


def main(names: list[str]) -> int:
    failed = False
    for name in names or models.CONFIGS:
        packed, latent = name.endswith("fp4"), "kv_lora_rank" in models.CONFIGS[name][1]
        ops = OPS_OF_MLA if latent else OPS | {"fp4_moe"} if packed else OPS
        reference = "CPU_MLA" if latent else "CPU_ATTN"
        shared = SHARED if packed else LATENT if latent else {}
        with tempfile.TemporaryDirectory() as folder:
            dense, checkpoint = models.save(name, Path(folder))
            rounded = {
                what: [generated(at, by, **how) for at, by in ((dense, reference), (checkpoint, "CUSTOM"))]
                for what, how in ROUNDED.items()
                if "kv_cache_dtype" not in how or (FP8 and not latent)
            }
            runs = [run for both in rounded.values() for run in both]
            texts = [(r["prompt"] + r["tokens"], len(r["tokens"])) for run in runs for r in requests(run)]
            theirs = generated(dense, reference, texts, dtype="float32")
            for how, options in {name: {}, **shared}.items():
                ours = generated(checkpoint, "CUSTOM", dtype="float32", **options)
                # Workers count for themselves.
                wrong = differences(theirs, ours) + used(theirs, ours, set() if options else ops)
                failed |= bool(wrong)
                print(f"{how}: {'; '.join(wrong) or 'equal'}", summary(theirs, ours), flush=True)
            scored = iter(theirs["told"])
            for what, both in rounded.items():
                wrong, distances = farther(*both, [next(scored) for run in both for _ in requests(run)])
                wrong = [message for message in wrong if "FP8" not in what or message.startswith(PROBABILITIES)]
                wrong += used(*both, ops)
                failed |= bool(wrong)
                print(f"{name} {what}: {'; '.join(wrong) or 'as near to float32'}", distances, flush=True)
    return int(failed)


def generated(
    folder: Path, backend: str, texts: list[tuple[list[int], int]] | None = None, **options: Any
) -> dict[str, Any]:
    """What generate.py says of the checkpoint in ``folder``; its output is shown if it fails."""
    result = folder / f"{backend}.json"
    command = [sys.executable, str(HERE / "generate.py"), str(folder), backend, str(result), json.dumps(options)]
    if texts is not None:
        (folder / "texts.json").write_text(json.dumps(texts))
        command.append(str(folder / "texts.json"))
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{backend}: generate.py ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return json.loads(result.read_text())


def requests(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [request for found in run["rounds"] for request in found]


def pairs(theirs: dict[str, Any], ours: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip(requests(theirs), requests(ours), strict=True))


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of log-probabilities of a request, of the tokens that both tell at a place."""
    positions = zip(a["logprobs"], b["logprobs"], strict=True)
    return max(abs(p[t] - q[t]) for p, q in positions for t in p.keys() & q.keys())


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What is wrong in float32, in words."""
    wrong = []
    for i, (a, b) in enumerate(pairs(theirs, ours)):
        if a["tokens"] != b["tokens"]:
            wrong.append(f"request {i} has other tokens")
        elif (most := apart(a, b)) > TOLERANCE:
            wrong.append(f"request {i}: log-probabilities differ by {most:.1e}")
    return wrong


def used(theirs: dict[str, Any], ours: dict[str, Any], ops: set[str]) -> list[str]:
    """What is wrong with the cache, or with the calls; ``ops`` are those that ours has to have called."""
    wrong = [
        f"request {i}: {b['cached']} tokens from the cache, theirs {a['cached']}"
        for i, (a, b) in enumerate(pairs(theirs, ours))
        if a["cached"] != b["cached"]
    ]
    if not sum(request["cached"] for request in ours["rounds"][1]):
        wrong.append("no prefix came from the cache")
    if theirs["calls"]:
        wrong.append(f"their run called {theirs['calls']}")
    if missing := ops - ours["calls"].keys():
        wrong.append(f"ours never called {', '.join(sorted(missing))}")
    return wrong


def farther(theirs: dict[str, Any], ours: dict[str, Any], scored: list[list[list[float]]]) -> tuple[list[str], str]:
    """What of ours is farther from float32 than theirs, and how far both are; ``scored`` are float32's
    log-probabilities at each place of theirs and then of ours."""
    wrong, both = [], []
    half = len(requests(theirs))
    distances = [from_float32(run, scored[i * half :][:half]) for i, run in enumerate((theirs, ours))]
    for what, (a, b) in {key: [d[key] for d in distances] for key in distances[0]}.items():
        both.append(f"{what} {b:.1e}, theirs {a:.1e}")
        if not b <= AS_GOOD * a + ROUNDING:
            wrong.append(f"{what} {b:.1e}, at most {AS_GOOD} x {a:.1e} + {ROUNDING:.1e}")
    return wrong, f"({', '.join(both)})"


def from_float32(run: dict[str, Any], scored: list[list[list[float]]]) -> dict[str, float]:
    """Means over all places: how far log-probabilities are from float32's, and how far behind the likeliest one there
    that of the chosen token is."""
    off, behind = [], []
    for request, rows in zip(requests(run), scored, strict=True):
        for token, entry, row in zip(request["tokens"], request["logprobs"], rows, strict=True):
            off += [abs(p - row[int(t)]) for t, p in entry.items()]
            behind.append(max(row) - row[token])
    return {PROBABILITIES: statistics.fmean(off), "tokens behind by": statistics.fmean(behind)}


def summary(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    both = pairs(theirs, ours)
    tokens = [b["tokens"] for _, b in both]
    distinct = len({token for request in tokens for token in request})
    most = max((apart(a, b) for a, b in both if a["tokens"] == b["tokens"]), default=NAN)
    return (
        f"({len(both)} requests, {sum(map(len, tokens))} tokens, {distinct} of them distinct,"
        f" log-probabilities within {most:.1e},"
        f" {sum(b['cached'] for _, b in both)} prompt tokens from the cache; calls {ours['calls']})"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
