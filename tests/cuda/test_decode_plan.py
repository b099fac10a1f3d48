"""How decode launches are cut: every plan fits on a Hopper SM, and the choices that were measured are made."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.cuda.decode_plan import plan

SMS, SHARED = 132, 228 << 10  # multiprocessors of an H200, and bytes of shared memory of each
DIMS = sorted({(row.dims["D"][0], row.dims["Dv"][0]) for row in OPS["sdpa_decode"].kernels if row.file == "sm90"})


@pytest.mark.filterwarnings("default")  # the compiler's own imports warn
@pytest.mark.skipif(
    importlib.util.find_spec("nvidia_cutlass_dsl") is None, reason="needs the package nvidia-cutlass-dsl"
)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_a_plan_fits(dim, dim_v):
    """All blocks of a launch are on the device at once, which the merge of a second kernel counts on for its speed."""
    from torch_attnkit.cuda.decode_types import Config, LatentConfig, WideConfig

    configs = {"trace": Config, "trace_wide": WideConfig, "trace_latent": LatentConfig}
    sizes = itertools.product((1, 8, 9, 70), (1, 128, 8192, 131072), (1, 8, 1024), (0, 16), (False, True))
    for group, most_keys, groups, page, same in sizes:
        p = plan(dim, dim_v, group, SMS, most_keys, groups, page=page, same=same)
        config = configs[p.trace](None, **p.sizes)
        per_sm = p.blocks // SMS
        assert config.stages >= 2 and p.blocks == per_sm * SMS
        assert per_sm <= config.blocks_per_sm, p
        assert per_sm * (config.shared_bytes + 1024) <= SHARED, p
        assert p.floats >= 2 * p.blocks * config.part_floats and p.counters >= p.blocks
        assert bool(p.combiners) == config.combine and p.combiners <= SMS
        assert p.chunks * config.heads >= group > (p.chunks - 1) * config.heads
        assert p.chunks % p.beside == 0 and p.blocks % p.beside <= p.blocks // 16


@pytest.mark.parametrize(
    ("dim", "group", "most_keys", "groups", "page", "trace", "combine"),
    [
        (128, 4, 1024, 8, 0, "trace", False),
        (128, 4, 8192, 8, 0, "trace", False),
        (128, 4, 131072, 8, 0, "trace_wide", False),
        (128, 4, 131072, 8, 16, "trace", False),
        (64, 8, 128, 1024, 0, "trace", False),
        (256, 8, 8192, 2, 0, "trace", True),
        (256, 2, 8192, 8, 0, "trace_wide", False),
        (256, 2, 8192, 128, 16, "trace", False),
        (128, 16, 8192, 4, 0, "trace_wide", True),
        (512, 64, 8192, 16, 0, "trace_wide", True),
    ],
)
def test_the_choices_that_were_measured(dim, group, most_keys, groups, page, trace, combine):
    p = plan(dim, dim, group, SMS, most_keys, groups, page=page)
    assert (p.trace, p.sizes["combine"]) == (trace, combine)


def test_keys_that_are_values_have_a_kernel():
    """And heads beyond what a block has go along the keys beside each other."""
    p = plan(512, 512, 128, SMS, 8192, 16, same=True)
    assert (p.trace, p.chunks, p.beside) == ("trace_latent", 2, 2)
