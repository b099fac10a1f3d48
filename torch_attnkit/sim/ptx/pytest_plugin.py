"""A pytest fixture that runs a test's own CuTeDSL code on a simulated GPU.

Name the plugin in the top-level conftest.py: ``pytest_plugins = ["torch_attnkit.sim.ptx.pytest_plugin"]``, or on the
command line: ``pytest -p torch_attnkit.sim.ptx.pytest_plugin``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import Launch, counting, device


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ptx(arch='sm100', check=True, **settings): the GPU and the settings of the ptx_simulator fixture, "
        "for example waive=('tensor_fence',)",
    )


@pytest.fixture
def ptx_simulator(request: pytest.FixtureRequest) -> Iterator[list[Launch]]:
    """A simulated GPU for the test, by default a checked sm100; the list of launches that it ran."""
    marker = request.node.get_closest_marker("ptx")
    options = {"arch": "sm100", "check": True} | (marker.kwargs if marker else {})
    with device(**options), counting() as launches:
        yield launches
