"""python tests/vllm/run.py [MODEL ...]: vLLM on our attention backend beside vLLM on its own, on this machine's CPU.

Each of the tiny checkpoints of models.py generates twice, in processes of their own: tokens have to be equal and
log-probabilities within 1e-4, the cache has to have served prefixes, and ours has to have run our ops and theirs none.
``make vllm`` makes the environment and runs this there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import models

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-4  # of a log-probability
# One process, one thread, nothing from the network, and a cache of 1 GiB.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip
NAN = float("nan")
# Beside one process: how the weights of the last model are shared by two.
SHARED = {
    "heads and rows of experts in two processes": {"tensor_parallel_size": 2},
    "heads and experts in two processes": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
OPS = {"paged_kv_cache_write", "flash_attention_paged_out", "sdpa_decode_paged_out"}


def main(names: list[str]) -> int:
    failed = False
    for name in names or models.CONFIGS:
        packed = name.endswith("mxfp4")
        with tempfile.TemporaryDirectory() as folder:
            dense, checkpoint = models.save(name, Path(folder))
            theirs = generated(dense, "CPU_ATTN")
            for words, options in {name: {}, **(SHARED if packed else {})}.items():
                ours = generated(checkpoint, "CUSTOM", **options)
                ops = set() if options else OPS | {"fp4_moe"} if packed else OPS  # workers count for themselves
                wrong = differences(theirs, ours, ops)
                failed |= bool(wrong)
                print(f"{words}: {'; '.join(wrong) or 'equal'}", summary(theirs, ours), flush=True)
    return int(failed)


def generated(folder: Path, backend: str, **options: Any) -> dict[str, Any]:
    """What generate.py says of the checkpoint in ``folder``; its output is shown if it fails."""
    result = folder / f"{backend}.json"
    command = [sys.executable, str(HERE / "generate.py"), str(folder), backend, str(result), json.dumps(options)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{backend}: generate.py ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return json.loads(result.read_text())


def requests(theirs: dict[str, Any], ours: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [pair for two in zip(theirs["rounds"], ours["rounds"], strict=True) for pair in zip(*two, strict=True)]


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of log-probabilities of a request, of the tokens that both tell at a place."""
    places = zip(a["logprobs"], b["logprobs"], strict=True)
    return max(abs(p[t] - q[t]) for p, q in places for t in p.keys() & q.keys())


def differences(theirs: dict[str, Any], ours: dict[str, Any], ops: set[str]) -> list[str]:
    """What is wrong, in words; ``ops`` are those that ours has to have called."""
    wrong = []
    for i, (a, b) in enumerate(requests(theirs, ours)):
        if a["tokens"] != b["tokens"]:
            wrong.append(f"request {i} has other tokens")
        elif (most := apart(a, b)) > TOLERANCE:
            wrong.append(f"request {i}: log-probabilities differ by {most:.1e}")
        if a["cached"] != b["cached"]:
            wrong.append(f"request {i}: {b['cached']} tokens from the cache, theirs {a['cached']}")
    if not sum(request["cached"] for request in ours["rounds"][1]):
        wrong.append("no prefix came from the cache")
    if theirs["calls"]:
        wrong.append(f"their run called {theirs['calls']}")
    if missing := ops - ours["calls"].keys():
        wrong.append(f"ours never called {', '.join(sorted(missing))}")
    return wrong


def summary(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    pairs = requests(theirs, ours)
    tokens = [b["tokens"] for _, b in pairs]
    distinct = len({token for request in tokens for token in request})
    most = max((apart(a, b) for a, b in pairs if a["tokens"] == b["tokens"]), default=NAN)
    return (
        f"({len(pairs)} requests, {sum(map(len, tokens))} tokens, {distinct} of them distinct,"
        f" log-probabilities within {most:.1e},"
        f" {sum(b['cached'] for _, b in pairs)} prompt tokens from the cache; calls {ours['calls']})"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
