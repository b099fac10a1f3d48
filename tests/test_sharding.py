"""Calls shared among processes by the table's rules give what one process gives, to the contract's tolerance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import processes
from tests.parity.test_random_signatures import needs
from torch_attnkit import sharding
from torch_attnkit.core import simulate
from torch_attnkit.core.dispatch import OPS, resolve
from torch_attnkit.core.op import Call, Op
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.core.target import Target
from torch_attnkit.parity.case import bound
from torch_attnkit.parity.judge import verdict

ROOT = Path(__file__).resolve().parent.parent
HEADS = dict(Hq=8, Hkv=4, D=32, Dv=32)
PAGED = dict(Hq=8, Hkv=4, D=64, Dv=64)
SPARSE = dict(Tq=24, Hq=4, R=4, S=40, C=12, K=5, D=128, window=8, Ps=5)
FUSED = SPARSE | dict(R2=16, groups=1, blk=16)
INDEXER = dict(Tq=8, R=4, S=40, Hi=4, Qb=64, Ps=8, bits=16)
EXPERTS = dict(Tq=8, N=64, M=128, E=4, K=2, blk=16, act=0)
# op: (sizes, features) of calls that can be cut in four; all ways of every op are met. Rows of GPUs take them.
CALLS: dict[str, list[tuple[dict[str, int], str]]] = {
    "flash_attention": [
        (dict(B=4, T=12, S=16, **HEADS), "gqa sink kv_len kv_start causal window"),
        (dict(B=4, T=12, S=16, **HEADS), "gqa kv_len unnormalized"),
        (dict(B=4, T=12, S=16, **HEADS | dict(Hkv=1)), "gqa sink"),
    ],
    "flash_attention_paged": [
        (dict(B=3, L=9, S=40, Np=16, Ps=8, Mp=5, **HEADS), "gqa sink causal window"),
        (dict(B=3, L=9, S=40, Np=16, Ps=8, Mp=5, **HEADS | dict(Hkv=1)), "gqa sink"),
    ],
    "flash_attention_varlen": [
        (dict(B=3, L=9, **HEADS), "gqa sink causal window"),
        (dict(B=3, L=9, **HEADS | dict(Hkv=1)), "gqa unnormalized"),
    ],
    "fp4_moe": [
        (EXPERTS, "interleaved bias gptoss limit global_scale"),
        (EXPERTS | dict(blk=32, act=2), "interleaved bias"),
        (EXPERTS, "swizzled"),
    ],
    "gated_rmsnorm": [(dict(R=4, H=8, N=33, y32=1, w32=0), "")],
    "gated_rmsnorm_backward": [(dict(R=4, H=8, N=33, y32=1, w32=0), "")],
    "grouped_output_projection": [
        (dict(Tq=8, G=4, Kn=96, R=12, blk=0), ""),
        (dict(Tq=8, G=4, Kn=96, R=12, blk=16), "swizzled global_scale"),
    ],
    "indexer_scores": [(INDEXER, ""), (INDEXER, "paged"), (INDEXER, "request_ids"), (INDEXER, "paged request_ids")],
    "indexer_select": [(INDEXER | dict(K=9), f) for f in ("", "paged", "request_ids")],
    "indexer_topk": [(dict(Tq=8, S=130, K=17, ties=1), "k_len")],
    "causal_conv1d": [(dict(lengths=(3, 5), C=16, W=4, Ws=3), "bias")],
    "gated_delta_rule": [(dict(lengths=(3, 5), Hk=2, Hv=4, K=32, V=16, decay=1), "")],
    "gated_delta_step": [(dict(B=2, n=2, Hk=2, Hv=4, K=32, V=16, decay=1), "")],
    "kimi_delta_step": [(dict(B=2, n=2, H=4, K=32, V=16, decay=1), "")],
    "inverse_rope_fp4": [(dict(Tq=8, Hq=8, D=96, R2=16, groups=1, blk=16), "global_scale")],
    "kv_cache_gather": [(dict(R=8, D=33, Nc=20, rope=0, fmt=0, long=1), "")],
    "kv_cache_write": [(dict(R=8, D=33, Nc=20, rope=0, fmt=0, long=1), "")],
    "merge_partials": [(dict(P=3, R=8, H=4, Dv=16), "sink"), (dict(P=3, R=8, H=4, Dv=16), "row_sum dtype")],
    "linear_decode": [(dict(Tq=4, K=64, N=6), ""), (dict(Tq=4, K=64, N=6), "bias")],
    "mxfp4_dequantize": [(dict(R=4, H=8, K=128), "")],
    "mxfp4_quantize": [(dict(R=4, H=8, K=128), "floor"), (dict(R=4, H=8, K=128), "swizzled")],
    "nvfp4_dequantize": [(dict(R=4, H=8, K=64), "global_scale")],
    "nvfp4_quantize": [(dict(R=4, H=8, K=64), "global_scale")],
    "paged_kv_cache_write": [(dict(R=8, Hkv=2, D=64, Dv=64, Np=5, Ps=16, joined=1, sided=1), "")],
    "rope_kv_cache_write": [(dict(Tq=8, Hq=4, D=64, Nc=20, rope=16, fmt=0), "")],
    "rope_kv_cache_append": [(dict(B=4, Hq=8, Hkv=2, D=64, Dv=64, S=20, R2=32, joined=1, one=1, sink=1), "")],
    "route_hash": [(dict(R=8, E=16, V=33, K=6, wide=1), "renormalize")],
    "route_softmax": [(dict(R=8, E=7, K=3), "softmax_first")],
    "route_sqrt_softplus": [(dict(R=8, E=7, K=3), "bias renormalize")],
    "sdpa_decode": [
        (dict(B=4, S=40, **HEADS), "gqa sink kv_start window sink_tokens"),
        (dict(B=4, S=40, **HEADS | dict(Hkv=1)), "gqa sink softcap"),
    ],
    "sdpa_decode_paged": [
        (dict(B=4, Np=16, Ps=16, Mp=3, S=40, **PAGED), "gqa sink kv_start window"),
        (dict(B=4, Np=16, Ps=16, Mp=3, S=40, **PAGED | dict(Hkv=1)), "gqa sink"),
    ],
    "sdpa_multi": [
        (dict(B=4, T=8, S=40, **HEADS), "gqa sink kv_start window"),
        (dict(B=4, T=8, S=40, **HEADS | dict(Hkv=1)), "gqa sink bidirectional"),
    ],
    "sparse_fmha_inverse_rope_fp4": [
        (FUSED, "compressed sink"),
        (FUSED, "compressed topk request_ids swa_paged o_global"),
    ],
    "sparse_fmha_with_swa": [
        (SPARSE, "compressed sink"),
        (SPARSE, "compressed topk compressed_len request_ids swa_paged compressed_paged unnormalized"),
    ],
}  # fmt: skip


def made(op: Op, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one of CALLS; the same in every process."""
    sizes, features = CALLS[op.name][index]
    gen = torch.Generator().manual_seed(7)
    dtype = DTYPES["f32" if op.name in ("indexer_topk", "merge_partials") else "bf16"]
    args, kwargs = op.module("cases").make(sizes, dtype, tuple(features.split()), gen)
    return args, kwargs


