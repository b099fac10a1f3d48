"""Values that are columns of keys: which kernel a launch takes is for its tensors to say, not for its signature."""

import pytest
import torch

import torch_attnkit
from torch_attnkit.core.dispatch import OPS, plan_of
from torch_attnkit.oracle.compare import check

# Warnings of the compiler are its own affair.
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("default")]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def right(name: str, got: tuple[torch.Tensor, ...], args: list[torch.Tensor]) -> None:
    reference = OPS[name].module("reference").reference
    double = [a.double() if a.dtype == torch.bfloat16 else a for a in args]
    for what, ours, low, high in zip(("out", "lse"), got, reference(*args), reference(*double), strict=True):
        check(f"{name} {what}", ours, low, high)


@pytest.mark.sample(4)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("name", ["sdpa_decode", "sdpa_decode_paged"])
@pytest.mark.proof
def test_one_tensor_and_two_of_the_same_strides_share_a_plan(name, arch):
    """The values of one cache, of another, and of the first again; the last begins where no kernel reads."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    shape = (2, 1, 80, 576) if name == "sdpa_decode" else (10, 16, 1, 576)
    table = torch.arange(10, dtype=torch.int32).flip(0).view(2, 5)
    rest = [torch.tensor([80, 37], dtype=torch.int32)]
    rest = rest if name == "sdpa_decode" else [table, *rest]
    q, keys, other = normal(2, 20, 576), normal(*shape, seed=1), normal(*shape, seed=2)
    odd = normal(keys.numel() + 1, seed=3)[1:].view(shape)
    plans = []
    with torch_attnkit.simulate(arch), ptx.settings(check=True, seed=1):
        for k, whole in ((keys, keys), (keys, other), (keys, keys), (odd, odd)):
            args = [q, k, whole[..., :512], *rest]
            right(name, getattr(torch.ops.attnkit, name)(*args), args)
            plans.append(plan_of(name, *args))
    assert all(plan is plans[0] for plan in plans)


@pytest.mark.sample(1)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_values_of_fewer_columns_that_begin_where_no_kernel_reads(arch):
    """Keys of 192 columns, of which the first 128 are the values, once aligned and once not: copied together."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    buffer = normal(2 * 2 * 80 * 192 + 4, seed=1)
    with torch_attnkit.simulate(arch):
        for begin in (0, 4):
            k = buffer[begin : begin + 2 * 2 * 80 * 192].view(2, 2, 80, 192)
            args = [normal(2, 4, 192), k, k[..., :128], torch.tensor([80, 37], dtype=torch.int32)]
            right("sdpa_decode", torch.ops.attnkit.sdpa_decode(*args), args)
