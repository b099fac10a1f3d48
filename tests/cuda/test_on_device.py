"""The norm and the merge on a GPU, in the ways they are used: graphs, streams, torch.compile, odd pointers, sizes."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.ops.gated_rmsnorm.reference import reference as norm_reference
from torch_attnkit.ops.merge_partials.reference import reference as merge_reference
from torch_attnkit.oracle.compare import check

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the compiler's own imports warn
    pytest.mark.hardware,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with compute capability 9.0 or 10.x"),
]
norm, merge = torch.ops.attnkit.gated_rmsnorm, torch.ops.attnkit.merge_partials


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def right_norm(name: str, got: torch.Tensor, y: torch.Tensor, z: torch.Tensor, w: torch.Tensor) -> None:
    check(name, got, norm_reference(y, z, w).cpu(), norm_reference(y.double(), z.double(), w.double()).cpu())


def right_merge(name: str, got: tuple[torch.Tensor, torch.Tensor], *args: torch.Tensor) -> None:
    for part, g, r, r64 in zip(
        ("out", "lse"), got, merge_reference(*args), merge_reference(*(a.double() for a in args)), strict=True
    ):
        check(f"{name} {part}", g, r.cpu(), r64.cpu())


@pytest.mark.parametrize("n", [1, 7, 128, 320, 1000, 2048, 4096, 5120, 8192, 10240, 16384, 32768, 65536, 200000])
@pytest.mark.parametrize("rows", [1, 9, 700])
def test_any_length(n, rows):
    if rows * n > 1 << 24:
        rows = max(1, (1 << 24) // n)
    y, z, w = normal(rows, n), normal(rows, n, seed=1), normal(n, seed=2)
    right_norm(f"norm {rows}x{n}", norm(y, z, w), y, z, w)


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_pointers_that_vectors_do_not_fit(shift):
    """The same shapes and strides first aligned, then not: the plan of the first call serves both."""
    for offset in (0, shift):
        y, z = (normal(33 * 256 + 8, seed=s)[offset : offset + 33 * 256].view(33, 256) for s in (0, 1))
        right_norm("norm", norm(y, z, normal(256, seed=2)), y, z, normal(256, seed=2))
        parts = normal(3 * 5 * 4 * 64 + 8)[offset : offset + 3 * 5 * 4 * 64].view(3, 5, 4, 64)
        lse = normal(3, 5, 4, seed=3, dtype=torch.float32)
        right_merge("merge", merge(parts, lse), parts, lse)


def test_permuted_and_broadcast_axes():
    y = normal(6, 5, 7, 128).permute(2, 0, 1, 3)
    z = normal(5, 1, 6, 128, seed=1).expand(5, 7, 6, 128).permute(1, 2, 0, 3)
    w = normal(128, seed=2)
    right_norm("norm", norm(y, z, w), y, z, w)
    parts, lse = normal(4, 9, 3, 64).permute(2, 1, 0, 3), normal(3, 9, 4, seed=1, dtype=torch.float32)
    right_merge("merge", merge(parts, lse), parts, lse)


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 17, 100, 1000])
@pytest.mark.parametrize("size", [1, 64, 100, 512, 4096])
def test_any_number_of_partials(parts, size):
    out = normal(parts, 3, 5, size)
    lse = 5 * normal(parts, 3, 5, seed=1, dtype=torch.float32)
    right_merge(f"merge {parts} of {size}", merge(out, lse), out, lse)


def test_graph_replays_with_new_inputs():
    y, z, w = normal(64, 1024), normal(64, 1024, seed=1), normal(1024, seed=2)
    norm(y, z, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = norm(y, z, w)
    y.copy_(normal(64, 1024, seed=5))
    graph.replay()
    right_norm("replayed", out, y, z, w)


def test_two_streams_at_once():
    inputs = [(normal(512, 4096, seed=s), normal(512, 4096, seed=s + 9), normal(4096, seed=s + 5)) for s in range(2)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs = []
    for stream, args in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            outs.append([norm(*args) for _ in range(20)][-1])
    torch.cuda.synchronize()
    for out, args in zip(outs, inputs, strict=True):
        right_norm("on a stream", out, *args)


def test_torch_compile_takes_the_whole_graph():
    y, z, w = normal(16, 2048), normal(16, 2048, seed=1), normal(2048, seed=2)
    compiled = torch.compile(lambda *a: norm(*a) * 2, fullgraph=True)
    assert torch.equal(compiled(y, z, w), norm(y, z, w) * 2)


def test_more_than_2_to_the_31_elements():
    rows, n = (1 << 31) // 4096 + 3, 4096
    y = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda").uniform_(-2, 2)
    z, w = torch.empty_like(y).uniform_(-2, 2), normal(n, seed=2)
    out = norm(y, z, w)
    for part in (slice(0, 4), slice(rows - 4, rows)):
        right_norm("far rows", out[part], y[part], z[part], w)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    y, z, w = (t.to("cuda:1") for t in (normal(33, 4096), normal(33, 4096, seed=1), normal(4096, seed=2)))
    parts, lse = normal(3, 9, 4, 64).to("cuda:1"), normal(3, 9, 4, seed=1, dtype=torch.float32).to("cuda:1")
    assert torch.cuda.current_device() == 0
    right_norm("norm on cuda:1", norm(y, z, w), y, z, w)
    right_merge("merge on cuda:1", merge(parts, lse), parts, lse)
    assert torch.cuda.current_device() == 0
