"""A block inside of a simulator with its checks on, for tests of one launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import torch_attnkit
from torch_attnkit.parity.runners import simulators


@contextmanager
def checked(arch: str) -> Iterator[None]:
    if missing := simulators()[arch]:
        pytest.skip(missing)
    if arch == "metal":
        from torch_attnkit.sim import metal

        with torch_attnkit.simulate(arch), metal.settings(mode="checked"):
            yield
    else:
        pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
        from torch_attnkit.sim import ptx

        with torch_attnkit.simulate(arch), ptx.settings(check=True), ptx.counting() as launches:
            yield
        assert len(launches) == 1
