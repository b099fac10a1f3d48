"""The kernel that norms, rotates and writes, in the simulators: rows to the bit, slots that are none, shared memory."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch

import torch_attnkit
from torch_attnkit import UnsupportedError
from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels.cache import plan
from torch_attnkit.kernels.cache.problem import Problem, RopeProblem, Row
from torch_attnkit.parity.runners import simulators

from .checking import checked

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(300)]

op = torch.ops.attnkit.rope_kv_cache_write
ROWS = [("none", 64, 24), ("fp8", 192, 64), ("nvfp4", 72, 56), ("mxfp4", 544 + 64, 64)]
HOSTILE = (-(2**31), -2, -1, 9, 10, 2**31 - 1)  # of a cache of nine rows
ARCHS = ("sm90", "metal")


def given(row, tokens, heads=3, dtype=torch.bfloat16, slots=9):
    format, dim, rope = row
    angle = 6.28 * torch.rand(tokens, rope // 2)
    size = kv_cache.row_bytes(format, dim, rope)
    cache = torch.randn(slots, dim).to(dtype) if format == "none" else torch.zeros(slots, size, dtype=torch.uint8)
    q, kv = torch.randn(tokens, heads, dim).to(dtype), torch.randn(tokens, dim).to(dtype)
    return [q, kv, cache, torch.randperm(slots)[:tokens], angle.cos(), angle.sin()], dict(format=format, rope_dim=rope)


def near(got, want):
    assert float((got.float() - want.float()).abs().max()) <= 2 * torch.finfo(got.dtype).eps * float(want.abs().max())


@pytest.mark.sample(13)
@pytest.mark.parametrize("before", [0, 8, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_rows_are_written_to_the_bit_and_nothing_else_is_touched(arch, row, dtype, before):
    args, kwargs = given(row, 7, dtype=dtype)
    args[3][2] = -1
    apart = lambda t: torch.nn.functional.pad(t, (before, before))[..., before : before + t.shape[-1]]
    args = [apart(t) if t.dim() > 1 else t for t in args]
    memory = torch.nn.functional.pad(args[2], (before, 5))
    args[2] = memory[:, before : before + args[2].shape[1]]
    wanted = memory.clone()
    out = op(*args[:2], wanted[:, before : before + args[2].shape[1]], *args[3:], **kwargs)
    with checked(arch):
        near(op(*args, **kwargs), out)
    assert torch.equal(memory.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize("row", ROWS[:2], ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_slots_that_no_cache_has_are_passed_over(arch, row, integer):
    """A CPU refuses them. A kernel cannot look before it runs; q is normed and rotated all the same."""
    far = (2**40, -(2**40), 2**63 - 1) if integer == torch.int64 else ()
    slot = torch.tensor([4, *HOSTILE, *far, 0], dtype=integer)
    args, kwargs = given(row, len(slot), slots=9)
    wanted, none = args[2].clone(), torch.where((slot >= 0) & (slot < 9), slot, -1)
    out = op(*args[:2], wanted, none, *args[4:], **kwargs)
    args[3] = slot
    with checked(arch):
        near(op(*args, **kwargs), out)
    assert torch.equal(args[2], wanted)


@pytest.mark.parametrize("arch", ARCHS)
def test_q_and_keys_may_lie_in_the_cache_itself(arch):
    """More rows than run at once, each to the place of the next."""
    cache, heads = torch.randn(300, 16), 2
    angle = torch.rand(300, 4)
    rest = ((torch.arange(300) + 1) % 300, angle.cos(), angle.sin())
    wanted = cache.clone()
    q = cache[:, None].expand(300, heads, 16)
    out = op(q.clone(), cache.clone(), wanted, *rest, rope_dim=8)
    with checked(arch):
        near(op(q, cache, cache, *rest, rope_dim=8), out)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_no_kernel_takes_is_refused_in_words(arch):
    with checked_refusal(arch):
        for row, words in (
            (("none", 36, 8), "D and rope_dim must be multiples of 8"), (("none", 64, 12), "multiples of 8"),
            (("none", 1032, 8), "D at most 1024"),
        ):  # fmt: skip
            args, kwargs = given(row, 2)
            with pytest.raises(UnsupportedError, match=words):
                op(*args, **kwargs)


@contextmanager
def checked_refusal(arch):
    if missing := simulators()[arch]:
        pytest.skip(missing)
    with torch_attnkit.simulate(arch):
        yield


@pytest.mark.parametrize(("row", "most"), [(("fp8", 512, 64), 190), (("none", 512, 64), 188)])
def test_a_head_takes_few_instructions(row, most):
    """Of PTX, a head of 512 bfloat16 numbers, of 64 that share a key. Seen: 180, 177."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    from torch_attnkit.sim import ptx

    args, kwargs = given(row, 80, heads=64, slots=80)
    with torch_attnkit.simulate("sm90"), ptx.counting() as launches:
        op(*args, **kwargs)
    assert launches[0].counters["instructions"] <= 80 * 64 * most


def problem(tokens, heads, row=("fp8", 512, 64), dtype=torch.bfloat16, step=0):
    dim, size = row[1], kv_cache.row_bytes(*row)
    cache = torch.uint8 if row[0] != "none" else dtype
    keys = Problem(Row(*row), torch.device("cpu"), dtype, cache, torch.int64, tokens, 64, dim, size)
    return RopeProblem(keys, heads, row[2] // 2, torch.float32, (heads * dim + step, dim), (64, 64))


def test_few_heads_have_a_warp_each_and_many_share_one():
    wide = partial(plan.rope, sms=132)
    assert [(c.warps, c.heads) for c in map(wide, (problem(1, 64), problem(32, 64), problem(4096, 64)))] == [
        (1, 1), (4, 1), (4, 2)
    ]  # fmt: skip
    assert wide(problem(4096, 1)).heads == 1
    assert wide(problem(1, 64)) == plan.RopeConfig(1, 1, q=8, kv=8, angles=4, codes=8, rope=8)
    assert wide(problem(2, 64, step=4)).q == 4 and wide(problem(2, 64, step=1)).q == 1
    assert wide(problem(2, 64, ("none", 512, 64))).dense == 8
    assert wide(problem(2, 64, ("none", 512, 64), torch.float32)).dense == 4
