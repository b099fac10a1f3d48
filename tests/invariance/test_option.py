"""The option itself: where it holds, what it refuses, and that plans look at a sequence alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import torch_attnkit
from torch_attnkit import UnsupportedError, batch_invariant, set_batch_invariant
from torch_attnkit.core import config, dispatch, invariance, target
from torch_attnkit.kernels.decode.problem import Problem, Strides
from torch_attnkit.kernels.decode.sm90 import plan as hopper
from torch_attnkit.kernels.decode.sm100 import plan as blackwell
from torch_attnkit.kernels.grouped_gemm.problem import Problem as Experts
from torch_attnkit.kernels.grouped_gemm.problem import Weights
from torch_attnkit.kernels.grouped_gemm.sm90 import plan as experts
from torch_attnkit.kernels.merge.plan import configure as merge
from torch_attnkit.kernels.norm.plan import configure as norm
from torch_attnkit.kernels.prefill.problem import Layout, PagedProblem
from torch_attnkit.kernels.prefill.problem import Problem as Attention
from torch_attnkit.kernels.prefill.sm90 import plan as prefill
from torch_attnkit.kernels.prefill.sm90.tiles import BITS16, FP8, heads
from torch_attnkit.kernels.scores import Scores

H200, B200 = 132, 148  # multiprocessors
NOWHERE, UNKNOWN = Strides(0, 0, 0), Layout((), ())
BATCHES, KEYS = (1, 3, 16, 64, 1000), (16, 512, 513, 4096, 8192, 131072)


# Where it holds.


def test_blocks_nest_and_belong_to_their_thread():
    assert not invariance.is_on()
    seen = {}
    with batch_invariant():
        assert invariance.is_on()
        thread = threading.Thread(target=lambda: seen.update(thread=invariance.is_on()))
        thread.start()
        thread.join()
        with batch_invariant(False):
            assert not invariance.is_on()
        assert invariance.is_on()
    assert not invariance.is_on() and seen == {"thread": False}


def test_a_process_has_it_in_every_thread_but_not_in_a_block_without():
    seen = {}
    set_batch_invariant(True)
    try:
        thread = threading.Thread(target=lambda: seen.update(thread=invariance.is_on()))
        thread.start()
        thread.join()
        with batch_invariant(False):
            seen["block"] = invariance.is_on()
    finally:
        set_batch_invariant(False)
    assert seen == {"thread": True, "block": False} and not invariance.is_on()


@pytest.mark.parametrize(("value", "printed"), [("1", "True"), ("0", "False"), ("", "False")])
def test_the_environment_says_what_a_process_begins_with(value, printed):
    code = "import torch_attnkit.core.invariance as i; print(i.is_on())"
    env = os.environ | {"ATTNKIT_BATCH_INVARIANT": value}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == printed


def test_the_environment_is_checked(monkeypatch):
    monkeypatch.setenv("ATTNKIT_BATCH_INVARIANT", "yes")
    with pytest.raises(ValueError, match="ATTNKIT_BATCH_INVARIANT: got 'yes', accepted: 0, 1"):
        config.batch_invariant()


def test_a_plan_belongs_to_the_option_it_was_made_with():
    x = torch.randn(3, 64)
    call = (x, x, torch.ones(64))
    torch.ops.attnkit.gated_rmsnorm(*call)
    plain = dispatch.plan_of("gated_rmsnorm", *call)
    with batch_invariant():
        torch.ops.attnkit.gated_rmsnorm(*call)
        apart = dispatch.plan_of("gated_rmsnorm", *call)
    assert plain is not apart and "one at a time" in apart.where
    assert dispatch.plan_of("gated_rmsnorm", *call) is plain


def test_forms_that_write_into_given_tensors_have_it_too():
    x = torch.randn(3, 64)
    out = torch.full_like(x, torch.nan)
    with batch_invariant():
        torch.ops.attnkit.gated_rmsnorm_out(x, x, torch.ones(64), out=out)
        assert torch.equal(out, torch.ops.attnkit.gated_rmsnorm(x, x, torch.ones(64)))


# What is refused.


def test_what_the_batch_decides_is_refused_by_name():
    q, kv = torch.randn(4, 8, 128, dtype=torch.bfloat16), torch.randn(1, 64, 128, dtype=torch.bfloat16)
    call = (q, kv, torch.full((4,), 64, dtype=torch.int32))
    torch.ops.attnkit.sparse_fmha_with_swa(*call)
    with batch_invariant(), pytest.raises(UnsupportedError, match=r"sparse_fmha_with_swa on cpu: .*how many tokens"):
        torch.ops.attnkit.sparse_fmha_with_swa(*call)
    with batch_invariant():
        answer = torch_attnkit.explain("sparse_fmha_with_swa", *call, target="sm90")
    assert "refused: UnsupportedError: sparse_fmha_with_swa on sm90" in answer


def test_only_rows_that_there_are_are_refused():
    for op in dispatch.OPS.values():
        assert set(op.varies) <= set(target.WHERE), op.name
        assert not op.apart or any(op.apart in text.split(":")[0].split() for text in op.dims.values()), op.name


# Plans look at a sequence, not at the batch.


def _one(found: set[Any]) -> None:
    assert len(found) == 1, found


@pytest.mark.parametrize("arch", [hopper, blackwell], ids=["sm90", "sm100"])
@pytest.mark.parametrize("same", [False, True])
def test_decode(arch, same):
    """Kernel, tile and warps, at sizes at which without the option all of these change. Stages may differ: they say
    how far ahead keys are loaded."""
    sms = H200 if arch is hopper else B200
    dims = [(*d, False) for d in [*arch.HEADS, (576, 512)]] + [(d, d, True) for d in (64, 128, 256)]
    for (dim, dim_v, fp8), group, page in itertools.product(dims, (1, 4, 8, 16, 64, 128), (0, 16, 64)):
        found = set()
        for batch, keys in itertools.product(BATCHES, KEYS):
            sizes = (batch, 2 * group, 2, dim, dim_v, keys, Scores(dim), NOWHERE, NOWHERE, NOWHERE)
            p = Problem(torch.bfloat16, torch.device("cpu"), *sizes, page=page, pages=int(page > 0), fp8_kv=fp8)
            with batch_invariant():
                plan = arch.plan(p, sms, same=same)
            assert plan.whole and not plan.sizes.get("combine")
            kept = {name: value for name, value in plan.sizes.items() if name != "stages"}
            splits = plan.combine_blocks if arch is blackwell else 0
            found.add((plan.trace, tuple(kept.items()), plan.head_blocks, splits))
        _one(found)


def _attention(dims: tuple[int, int], dtype: torch.dtype, batch: int, queries: int, keys: int, **more) -> Attention:
    sizes = (batch, queries, keys, 16, 4, *dims, Scores(dims[0]), UNKNOWN, UNKNOWN, UNKNOWN)
    return Attention(dtype, torch.device("cpu"), *sizes, causal=True, **more)


@pytest.mark.parametrize(("elements", "dtype"), [(BITS16, torch.bfloat16), (FP8, torch.float8_e4m3fn)])
def test_blocks_of_queries(elements, dtype):
    for dims, page in itertools.product(heads(elements), (1, 16, 64)):
        pages, cache, dense = set(), set(), set()
        for batch, keys, queries in itertools.product(BATCHES, KEYS, (1, 7, 64, 2048)):
            p = _attention(dims, dtype, batch, batch * queries, keys, packed=True, cached=True, longest=queries)
            with batch_invariant():
                paged = PagedProblem(p, page, 1000, keys)
                chosen = prefill.of_pages(paged, H200)
                pages.add((chosen, tuple(prefill.pages_signature(paged, chosen).items())))
                cached = _attention(dims, dtype, batch, queries, keys, cached=True, longest=queries)
                cache.add((prefill.of_cache(cached, H200), prefill.packs_heads(cached, H200)))
                assert prefill.dynamic(_attention(dims, dtype, batch, queries, keys), H200) is None
                dense.add(prefill.tile(_attention(dims, dtype, batch, queries, keys)))
        for found in (pages, cache, dense):
            _one(found)
        assert next(iter(pages))[0].ctas == 1 and next(iter(cache))[0].ctas == 1


def test_experts():
    """Of GPT-OSS: one kernel, and one order in which K is added up, whatever the width of a work tile."""
    up, down = (Weights(n, 2880, n * 1440, 1440, n * 90, 90, 90) for n in (5760, 2880))
    kinds = torch.bfloat16, torch.int32
    for options in (dict(format="mxfp4", activations="none"), dict(format="mxfp4", activations="mxfp8")):
        found = set()
        for tokens in (1, 3, 16, 100, 1000, 8192):
            p = Experts(
                torch.device("cpu"), *kinds, tokens, 4, 32, up, down, **options, swiglu="gptoss", alpha=1.7, limit=7.0,
                interleaved=True, scale_layout="linear",
            )  # fmt: skip
            with batch_invariant():
                plan = experts.plan(p, H200)
            found.add((plan.token_widths, plan.row_warps))
        _one(found)


def test_rows():
    with batch_invariant():
        for n in (128, 4096, 16384, 65536):
            _one({norm(n, rows, 8, n * rows * 6, H200, True).cluster for rows in (1, 32, 33, 64, 5000)})
        for parts in (2, 16, 17, 40):
            spreads = [merge(parts, rows, 128, 8, H200) for rows in (1, 64, 1000, 100000)]
            _one({(s.lanes, s.splits, s.parts, s.ahead) for s in spreads})
    assert len({norm(16384, rows, 8, 1, H200, True).cluster for rows in (1, 5000)}) == 2
