"""Attention and experts over several processes give what one process gives, to the contract's tolerance."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests import processes
from tests.parity.test_random_signatures import needs
from torch_attnkit.core import simulate
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.integrations import distributed
from torch_attnkit.oracle.compare import check
from torch_attnkit.parity.judge import reference_of
from torch_attnkit.warmup import asked_by

ops = torch.ops.attnkit
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Sizes:
    """Head sizes of keys and of values, and the dtype of cases that ask for float32."""

    D: int
    Dv: int
    F32: torch.dtype


ODD, KERNELS = Sizes(16, 13, F32), Sizes(64, 64, BF16)  # for the references, and what rows of GPUs take


def here(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.to(processes.device()) for t in tensors]


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def judged(op: str, got: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Against one process, by the oracle: ``got`` are the outputs that the function has of the op's."""
    exact, ref = (reference_of(OPS[op], args, kwargs, double=double) for double in (True, False))
    for name, g, e, r in zip(OPS[op].outnames, got, exact, ref, strict=False):
        check(f"{op} {name}", g.cpu(), r, e)


def prefill(world: int, sizes: Sizes, dtype: torch.dtype, **options: Any) -> None:
    B, T, Hq, Hkv = 2, 32, 4, 2
    dtype = sizes.F32 if dtype == F32 else dtype
    q, k, v = (normal(i, B, T, h, sizes.D, dtype=dtype) for i, h in enumerate((Hq, Hkv, Hkv)))
    sink = normal(3, Hq, dtype=F32)
    lengths = [torch.tensor(n, dtype=torch.int32) for n in ((32, 21), (0, 5))]
    local = [distributed.head_tail(x) for x in here(q, k, v)]
    out, lse = distributed.cp_prefill(*local, *here(sink, *lengths), **options)
    whole = [distributed.from_head_tail(x) for x in (out, lse)]
    judged("flash_attention", whole, (q, k, v, sink, *lengths), dict(causal=True, **options))


