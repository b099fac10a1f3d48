"""Products of groups of FP4 numbers in the simulator: borders of tiles, garbage beside the operands, NaN, exponents."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.cuda import driver
from torch_attnkit.formats import scale_layout
from torch_attnkit.kernels.batched_gemm.problem import Fp4Problem
from torch_attnkit.kernels.batched_gemm.sm90 import plan
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(300)]

op = torch.ops.attnkit.grouped_output_projection
ONE = {"nvfp4": 0x38, "mxfp4": 127}  # a scale of 1
NAN = {"nvfp4": 0x7F, "mxfp4": 255}
BLOCK = {"nvfp4": 16, "mxfp4": 32}
SIGNS = torch.tensor([0, 2, 10], dtype=torch.uint8)  # codes of 0, 1 and -1, whose sums are exact


def simulated(*args, **kwargs):
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True):
        return op(*args, dtype=torch.bfloat16, **kwargs)


def integers(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., K/2) of numbers (..., K)."""
    which = torch.randint(0, 3, shape)
    codes = SIGNS[which]
    return codes[..., ::2] | codes[..., 1::2] << 4, torch.tensor([0.0, 1.0, -1.0])[which]


def scales(format: str, *shape: int) -> torch.Tensor:
    """Ones for rows (..., K)."""
    return torch.full((*shape[:-1], shape[-1] // BLOCK[format]), ONE[format], dtype=torch.uint8)


def beside_nan(t: torch.Tensor, format: str, before: int, after: int) -> torch.Tensor:
    """Bytes in a buffer of NaN, or of codes of -6, so many before and after each row."""
    buffer = torch.full((*(n + 1 for n in t.shape[:-1]), before + t.shape[-1] + after), NAN[format], dtype=torch.uint8)
    view = buffer[tuple(slice(0, n) for n in t.shape[:-1])][..., before : before + t.shape[-1]]
    return view.copy_(t)


def want(o: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tgk,grk->tgr", o, w).bfloat16()


@pytest.mark.sample(25)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("before", "after"), [(16, 0), (3, 2)])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 33, 65, 129])
def test_tiles_have_borders_and_nothing_beyond_the_operands_is_read(tokens, before, after, format):
    for k, n in ((96, 64), (288, 65), (2400, 3)):
        (o, ov), (w, wv) = integers(tokens, 2, k), integers(2, n, k)
        bytes_ = o, w, scales(format, tokens, 2, k), scales(format, 2, n, k)
        got = simulated(*(beside_nan(t, format, before, after) for t in bytes_), format=format)
        assert torch.equal(got, want(ov, wv))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_padding_of_128x4_scales_is_not_read(format):
    tokens, n, k = 3, 5, 96 + BLOCK[format]
    (o, ov), (w, wv) = integers(tokens, 2, k), integers(2, n, k)
    padded = []
    for rows in (tokens, n):
        blocks = k // BLOCK[format]
        whole = torch.full((2, *scale_layout.padded_shape(rows, blocks)), NAN[format], dtype=torch.uint8)
        whole[:, :rows, :blocks] = ONE[format]
        padded.append(scale_layout.to_128x4(whole))
    assert torch.equal(simulated(o, w, *padded, format=format, scale_layout="128x4"), want(ov, wv))


@pytest.mark.sample(3)
@pytest.mark.parametrize("tokens", [4, 20])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_nan_stays_in_its_row_and_its_column(format, tokens):
    (o, _), (w, _) = integers(tokens, 2, 64), integers(2, 12, 64)
    so, sw = scales(format, tokens, 2, 64), scales(format, 2, 12, 64)
    so[3, 0, 1], sw[1, 7, 0] = NAN[format], NAN[format]
    expected = torch.zeros(tokens, 2, 12, dtype=torch.bool)
    expected[3, 0], expected[:, 1, 7] = True, True
    assert torch.equal(simulated(o, w, so, sw, format=format).isnan(), expected)


@pytest.mark.parametrize("tokens", [4, 8])
@pytest.mark.parametrize(("of_o", "of_w"), [(-127, 64), (60, -69), (-60, 64), (125, -69)])
def test_exponents_of_mxfp4(of_o, of_w, tokens):
    """Numbers of o have all exponents that float32 has, those of weights what ``cuda/fp4_weights.py`` says."""
    (o, ov), (w, wv) = integers(tokens, 1, 64), integers(1, 9, 64)
    so, sw = scales("mxfp4", tokens, 1, 64) + of_o % 256, scales("mxfp4", 1, 9, 64) + of_w % 256
    got = simulated(o, w, so, sw, format="mxfp4")
    assert torch.equal(got, want(ov.double() * 2.0**of_o, wv.double() * 2.0**of_w))


def test_largest_scales_of_blocks_whose_sum_is_zero():
    """Codes are multiplied before scales, of which no two together are beyond float32."""
    o = torch.full((2, 1, 32), 0x22, dtype=torch.uint8)
    w = torch.full((1, 5, 32), 0xA2, dtype=torch.uint8)
    got = simulated(o, w, scales("mxfp4", 2, 1, 64) + 127, scales("mxfp4", 1, 5, 64) + 64, format="mxfp4")
    assert torch.equal(got, torch.zeros(2, 1, 5, dtype=torch.bfloat16))


