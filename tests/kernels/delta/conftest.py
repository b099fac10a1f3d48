"""Where tests of the gated delta rule run: by the definition, and in simulators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.targets import needs, on

TARGETS = ["cpu", *(pytest.param(t, marks=pytest.mark.simulator) for t in ("sm90", "sm80", "metal"))]


@pytest.fixture(params=TARGETS)
def target(request) -> Iterator[str]:
    if request.param != "cpu":
        needs(request.param)
    with on(request.param):
        yield request.param
