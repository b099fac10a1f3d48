"""The lines of a bench: for each case inputs, the parity gate, our time, the peers' times, and what they mean."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from bench import peers, timing
from bench.gate import gate, tensors_of
from bench.inputs import Inputs
from bench.same import difference
from torch_attnkit.core.op import Op
from torch_attnkit.parity import mutated

_SAME = 2e-2  # difference up to which a peer is taken to compute the same


def lines(
    op: Op, dtype: torch.dtype, only: str, limits: dict[str, float], with_peers: bool
) -> Iterator[dict[str, Any]]:
    """One record for each case; a case that is not right carries ``error`` and no number."""
    inputs = Inputs(op, dtype)
    for name, dims in inputs.cases.BENCH.items():
        if only in name:
            yield {"op": op.name, "case": name, "dtype": str(dtype).removeprefix("torch.")} | _line(
                inputs, dims, limits, with_peers
            )
            gc.collect()
            torch.cuda.empty_cache()


def prepare(op: Op, dtype: torch.dtype, only: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Make each case's call of ours and of every peer once, so that all is compiled: its name, and what failed."""
    inputs, call = Inputs(op, dtype), getattr(torch.ops.attnkit, op.name)
    for name, dims in inputs.cases.BENCH.items():
        if only not in name:
            continue
        failed: dict[str, str] = {}
        args, kwargs = inputs.first(dims)
        try:
            call(*args, **kwargs)
        except Exception as failure:
            failed["ours"] = _message(failure)
        for peer in peers.ALL:
            try:
                if (run := peer.adapt(op.name, args, kwargs)) is not None:
                    run()
            except Exception as failure:
                failed[peer.name] = _message(failure)
        torch.cuda.synchronize()
        del args
        torch.cuda.empty_cache()
        yield name, failed


def _line(inputs: Inputs, dims: dict[str, int], limits: dict[str, float], with_peers: bool) -> dict[str, Any]:
    op, cases = inputs.op, inputs.cases
    call = getattr(torch.ops.attnkit, op.name)
    try:
        args, kwargs = inputs.first(dims)
        before = timing.clones(args) if op.mutated else args
        got = (*mutated(op, args), *tensors_of(call(*args, **kwargs)))
        error = gate(op, before, kwargs, got)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError, TypeError) as failure:
        return {"error": f"{type(failure).__name__}: {failure}"}
    nbytes, flops = cases.bytes(dims, inputs.dtype), cases.flops(dims)
    copies = timing.sets_for(max(inputs.touched(dims, args, got), 1), torch.device("cuda"))
    sets = [args, *inputs.more(dims, args, copies - 1)]
    ours: timing.Calls = [lambda a=a: call(*a, **kwargs) for a in sets]
    rivals: dict[str, timing.Calls] = {}
    missing: dict[str, str] = {}
    for peer in peers.ALL if with_peers else ():
        _prepare(peer, op, before, sets, kwargs, got, rivals, missing)
    us, us_host, found = _timed(ours, rivals, missing)
    bandwidth, speed = nbytes / us / 1e6, flops / us / 1e6
    memory_bound = bandwidth / limits["copy"] >= speed / limits["bf16"]
    line = {
        "us": us,
        "us_eager": timing.eager(ours),
        "us_host": us_host,
        "bytes": nbytes,
        "flops": flops,
        "tb_s": bandwidth,
        "tflop_s": speed,
        "fraction": bandwidth / limits["copy"] if memory_bound else speed / limits["bf16"],
        "rate": f"{bandwidth:.2f} TB/s" if memory_bound else f"{speed:.0f} TFLOP/s",
        "error_of_tolerance": error,
        "input_sets": len(sets),
        "peers": found,
        "missing": missing,
    }
    return line


def _prepare(
    peer: peers.Peer, op: Op, before: Any, sets: list[Any], kwargs: dict[str, Any], got: Any,
    rivals: dict[str, timing.Calls], missing: dict[str, str],
) -> None:  # fmt: skip
    """Put a peer's calls, one for each input set, into ``rivals``, or into ``missing`` why there are none.

    ``before``: the first set as it was before our call, of which ``got`` are the results.
    """
    try:
        first = peer.adapt(op.name, before, kwargs)
        if first is None:
            return
        result = len(op.mutated) if op.outnames else 0  # what is returned, where an op writes besides
        off = difference(op.name, before, tensors_of(got)[result], tensors_of(first())[0])
        if not off <= _SAME:
            missing[peer.name] = f"computes something else here (difference {off:.2g})"
            return
        calls = [first, *(peer.adapt(op.name, a, kwargs) for a in sets[1:])]
        for each in calls:
            each()
        torch.cuda.synchronize()
        rivals[peer.name] = calls
    except Exception as failure:  # a peer may fail in any way; that is named, and the bench goes on
        missing[peer.name] = _message(failure)


def _timed(
    ours: timing.Calls, rivals: dict[str, timing.Calls], missing: dict[str, str]
) -> tuple[float, float, dict[str, dict[str, Any]]]:
    """Our microseconds in a graph and on the host, and each peer's record; all contenders take turns."""
    graphs = {p.name: p.graphs for p in peers.ALL}
    runs = {}
    for name, calls in rivals.items():
        try:
            runs[name] = timing.graph(calls) if graphs[name] else timing.plain(calls)
        except Exception as failure:
            torch.cuda.synchronize()
            missing[name] = f"not captured by a CUDA graph: {_message(failure)}"
            runs[name] = timing.plain(calls)
    us, *theirs = timing.interleaved([timing.graph(ours), *runs.values()])
    us_host, *hosts = timing.host([ours, *rivals.values()])
    found = {}
    for (name, run), each, host in zip(runs.items(), theirs, hosts, strict=True):
        found[name] = {
            "us": each, "us_eager": timing.eager(rivals[name]), "us_host": host, "ratio": each / us,
            "graph": run.kept is not None,
        }  # fmt: skip
    return us, us_host, found


def _message(failure: Exception) -> str:
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0][:200]}"
