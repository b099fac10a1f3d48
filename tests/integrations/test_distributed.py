"""Attention and experts over several processes give what one process gives, to the contract's tolerance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import gloo
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.integrations import distributed
from torch_attnkit.oracle.compare import check
from torch_attnkit.parity.judge import reference_of

ops = torch.ops.attnkit


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def judged(op: str, got: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Against one process, by the oracle: ``got`` are the outputs that the function has of the op's."""
    exact, ref = (reference_of(OPS[op], args, kwargs, double=double) for double in (True, False))
    for name, g, e, r in zip(OPS[op].outnames, got, exact, ref, strict=False):
        check(f"{op} {name}", g, r, e)


def prefill(world: int, dtype: torch.dtype, **options: Any) -> None:
    B, T, Hq, Hkv, D = 2, 32, 4, 2, 16
    q, k, v = (normal(i, B, T, h, D, dtype=dtype) for i, h in enumerate((Hq, Hkv, Hkv)))
    sink = normal(3, Hq, dtype=torch.float32)
    lengths = [torch.tensor(n, dtype=torch.int32) for n in ((32, 21), (0, 5))]
    local = [distributed.head_tail(x) for x in (q, k, v)]
    out, lse = distributed.cp_prefill(*local, sink, *lengths, **options)
    whole = [distributed.from_head_tail(x) for x in (out, lse)]
    judged("flash_attention", whole, (q, k, v, sink, *lengths), dict(causal=True, **options))


def decode(world: int, dtype: torch.dtype, lengths: tuple[int, ...], start: bool, **options: Any) -> None:
    B, S, Hq, Hkv, D, Dv = len(lengths), 32, 4, 2, 16, 13
    q, k, v = (
        normal(0, B, Hq, D, dtype=dtype),
        normal(1, B, Hkv, S, D, dtype=dtype),
        normal(2, B, Hkv, S, Dv, dtype=dtype),
    )
    sink, kv_len = normal(3, Hq, dtype=torch.float32), torch.tensor(lengths, dtype=torch.int32)
    kv_start = (kv_len // 3) if start else None
    mine = slice(dist.get_rank() * S // world, (dist.get_rank() + 1) * S // world)
    got = distributed.cp_decode(q, k[:, :, mine], v[:, :, mine], kv_len, sink, kv_start, **options)
    judged("sdpa_decode", list(got), (q, k, v, kv_len, sink, kv_start), options)


def experts(world: int, tokens: str, count: int, **changes: Any) -> None:
    """``count`` tokens in all; of "own" ones rank 0 has two more than the others, and some ask one process alone."""
    sizes = dict(Tq=count, N=64, M=64, E=8, K=3, blk=16, act=0) | changes
    op = OPS["fp4_moe"]
    args, kwargs = op.module("cases").make(
        sizes, torch.bfloat16, ("gptoss", "limit", "bias", "global_scale"), torch.Generator().manual_seed(1)
    )
    x, weights, indices, *rest = args
    rank, local = dist.get_rank(), sizes["E"] // world
    each = op.argnames[3:]
    cut = lambda n, t: t[rank * local : (rank + 1) * local] if t is not None and n[1:] != "_global" else t
    own = [cut(n, t) for n, t in zip(each, rest, strict=False)]
    if tokens == "replicated":
        got = distributed.ep_moe(x, weights, indices, *own, **kwargs)
    else:
        ends = [count - (world - 1 - r) * max((count - 2) // world, 0) for r in range(world)]
        begin, end = [0, *ends][rank], ends[rank]
        part = distributed.ep_moe(*(t[begin:end] for t in (x, weights, indices)), *own, tokens="own", **kwargs)
        padded = torch.zeros(count, *part.shape[1:], dtype=part.dtype)
        padded[begin:end] = part
        dist.all_reduce(padded)  # the others have zeros there
        got = padded
    judged("fp4_moe", [got], args, kwargs)


F32, BF16 = torch.float32, torch.bfloat16
CASES: dict[str, tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]] = {
    "prefill": (prefill, (BF16,), {}),
    "prefill window": (prefill, (F32,), dict(window=6, sink_tokens=2)),
    "prefill window of nothing": (prefill, (BF16,), dict(window=0, softcap=3.0)),
    "decode": (decode, (BF16, (32, 17, 3, 0), False), {}),
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


def everything(rank: int, world: int) -> dict[str, str]:
    found = {}
    for name, (function, args, options) in CASES.items():
        found[name] = gloo.attempted(lambda f=function, a=args, o=options: f(world, *a, **o))
    found["refusals"] = gloo.attempted(refusals)
    return found


def refusals() -> None:
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(ValueError, match="cp_prefill: q has 3 and k 3 tokens, accepted"):
        distributed.cp_prefill(q, q, q)
    with pytest.raises(ValueError, match="head_tail: axis 1 of x has 3 tokens, accepted: a multiple of"):
        distributed.head_tail(q)
    with pytest.raises(NotImplementedError, match="cp_decode: q requires a gradient, but cp_decode has no backward"):
        distributed.cp_decode(q[:, 0].requires_grad_(), q, q, torch.tensor([3]))
    with pytest.raises(ValueError, match="ep_moe: tokens is 'mine', accepted: 'replicated', 'own'"):
        distributed.ep_moe(*[torch.zeros(1)] * 7, tokens="mine")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_processes_give_what_one_gives(world: int):
    for rank, found in enumerate(gloo.run(world, everything, world)):
        for name, wrong in found.items():
            assert not wrong, f"{name}, process {rank}: {wrong}"
