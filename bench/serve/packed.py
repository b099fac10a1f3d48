"""FP4 experts drawn by name: codes and scales as checkpoints have them, and the same numbers in bfloat16.

bfloat16 holds the products of codes and scales. They are unpacked by PyTorch alone: what is judged has no part in what
judges, and a process without a compiler draws them too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch

MXFP4, NVFP4 = "mxfp4", "nvfp4"
BLOCK = {MXFP4: 32, NVFP4: 16}  # numbers that share a scale of one byte
_RMS_OF_CODES = 2.93  # of the sixteen E2M1 numbers
_RMS_OF_SCALES = 1.46  # of the eight E4M3 numbers from 1 to 1.875, whose bytes begin here
_ONE = 0x38
_INPUT_SCALE = 2.0**-9  # of activations up to 5.25; kernels with activations of 16 bits do not use it
Shape = tuple[int, ...]


def is_expert(name: str) -> bool:
    """Whether it is a matrix of all experts, which checkpoints have in FP4."""
    return name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))


def generator(name: str, device: torch.device) -> torch.Generator:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
    return torch.Generator(device).manual_seed(seed)


def checkpoint(
    form: str, name: str, shape: Shape, device: torch.device, *, packed: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts ``name`` as tensors of a published checkpoint, or of one that is not packed."""
    if form == NVFP4:
        yield from _one_by_one(name, shape, device, packed=packed)
    elif packed:
        codes, scales = mxfp4(name, shape, device)
        yield f"{name}_blocks", codes.unflatten(-1, (-1, BLOCK[MXFP4] // 2))
        yield f"{name}_scales", scales
    else:
        yield name, dense(form, name, shape, device)


def dense(form: str, name: str, shape: Shape, device: torch.device) -> torch.Tensor:
    """The experts ``name`` in bfloat16, as transformers has them. Expert by expert, for an index takes 8 bytes."""
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if form == NVFP4:
        for expert, *parts in zip(out, *nvfp4(name, shape, device), strict=True):
            expert.copy_(_of_nvfp4(*parts))
    else:
        for expert, code, scale in zip(out, *mxfp4(name, shape, device), strict=True):
            blocks = _values(code).unflatten(-1, (-1, BLOCK[MXFP4]))
            expert.copy_(torch.ldexp(blocks, scale.int()[..., None] - 127).flatten(-2).T)
    return out


def mxfp4(name: str, shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts (E, K, N): codes (E, N, K / 2) and scales (E, N, K / 32); numbers of about N(0, 1 / K)."""
    experts, k, n = shape
    codes = torch.empty(experts, n, k // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(experts, n, k // BLOCK[MXFP4], dtype=torch.uint8, device=device)
    source = generator(name, codes.device)
    lowest = 127 + math.floor(math.log2(k**-0.5 / _RMS_OF_CODES))  # at K 2880 2^-8, and 2^-7
    return codes.random_(0, 256, generator=source), scales.random_(lowest, lowest + 2, generator=source)


def nvfp4(name: str, shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts (E, N, K): codes (E, N, K / 2), scales in E4M3 (E, N, K / 16), and what all of an expert is multiplied
    by, one of two powers of two (E,) float32; numbers of about N(0, 1 / K)."""
    experts, n, k = shape
    codes = torch.empty(experts, n, k // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(experts, n, k // BLOCK[NVFP4], dtype=torch.uint8, device=device)
    powers = torch.empty(experts, dtype=torch.int32, device=device)
    source = generator(name, codes.device)
    codes.random_(0, 256, generator=source)
    scales.random_(_ONE, _ONE + 8, generator=source)
    lowest = math.floor(math.log2(k**-0.5 / (_RMS_OF_CODES * _RMS_OF_SCALES)))
    powers.random_(lowest, lowest + 2, generator=source)
    return codes, scales.view(torch.float8_e4m3fn), torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)


def _one_by_one(name: str, shape: Shape, device: torch.device, *, packed: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts as Model Optimizer writes them, or unpacked: matrices by themselves, gate before up."""
    home, _, kind = name.rpartition(".")
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for e, (codes, scales, power) in enumerate(zip(*nvfp4(name, shape, device), strict=True)):
        matrices = {"weight": codes, "weight_scale": scales} if packed else {"weight": _of_nvfp4(codes, scales, power)}
        of_all = {"weight_scale_2": power, "input_scale": torch.full_like(power, _INPUT_SCALE)} if packed else {}
        for i, part in enumerate(names):
            found = {key: matrix.chunk(len(names))[i] for key, matrix in matrices.items()} | of_all
            yield from ((f"{home}.{e}.{part}.{key}", tensor) for key, tensor in found.items())


def _of_nvfp4(codes: torch.Tensor, scales: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
    """One expert (N, K) in bfloat16."""
    blocks = _values(codes).unflatten(-1, (-1, BLOCK[NVFP4])).float()
    return (blocks * scales.float()[..., None] * power).flatten(-2).bfloat16()


def _values(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 numbers in bfloat16, two of a byte side by side, the lower four bits first."""
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.bfloat16, device=codes.device)
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return torch.cat([positive, -positive])[both.long()]
