"""NVFP4 under a global scale of 0, infinity or NaN: every op that makes codes or reads them gives one result on every
target, to the bit but for which NaN it is."""

from __future__ import annotations

import pytest
import torch

from tests.targets import needs, on

pytestmark = [pytest.mark.simulator, pytest.mark.seconds(300)]
OPS = torch.ops.attnkit
ODD = (0.0, torch.inf, torch.nan)
D, ROPE = 64, 16


def values() -> torch.Tensor:
    """(8, 64): of all sizes, zeros of either sign, whole blocks of them, infinities and NaN."""
    x = torch.randn(8, D, generator=torch.Generator().manual_seed(0))
    x[1], x[5], x[2, :16], x[6, ::3] = 0.0, -0.0, 0.0, 0.0
    x[3, 5], x[3, 20], x[4, 7], x[7] = torch.inf, -torch.inf, torch.nan, x[7] * 1e-30
    return x


def made(x: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
    """Codes and scales by each op that makes them, and the rows of caches."""
    c, s = torch.ones(8, ROPE // 2), torch.zeros(8, ROPE // 2)
    slot, row = torch.arange(8), (D - ROPE) // 2 + 2 * ROPE + (D - ROPE) // 16 + 1
    caches = [torch.zeros(8, row, dtype=torch.uint8) for _ in range(2)]
    kv = x.clone()
    kv[:, D - ROPE :] = 1.0  # RoPE channels have no scale
    OPS.kv_cache_write(kv, caches[0], slot, scale, format="nvfp4", rope_dim=ROPE)
    OPS.rope_kv_cache_write(x[:, None], kv, caches[1], slot, c, s, scale, format="nvfp4", rope_dim=ROPE)
    rotated = OPS.inverse_rope_fp4(x[:, None], c, s, scale)
    return [*OPS.nvfp4_quantize(x, scale), *OPS.nvfp4_quantize(x, scale, scale_layout="128x4"), *rotated, *caches]


def read(scale: torch.Tensor) -> list[torch.Tensor]:
    """Numbers by each op that reads codes: of every code under every scale that is a number, 0 among them."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(8).view(-1, 8)  # (256, 8)
    byte = torch.arange(256, dtype=torch.uint8)[:, None]
    row = torch.zeros(256, 12, dtype=torch.uint8)
    row[:, :8], row[:, 8:9] = codes, byte
    gathered = OPS.kv_cache_gather(row, torch.arange(256), scale, format="nvfp4", head_dim=16, rope_dim=0)
    return [OPS.nvfp4_dequantize(codes, byte, scale, dtype=d) for d in (torch.float32, torch.bfloat16)] + [gathered]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("target", ["metal", "sm90", pytest.param("sm100", marks=pytest.mark.proof)])
def test_every_target_gives_what_the_definition_gives(target: str, value: float):
    needs(target)
    x, scale = values(), torch.tensor(value)
    want, exact_values = made(x, scale), read(scale)
    with on(target):
        assert all(map(torch.equal, made(x, scale), want))
        for got, exact in zip(read(scale), exact_values, strict=True):
            assert torch.equal(got.isnan(), exact.isnan())
            assert torch.equal(got.nan_to_num(7.0, torch.inf, -torch.inf), exact.nan_to_num(7.0, torch.inf, -torch.inf))


def test_what_the_contract_says_of_each():
    x = torch.tensor([1.0, -2.0, 0.0, -0.0] * 4)
    codes, scale = OPS.nvfp4_quantize(x, torch.tensor(0.0))
    assert scale.tolist() == [0] and codes.tolist() == [0x80] * 8
    codes, scale = OPS.nvfp4_quantize(x, torch.tensor(torch.inf))
    assert scale.tolist() == [126] and codes.tolist() == [0xF7, 0x77] * 4  # 448, and 0 times infinity is NaN
    for value in (torch.inf, torch.nan):
        assert OPS.nvfp4_quantize(torch.zeros(16), torch.tensor(value))[1].tolist() == [127]
    codes, scale = OPS.nvfp4_quantize(x, torch.tensor(500.0))
    for value, one in ((0.0, torch.inf), (torch.inf, 0.0), (torch.nan, torch.nan)):
        back = OPS.nvfp4_dequantize(codes, scale, torch.tensor(value))
        assert torch.equal(back[::4], torch.full((4,), one)) or bool(back[::4].isnan().all() and one != one)
        assert not back[2::4].any() and not back[3::4].any()