def ways(op: Op, call: Call, world: int) -> list[tuple[str, set[str], sharding.Cuts]]:
    """What ``sharding.ways_of`` yields, entry by entry of the table, with the entry's words."""
    found = []
    for shards in op.shards:
        one = Op(
            op.schema, op.dims, layouts=op.layouts, derive=op.derive, unless=op.unless, where=op.where, shards=(shards,)
        )
        found += [(shards.axes, *way) for way in sharding.ways_of(one, call, (world,))]
    return found


def shared(op: Op, index: int, world: int) -> set[str]:
    """Every way to cut one call, on processes of this group: judged as a kernel would be. The axes that were cut."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    device = processes.device()
    mesh = init_device_mesh(device.type, (world,))
    args, kwargs = made(op, index)
    covered = set()
    for axes, sums, cuts in [("", set(), {}), *ways(op, bound(op, args, kwargs), world)]:
        placement = lambda n, cuts=cuts: Replicate() if cuts.get(n) is None else Shard(cuts[n])
        name = f"{op.name} {index} {axes!r}"
        given = [
            distribute_tensor(a.to(device, copy=True), mesh, [placement(n)], src_data_rank=None)
            if isinstance(a, torch.Tensor)
            else a
            for n, a in zip(op.argnames, args, strict=False)
        ]
        out = getattr(torch.ops.attnkit, op.name)(*given, **kwargs)
        outs = [] if out is None else [out] if isinstance(out, torch.Tensor) else list(out)
        for n, o in zip(op.outnames, outs, strict=True):
            assert isinstance(o, DTensor)
            want = Partial() if n in sums else placement(n)
            assert o.placements == (want,), f"{name}: {n} is {o.placements}, the rule says {want}"
            if cuts.get(n) is not None:
                assert o.to_local().shape[cuts[n]] * world == o.shape[cuts[n]], f"{name}: {n}"
        got = [given[op.argnames.index(n)] for n in op.mutated] + outs
        verdict(name, op, [whole(o).cpu() for o in got], args, kwargs)
        covered.add(axes)
    return covered


def whole(tensor: Any) -> torch.Tensor:
    """A DTensor, gathered; numbers of a byte as bytes, for NCCL does not know all of them."""
    from torch.distributed.tensor import DTensor

    if tensor.dtype.itemsize > 1:
        return tensor.full_tensor()
    local = tensor.to_local().view(torch.uint8)
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements).full_tensor().view(tensor.dtype)


def _all_calls(op: Op, world: int, covered: set[str]) -> None:
    for index in range(len(CALLS[op.name])):
        covered.update(shared(op, index, world))


def _refusal(world: int) -> None:
    """kv_cache_write takes no rows that are shared: what it wrote to a copy would be lost."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    device = processes.device()
    mesh = init_device_mesh(device.type, (world,))
    rows = [distribute_tensor(t.to(device), mesh, [Shard(0)]) for t in (torch.ones(4, 8), torch.arange(4))]
    cache = distribute_tensor(torch.zeros(4, 8, device=device), mesh, [Replicate()])
    message = r"kv_cache_write: kv is \(Shard\(dim=0\),\), accepted: Replicate\(\), since every process"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.attnkit.kv_cache_write(rows[0], cache, rows[1])


