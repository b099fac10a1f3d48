"""Products of groups of FP4 numbers with block scales in the simulators of other targets than Hopper: borders of work
tiles, garbage beside the operands, NaN, exponents, and every work tile that Blackwell has."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.cuda import driver
from torch_attnkit.formats import scale_layout
from torch_attnkit.kernels.batched_gemm.problem import Fp4Problem
from torch_attnkit.kernels.batched_gemm.sm100 import plan
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(300)]

op = torch.ops.attnkit.grouped_output_projection
ONE = {"nvfp4": 0x38, "mxfp4": 127}  # a scale of 1
NAN = {"nvfp4": 0x7F, "mxfp4": 255}
BLOCK = {"nvfp4": 16, "mxfp4": 32}
TARGETS = ["sm80", "sm100", "sm120"]  # sm89 has the kernel of sm80
SIGNS = torch.tensor([0, 2, 10], dtype=torch.uint8)  # codes of 0, 1 and -1, whose sums are exact


def simulated(*args, target: str = "sm100", seed: int = 0, **kwargs) -> torch.Tensor:
    with torch_attnkit.simulate(target), ptx.settings(check=True, seed=seed):
        return op(*args, dtype=torch.float32, **kwargs)


def integers(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., K/2) of numbers (..., K)."""
    which = torch.randint(0, 3, shape)
    codes = SIGNS[which]
    return codes[..., ::2] | codes[..., 1::2] << 4, torch.tensor([0.0, 1.0, -1.0])[which]


