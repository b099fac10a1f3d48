"""What a caller switched on elsewhere changes no result: every op, every feature set, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core import dispatch, numerics
from torch_attnkit.core.dispatch import OPS


@contextlib.contextmanager
def setting(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def precision(value):
    return setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value)


def default_dtype(value):
    return setting(torch.get_default_dtype, torch.set_default_dtype, value)


STATES = {
    "autocast to bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to f16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype f64": lambda: default_dtype(torch.float64),
    "default dtype bf16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "products in bf16": lambda: precision("medium"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}


def run(op, args, kwargs):
    """What the call writes and returns, on copies of its arguments."""
    args = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    out = getattr(torch.ops.attnkit, op.name)(*args, **kwargs)
    return [*parity.mutated(op, args), *(() if out is None else (out,) if isinstance(out, torch.Tensor) else out)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def calls(op):
    for shape in parity.shapes(op):
        for features in parity.feature_sets(op, tuple(op.features)):
            for dtype in (torch.float32, torch.bfloat16):
                yield f"{shape} {features} {dtype}", *parity.inputs(op, shape, dtype, features)


@pytest.mark.sample(3)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_op_gives_the_same_bits_in_every_state(op, pytestconfig):
    every = 1 if pytestconfig.getoption("--proof") else 5
    for name, args, kwargs in itertools.islice(calls(op), 0, None, every):
        plain = run(op, args, kwargs)
        for state, enter in STATES.items():
            with enter():
                got = run(op, args, kwargs)
            assert all(map(same, got, plain)), f"{name}: {state}"


@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", ["metal", "sm90", "sm100"])
def test_default_dtype_and_autocast_change_no_simulated_kernel(arch):
    from torch_attnkit.core import simulate

    pytest.importorskip("torch_attnkit.sim._metal" if arch == "metal" else "torch_attnkit.sim._ptx")
    for name in ("merge_partials", "sdpa_multi", "sdpa_decode"):
        op = OPS[name]
        row = next(i for i, row in enumerate(op.kernels) if arch in row.archs)
        case = parity.cases(op, row, arch, covering=True)[0]
        args, kwargs = parity.inputs(op, case.shape, torch.bfloat16, (), case.dims)
        with simulate(arch):
            plain = run(op, args, kwargs)
            for state in ("default dtype f64", "autocast to bf16", "default device"):
                dispatch._PLANS[name].clear()  # what is made for a plan is made in this state
                with STATES[state]():
                    got = run(op, args, kwargs)
                assert all(map(same, got, plain)), f"{name}: {state}"


def test_products_of_the_caller_keep_the_precision_that_was_set():
    with precision("medium"):
        before = numerics._get()
        assert before in numerics._rounded
        assert numerics.exact(numerics._get)() == numerics._full
        assert numerics._get() == before
        with pytest.raises(ZeroDivisionError):
            numerics.exact(lambda: 1 // 0)()
        assert numerics._get() == before, "also after an error"
    assert numerics.exact(torch.is_autocast_enabled)() is False


def test_precision_comes_back_after_the_last_of_several_threads():
    started, leave = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        leave.wait()

    with precision("medium"):
        before = numerics._get()
        thread = threading.Thread(target=numerics.exact(wait))
        thread.start()
        started.wait()
        assert numerics.exact(numerics._get)() == numerics._full
        assert numerics._get() == numerics._full, "the other thread still computes"
        leave.set()
        thread.join()
        assert numerics._get() == before


def test_other_threads_compute_the_same():
    op = OPS["fp4_moe"]
    name, args, kwargs = next(calls(op))
    results = []
    thread = threading.Thread(target=lambda: results.append(run(op, args, kwargs)))
    thread.start()
    thread.join()
    assert all(map(same, results[0], run(op, args, kwargs))), name
