"""Two GPUs of this machine give what one gives: the same bodies that run over gloo on a CPU, over NCCL, and beside them
what only GPUs have: graphs, streams, a current device that is another one, and waits of the host.

tests/test_sharding.py and tests/integrations/test_distributed.py hold the bodies, and show without a GPU that rows take
all of their calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import processes, test_sharding
from tests.integrations import test_distributed
from tests.integrations.test_distributed import KERNELS, here, judged, local_experts, normal, routed
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.integrations.distributed import cp_decode, cp_prefill, ep_moe, from_head_tail, head_tail
from torch_attnkit.parity.judge import mutated, verdict
from torch_attnkit.warmup import asked_by

pytestmark = pytest.mark.filterwarnings("default")  # the compiler's own imports warn


def on_gpus(test: Any) -> Any:
    needs = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs, sm90 or sm100")
    return pytest.mark.hardware(pytest.mark.seconds(600)(needs(test)))


WORLD = 2
KEYS = (300, 177)
Step = tuple[Callable[..., tuple[torch.Tensor, ...]], list[Any], Callable[[tuple[torch.Tensor, ...]], None]]


@on_gpus
def test_every_op_with_a_rule():
    test_sharding.judged(WORLD, list(test_sharding.CALLS), backend="nccl")


@on_gpus
def test_attention_and_experts():
    results = processes.run(WORLD, test_distributed.everything, WORLD, KERNELS, backend="nccl")
    test_distributed.succeeded(results)


def steps() -> dict[str, Step]:
    """Of each function: itself, its tensors in this process, and what judges its result."""
    rank = dist.get_rank()
    q, k, v = normal(0, 2, 8, 64), normal(1, 2, 2, 320, 64), normal(2, 2, 2, 320, 64)
    lengths = torch.tensor(KEYS, dtype=torch.int32)
    local = slice(rank * 160, (rank + 1) * 160)
    tq, tk, tv = (normal(3 + i, 1, 256, h, 64) for i, h in enumerate((8, 2, 2)))
    args, kwargs = routed(32)
    own = [t.chunk(WORLD)[rank] for t in args[:3]]
    experts = local_experts(WORLD, args)

    def of_tokens(out: tuple[torch.Tensor, ...]) -> None:
        judged("flash_attention", [from_head_tail(x) for x in out], (tq, tk, tv), dict(causal=True))

    def of_own_tokens(out: tuple[torch.Tensor, ...]) -> None:
        parts = [torch.empty_like(out[0]) for _ in range(WORLD)]
        dist.all_gather(parts, out[0])
        judged("fp4_moe", [torch.cat(parts)], args, kwargs)

    one = lambda tokens: lambda *given: (ep_moe(*given, tokens=tokens, **kwargs),)
    return {
        "cp_decode": (
            cp_decode,
            here(q, k[:, :, local], v[:, :, local], lengths),
            lambda out: judged("sdpa_decode", list(out), (q, k, v, lengths), {}),
        ),
        "cp_prefill": (cp_prefill, here(*map(head_tail, (tq, tk, tv))), of_tokens),
        "ep_moe": (one("replicated"), here(*experts), lambda out: judged("fp4_moe", list(out), args, kwargs)),
        "ep_moe own": (one("own"), here(*own, *experts[3:]), of_own_tokens),
    }


def each(body: Callable[[Step], None], *names: str) -> dict[str, str]:
    found = {}
    for name, step in steps().items():
        if not names or name in names:
            found[name] = processes.attempted(body, step)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    return found


def as_they_are(step: Step) -> None:
    function, tensors, right = step
    right(function(*tensors))


def on_a_stream(step: Step) -> None:
    """Inputs are late on a stream of the caller's, which alone may be waited for, and what is next on it reads the
    result: a collective that began under another stream would send what is not there yet, or hand it on too early."""
    function, tensors, right = step
    function(*tensors)  # kernels are loaded and processes joined, so that the calls below are only issued
    late = [None if t is None else torch.zeros_like(t) for t in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # about 30 ms
        for destination, t in zip(late, tensors, strict=True):
            if destination is not None:
                destination.copy_(t)
        copies = tuple(out.clone() for out in function(*late))
        for t in late:  # a collective that still read its inputs would send these
            if t is not None:
                t.zero_()
    stream.synchronize()
    right(copies)


def with_another_current_device(step: Step) -> None:
    function, tensors, right = step
    other = (dist.get_rank() + 1) % WORLD
    with torch.cuda.device(other):
        out = function(*tensors)
        assert torch.cuda.current_device() == other
        assert all(o.device == processes.device() for o in out)
    torch.cuda.synchronize(processes.device())
    right(out)


def in_a_graph(step: Step) -> None:
    function, tensors, right = step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(*tensors)  # processes join at a group's first collective, which no graph can hold
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = function(*tensors)
    for _ in range(3):
        for o in out:
            o.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    right(out)


def without_a_wait(step: Step) -> None:
    function, tensors, right = step
    function(*tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = function(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    right(out)


def over_gloo(rank: int) -> dict[str, str]:
    with asked_by("sm90"), asked_by("sm100"):
        return each(as_they_are)


@pytest.mark.proof
def test_steps_over_gloo_are_right_and_ones_that_gpus_take():
    test_distributed.succeeded(processes.run(WORLD, over_gloo))


def ways(rank: int) -> dict[str, str]:
    device_alone = ("cp_decode", "cp_prefill", "ep_moe")  # own tokens: the host has to know how many
    found: dict[str, str] = {}
    for body, names in (
        (on_a_stream, ()),
        (with_another_current_device, ()),
        (without_a_wait, device_alone),
        (in_a_graph, device_alone),
    ):
        found |= {f"{body.__name__}: {name}": wrong for name, wrong in each(body, *names).items()}
        if any(found.values()):
            break  # the other process may have gone on, or not
    return found


@on_gpus
def test_streams_devices_waits_and_graphs():
    test_distributed.succeeded(processes.run(WORLD, ways, backend="nccl"))


@on_gpus
@pytest.mark.parametrize("name", [n for n in test_sharding.CALLS if any("sm90" in row.archs for row in OPS[n].kernels)])
def test_tensors_on_a_device_that_is_not_the_current_one(name: str):
    """One process: kernels launch where the tensors are, on that device's current stream."""
    op = OPS[name]
    for index in range(len(test_sharding.CALLS[name])):
        args, kwargs = test_sharding.made(op, index)
        for gpu in (torch.device("cuda", 0), torch.device("cuda", 1)):
            stream = torch.cuda.Stream(gpu)
            moved = tuple(a.to(gpu, copy=True) if isinstance(a, torch.Tensor) else a for a in args)
            torch.cuda.synchronize(gpu)
            with torch.cuda.stream(stream), torch.cuda.device(0):
                out = getattr(torch.ops.attnkit, name)(*moved, **kwargs)
                assert torch.cuda.current_device() == 0
            stream.synchronize()
            outs = [] if out is None else [out] if isinstance(out, torch.Tensor) else list(out)
            verdict(f"{name} {index} on {gpu}", op, [o.cpu() for o in (*mutated(op, moved), *outs)], args, kwargs)
