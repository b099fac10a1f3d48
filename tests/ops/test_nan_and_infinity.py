"""Every op that has kernels, on every arch: what is not a number in an input comes out where the reference says.

A batch has three sequences: one that attends all its keys, one shorter than its block of queries, one without keys.
Where each KV head has an input of its own, the three get nan, inf and -inf.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_attnkit import parity, simulate
from torch_attnkit.core import dispatch
from torch_attnkit.oracle.compare import check

pytestmark = [pytest.mark.simulator, pytest.mark.seconds(600)]
Args = dict[str, Any]
NAN, INF = float("nan"), float("inf")
VALUES = (NAN, INF, -INF)
E4M3 = torch.float8_e4m3fn
B, HQ, HKV, D = 3, 6, 3, 64
SHORT, PAGE = 4, 16
STARTS = (3, 1, 0)  # the first valid key of each sequence

# Queries and keys of a sequence: so many keys that kernels split them, and fewer; few rows and many.
SHAPES = {
    "sdpa_decode": ((1, 700), (1, 40)),
    "sdpa_decode_paged": ((1, 704),),
    "sdpa_multi": ((6, 700), (40, 90)),
    "flash_attention": ((70, 150),),
    "flash_attention_varlen": ((70, 150),),
}


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Attention:
    """One attention op's arguments, and views of them by sequence: q (T, Hq, D), k and v (keys, Hkv, D)."""

    def __init__(self, op: str, T: int, S: int, dtype: torch.dtype):
        self.op, self.T, self.S = op, T, S
        sink = normal(3, HQ)
        q, k, v = (normal(i, B, n, h, D) for i, n, h in ((0, T, HQ), (1, S, HKV), (2, S, HKV)))
        self.length = [S, SHORT, 0]
        if op.endswith("varlen"):
            ends = ints(0, S, S + SHORT, S + SHORT)
            self.args = dict(q=q.flatten(0, 1), k=k.flatten(0, 1), v=v.flatten(0, 1), sink=sink)
            self.args |= dict(cu_seqlens_q=ints(0, T, 2 * T, 3 * T), cu_seqlens_k=ends, causal=True)
        else:
            self.args = dict(sink=sink, kv_len=ints(*self.length), kv_start=ints(*STARTS))
            if op == "sdpa_decode_paged":
                order = torch.randperm(B * S // PAGE, generator=torch.Generator().manual_seed(0))
                k, v = (t.reshape(-1, PAGE, HKV, D)[order.argsort()] for t in (k, v))
                self.args |= dict(k_cache=k, v_cache=v, block_table=order.to(torch.int32).view(B, -1))
            elif op == "flash_attention":
                self.args |= dict(k=k, v=v, causal=True)
            else:
                self.args |= dict(k_cache=k.transpose(1, 2).clone(), v_cache=v.transpose(1, 2).clone())
            self.args["q"] = q[:, 0] if "decode" in op else q
        for name in self.names():
            self.args[name] = self.args[name].to(dtype)

    def names(self) -> tuple[str, str, str]:
        return ("q", "k", "v") if self.op.startswith("flash") else ("q", "k_cache", "v_cache")

    def queries(self, b: int) -> torch.Tensor:
        q = self.args["q"]
        return q[b * self.T : (b + 1) * self.T] if self.op.endswith("varlen") else q[b].view(self.T, HQ, D)

    def write(self, which: int, b: int, keys: slice | int, head: int, value: Any) -> None:
        """Into keys (1) or values (2) of a sequence and KV head: at all elements of one or several keys."""
        cache = self.args[self.names()[which]]
        for key in range(self.S)[keys] if isinstance(keys, slice) else (keys,):
            if self.op.endswith("varlen"):
                cache[int(self.args["cu_seqlens_k"][b]) + key, head] = value
            elif self.op == "sdpa_decode_paged":
                cache[int(self.args["block_table"][b, key // PAGE]), key % PAGE, head] = value
            elif self.op == "flash_attention":
                cache[b, key, head] = value
            else:
                cache[b, head, key] = value

    def start(self, b: int) -> int:
        return 0 if self.op.endswith("varlen") else STARTS[b]


def _queries(a: Attention) -> None:
    for head, value in enumerate(VALUES):
        a.queries(0)[-1, 2 * head, 5] = value


def _queries_without_keys(a: Attention) -> None:
    """Those of the empty sequence, and those in front of a sequence that is shorter than its block, which its keys
    would not be hidden from."""
    a.queries(2)[:] = NAN
    if a.op == "sdpa_multi":
        a.args["causal"] = False
        a.queries(1)[: a.T - SHORT] = NAN


def _some_keys(a: Attention) -> None:
    for head, (key, value) in enumerate(zip((a.start(0), a.S // 2, a.S - 1), VALUES, strict=True)):
        a.write(1, 0, key, head, value)


def _all_keys(a: Attention) -> None:
    for head, value in enumerate(VALUES):
        a.write(1, 0, slice(0, a.S), head, value)


def _some_values(a: Attention) -> None:
    """Of keys that every query of the sequence sees."""
    last = a.S - a.T
    for head, (key, value) in enumerate(zip((a.start(0), last // 2, last), VALUES, strict=True)):
        a.write(2, 0, key, head, value)


def _outside(a: Attention) -> None:
    """Keys and values before the first and behind the last of each sequence."""
    for b, head, which in ((b, h, w) for b in range(B) for h in range(HKV) for w in (1, 2)):
        a.write(which, b, slice(0, a.start(b)), head, VALUES[head])
        if not a.op.endswith("varlen"):
            a.write(which, b, slice(a.length[b], a.S), head, VALUES[head])
    if a.op.endswith("varlen"):
        for name in "kv":
            a.args[name][a.S + SHORT :] = NAN


def _sinks(a: Attention) -> None:
    a.args["sink"][:] = torch.tensor([NAN, INF, -INF, 1e4, -1e4, 0.3])


def _overflowing_scores(a: Attention) -> None:
    """To inf in one head, to -inf in another; bfloat16 and float32 reach so far."""
    a.args["q"].abs_().mul_(1e20)
    for b in range(2):
        a.write(1, b, slice(a.start(b), a.length[b]), 0, 1e20)
        a.write(1, b, slice(a.start(b), a.length[b]), 1, -1e20)
        a.write(1, b, slice(a.start(b), a.length[b]), 2, 1e-20)


INPUTS: dict[str, Callable[[Attention], None]] = {
    "q": _queries,
    "q without keys": _queries_without_keys,
    "one key": _some_keys,
    "all keys": _all_keys,
    "one value": _some_values,
    "beside the keys": _outside,
    "sink": _sinks,
    "scores": _overflowing_scores,
}


def _needs(arch: str) -> None:
    if arch.startswith("sm") and not all(map(importlib.util.find_spec, ("nvidia_cutlass_dsl", "tvm_ffi"))):
        pytest.skip("needs nvidia-cutlass-dsl, whose output the PTX simulator runs")


def compare(name: str, arch: str, args: Args) -> None:
    """The kernel's results with the reference's: the same nan, the same infinities, and the other numbers right."""
    op = dispatch.OPS[name]
    tensors = {n: args.get(n) for n in op.argnames[: op.positional]}
    kwargs = {n: v for n, v in args.items() if n not in tensors}
    with contextlib.nullcontext() if arch == "cpu" else simulate(arch):
        got = getattr(torch.ops.attnkit, name)(**args)
        assert dispatch.plan_of(name, **args).where.startswith(arch)
    ref, ref64 = (parity.reference_of(op, tuple(tensors.values()), kwargs, double=d) for d in (False, True))
    got = got if isinstance(got, tuple) else (got,)
    for out, g, r, r64 in zip(op.outnames, got, ref, ref64, strict=True):
        check(f"{name} {out}", g, r, r64)


@pytest.mark.sample(25)
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("arch", ["metal", "sm90", "sm100"])
@pytest.mark.parametrize(("op", "shape"), [(op, shape) for op, shapes in SHAPES.items() for shape in shapes])
def test_attention(op: str, shape: tuple[int, int], arch: str, given: str):
    _needs(arch)
    call = Attention(op, *shape, torch.bfloat16)
    INPUTS[given](call)
    compare(op, arch, call.args)


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("shape", [(6, 40), (70, 150)])
def test_attention_on_the_cpu(shape: tuple[int, int], given: str):
    call = Attention("flash_attention", *shape, torch.bfloat16)
    INPUTS[given](call)
    compare("flash_attention", "cpu", call.args)


def test_attention_on_the_cpu_in_parts(monkeypatch: pytest.MonkeyPatch):
    """Where the definition has to run, it takes a few queries at a time."""
    monkeypatch.setattr("torch_attnkit.kernels.prefill.cpu._SCORES", 7 * HQ * 150)
    test_attention_on_the_cpu((70, 150), "one key")


@pytest.mark.sample(15)
@pytest.mark.parametrize("given", [g for g in INPUTS if g != "scores"])
@pytest.mark.parametrize(
    ("op", "shape", "arch"),
    [(op, s, "metal") for op, shapes in SHAPES.items() for s in shapes]
    + [(op, shapes[0], "sm100") for op, shapes in SHAPES.items()],
)
def test_attention_of_codes(op: str, shape: tuple[int, int], arch: str, given: str, monkeypatch: pytest.MonkeyPatch):
    """E4M3, which has nan and no infinities, on the archs that take it everywhere."""
    _needs(arch)
    monkeypatch.setattr(f"{__name__}.VALUES", (NAN, 2.0, NAN))
    call = Attention(op, *shape, E4M3)
    INPUTS[given](call)
    compare(op, arch, call.args)


@pytest.mark.sample(7)
# By the number of partials: on CUDA a few are loaded at once, many are shared by groups of threads.
@pytest.mark.parametrize("given", ["out", "out of no weight", "lse", "row_sum", "sink"])
@pytest.mark.parametrize("parts", [3, 40])
@pytest.mark.parametrize("arch", ["metal", "sm90", "sm100"])
def test_merge_partials(arch: str, parts: int, given: str):
    """Rows (R) that every partial has seen, all but the first and last, and none; heads get nan, inf and -inf."""
    _needs(arch)
    H, Dv = 3, 40
    out, lse, row_sum = normal(0, parts, 3, H, Dv), normal(1, parts, 3, H), normal(2, parts, 3, H).abs() + 0.5
    lse[0, 1], lse[-1, 1], lse[:, 2] = -INF, -INF, -INF
    sink, values = normal(3, H), torch.tensor(VALUES)
    out[:, 2] = NAN
    row_sum[:, 2] = NAN
    out[0, 1], row_sum[-1, 1] = values[:, None], values
    if given == "out":
        out[1, :2] = values[:, None]
    elif given == "out of no weight":  # underflown, not absent: it has seen keys
        lse[1, :2] = -1000.0
        out[1, :2] = values[:, None]
    elif given == "lse":
        lse[1, :2] = values
    elif given == "row_sum":
        row_sum[1, :2] = torch.tensor([NAN, INF, 0.0])
    else:
        sink = values
    for also in (None, row_sum):
        compare("merge_partials", arch, dict(out_partial=out, lse_partial=lse, sink=sink, row_sum=also))
    if given == "sink":
        for large in (1e4, -1e4):
            compare("merge_partials", arch, dict(out_partial=out, lse_partial=lse, sink=torch.full((H,), large)))


@pytest.mark.parametrize("given", ["y", "z", "w"])
@pytest.mark.parametrize("n", [96, 3000])
@pytest.mark.parametrize("arch", ["metal", "sm90", "sm100"])
def test_gated_rmsnorm(arch: str, n: int, given: str):
    _needs(arch)
    args = dict(y=normal(0, 5, n), z=normal(1, 5, n).bfloat16(), w=normal(2, n).bfloat16())
    for i, value in enumerate((*VALUES, -1e4)):
        args[given][(7 * i,) if given == "w" else (i, 7 * i)] = value
    compare("gated_rmsnorm", arch, args)
