"""The calls that a profiler looks at: ``python -m bench.profiled REQUEST.json``, which ``bench.profile`` starts.

Of each case inputs are made, then every contender is called until all is compiled, and once more between the driver's
marks for profilers. Ahead of that call goes a kernel that nothing else launches, ``MARK``: what the profiler lists
between two of them is one call's. Calls are written down in the same order, with what failed. Without a profiler the
marks cost nothing and everything is compiled: so it is prepared.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench import peers
from bench.inputs import Args, Inputs
from torch_attnkit.core.dispatch import OPS

MARK = "spin_kernel"  # of torch.cuda._sleep
OURS = "ours"
NOT_TAKEN = "the peer does not take this case"
_WARM = 2  # calls: the first compiles, the second may still choose among what was compiled


@contextlib.contextmanager
def locked(lock: str | None) -> Iterator[None]:
    """Alone on the device, as far as others ask for the same ``lock``: counters see what runs beside a kernel."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def contender(inputs: Inputs, name: str, args: Args, kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The call of ours or of a peer, warm; None if the peer has none."""
    op = inputs.op
    if name == OURS:
        ours = getattr(torch.ops.attnkit, op.name)
        call: Callable[[], Any] | None = lambda: ours(*args, **kwargs)
    else:
        call = next(p for p in peers.ALL if p.name == name).adapt(op.name, args, kwargs)
    for _ in range(_WARM if call else 0):
        call()
    torch.cuda.synchronize()
    return call


def profiled(call: Callable[[], Any]) -> None:
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda._sleep(1)
    try:
        call()
        torch.cuda.synchronize()
    finally:  # whatever failed: what follows is not this call's
        torch.cuda.cudart().cudaProfilerStop()


def case(inputs: Inputs, name: str, contenders: list[str]) -> Iterator[dict[str, Any]]:
    """One record for each contender; ``marked`` says that the profiler has seen its mark."""
    made: tuple[Args, dict[str, Any]] | None = None
    for who in contenders:
        record = {"op": inputs.op.name, "case": name, "contender": who, "marked": False}
        try:
            made = made or inputs.first(inputs.cases.BENCH[name])
            call = contender(inputs, who, *made)
            if call:
                record["marked"] = True
                profiled(call)
            else:
                record["missing"] = NOT_TAKEN
            del call
        except Exception as failure:  # of a peer, anything; the others go on
            output_lines = str(failure).strip().splitlines() or [""]
            record["missing"] = f"{type(failure).__name__}: {output_lines[0][:200]}"
        yield record


def main(file: str) -> None:
    asked = json.loads(Path(file).read_text())
    op = OPS[asked["op"]]
    inputs = Inputs(op, getattr(torch, asked["dtype"]))
    with locked(asked["lock"]), open(asked["calls"], "w", buffering=1) as calls:  # by lines: a run may be stopped
        for name, contenders in asked["cases"].items():
            if time.time() > asked["until"]:
                break
            for record in case(inputs, name, contenders):
                calls.write(json.dumps(record | {"dtype": asked["dtype"]}) + "\n")
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1])