def scales(format: str, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows (..., K): bytes of 1, 2 and 4, and these numbers for each of K."""
    power = torch.randint(0, 3, (*shape[:-1], shape[-1] // BLOCK[format]), dtype=torch.uint8)
    wide = torch.exp2(power.float()).repeat_interleave(BLOCK[format], -1)
    return ONE[format] + power * (8 if format == "nvfp4" else 1), wide


def swizzled(scale: torch.Tensor, format: str) -> torch.Tensor:
    """Linear scales (G, rows, blocks) in the 128x4 layout, with NaN for padding."""
    rows, blocks = scale.shape[1:]
    whole = torch.full((len(scale), *scale_layout.padded_shape(rows, blocks)), NAN[format], dtype=torch.uint8)
    whole[:, :rows, :blocks] = scale
    return scale_layout.to_128x4(whole)


def beside_nan(t: torch.Tensor, format: str, before: int, after: int) -> torch.Tensor:
    """Bytes in a buffer of NaN, or of codes of -6, so many before and after each row."""
    buffer = torch.full((*(n + 1 for n in t.shape[:-1]), before + t.shape[-1] + after), NAN[format], dtype=torch.uint8)
    view = buffer[tuple(slice(0, n) for n in t.shape[:-1])][..., before : before + t.shape[-1]]
    return view.copy_(t)


def is_right(
    sizes: tuple[int, int, int, int], format: str, layout: str, *, target: str = "sm100", seed: int = 0,
    around: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """``sizes``: tokens, groups, K and N; ``around``: bytes of garbage before and behind each row."""
    tokens, groups, k, n = sizes
    (o, ov), (w, wv) = integers(tokens, groups, k), integers(groups, n, k)
    (so, sov), (sw, swv) = scales(format, tokens, groups, k), scales(format, groups, n, k)
    if layout == "128x4":
        so, sw = swizzled(so.transpose(0, 1), format), swizzled(sw, format)
    bytes_ = (beside_nan(t, format, *around) for t in (o, w, so, sw)) if around else (o, w, so, sw)
    got = simulated(*bytes_, format=format, scale_layout=layout, target=target, seed=seed)
    assert torch.equal(got, torch.einsum("tgk,grk->tgr", ov * sov, wv * swv))


@pytest.mark.sample(8)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("around", [(16, 0), (3, 2)])
@pytest.mark.parametrize("tokens", [1, 9, 33, 129])
@pytest.mark.parametrize("target", TARGETS)
def test_tiles_have_borders_and_nothing_beyond_the_operands_is_read(target, tokens, around, format):
    for k, n in ((96, 64), (288, 65), (256, 3)):
        is_right((tokens, 2, k, n), format, "linear", around=around, target=target)


@pytest.mark.sample(7)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("k", [96, 128, 160, 256, 640])
@pytest.mark.parametrize("target", TARGETS)
def test_padding_of_128x4_scales_is_not_read(target, k, format):
    """Of the last tile along K there are all four scales, or some, or the row of codes ends amid a stage."""
    is_right((3, 2, k, 130), format, "128x4", target=target)
    is_right((130, 1, k, 5), format, "128x4", seed=2, target=target)


@pytest.mark.sample(4)
@pytest.mark.parametrize("tokens", [7, 40, 130])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("target", ["sm80", "sm120"])
def test_the_ring_goes_round_under_hostile_schedules(target, format, tokens):
    """K is 13 stages of a ring of 8 or of 5; the last is cut short."""
    for seed in (1, 2, 3):
        is_right((tokens, 1, 13 * 128 - 32, 70), format, "linear", seed=seed, target=target)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("target", TARGETS)
def test_nan_stays_in_its_row_and_its_column(target, format, layout):
    (o, _), (w, _) = integers(20, 2, 128), integers(2, 12, 128)
    so, sw = scales(format, 20, 2, 128)[0], scales(format, 2, 12, 128)[0]
    so[3, 0, 1], sw[1, 7, 0] = NAN[format], NAN[format]
    if layout == "128x4":
        so, sw = swizzled(so.transpose(0, 1), format), swizzled(sw, format)
    expected = torch.zeros(20, 2, 12, dtype=torch.bool)
    expected[3, 0], expected[:, 1, 7] = True, True
    got = simulated(o, w, so, sw, format=format, scale_layout=layout, target=target)
    assert torch.equal(got.isnan(), expected)


EXPONENTS = [(-127, 120), (100, -127), (-60, -60), (60, 60)]
NARROW = [(-127, 64), (100, -69), (-30, -30), (60, 60)]  # of weights that are dequantised, times 2^-63


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("target", "of_o", "of_w"),
    [(target, *pair) for target in TARGETS for pair in (NARROW if target == "sm80" else EXPONENTS)],
)
def test_exponents_of_mxfp4(target, of_o, of_w):
    """Both operands have all exponents that float32 has; weights that are dequantised have 2^-69 to 2^64, and their
    sums 2^63 less than float32."""
    (o, ov), (w, wv) = integers(4, 1, 64), integers(1, 9, 64)
    so = torch.full((4, 1, 2), 127 + of_o, dtype=torch.uint8)
    sw = torch.full((1, 9, 2), 127 + of_w, dtype=torch.uint8)
    want = torch.einsum("tgk,grk->tgr", ov.double() * 2.0**of_o, wv.double() * 2.0**of_w)
    assert torch.equal(simulated(o, w, so, sw, format="mxfp4", target=target), want.float())


@pytest.mark.sample(7)
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("tokens_are_rows", [False, True])
@pytest.mark.parametrize("columns", plan.COLUMNS)
def test_every_work_tile(columns, tokens_are_rows, layout, monkeypatch):
    """Two blocks have several work tiles each; the ring goes round amid one."""
    format = "nvfp4" if columns % 64 else "mxfp4"
    made = lambda p, whole, sms: plan.Fp4Tile(p.format, columns, tokens_are_rows, whole)
    monkeypatch.setattr(plan, "fp4", made)
    monkeypatch.setattr(driver, "sm_count", lambda device: 2)
    few, many = columns + 3 if columns % 128 == 0 else columns - 1, 140
    tokens, n = (many, few) if tokens_are_rows else (few, many)
    is_right((tokens, 2, 1280, n), format, layout, seed=3)


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("columns", [8, 16, 32, 64])
@pytest.mark.parametrize("k", [1056, 2560])
def test_slices_of_k(k, columns, layout, monkeypatch):
    """Both blocks of a cluster have stages, the second of K = 1056 fewer, and its ring goes round with 2560."""
    format = "nvfp4" if columns % 32 else "mxfp4"
    made = lambda p, whole, sms: plan.Fp4Tile(p.format, columns, False, whole, 2)
    monkeypatch.setattr(plan, "fp4", made)
    is_right((columns - 1, 2, k, 140), format, layout, seed=columns)


def test_few_work_tiles_are_cut():
    """8 groups of 1024 rows are 64 work tiles; of 16 groups there are enough."""
    for groups, slices in ((8, 2), (16, 1)):
        steps = (0, 0), (0, 0), (0, 0)
        given = Fp4Problem(
            torch.device("cpu"), "nvfp4", "128x4", (False, False), torch.bfloat16, 1, groups, 4096, 1024, *steps
        )
        assert plan.fp4(given, True, 148).slices == slices


def test_rings_fit_into_both_memories():
    for format in ("nvfp4", "mxfp4"):
        for columns in plan.COLUMNS:
            tile = plan.Fp4Tile(format, columns, False, True)
            scales_ = tile.stages * (1 + tile.column_tiles) * tile.scale_columns
            assert tile.stages >= 3 and tile.buffers * columns <= tile.first_scales
            assert tile.first_scales + scales_ <= 512
            assert tile.stages * (tile.code_bytes + (1 + tile.column_tiles) * tile.scale_bytes) <= 224 << 10
