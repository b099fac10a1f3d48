"""E4M3 without its instructions: bit for bit what they give, for every byte and around every border."""

from __future__ import annotations

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import cutlass.cute as cute  # noqa: E402

from torch_attnkit.cuda import e4m3  # noqa: E402
from torch_attnkit.cuda.limits import tracing  # noqa: E402
from torch_attnkit.sim import ptx  # noqa: E402

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore")]
THREADS = 256


@cute.kernel
def _encode(mCodes: cute.Tensor, mX: cute.Tensor):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    mCodes[i] = e4m3.pack([mX[i, j] for j in range(4)])


@cute.jit
def encode(mCodes: cute.Tensor, mX: cute.Tensor):
    _encode(mCodes, mX).launch(grid=(cute.size(mCodes) // THREADS, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def _decode(mX: cute.Tensor, mPairs: cute.Tensor):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    mX[i, 0], mX[i, 1] = e4m3.values(mPairs[i])


@cute.jit
def decode(mX: cute.Tensor, mPairs: cute.Tensor):
    _decode(mX, mPairs).launch(grid=(cute.size(mPairs) // THREADS, 1, 1), block=(THREADS, 1, 1))


def run(host, arch: str, *tensors: torch.Tensor) -> str:
    with tracing(arch):
        compiled = ptx.compile(host, *tensors, arch=arch)
        ptx.run(compiled, *tensors)
    return compiled.__ptx__


def inputs() -> torch.Tensor:
    """All of float16, which has every number of E4M3 and every tie, and neighbours of each in float32; what is none."""
    exact = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    bits = exact.view(torch.int32)
    odd = torch.tensor([1e38, -1e38, 1e-45, torch.inf, -torch.inf, torch.nan, -torch.nan] + [0.0] * 1017)
    return torch.cat([bits - 1, bits, bits + 1, odd.view(torch.int32)]).view(torch.float32).view(-1, 4)


def test_codes_are_those_of_the_instruction_and_of_torch():
    x = inputs()
    got = {arch: torch.zeros(len(x), dtype=torch.int32) for arch in ("sm80", "sm89")}
    text = {arch: run(encode, arch, codes, x) for arch, codes in got.items()}
    assert ".e4m3x2" in text["sm89"] and ".e4m3x2" not in text["sm80"]
    assert torch.equal(got["sm80"], got["sm89"])
    codes = got["sm80"].view(torch.uint8).view_as(x)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes[~x.isnan()], want[~x.isnan()]) and (codes[x.isnan()] == 0x7F).all()


def test_every_byte_is_its_number():
    pairs = torch.arange(1 << 16, dtype=torch.int32)
    got = {arch: torch.zeros(1 << 16, 2) for arch in ("sm80", "sm89")}
    for arch, x in got.items():
        run(decode, arch, x, pairs)
    want = torch.stack([pairs & 255, pairs >> 8], -1).to(torch.uint8).view(torch.float8_e4m3fn).float()
    for x in got.values():
        assert torch.equal(x.nan_to_num(999), want.nan_to_num(999))
