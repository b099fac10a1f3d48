"""Inputs of sparse_fmha_inverse_rope_fp4 for parity and bench: those of sparse_fmha_with_swa, and angles."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core.op import Kernel
from torch_attnkit.ops.sparse_fmha_with_swa import cases as attention
from torch_attnkit.oracle import fp4, fp4_rows, sampling

_FORMATS = {16: "nvfp4", 32: "mxfp4"}
# R2 rotated pairs; blk numbers under a scale of the result; t_angles=1: cos and sin in the model dtype.
PARITY = {
    "prefill": attention.PARITY["prefill"] | dict(R2=32, groups=2, blk=16),
    "decode": attention.PARITY["decode"] | dict(R2=8, groups=4, blk=32, t_angles=1),
    "deepseek": attention.PARITY["deepseek"] | dict(R2=32, groups=3, blk=16, t_angles=1),
    "long": attention.PARITY["long"] | dict(R2=5, groups=5, blk=32),
    "fp8": attention.PARITY["fp8"] | dict(R2=32, groups=1, blk=32),
    "nvfp4": attention.PARITY["nvfp4"] | dict(R2=32, groups=5, blk=16),
    "mxfp4": attention.PARITY["mxfp4"] | dict(R2=32, groups=1, blk=32),
}
DEGENERATE = {
    "one": attention.DEGENERATE["one"] | dict(R2=1, groups=2, blk=16),
    "nothing": attention.DEGENERATE["nothing"] | dict(R2=32, groups=3, blk=32),
    "empty": attention.DEGENERATE["empty"] | dict(R2=3, groups=1, blk=16),
    "no_rope": dict(Tq=2, Hq=4, R=1, S=9, C=4, K=2, D=64, window=4, Ps=3, R2=0, groups=1, blk=16),
    "all_rope": dict(Tq=3, Hq=2, R=1, S=9, C=4, K=2, D=128, window=4, Ps=3, R2=64, groups=2, blk=16),
}
EXTRAS = (
    ("nan:q", "decode", "all"),
    ("nan:swa_kv", "prefill", "all"),
    ("nan:compressed_kv", "prefill", "all"),
    ("nan:sink", "decode", "sink"),
    ("nan:cos", "prefill", "all"),
    ("nan:sin", "decode"),
)
BENCH = {
    f"{name}-{_FORMATS[blk]}": attention.BENCH[name] | dict(R2=32, groups=8, blk=blk)
    for name in ("csa-64h-1", "csa-64h-32", "csa-64h-128", "csa-64h-4096", "csa-128h-4096", "hca-64h-4096x160")
    for blk in (16, 32)
}


def _with_angles(
    call: tuple[tuple[Any, ...], dict[str, Any]], dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator,
    features: tuple[str, ...] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """A call of attention as one of this op."""
    args, kwargs = call
    angle = 6.28 * torch.rand(dims["Tq"], dims["R2"], generator=gen)  # (Tq, R2)
    cos, sin = (t.to(dtype if dims.get("t_angles") else torch.float32) for t in (angle.cos(), angle.sin()))
    o_global = fp4.global_scales(gen) if "o_global" in features else None  # only nvfp4 has one
    kwargs = {name: value for name, value in kwargs.items() if name != "normalize"}
    kwargs |= dict(
        groups=dims["groups"],
        o_format="nvfp4" if o_global is not None else _FORMATS[dims["blk"]],
        scale_layout="128x4" if "swizzled" in features else "linear",
    )
    return (*args[:3], cos, sin, *args[3:], o_global), kwargs


def make(
    dims: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _with_angles(attention.make(dims, dtype, features, gen), dims, dtype, gen, features)


def bench(dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As of attention; angles in float32, scales linear."""
    return _with_angles(attention.bench(dims, dtype, gen), dims, dtype, gen)


def bytes(dims: dict[str, int], dtype: torch.dtype) -> int:
    """As attention reads, without its output; half a byte a number and the scales are written."""
    elements = dims["Tq"] * dims["Hq"] * dims["D"]
    inputs = attention.bytes(dims, dtype) - elements * dtype.itemsize - dims["Tq"] * dims["Hq"] * 4
    return inputs + elements // 2 + elements // dims["blk"] + dims["Tq"] * dims["R2"] * 8


def flops(dims: dict[str, int]) -> int:
    return attention.flops(dims) + dims["Tq"] * dims["Hq"] * (2 * dims["D"] + 6 * dims["R2"])


def sample(d: sampling.Sampler, row: Kernel) -> sampling.Facts:
    """``o_gs`` is the result's global scale, ``blk`` its block. Heads are in one group, in groups of one, or in two."""
    k, facts = d.kernel, attention.sample(d, row)
    facts |= dict(blk=k.choice((16, 16, 32)), layout=k.choice(("", "", "128x4")), t_angles=k.choice((0, 1)))
    facts |= dict(R2=min(facts["D"] // 2, k.choice((32, 32, 0, 1, 5, 8, 33, 256))), o_gs="")
    if facts["blk"] == 16 and k.random() < 0.7:
        facts |= dict(o_gs=d.pick((1.0, 731.37, 1 / 3, 2688.0, 1e-5)))
    facts |= dict(groups=d.pick([n for n in (1, 1, 2, facts["H"]) if facts["H"] % n == 0]))
    return facts | {"cos.at": d.layout(2, (0,)), "sin.at": d.layout(2, (0,))}


def generate(f: sampling.Facts, gen: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = attention.generate(f, gen)
    cos, sin = (2 * torch.rand(len(args[0]), f.get("R2") or 0, generator=gen) - 1 for _ in range(2))
    cos, sin = (sampling.cast(t, f["dtype"] if f.get("t_angles") else "f32") for t in (cos, sin))
    o_global = None if f.get("o_gs", "") == "" else torch.tensor(f["o_gs"])
    kwargs = {name: value for name, value in kwargs.items() if name != "normalize"}
    kwargs |= dict(groups=f.get("groups") or 1, o_format=_FORMATS[f["blk"]], scale_layout=fp4_rows.layout_of(f))
    return (*args[:3], cos, sin, *args[3:], o_global), kwargs