def everything(rank: int, world: int, names: list[str]) -> dict[str, tuple[set[str], str]]:
    """Of each op: the axes that were cut, and what went wrong."""
    found = {"": (set[str](), processes.attempted(_refusal, world))}
    for name in names:
        covered: set[str] = set()
        wrong = processes.attempted(_all_calls, OPS[name], world, covered)
        found[name] = (covered, wrong)
        if wrong:
            break  # the other processes may have gone on, or not
    return found


def judged(world: int, names: list[str], backend: str = "gloo") -> None:
    covered_everywhere(processes.run(world, everything, world, names, backend=backend), names)


def covered_everywhere(results: list[dict[str, tuple[set[str], str]]], names: list[str]) -> None:
    for found in results:
        wrong = [text for _, text in found.values() if text]
        assert not wrong, wrong[0]
        for name in names:
            covered, _ = found[name]
            assert covered == {"", *(shards.axes for shards in OPS[name].shards)}, f"{name}: not every way was met"


def test_every_op_says_how_it_is_shared_or_why_not():
    for op in OPS.values():
        assert bool(op.shards) != bool(op.whole), op.name
        axes = {a for n in op.dims for a in (x.name for x in op.spec(n).axes)} | {"...", "R"}
        for shards in op.shards:
            assert set(shards.axes.split()) <= axes, f"{op.name}: {shards.axes}"
            assert set(shards.sums.split()) <= {*op.tensors, *op.outnames}
    assert set(CALLS) == set(OPS)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("name", [n for n in CALLS if any("sm90" in row.archs for row in OPS[n].kernels)])
