"""The grid contract: what is refused before anything is dispatched, and what is passed on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_attnkit.mps import launch
from torch_attnkit.mps.library import Library


class Kernel:
    """Records its calls in place of a GPU."""

    def __init__(self, limit: int = 1024):
        self.max_threads_per_threadgroup = limit
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **how: Any) -> None:
        self.calls.append((args, how))


def library(kernel: Kernel, slots: int = 2) -> Library:
    return Library(SimpleNamespace(k=kernel), {"k": slots})


def test_threads_are_the_total_number():
    kernel = Kernel()
    launch.launcher(library(kernel), "k", (3, 2, 5), 64)(("a", "b"))
    assert kernel.calls == [(("a", "b"), dict(threads=(192, 2, 5), group_size=(64, 1, 1)))]


@pytest.mark.parametrize("threads", [0, 16, 48, 544, 1024])
def test_threads_that_the_pipeline_cannot_run_are_refused(threads: int):
    with pytest.raises(ValueError, match=rf"k: {threads} threads .*multiples of 32 up to the pipeline's 512"):
        launch.launcher(library(Kernel(512)), "k", (1, 1, 1), threads)


def test_a_grid_beyond_32_bits_is_refused():
    with pytest.raises(ValueError, match="at most 4294967295 along an axis"):
        launch.launcher(library(Kernel()), "k", (2**27, 1, 1), 32)


def test_a_negative_grid_is_refused():
    with pytest.raises(ValueError, match="at least 0"):
        launch.launcher(library(Kernel()), "k", (1, -1, 1), 32)


def test_an_empty_grid_launches_nothing():
    kernel = Kernel()
    launch.launcher(library(kernel), "k", (1, 0, 1), 32)(("a", "b"))
    assert kernel.calls == []


def test_a_slot_left_unbound_is_refused():
    kernel = Kernel()
    with pytest.raises(ValueError, match="k: 1 arguments, accepted: 2"):
        launch.launcher(library(kernel), "k", (1, 1, 1), 32)(("a",))
    assert kernel.calls == []


@pytest.mark.parametrize(("limit", "simdgroups"), [(1024, 32), (448, 14), (50, 1)])
def test_simdgroups_come_from_the_pipeline(limit: int, simdgroups: int):
    assert launch.most_simdgroups(library(Kernel(limit)), "k") == simdgroups


def test_a_pipeline_below_one_simdgroup_is_an_error():
    with pytest.raises(RuntimeError, match="runs 16 threads"):
        launch.most_simdgroups(library(Kernel(16)), "k")


@pytest.mark.parametrize(
    ("steps", "offset", "width"), [((64, 0), 0, 4), ((64, 3), 0, 1), ((64,), 8, 4), ((64,), 2, 1), ((), 0, 4)]
)
def test_vectors_are_read_only_where_they_are_aligned(steps: tuple[int, ...], offset: int, width: int):
    seen: list[tuple[int, Any]] = []
    run = launch.by_alignment(lambda w: lambda args: seen.append((w, args)), steps)
    run([torch.zeros(64)[offset:]], ("x",))
    assert seen == [(width, ("x",))]


def test_an_absent_tensor_is_replaced_and_a_present_one_is_not():
    here, other = torch.zeros(2), torch.ones(2)
    assert launch.bound(here, other) is here
    assert launch.bound(None, other) is other
    assert launch.bound(torch.zeros(0), other) is other
