"""Metal's experts: what codes and scales become, what a call reads, and what its indices and layouts may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_attnkit.core import dispatch
from torch_attnkit.core.target import Target
from torch_attnkit.formats import fp8, mxfp4, nvfp4
from torch_attnkit.kernels.grouped_gemm import metal as family
from torch_attnkit.mps import library
from torch_attnkit.ops.fp4_moe import cases
from torch_attnkit.oracle import fp4
from torch_attnkit.oracle.compare import check
from torch_attnkit.parity import poison, reference_of
from torch_attnkit.sim import metal
from torch_attnkit.sim.metal.lint import lint

pytestmark = pytest.mark.simulator
METAL = Target("metal", simulated=True)
OP = dispatch.OPS["fp4_moe"]
FEW, MANY = 5, 70  # tokens that go down either path where experts are 3


def given(features: tuple[str, ...] = (), dtype: torch.dtype = torch.float32, **dims: int) -> dict[str, Any]:
    """All arguments of a call by name."""
    sizes = dict(Tq=FEW, N=64, M=96, E=3, K=2, blk=16, act=0) | dims
    args, kwargs = cases.make(sizes, dtype, features, torch.Generator().manual_seed(0))
    return dict(zip(OP.argnames, args, strict=False)) | kwargs


def launch(call: dict[str, Any]) -> torch.Tensor:
    """The kernels on CPU tensors, with a poisoned output."""
    values = tuple(call.get(n, OP.defaults.get(n)) for n in OP.argnames)
    bound = OP.bind(values)
    ((shape, dtype),) = OP.outputs(bound)
    out = poison(shape, dtype, "cpu")
    dispatch.build(OP, bound, METAL)(*values, out)
    return out


def run(call: dict[str, Any]) -> torch.Tensor:
    with metal.settings(mode="checked", strict=True):
        return launch(call)


def compare(call: dict[str, Any]) -> torch.Tensor:
    got = run(call)
    (ref,), (ref64,) = (reference_of(OP, (), call, double=d) for d in (False, True))
    check("fp4_moe out", got, ref, ref64)
    return got


# Kernels of this file's own, around the functions that decode and round.
_ALONE = """
#include <metal_stdlib>
using namespace metal;
#include "attnkit/vectors.h"
#include "attnkit/fp4.h"
kernel void decoded(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  const Factor factor = factor_of(i / 8);
  const Codes8 codes = decode(i % 8 < 4 ? 0x76543210u : 0xfedcba98u);
  out[i * 2] = scaled(float(codes.pairs[i % 4].x), factor);
  out[i * 2 + 1] = scaled(float(codes.pairs[i % 4].y), factor);
}
kernel void multiplied(device uint* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  uint words[BLOCK / 8];
  uint4 made[BLOCK / 8];
  for (int w = 0; w < BLOCK / 8; w++) {
    words[w] = w % 2 == 0 ? 0x76543210u : 0xfedcba98u;
  }
  bfloat_block(words, i, made);
  for (int w = 0; w < 2; w++) {
    for (int j = 0; j < 4; j++) {
      out[i * 8 + w * 4 + j] = made[w][j];
    }
  }
}
kernel void quantised(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    constant float& global [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  out[i] = rounded(x[i], global);
}
"""


def alone(**defines: int) -> Any:
    head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return metal.compile_shader(head + library.inline(_ALONE))


@pytest.mark.parametrize("block", [16, 32])
def test_every_code_under_every_scale_is_exact(block: int):
    out = torch.full((256, 2, 4, 2), torch.nan)  # scale byte, sign, i, codes i and i + 4
    alone(BLOCK=block, ACT=0).decoded(out, threads=2048, group_size=256)
    check_values(out, block)


@pytest.mark.parametrize("block", [16, 32])
def test_every_weight_of_many_tokens_is_exact(block: int):
    """In bfloat, which holds them all; of E8M0 most by integers, the ends by factors."""
    out = torch.full((256, 2, 4, 2), torch.nan, dtype=torch.bfloat16)
    alone(BLOCK=block, ACT=0).multiplied(out.view(torch.int32), threads=256, group_size=256)
    check_values(out.float(), block)


def check_values(out: torch.Tensor, block: int) -> None:
    got = out.transpose(-1, -2).reshape(256, 16)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, block // 16)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    elements = nvfp4.dequantize(packed, scale) if block == 16 else mxfp4.dequantize(packed, scale)
    torch.testing.assert_close(got, elements[:, :16], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() | got.isnan(), elements[:, :16].signbit() | got.isnan())
    assert got[0].abs().max() == (0 if block == 16 else 6 * 2.0**-127)
    assert got[0x7F if block == 16 else 0xFF].isnan().all()


@pytest.mark.sample(3)
@pytest.mark.parametrize("act", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("divisor", [1.0, 600.0])
def test_activations_are_rounded_as_their_formats_round(act: str, divisor: float):
    gen = torch.Generator().manual_seed(0)
    x = fp4.spread(gen, torch.float32, 2, 40, 32)
    x[0, 0, :16] = 0
    x[0, 1, 3:6] = torch.tensor([torch.nan, 1e30, -0.0])
    x[0, 2] = torch.nan
    x[0, 3, 7] = -torch.inf
    x[0, 4] = torch.finfo(torch.float32).max
    x[0, 5] = 1e-30
    scaled = act == "nvfp4" and divisor != 1.0
    out = torch.full_like(x, torch.nan)
    kind = {"nvfp4": 1, "mxfp4": 2, "mxfp8": 3}[act]
    alone(BLOCK=16, ACT=kind).quantised(x, out, divisor if scaled else 1.0, threads=x.numel(), group_size=256)
    if act == "nvfp4":
        codes, scale = nvfp4.quantize(x, torch.tensor(divisor) if scaled else None)
        want = nvfp4.dequantize(codes, scale)
    else:
        want = mxfp4.dequantize(*mxfp4.quantize(x)) if act == "mxfp4" else fp8.dequantize(*fp8.quantize(x))
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
    # What products see of it is stored as bfloat.
    torch.testing.assert_close(out.bfloat16().float(), out, rtol=0, atol=0, equal_nan=True)


@pytest.mark.proof
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_scales_at_both_ends_of_their_format(tokens: int):
    """2^-127 and NaN of E8M0; the least subnormal and NaN of E4M3. h is large, so that results are normal."""
    for block in (16, 32):
        call = given(Tq=tokens, blk=block, M=64)
        scale = call["w2_scale"]
        scale.fill_(0 if block == 32 else 1)
        call["bias2"] = None
        call["w13_scale"].fill_(127 + 20 if block == 32 else 0x7E)
        got = compare(call)
        assert got.abs().max() > 0
        scale[1, 5, 1] = 0xFF if block == 32 else 0x7F
        got = compare(call)
        hit = (call["indices"] == 1).any(1)
        assert got[hit, 5].isnan().all() and got[~hit].isfinite().all() and got[:, :5].isfinite().all()
        assert hit.any()


@pytest.mark.sample(2)
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_indices_that_lie_are_no_experts(tokens: int):
    """A reference refuses them; a kernel takes them as -1, and looks at nothing of theirs."""
    call = given(("bias",), Tq=tokens)
    lies = call["indices"].clone()
    lies[0], lies[2, 1], lies[-1, 0] = 3, -7, 2**31 - 1
    weights = call["weights"].clone()
    weights[0] = torch.nan
    honest = call | dict(indices=lies.masked_fill((lies < 0) | (lies > 2), -1))
    assert torch.equal(run(call | dict(indices=lies, weights=weights)), compare(honest))
    assert (run(call | dict(indices=lies))[0] == 0).all()


@pytest.mark.proof
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("act", [0, 1])
def test_a_token_that_is_nan_spoils_no_other(tokens: int, act: int):
    call = given(Tq=tokens, N=64, M=64, act=act)
    whole = run(call)
    call["x"][1] = torch.nan
    got = run(call)
    others = torch.arange(tokens) != 1
    assert torch.equal(got[others], whole[others])
    assert act or got[1].isnan().all() or (call["indices"][1] < 0).all()


def odd(t: torch.Tensor, offset: int, pad: int) -> torch.Tensor:
    """``t`` in a poisoned buffer, ``offset`` elements in, its rows ``pad`` further apart, matrices 3 more."""
    steps = [t.shape[-1] + pad]
    for n in t.shape[-2:0:-1]:
        steps.insert(0, steps[0] * n + 3 * pad)
    buffer = poison((steps[0] * t.shape[0] + offset,), t.dtype, "cpu")
    return buffer.as_strided(t.shape, (*steps, 1), offset).copy_(t)


@pytest.mark.proof
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize(("offset", "pad"), [(1, 1), (8, 8), (16, 16)])
@pytest.mark.parametrize("features", [("bias",), ("swizzled", "interleaved", "global_scale")])
def test_rows_anywhere(tokens: int, offset: int, pad: int, features: tuple[str, ...]):
    call = given(features, torch.float16, Tq=tokens, N=48, M=80)
    assert family.few(_problem(call)) == (tokens == FEW)
    for name in ("x", "weights", "w13", "w13_scale", "w2", "w2_scale", "bias13", "bias2"):
        if call[name] is not None:
            call[name] = odd(call[name], offset, pad)
    call["indices"] = call["indices"].t().contiguous().t().long()
    compare(call)


def _problem(call: dict[str, Any]) -> Any:
    from torch_attnkit.ops.fp4_moe.problem import problem

    return problem(OP.bind(tuple(call.get(n, OP.defaults.get(n)) for n in OP.argnames)))


@pytest.mark.proof
@pytest.mark.parametrize("tokens", [1, FEW, MANY])
def test_no_features_and_no_experts(tokens: int):
    """h of no numbers leaves biases; nobody's experts leave zeros, whatever lies in the workspace."""
    call = given(("bias",), Tq=tokens, M=0)
    compare(call)
    call = given(("bias",), Tq=tokens)
    call["indices"].fill_(-1)
    assert (compare(call) == 0).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("tokens", [1, 3])
def test_few_tokens_read_weights_once(tokens: int):
    """Tokens that share an expert share its bytes, in three launches; an expert of nobody is not read."""
    call = given(dtype=torch.bfloat16, Tq=tokens, N=1056, M=288, E=4, K=2, blk=32)
    call["indices"] = torch.tensor([[2, 0]], dtype=torch.int32).expand(tokens, 2)
    with metal.counting() as reports:
        launch(call)
    assert [r.kernel for r in reports] == ["experts_few_up", "experts_few_down", "experts_combine"]
    up, down, combine = reports
    # Tiles are of 64 features and 96 rows, of 96 and 160 for more than one token; a last one reads its last row again.
    features, rows = (320, 1056) if tokens == 1 else (288, 1120)
    assert up.buffers["w13"] == (2 * 2 * features * 1056 // 2, 0)
    assert down.buffers["w2"] == (2 * rows * 288 // 2, 0)
    assert combine.buffers["parts"] == (tokens * 2 * 1056 * 4, 0) and combine.buffers["out"] == (0, tokens * 1056 * 2)
    # A multiplication and an addition for each weight and token, four of them where there are three, and a tenth more:
    # scales, sums, SwiGLU. Decoding is integer arithmetic.
    multiplied = 2 * (1 if tokens == 1 else 4) * 2 * (2 * features * 1056 + rows * 288)
    assert multiplied <= up.flops + down.flops <= 1.1 * multiplied


def test_many_tokens_multiply_little_but_their_tiles():
    call = given(dtype=torch.bfloat16, Tq=128, N=128, M=64, E=2, K=1, blk=32)
    call["indices"] = (torch.arange(128, dtype=torch.int32)[:, None]) // 64
    with metal.counting() as reports:
        launch(call)
    names = ["experts_sort", "experts_many_up", "experts_many_down", "experts_combine"]
    assert [r.kernel for r in reports] == names
    products = reports[1:3]
    assert sum(r.matrix_flops for r in products) == 2 * 128 * 3 * 128 * 64
    tiles = 2 * 2 * (64 // 64 * (128 // 32) + 128 // 128 * (64 // 32))  # steps over K of 4 tiles of 32 tokens
    assert sum(r.barriers for r in products) == 2 * tiles
    assert reports[1].buffers["w13"] == (4 * 2 * 64 * 128 // 2, 0)  # a tile's weights once for 32 tokens
    # Weights are made by integers: floats are left for divisors, SwiGLU and routing weights.
    assert sum(r.flops for r in products) <= 128 * (12 * 64 + 4 * 128)
    # Each simdgroup reads all tokens of a step and its own weights, in bfloat; both are written once.
    step = 2 * 32 * (4 * (32 + 32) + 32 + 128)
    assert sum(r.threadgroup_read + r.threadgroup_written for r in products) == tiles * step


@pytest.mark.proof
def test_a_call_gives_the_same_bits_whatever_order_experts_have():
    """Tokens are sorted by index, and a token's parts are added in the order of its choices."""
    for tokens in (FEW, MANY):
        call = given(("bias",), Tq=tokens)
        new_ids = torch.tensor([2, 0, 1])  # the new name of each expert
        back = new_ids.argsort()
        names = ("w13", "w13_scale", "w2", "w2_scale", "bias13", "bias2")
        other = call | {n: call[n][back].contiguous() for n in names}
        kept = call["indices"] < 0
        other["indices"] = torch.where(kept, -1, new_ids[call["indices"].long()].int())
        assert torch.equal(run(call), run(other))


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("many", [0, 1])
def test_nothing_is_known_to_keep_apples_compiler_from_the_sources(dtype: torch.dtype, many: int):
    """For macOS 14 (Metal 3.1) and later, and in threadgroup memory that every GPU has."""
    variants = (
        (4, dict(BLOCK=16, ACT=0, SCALES=2, CODES=1, INDEX_BYTES=8)),
        (1, dict(BLOCK=32, ACT=3, SCALES=0, CODES=16, INDEX_BYTES=4)),
    )
    for width, variant in variants:
        seen = dtype if variant["ACT"] == 0 else torch.bfloat16
        stage = 24576 // (width * seen.itemsize) // 1024 * 1024
        tiles = dict(TILE_TOKENS=32 if width == 4 else 16, WIDTH=width)
        rows = dict(TOKENS=width, STAGE=stage, SIMDS=8, UP_PASSES=6, DOWN_PASSES=5, MOST_SLOTS=512)
        text = library.source("fp4_moe", variant | (tiles if many else rows) | dict(
            TYPE=dtype, SEEN=seen, GPTOSS=1, INTERLEAVED=variant["ACT"] == 0, MANY=many,
        ))  # fmt: skip
        assert [str(f) for f in lint(text)] == []
        compiled = metal.compile_shader(text)
        for kernel in dir(compiled):
            assert getattr(compiled, kernel).static_thread_group_memory_length <= 32768


def test_what_is_staged_fits_beside_sums_and_slots():
    for size, dtype in ((4, torch.float32), (2, torch.bfloat16)):
        for width in (1, 2, 4):
            for columns in (16, 2880, 4096, 1 << 16):
                call = given(dtype=dtype, N=32)
                problem = _problem(call)
                wide = type(problem)(**(vars(problem) | dict(up=_wide(problem.up, columns))))
                staged = family.few_stage(wide, width)
                assert staged % 1024 == 0 and staged * width * size <= 24576


def _wide(weights: Any, columns: int) -> Any:
    return type(weights)(**(vars(weights) | dict(columns=columns)))
