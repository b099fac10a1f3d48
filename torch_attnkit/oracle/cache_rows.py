"""What ops on encoded cache rows share: the rules of rows of Rb elements (D channels, rope_dim of them RoPE); sizes;
random signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.op import Call, Kernel
from torch_attnkit.core.spec import DTYPES, short
from torch_attnkit.formats import kv_cache

from . import sampling


def _dtype(c: Call) -> bool:
    """Numbers for format "none", bytes for the others. Raises TypeError, as the table does."""
    found, plain = c.arg.cache.dtype, c.arg.format == "none"
    if plain == (found == torch.uint8):
        accepted = f"accepted with format {c.arg.format!r}: {short(c.dtype) if plain else 'u8'}"
        raise TypeError(f"{c.op}: cache is {short(found)}, {accepted}")
    return True


def _size(c: Call) -> bool:
    size = c.dim["D"] if c.arg.format == "none" else kv_cache.row_bytes(c.arg.format, c.dim["D"], c.arg.rope_dim)
    if c.dim["Rb"] != size:
        given = f"format {c.arg.format!r}, D={c.dim['D']}, rope_dim={c.arg.rope_dim}"
        raise ValueError(f"{c.op}: cache has rows of Rb={c.dim['Rb']}, accepted with {given}: {size}")
    return True


# format "none" does not look at rope_dim.
RULES: dict[str, Callable[[Call], Any]] = {
    "dtype of the cache": _dtype,
    "rope_dim must be 0 to D": lambda c: c.arg.format == "none" or 0 <= c.arg.rope_dim <= c.dim["D"],
    "D - rope_dim must be a multiple of the block of format, 64 for fp8, 16 for nvfp4, 32 for mxfp4": lambda c: (
        c.arg.format == "none" or (c.dim["D"] - c.arg.rope_dim) % kv_cache.BLOCK[c.arg.format] == 0
    ),
    "size of a row of the cache": _size,
    "global_scale is accepted with format 'nvfp4' only": lambda c: (
        c.arg.format == "nvfp4" or c.arg.global_scale is None
    ),
}

# Sizes for cases. fmt: 0 none, 1 fp8, 2 nvfp4, 3 mxfp4; long=1: slots are int64; full=1: no slot is -1.
PARITY = {
    "plain": dict(R=7, D=33, Nc=20, rope=0, fmt=0, long=1),
    "fp8": dict(R=5, D=192, Nc=9, rope=64, fmt=1),
    "nvfp4": dict(R=5, D=112, Nc=9, rope=32, fmt=2),
    "mxfp4": dict(R=5, D=512, Nc=9, rope=64, fmt=3, long=1),
}
DEGENERATE = {
    "one": dict(R=1, D=64, Nc=1, rope=64, fmt=0),
    "empty": dict(R=0, D=64, Nc=4, rope=16, fmt=2),
}


def bench(*rows: int) -> dict[str, dict[str, int]]:
    """DeepSeek-V4's rows of every format, so many of them at once, of a cache of twice as many."""
    return {
        f"{name}-{r}": dict(R=r, D=512, Nc=max(2 * r, 64), rope=64, fmt=fmt, full=1)
        for fmt, name in enumerate(kv_cache.FORMATS)
        for r in rows
    }


def bytes_moved(dims: dict[str, int], dtype: torch.dtype) -> int:
    """R rows as numbers on one side, encoded on the other, and a slot each."""
    plain = dims["D"] * dtype.itemsize
    row = kv_cache.row_bytes(kv_cache.FORMATS[dims["fmt"]], dims["D"], dims["rope"]) if dims["fmt"] else plain
    return dims["R"] * (plain + row + 4)


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    """A format, its channels, slots, and how large numbers are; RoPE channels may be none, odd in number, or all."""
    k = d.kernel
    format = k.choice(kv_cache.FORMATS)
    facts: sampling.Facts = dict(
        dtype=k.choice(row.dtypes.split()), format=format, ids=k.choice(("i32", "i64")),
        D=k.choice((1, 2, 7, 33, 64, 129, 512, 576, 1100)), gs="", rope=0,
    )  # fmt: skip
    if format != "none":
        nope = kv_cache.BLOCK[format] * k.choice((0, 1, 1, 2, 3, 7, 7, 9))
        facts |= dict(rope=k.choice((0, 1, 2, 8, 24, 64, 64, 70)) or 64 * (nope == 0))
        facts |= dict(D=nope + facts["rope"])
    if format == "nvfp4" and k.random() < 0.7:
        facts |= dict(gs=d.pick((1.0, 731.37, 1 / 3, 2688.0, 1e-5)))
    most = max(1, min(300, d.limits.terms // (64 * facts["D"])))
    facts |= dict(R=0 if d.sometimes(0.02) else d.size(most), S=d.size(most), absent=d.pick((0, 0, 3, 10)))
    facts |= dict(x_by=d.pick((1, 1, 2.0**-120, 2.0**-135, 2.0**9, 2.0**100)), odd=d.pick(("", "", "nans", "infs")))
    return facts | {
        "seed": d.call.randrange(1 << 30), "kv.at": d.layout(2, (0,)), "cache.at": d.layout(2), "slot.at": d.layout(1)
    }  # fmt: skip


def format_of(f: sampling.Facts) -> dict[str, Any]:
    """The keyword arguments that both ops have."""
    return dict(format=f.get("format") or "none", rope_dim=f.get("rope", 0))


def generate_values(f: sampling.Facts, gen: torch.Generator, rows: int) -> torch.Tensor:
    """Rows (rows, D) of very different size. ``odd`` is what some NoPE channels are: which bits a NaN of a RoPE channel
    has after rounding, no contract says."""
    x = sampling.randn(gen, rows, f["D"])
    x = x * torch.exp2(torch.randint(-4, 5, (rows, 1), generator=gen).float()) * f.get("x_by", 1)
    if f.get("odd"):
        some = torch.rand(rows, f["D"], generator=gen) < 0.02
        some[:, f["D"] - f.get("rope", 0) :] = False
        x = x.masked_fill(some, dict(nans=torch.nan, infs=torch.inf)[f["odd"]])
    return sampling.cast(x, f["dtype"])


def generate_slots(f: sampling.Facts, gen: torch.Generator, *, distinct: bool) -> torch.Tensor:
    """(R,) rows of a cache of S rows, -1 where a row has none: of every ``absent``-th, and past the last one."""
    R, S = f["R"], f["S"]
    if distinct:
        slot = torch.nn.functional.pad(torch.randperm(S, generator=gen)[:R], (0, max(0, R - S)), value=-1)
    else:
        slot = torch.randint(0, S, (R,), generator=gen)
    if f.get("absent"):
        slot[:: f["absent"]] = -1
    return slot.to(DTYPES[f["ids"]])