def decode(
    world: int, sizes: Sizes, dtype: torch.dtype, lengths: tuple[int, ...], start: bool, S: int = 32, **options: Any
) -> None:
    B, Hq, Hkv = len(lengths), 4, 2
    dtype = sizes.F32 if dtype == F32 else dtype
    q, k, v = (
        normal(0, B, Hq, sizes.D, dtype=dtype),
        normal(1, B, Hkv, S, sizes.D, dtype=dtype),
        normal(2, B, Hkv, S, sizes.Dv, dtype=dtype),
    )
    sink, kv_len = normal(3, Hq, dtype=F32), torch.tensor(lengths, dtype=torch.int32)
    kv_start = (kv_len // 3) if start else None
    shard = slice(dist.get_rank() * S // world, (dist.get_rank() + 1) * S // world)
    got = distributed.cp_decode(*here(q, k[:, :, shard], v[:, :, shard], kv_len, sink, kv_start), **options)
    judged("sdpa_decode", list(got), (q, k, v, kv_len, sink, kv_start), options)


def experts(world: int, sizes: Sizes, tokens: str, count: int, **changes: Any) -> None:
    """``count`` tokens in all; of "own" ones rank 0 has two more than the others, and some ask one process alone."""
    args, kwargs = routed(count, **changes)
    shard = local_experts(world, args)
    if tokens == "replicated":
        got = distributed.ep_moe(*here(*shard), **kwargs)
    else:
        rank = dist.get_rank()
        ends = [count - (world - 1 - r) * max((count - 2) // world, 0) for r in range(world)]
        begin, end = [0, *ends][rank], ends[rank]
        own = (t[begin:end] for t in shard[:3])
        part = distributed.ep_moe(*here(*own, *shard[3:]), tokens="own", **kwargs)
        padded = part.new_zeros(count, *part.shape[1:])
        padded[begin:end] = part
        dist.all_reduce(padded)  # the others have zeros there
        got = padded
    judged("fp4_moe", [got], args, kwargs)


def routed(count: int, **changes: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``count`` tokens and eight experts, whole."""
    dims = dict(Tq=count, N=64, M=64, E=8, K=3, blk=16, act=0) | changes
    features = ("gptoss", "limit", "bias", "global_scale")
    args, kwargs = OPS["fp4_moe"].module("cases").make(dims, BF16, features, torch.Generator().manual_seed(1))
    return args, kwargs


def local_experts(world: int, args: tuple[Any, ...]) -> list[Any]:
    """The arguments of fp4_moe with the experts of this process alone."""
    cut = lambda n, t: t if t is None or n[1:] == "_global" else t.chunk(world)[dist.get_rank()]
    return [*args[:3], *(cut(n, t) for n, t in zip(OPS["fp4_moe"].argnames[3:], args[3:], strict=False))]


CASES: dict[str, tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]] = {
    "prefill": (prefill, (BF16,), {}),
    "prefill window": (prefill, (F32,), dict(window=6, sink_tokens=2)),
    "prefill window of nothing": (prefill, (BF16,), dict(window=0, softcap=3.0)),
    "decode": (decode, (BF16, (32, 17, 3, 0), False), {}),
    "decode of many keys": (decode, (BF16, (2048, 1300, 700), False), dict(S=2048)),
    "decode scale": (decode, (F32, (32, 17, 3), False), dict(scale=0.5)),
    "decode window": (decode, (F32, (32, 17, 3, 0), True), dict(window=7)),
    "decode window over all": (decode, (BF16, (32, 9), False), dict(window=2**31)),
    "decode first tokens": (decode, (F32, (32, 17, 3, 0, 11), True), dict(window=4, sink_tokens=5)),
    "decode many first tokens": (decode, (BF16, (32, 20, 1), False), dict(window=4, sink_tokens=19, softcap=2.0)),
    "decode window of nothing": (decode, (F32, (32, 20), False), dict(window=0, sink_tokens=3)),
    "experts": (experts, ("replicated", 9), {}),
    "experts of no tokens": (experts, ("replicated", 0), {}),
    "experts, own tokens": (experts, ("own", 11), {}),
    "experts, own activations": (experts, ("own", 11), dict(act=1)),
    "experts, few own tokens": (experts, ("own", 1), {}),
}  # fmt: skip


def everything(rank: int, world: int, sizes: Sizes, *archs: str) -> dict[str, str]:
    """What went wrong in each case, in this process. Rows of each of ``archs`` have to take every call of an op."""
    found = {}
    for name, (function, args, options) in CASES.items():
        with contextlib.ExitStack() as stack:
            for arch in archs:
                stack.enter_context(asked_by(arch))
            found[name] = processes.attempted(lambda f=function, a=args, o=options: f(world, sizes, *a, **o))
    found["refusals"] = processes.attempted(refusals)
    return found


def refusals() -> None:
    q = torch.zeros(1, 3, 2, 8, device=processes.device())
    with pytest.raises(ValueError, match="cp_prefill: q has 3 and k 3 tokens, accepted"):
        distributed.cp_prefill(q, q, q)
    with pytest.raises(ValueError, match="head_tail: axis 1 of x has 3 tokens, accepted: a multiple of"):
        distributed.head_tail(q)
    with pytest.raises(NotImplementedError, match="cp_decode: q requires a gradient, but cp_decode has no backward"):
        distributed.cp_decode(q[:, 0].requires_grad_(), q, q, torch.tensor([3]))
    with pytest.raises(ValueError, match="ep_moe: tokens is 'mine', accepted: 'replicated', 'own'"):
        distributed.ep_moe(*[torch.zeros(1)] * 7, tokens="mine")


def succeeded(results: list[dict[str, str]]) -> None:
    for rank, found in enumerate(results):
        for name, wrong in found.items():
            assert not wrong, f"{name}, process {rank}: {wrong}"


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_processes_give_what_one_gives(world: int):
    succeeded(processes.run(world, everything, world, ODD))


class Issued(TorchDispatchMode):
    """The calls in this block that are more than another view of a tensor, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def issued() -> dict[str, list[str]]:
    q, k, v = (normal(i, *shape) for i, shape in enumerate(((2, 4, 16), (2, 2, 8, 16), (2, 2, 8, 16))))
    args, kwargs = routed(8)
    shard = local_experts(2, args)
    calls = {
        "decode": lambda: distributed.cp_decode(q, k, v, torch.tensor([16, 3], dtype=torch.int32)),
        "replicated": lambda: distributed.ep_moe(*shard, **kwargs),
        "own": lambda: distributed.ep_moe(*shard, tokens="own", **kwargs),
    }
    found = {}
    for name, call in calls.items():
        with Issued() as mode:
            call()
        found[name] = mode.names
    return found


def for_gpus(rank: int) -> tuple[dict[str, str], dict[str, list[str]]]:
    return everything(rank, 2, KERNELS, "sm90", "sm100"), issued()


def test_what_gpus_are_asked_for():
    """Without a GPU: each call of the cases that run there (tests/cuda/test_several_gpus.py) has a row, and a shared
    step issues little. What stands beside the attention of a decode step costs as much as thousands of keys."""
    wrong, names = zip(*processes.run(2, for_gpus), strict=True)
    succeeded(list(wrong))
    waits = {"nonzero", "item", "_local_scalar_dense", "masked_select"}
    for found in names:
        local = ["sub", "clamp", "sdpa_decode"]
        assert found["decode"] == [*local, "cat", "_allgather_base_", "merge_partials"], found["decode"]
        assert [n for n in found["replicated"] if n.startswith("all")] == ["allreduce_"]
        assert [n for n in found["own"] if n.startswith("all")] == ["alltoall_base_"] * 4  # counts, x, routes, back
        assert not waits & {name for each in found.values() for name in each}


def simulated(rank: int, arch: str) -> dict[str, str]:
    with simulate(arch):
        return everything(rank, 2, KERNELS)


@pytest.mark.proof
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_kernels_in_simulators_give_what_one_process_gives(arch: str):
    """As on two GPUs but for what joins them: views of what was gathered go straight into a kernel, and so on."""
    needs(arch)
    succeeded(processes.run(2, simulated, arch))