def block_of(format: str, columns: int, rows: int, slices: int, k: int, vector: int = 1) -> plan.Few:
    return plan.FewTokens(format, columns, rows, slices, -(-k // (256 * slices)), vector)


BLOCKS = [(columns, *block) for columns, blocks in plan.FEW_BLOCKS.items() for block in blocks]


@pytest.mark.sample(11)
@pytest.mark.parametrize(("columns", "rows", "slices"), BLOCKS)
def test_every_block_for_few_tokens(columns, rows, slices, monkeypatch):
    """K ends amid a slice, tokens and rows amid a block; the ring goes round where a slice has five boxes."""
    format = "nvfp4" if rows == 128 or columns == 2 else "mxfp4"
    k, n, tokens = 1056 if columns == 8 else 800, rows + 8, max(columns - 1, 1)
    (o, ov), (w, wv) = integers(tokens, 2, k), integers(2, n, k)
    block = block_of(format, columns, rows, slices, k)
    monkeypatch.setattr(plan, "few", lambda problem, sms: block)
    got = simulated(o, w, scales(format, tokens, 2, k), scales(format, 2, n, k), format=format)
    assert torch.equal(got, want(ov, wv))


@pytest.mark.sample(7)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("columns", "rows", "slices", "boxes"),
    [(1, 64, 1, 16), (2, 64, 1, 16), (4, 64, 1, 16), (4, 64, 2, 10), (8, 64, 1, 22), (8, 128, 1, 12), (32, 64, 1, 10)],
)
def test_rings_go_round_in_any_order(columns, rows, slices, boxes, seed, monkeypatch):
    """On hardware boxes come in any order, and a part may be ahead of the others."""
    k = boxes * 256 * slices - 32
    block = block_of("nvfp4", columns, rows, slices, k)
    assert block.parts <= block.stages < block.boxes
    (o, ov), (w, wv) = integers(columns, 1, k), integers(1, rows, k)
    monkeypatch.setattr(plan, "few", lambda problem, sms: block)
    given = o, w, scales("nvfp4", columns, 1, k), scales("nvfp4", 1, rows, k)
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True, seed=seed):
        got = op(*given, dtype=torch.bfloat16, format="nvfp4")
    assert torch.equal(got, want(ov, wv))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_box_of_a_ring_is_always_of_the_same_part(format):
    """And blocks fit on a multiprocessor, which has 228 KB, 1 KB of which every block takes."""
    for columns, rows, slices in BLOCKS:
        for k in range(256, 32768, 256):
            block = block_of(format, columns, rows, slices, k)
            assert block.stages == block.boxes or block.stages % block.parts == 0
            if block.stages > 0:
                ring = block.stages * block.teams * (64 * 128 + 16)
                assert block.resident * (ring + block.fixed_bytes + 2048) <= 228 << 10


@pytest.mark.sample(7)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize(("columns", "slices"), [(1, 1), (1, 2), (2, 1), (4, 1), (4, 4), (8, 1)])
def test_scales_of_few_tokens(columns, slices, layout, format, monkeypatch):
    """Those of all blocks differ; K ends amid a box, rows amid a block."""
    k, n, tokens = 1056, 72, columns - columns // 4
    (o, ov), (w, wv) = integers(tokens, 2, k), integers(2, n, k)
    given = []
    for values in (ov.transpose(0, 1), wv):
        exponents = torch.randint(-2, 3, (*values.shape[:-1], k // BLOCK[format]))
        values *= (2.0**exponents).repeat_interleave(BLOCK[format], -1)
        given.append((ONE[format] + exponents * (8 if format == "nvfp4" else 1)).to(torch.uint8))
    so, sw = (scale_layout.to_128x4(s) for s in given) if layout == "128x4" else (given[0].transpose(0, 1), given[1])
    block = block_of(format, columns, 64, slices, k, 1 if layout == "linear" else 4)
    monkeypatch.setattr(plan, "few", lambda problem, sms: block)
    got = simulated(o, w, so, sw, format=format, scale_layout=layout)
    assert torch.equal(got, want(ov, wv))


@pytest.mark.parametrize(
    ("groups", "tokens", "few"), [(8, 1, True), (8, 32, True), (12, 32, False), (16, 16, True), (16, 32, False)]
)
def test_few_tokens_go_to_the_kernel_that_was_faster(groups, tokens, few):
    """On an H200; 16 groups of 32 tokens took 26.3 us by the one and 22.9 by ``wgmma``."""
    k, n = 4096, 1024
    steps = (groups * k // 2, k // 2), (n * k // 2, k // 2), (n * k // 16, k // 16)
    sizes = torch.bfloat16, tokens, groups, k, n
    p = Fp4Problem(torch.device("cuda"), "nvfp4", "linear", (False, False), *sizes, *steps)
    assert (plan.few(p, 132) is not None) == few


def test_few_tokens_are_those_whose_codes_tma_takes():
    """Of NVFP4 a row may end amid 16 bytes: then codes are copied by lanes, and the product is by wgmma."""
    (o, ov), (w, wv) = integers(3, 2, 80), integers(2, 40, 80)
    got = simulated(o, w, scales("nvfp4", 3, 2, 80), scales("nvfp4", 2, 40, 80), format="nvfp4")
    assert torch.equal(got, want(ov, wv))


@pytest.mark.sample(2)
@pytest.mark.parametrize("tokens", [40, 104, 208])
def test_blocks_have_several_work_tiles(tokens, monkeypatch):
    monkeypatch.setattr(driver, "sm_count", lambda device: 2)
    (o, ov), (w, wv) = integers(2 * tokens + 3, 2, 160), integers(2, 130, 160)
    t = len(o)
    monkeypatch.setattr(plan, "FP4_WIDTHS", (tokens,))
    got = simulated(o, w, scales("nvfp4", t, 2, 160), scales("nvfp4", 2, 130, 160), format="nvfp4")
    assert torch.equal(got, want(ov, wv))