def test_calls_and_their_parts_are_ones_that_gpus_take(name: str, arch: str):
    """What runs on GPUs (tests/cuda/test_several_gpus.py) has a row, found without a GPU: it raises otherwise."""
    op = OPS[name]
    for index in range(len(CALLS[name])):
        args, kwargs = made(op, index)
        for _, _, cuts in [("", set(), {}), *ways(op, bound(op, args, kwargs), 2)]:
            part = lambda n, a, cuts=cuts: sharding._part(a, cuts.get(n), 2)
            local = tuple(part(n, a) for n, a in zip(op.argnames, args, strict=False))
            resolve(op, bound(op, local, kwargs), Target(arch))


def test_ops_on_two_processes():
    judged(2, list(CALLS))


@pytest.mark.proof
def test_ops_on_four_processes():
    judged(4, list(CALLS))


def simulated(rank: int, arch: str, names: list[str]) -> dict[str, tuple[set[str], str]]:
    with simulate(arch):
        return everything(rank, 2, names)


@pytest.mark.proof
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_ops_on_two_processes_by_the_kernels_of_gpus(arch: str):
    needs(arch)
    names = [n for n in CALLS if any(arch in row.archs for row in OPS[n].kernels)]
    covered_everywhere(processes.run(2, simulated, arch, names), names)


def _offered(name: str, index: int, *parts: int, **changes: int) -> list[set[str]]:
    """Which tensors are cut in the ways that are offered for a call."""
    op = OPS[name]
    sizes, features = CALLS[name][index]
    args, kwargs = op.module("cases").make(sizes | changes, torch.float32, tuple(features.split()), torch.Generator())
    found = sharding.ways_of(op, bound(op, args, kwargs), parts)
    return [{n for n, at in cuts.items() if at is not None} for _, cuts in found]


def test_only_equal_parts_that_the_op_takes_are_offered():
    keys = {"q", "k", "v"}
    both = lambda *parts, **sizes: _offered("flash_attention", 1, *parts, **sizes)
    heads = lambda *parts, **sizes: [o for o in both(*parts, **sizes) if o >= keys and "kv_len" not in o]
    assert heads(4) and heads(2, 4, 8)  # of 4 KV heads no process of 8 can have one: DTensor leaves that out itself
    assert not heads(3)  # 8 query heads, 4 of keys
    assert heads(2, Hq=6, Hkv=6) and not heads(2, 4, Hq=6, Hkv=6)
    assert not _offered("mxfp4_quantize", 1, 2)  # tiles of scales hold several rows
    last = lambda parts, k: [o for o in _offered("mxfp4_quantize", 0, parts, K=k)][2:]
    assert last(4, 128) and not last(4, 64) and not last(2, 96)  # blocks of 32 stay whole
    halves = _offered("fp4_moe", 2, 2)
    assert halves == [{"x", "weights", "indices", "out"}]  # [gate; up] cannot be cut into halves of both
    assert _offered("fp4_moe", 1, 4) and len(_offered("fp4_moe", 1, 4, M=64, blk=16)) == 1  # 16 of M are half a block


def test_one_number_for_all_scales_is_whole_everywhere():
    q, k, scales = torch.randn(4, 3, 8, 32), torch.randn(4, 5, 4, 32), (torch.tensor(0.5), torch.ones(4, 4), None)
    call = bound(OPS["flash_attention"], (q, k, k, None, None, None, *scales), {})
    cuts = [cuts for _, cuts in sharding.ways_of(OPS["flash_attention"], call, (2,))]
    assert len(cuts) > 1 and all(cut["q_scale"] is None for cut in cuts)
    assert {0, 1} <= {cut["k_scale"] for cut in cuts}


@pytest.mark.parametrize("first", ["torch_attnkit", pytest.param("torch.distributed.tensor", marks=pytest.mark.proof)])
def test_rules_are_there_whichever_is_imported_first(first: str):
    other = {"torch_attnkit": "torch.distributed.tensor", "torch.distributed.tensor": "torch_attnkit"}[first]
    script = f"""
import sys, torch, {first}
early = "torch.distributed.tensor" in sys.modules
import {other}
from torch.distributed.tensor import DTensor
known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
print(early, torch.ops.attnkit.flash_attention.default in known)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(first == "torch.distributed.tensor"), "True"]
