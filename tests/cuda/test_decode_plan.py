"""How decode launches are cut: every plan fits on its SM, and the choices that were measured or counted are made."""

from __future__ import annotations

import importlib.util
import itertools
from types import SimpleNamespace

import pytest

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.cuda.decode_plan import plan
from torch_attnkit.cuda.sm100 import decode_plan as blackwell

SMS, SHARED = 132, 228 << 10  # multiprocessors of an H200, and bytes of shared memory of each
B200_SMS, TENSOR_COLUMNS, CLUSTER = 148, 512, 8  # CTAs of a cluster that any GPU can place
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
        (128, 4, 131072, 8, 16, "trace_wide", False),
        (128, 4, 8192, 1024, 16, "trace", False),
        (64, 8, 128, 1024, 0, "trace", False),
        (256, 8, 8192, 2, 0, "trace", True),
        (256, 2, 8192, 8, 0, "trace_wide", False),
        (256, 2, 8192, 128, 16, "trace", False),
        (256, 2, 8192, 1024, 16, "trace", False),
        (128, 16, 8192, 4, 0, "trace_wide", True),
        (512, 64, 8192, 16, 0, "trace_wide", True),
        (512, 8, 8192, 16, 0, "trace_wide", False),
        (512, 8, 1024, 16, 0, "trace", True),
        (512, 8, 8192, 16, 16, "trace", True),
    ],
)
def test_the_choices_that_were_measured(dim, group, most_keys, groups, page, trace, combine):
    p = plan(dim, dim, group, SMS, most_keys, groups, page=page)
    assert (p.trace, p.sizes["combine"]) == (trace, combine)


def test_keys_that_are_values_have_a_kernel():
    """And heads beyond what a block has go along the keys beside each other."""
    p = plan(512, 512, 128, SMS, 8192, 16, same=True)
    assert (p.trace, p.chunks, p.beside) == ("trace_latent", 2, 2)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(
    importlib.util.find_spec("nvidia_cutlass_dsl") is None, reason="needs the package nvidia-cutlass-dsl"
)
@pytest.mark.parametrize("size", [1, 2], ids=["E4M3", "16-bit"])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_a_blackwell_plan_for_many_heads_fits(dim, size):
    from torch_attnkit.cuda.sm100.decode_types import TallConfig

    for group, most_keys, groups, page in itertools.product(
        (9, 16, 17, 64, 65, 128, 129, *((1, 8) if size == 1 else ())),
        (0, 1, 128, 1152, 131072),
        (1, 8, 1024),
        (0, 16, 48, 256),
    ):
        for same in (False, True):
            p = blackwell.plan(dim, dim, group, B200_SMS, most_keys, groups, page, same=same, size=size)
            assert p.trace == "trace_wide"
            config = TallConfig(SimpleNamespace(width=8 * size), **p.sizes)
            ctas = config.sides * p.combiners
            assert 1 <= ctas <= CLUSTER and ctas * p.blocks <= B200_SMS
            # A tile's buffers are full at once; what else is in shared memory takes less than 4 KB.
            assert config.stages >= config.parts and config.shared_bytes <= SHARED - (5 << 10)
            assert config.output + config.parts * config.heads <= TENSOR_COLUMNS
            assert page % config.box == 0 and config.boxes % config.sides == 0 and config.boxes <= 32
            assert p.floats >= 2 * p.blocks * config.sides * config.part_floats and p.counters >= ctas * p.blocks
            heads = config.heads * config.sides
            assert p.chunks * heads >= group > (p.chunks - 1) * heads
        # Groups are units of work only where one cluster's CTAs have a tile each, and are all attended then.
        assert not p.by_group or (p.least == 1 and most_keys <= 128 * p.combiners and p.blocks <= groups * p.chunks)


@pytest.mark.parametrize(
    ("dim", "dim_v", "group", "keys", "groups", "trace", "sides", "ctas", "clusters"),
    [
        (512, 512, 128, 1152, 1, "trace_wide", 2, 8, 3),
        (512, 512, 128, 8192, 128, "trace_wide", 2, 2, 74),
        (512, 512, 64, 131072, 1, "trace_wide", 1, 8, 18),
        (128, 128, 16, 1024, 8, "trace_wide", 1, 8, 8),
        (512, 512, 8, 8192, 1, "trace_wide", 1, 8, 10),
        (128, 128, 8, 8192, 8, "trace", None, None, None),
        (192, 128, 128, 8192, 8, "trace", None, None, None),
    ],
)
def test_the_choices_for_blackwell(dim, dim_v, group, keys, groups, trace, sides, ctas, clusters):
    p = blackwell.plan(dim, dim_v, group, B200_SMS, keys, groups)
    assert (p.trace, p.sizes.get("sides")) == (trace, sides)
    if sides:
        assert (sides * p.combiners, p.blocks) == (ctas, clusters)
