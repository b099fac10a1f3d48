"""Cases of the ops that quantise rows of numbers in blocks under scales, and of those that bring them back; and their
random signatures.

Of a case R x H rows of K numbers; R -1: one row without batch axes.
"""

from __future__ import annotations

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.formats import nvfp4

from . import fp4, sampling

Dims = dict[str, int]
_ORDINARY = {"nvfp4": range(16, 96), "mxfp4": range(120, 132)}  # bytes of scales of ordinary size
# Of random signatures: what numbers are multiplied by, and global scales.
_SIZES = (1.0, 1.0, 2.0**-8, 2.0**-14, 2.0**-120, 2.0**-135, 2.0**9, 2.0**100)
_GLOBAL = (1.0, 731.37, 1 / 3, 2688.0, 1e-5, 2.0**-100, 1e-40, 2.0**60, nvfp4.GLOBAL_SCALE_MAX)
BENCH = {f"{r}x{k}": dict(R=r, H=1, K=k) for r in (1, 128, 8192) for k in (4096, 7168)}


def parity(block: int, **special: int) -> dict[str, Dims]:
    """For blocks of so many numbers; ``special`` is what else the case of several heads switches on."""
    return {
        "vector": dict(R=-1, H=1, K=3 * block),
        "heads": dict(R=3, H=5, K=5 * block) | special,
        "tiles": dict(R=65, H=2, K=17 * block),
        "large": dict(R=130, H=1, K=8192),
    }


def degenerate(block: int) -> dict[str, Dims]:
    return {
        "one": dict(R=1, H=1, K=block),
        "no_columns": dict(R=2, H=3, K=0),
        "empty": dict(R=0, H=2, K=64),
    }


def _batch(dims: Dims) -> tuple[int, ...]:
    return () if dims["R"] < 0 else (dims["R"], dims["H"])


def scale_layout(features: tuple[str, ...]) -> str:
    return "128x4" if "swizzled" in features else "linear"


def values(dims: Dims, dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    """Rows (..., K) to quantise; with ``odd`` there are nan and infinities among them."""
    x = fp4.spread(gen, dtype, *_batch(dims), dims["K"])
    if dims.get("odd"):
        x[0, 0, :3] = torch.tensor((torch.nan, torch.inf, -torch.inf))
        x[1, :, 1] = torch.nan
    return x


def coded(dims: Dims, format: str, layout: str, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to bring back: every code under scales of ordinary size; with ``f8`` these are 8-bit floats."""
    return _coded((*_batch(dims), dims["K"]), format, _ORDINARY[format], layout, bool(dims.get("f8")), gen)


def _coded(
    shape: tuple[int, ...], format: str, sizes: range, layout: str, f8: bool, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of (..., K) numbers and their scales, whose bytes are ``sizes``, as bytes or as 8-bit floats."""
    *batch, k = shape
    codes = torch.randint(0, 256, (*batch, k // 2), generator=gen, dtype=torch.uint8)  # (..., K/2)
    blocks = (*batch, k // fp4.BLOCK[format])
    scale = torch.randint(sizes.start, sizes.stop, blocks, generator=gen, dtype=torch.uint8)
    scale = fp4.store_scale(scale, layout)  # (..., K/block) or one matrix
    return codes, scale.view(fp4.SCALE_DTYPE[format]) if f8 else scale


def elements(dims: Dims) -> int:
    return abs(dims["R"]) * dims["H"] * dims["K"]


def bytes(dims: Dims, dtype: torch.dtype, block: int) -> int:
    """Of the numbers on one side, and of half a byte for each and a scale a block on the other."""
    n = elements(dims)
    return n * dtype.itemsize + n // 2 + n // block


def _sample(d: sampling.Sampler, row: Kernel, block: int) -> sampling.Facts:
    """The axes of the rows, as ``_shape`` reads them, K, the layout of the scales, and a global scale."""
    k, on = d.kernel, row.features.split()
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), rank=k.choice((0, 1, 2, 2, 3)), layout=k.choice(("", "128x4")),
        gs=d.pick(_GLOBAL) if "global_scale" in on and k.random() < 0.7 else "",
        K=block * (0 if d.sometimes(0.02) else d.pick((1, 2, 3, 4, 5, 7, 8, 12, 17, 33))),
    )  # fmt: skip
    most = max(1, d.limits.terms // (max(facts["K"], 1) * 64))
    axes = [0 if d.sometimes(0.02) else d.pick((1, 2, 3, 5)) for _ in range(3)]
    axes[d.call.randrange(3)] = d.size(min(most, 300))
    while axes[0] * axes[1] * axes[2] > most:
        axes[axes.index(max(axes))] //= 2
    return facts | dict(zip("ABC", axes, strict=True)) | dict(seed=d.call.randrange(1 << 30))


def sample_values(d: sampling.Sampler, row: Kernel, block: int) -> sampling.Facts:
    """Of numbers to quantise: how large they are, and which odd ones are among them."""
    facts = _sample(d, row, block)
    facts |= dict(x_by=d.pick(_SIZES), odd=d.pick(("", "nans", "infs", "all")), ties=int(d.sometimes(0.4)))
    return facts | {"x.at": d.layout(facts["rank"] + 1, range(facts["rank"]))}


def sample_codes(d: sampling.Sampler, row: Kernel, block: int) -> sampling.Facts:
    """Of codes to bring back: what their scales are."""
    facts = _sample(d, row, block) | dict(f8=d.pick(("", 1)), any=d.pick(("", 1)))
    layouts = {"codes.at": d.layout(facts["rank"] + 1, range(facts["rank"]))}
    axes = 2 if facts["layout"] else facts["rank"] + 1
    return facts | layouts | {"scale.at": d.layout(axes, () if facts["layout"] else range(facts["rank"]))}


def _shape(f: sampling.Facts) -> tuple[int, ...]:
    """The batch axes: the first ``rank`` of A, B, C."""
    return (f["A"], f["B"], f["C"])[: f["rank"]]


def generate_values(f: sampling.Facts, gen: torch.Generator) -> torch.Tensor:
    """Rows of very different size; ``ties`` are multiples of a quarter, ``odd`` names what a tenth of them become."""
    x = sampling.randn(gen, *_shape(f), f["K"])
    size = torch.exp2(torch.randint(-4, 5, (*x.shape[:-1], 1), generator=gen).float())
    x = ((x * 8).round() / 4 if f.get("ties") else x * size) * f.get("x_by", 1.0)
    for value in dict(
        nans=(torch.nan,), infs=(torch.inf, -torch.inf), all=(torch.nan, -torch.nan, torch.inf, -0.0)
    ).get(f.get("odd", ""), ()):
        x = x.masked_fill(torch.rand(*x.shape, generator=gen) < 0.02, value)
    return sampling.cast(x, f["dtype"])


def generate_codes(f: sampling.Facts, gen: torch.Generator, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Any codes under scales of ordinary size, or under any byte with ``any``; ``f8``: as 8-bit floats."""
    sizes = range(256) if f.get("any") else _ORDINARY[format]
    return _coded((*_shape(f), f["K"]), format, sizes, layout_of(f), bool(f.get("f8")), gen)


def layout_of(f: sampling.Facts) -> str:
    """Of the scales."""
    return f.get("layout") or "linear"


def global_of(f: sampling.Facts) -> torch.Tensor | None:
    return None if f.get("gs", "") == "" else torch.tensor(f["gs"])
