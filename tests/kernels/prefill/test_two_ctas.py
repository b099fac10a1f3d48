"""Where two CTAs that have a tile look for its rows in tensor memory, beside CuTe's layout of their products."""

from __future__ import annotations

import pytest

cutlass = pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = pytest.mark.filterwarnings("default")  # the compiler's own imports warn


def accumulator(n: int) -> dict[tuple[int, int], int]:
    """The address, lane << 16 | column, of every element of a pair's product of M 128 in one CTA, by CuTe's layout."""
    from cutlass import cute
    from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
    from cutlass.utils import blackwell_helpers

    kept = []

    @cute.jit
    def host():
        major = OperandMajorMode.K
        mma = blackwell_helpers.make_trivial_tiled_mma(
            cutlass.BFloat16, cutlass.BFloat16, major, major, cutlass.Float32, tcgen05.CtaGroup.TWO, (128, n)
        )
        layout = mma.get_slice(0).make_fragment_C(mma.partition_shape_C((128, n))).layout
        kept.append((layout.shape, layout.stride))

    cute.compile(host, options="--gpu-arch sm_100a")
    (((rows, (half, halves)), *_), ((by_row, (by_column, by_half)), *_)) = kept[0]
    assert (rows, half * halves) == (64, n)
    return {
        (row, column): row * by_row + column % half * by_column + column // half * by_half
        for row in range(rows)
        for column in range(n)
    }


@pytest.mark.seconds(300)
def test_outputs_lie_where_cute_puts_them():
    from torch_attnkit.kernels.prefill.sm100.types import HALF, LANES, element

    addresses = accumulator(HALF)
    for at in range(2 * HALF // 2):  # columns of both products' outputs
        product, column = divmod(at, HALF // 2)
        for lane in (0, 1, 37, 63, 64, 65, 127):
            within = element(at, lane // LANES) - product * HALF
            assert addresses[lane % LANES, within] == lane << 16 | column


@pytest.mark.seconds(300)
def test_scores_of_a_row_are_in_two_lanes():
    """The first half of a block's keys in lane r, the second in lane r + 64."""
    for (row, key), address in accumulator(128).items():
        assert address == (row + key // 64 * 64) << 16 | key % 64
