"""Others' Metal kernels for experts run in the simulator as they are written, and are right.

Their sources are no part of the repository: each is looked for in the folder that ``bench.peers.metal_moe`` takes.
"""

from __future__ import annotations

import pytest

from bench.peers import metal_moe
from torch_attnkit.core import config

pytestmark = [pytest.mark.simulator, pytest.mark.proof]


@pytest.mark.parametrize("y", metal_moe.YARDSTICKS, ids=lambda y: y.name.replace(" ", "-"))
def test_a_kernel_of_others_is_right(y: metal_moe.Yardstick):
    checkouts = config.cache_dir() / "checkouts"
    if why := metal_moe.missing(checkouts, y):
        pytest.skip(why)
    shape = (4, 64, 128, 33, 4) if y.many else (6, 24, 1056, 2, 4)
    reports = metal_moe.counted(y, checkouts, metal_moe.product(*shape))
    assert sum(r.device_bytes for r in reports) > 0


def test_what_a_product_is():
    """The decoding that others' results are compared with, against this package's own."""
    import torch

    from torch_attnkit.formats import mxfp4

    p = metal_moe.product(3, 8, 64, 2, 2)
    w = mxfp4.dequantize(p.codes, p.scale, torch.float64)
    expected = torch.einsum("tk,tjnk->tjn", p.x.double(), w[p.ids.long()])
    torch.testing.assert_close(p.expected(), expected)
