"""Others' Metal kernels for experts with MXFP4 weights, counted in the simulator: MLX, llama.cpp's ggml, gpt-oss.

Their sources are read from checkouts and run as they are; nothing of them is in this repository. Each result is
compared with the product in float64 before its counts are printed. A count is no time.

    python -m bench.peers.metal_moe --checkouts FOLDER           # FOLDER/mlx, FOLDER/ggml, FOLDER/gpt-oss
    python -m bench.peers.metal_moe --own --tokens 4             # fp4_moe of this package: a layer, and each product
"""

from __future__ import annotations

import argparse
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torch_attnkit.core import config
from torch_attnkit.sim import metal
from torch_attnkit.sim.metal import roofline

FOLDERS = {"mlx": "mlx/backend/metal/kernels", "ggml": "src/ggml-metal", "gpt-oss": "gpt_oss/metal/source"}
_BLOCK = 32  # numbers under one scale
_MLX_VERSION = 310  # from 3.2 on MLX logs by metal::os_log, which the simulator has not
_GPT_OSS_SCALE = 14  # its codes become halves that are 2^14 too small, which its scales make good


@dataclass(frozen=True)
class Product:
    """One product of a layer: E experts of N rows and K columns, T tokens that each have ``top`` experts."""

    E: int
    N: int
    K: int
    T: int
    top: int
    x: torch.Tensor  # (T, K) float32
    ids: torch.Tensor  # (T, top) int32
    codes: torch.Tensor  # (E, N, K/2) uint8
    scale: torch.Tensor  # (E, N, K/32) uint8

    @property
    def uses(self) -> int:
        """Products of a weight and a number of a token."""
        return self.T * self.top * self.N * self.K

    def expected(self) -> torch.Tensor:
        """(T, top, N) float64."""
        shape = (self.E, self.N, self.K // _BLOCK, _BLOCK)
        w = (_elements(self.codes).view(shape) * _powers(self.scale)[..., None]).view(self.E, self.N, self.K)
        rows = [torch.stack([w[e] @ x for e in ids]) for x, ids in zip(self.x.double(), self.ids.tolist(), strict=True)]
        return torch.stack(rows)


def _elements(codes: torch.Tensor) -> torch.Tensor:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat([values, -values])
    return torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).flatten(-2)


def _powers(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.double() - 127)


def product(E: int, N: int, K: int, T: int, top: int, seed: int = 0) -> Product:
    """Random weights and numbers; a token's experts differ."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(E, generator=g)[:top] for _ in range(T)]).to(torch.int32)
    return Product(
        E, N, K, T, top, torch.randn(T, K, generator=g), ids,
        torch.randint(0, 256, (E, N, K // 2), generator=g, dtype=torch.uint8),
        torch.randint(120, 126, (E, N, K // _BLOCK), generator=g, dtype=torch.uint8),
    )  # fmt: skip


def _launch(
    kernel: Any, args: Sequence[Any], groups: tuple[int, int, int], group: tuple[int, int, int], **more: Any
) -> None:
    threads = tuple(n * size for n, size in zip(groups, group, strict=True))
    kernel(*args, threads=threads, group_size=group, **more)


def _bytes(pattern: str, *values: Any) -> torch.Tensor:
    """A structure of the host's, as bytes."""
    return torch.frombuffer(bytearray(struct.pack(pattern, *values)), dtype=torch.uint8)


def _int(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _long(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# ---- MLX: mlx/backend/metal/quantized.cpp says how it launches them.


@cache
def _mlx(root: Path, kernels: tuple[str, ...]) -> metal.Library:
    text = (root / FOLDERS["mlx"] / "fp_quantized.metal").read_text()
    with metal.settings(version=_MLX_VERSION):
        return metal.compile_foreign(text, folders=[str(root)], kernels=kernels)


def mlx_gather_qmv(root: Path, p: Product) -> torch.Tensor:
    """Few tokens: one threadgroup of two simdgroups makes 8 rows of one token and expert."""
    fast = p.N % 8 == 0 and p.K % 512 == 0
    name = f"mxfp4_gather_qmv{'_fast' if fast else ''}_bfloat16_t_gs_32_b_4"
    y = torch.full((p.T * p.top, p.N), float("nan"), dtype=torch.bfloat16)
    tokens = torch.arange(p.T, dtype=torch.int32).repeat_interleave(p.top)
    args = [
        p.codes, p.scale, None, p.x.bfloat16(), tokens, p.ids.reshape(-1), y, _int(p.K), _int(p.N),
        _int(1), _int(p.T, 1, p.K), _long(p.K, p.K, 1),
        _int(1), _int(p.E, p.N, p.K // 8), _long(p.N * p.K // 8, p.K // 8, 1),
        _long(p.N * p.K // _BLOCK, p.K // _BLOCK, 1),
        _int(1), _int(p.T * p.top), _long(1), _long(1),
    ]  # fmt: skip
    _launch(getattr(_mlx(root, (name,)), name), args, (1, -(-p.N // 8), p.T * p.top), (32, 2, 1))
    return y.view(p.T, p.top, p.N)


def mlx_gather_qmm_rhs(root: Path, p: Product) -> torch.Tensor:
    """Many tokens, sorted by expert before: tiles of 16 rows and 32 columns."""
    name = "mxfp4_gather_qmm_rhs_nt_bfloat16_t_gs_32_b_4_bm_16_bn_32_bk_32_wm_1_wn_2"
    M = p.T * p.top
    order = p.ids.reshape(-1).argsort(stable=True)
    x = p.x.bfloat16().repeat_interleave(p.top, 0)[order].contiguous()
    y = torch.full((M, p.N), float("nan"), dtype=torch.bfloat16)
    kernel = _mlx(root, (name,)).function(name, {200: M % 16 == 0, 201: p.N % 32 == 0, 202: p.K % 32 == 0})
    args = [x, p.codes, p.scale, p.ids.reshape(-1)[order].contiguous(), y, _int(M), _int(p.N), _int(p.K)]
    _launch(kernel, args, (-(-p.N // 32), -(-M // 16), 1), (32, 2, 1))
    out = torch.empty_like(y)
    out[order] = y
    return out.view(p.T, p.top, p.N)


# ---- ggml: src/ggml-metal/ggml-metal-ops.cpp and ggml-metal-device.cpp say how it launches them.


@cache
def _ggml(root: Path) -> metal.Library:
    folder = root / FOLDERS["ggml"]
    names = [f"kernel_mul_m{kind}_id_mxfp4_f32" for kind in "vm"] + ["kernel_mul_mm_id_map0_ne20_4"]
    text = (folder / "ggml-metal.metal").read_text()
    return metal.compile_foreign(text, folders=[str(folder), str(folder.parent)], kernels=names)


def _ggml_blocks(p: Product) -> torch.Tensor:
    """(E, N, K/32, 17): a scale and 16 bytes, whose low halves are the first 16 numbers."""
    halves = torch.stack([p.codes & 15, p.codes >> 4], -1).view(p.E, p.N, p.K // _BLOCK, 2, 16)
    return torch.cat([p.scale[..., None], halves[..., 0, :] | halves[..., 1, :] << 4], -1).contiguous()


def ggml_mul_mv_id(root: Path, p: Product) -> torch.Tensor:
    """Fewer than 32 tokens: one threadgroup of two simdgroups makes 4 rows of one token and expert."""
    simdgroups, rows = 2, 2
    blocks, y = _ggml_blocks(p), torch.full((p.T, p.top, p.N), float("nan"))
    row, expert = blocks.stride(1), blocks.stride(0)
    args = _bytes(
        "@2iQ3i3Q4i3Q2iQi0Q", p.top, p.T, 4 * p.top, p.K, p.N, p.E, 17, row, expert,
        p.K, 1, p.T, 1, 4, 4 * p.K, 4 * p.K, p.N, p.top, 4 * p.N, rows,
    )  # fmt: skip
    kernel = _ggml(root).function("kernel_mul_mv_id_mxfp4_f32", {600: simdgroups, 602: 1, 603: 1, 604: 1})
    groups = (-(-p.N // (rows * simdgroups)), 1, p.T * p.top)
    _launch(kernel, [args, blocks, p.x, y, p.ids], groups, (32, simdgroups, 1), threadgroup={0: 128})
    return y


def ggml_mul_mm_id(root: Path, p: Product) -> torch.Tensor:
    """From 32 tokens on: a launch that lists the tokens of experts, and tiles of 64 rows and 32 tokens."""
    blocks, y = _ggml_blocks(p), torch.full((p.T, p.top, p.N), float("nan"))
    counts, lists = torch.zeros(p.E, dtype=torch.int32), torch.zeros(p.E, p.T, dtype=torch.int32)
    row, expert = blocks.stride(1), blocks.stride(0)
    mapped = _bytes("@3i2Q2iQ", p.E, p.K, 1, 4 * p.K, 4 * p.K, p.T, p.top, 4 * p.top)
    kernel = getattr(_ggml(root), f"kernel_mul_mm_id_map0_ne20_{p.top}")
    shared = {0: -(-2 * p.E * p.top // 16) * 16}
    _launch(kernel, [mapped, p.ids, counts, lists], (1, 1, 1), (p.E, 1, 1), threadgroup=shared)
    args = _bytes(
        "@2i3Qi4Q4i2h0Q", p.K, p.E, row, expert, p.E * expert, 1, 4, 4 * p.K, 4 * p.K, 4 * p.K * p.T,
        p.top, p.T, p.N, p.top, 1, 1,
    )  # fmt: skip
    kernel = _ggml(root).function("kernel_mul_mm_id_mxfp4_f32", {700: p.K % 32 != 0})
    groups = (-(-p.T // 32), -(-p.N // 64), p.E)
    _launch(kernel, [args, blocks, p.x, counts, lists, y], groups, (128, 1, 1), threadgroup={0: 8192})
    return y


# ---- gpt-oss: gpt_oss/metal/source/metal-kernels.c says how it launches them.


@cache
def _gpt_oss(root: Path) -> metal.Library:
    folder = root / FOLDERS["gpt-oss"]
    return metal.compile_foreign((folder / "moematmul.metal").read_text(), folders=[str(folder / "include")])


def _gpt_oss_weights(p: Product) -> tuple[torch.Tensor, int, list[torch.Tensor]]:
    """An expert's codes, scales and bias lie behind each other: all of it, bytes of an expert, where each begins."""
    parts = [
        p.codes.view(p.E, -1),
        (p.scale + _GPT_OSS_SCALE).view(p.E, -1),
        torch.zeros(p.E, 2 * p.N, dtype=torch.uint8),
    ]
    size = -(-sum(t.shape[1] for t in parts) // 16) * 16
    whole = torch.zeros(p.E * size, dtype=torch.uint8)
    begin, views = 0, []
    for t in parts:
        whole.view(p.E, size)[:, begin : begin + t.shape[1]] = t
        views.append(whole[begin:])
        begin += t.shape[1]
    views[2] = views[2].view(torch.bfloat16)
    return whole, size, views


def gpt_oss_matmul(root: Path, p: Product) -> torch.Tensor:
    """Few tokens: a simdgroup makes one row of one token and expert, six of them are a threadgroup."""
    simdgroups = 6
    _, size, weights = _gpt_oss_weights(p)
    predicted = torch.stack([p.ids.reshape(-1), torch.zeros(p.T * p.top, dtype=torch.int32)], -1).contiguous()
    y = torch.full((p.top, p.T, p.N), float("nan"))
    args = _bytes("=6I", p.K // _BLOCK, p.N, p.top, 0, size, p.N * p.T)
    kernel = _gpt_oss(root).gptoss_f32_mf4w_moe_matmul
    groups = (p.N // simdgroups, p.T, p.top)
    _launch(kernel, [args, p.x, predicted, *weights, y, _int(0)], groups, (32 * simdgroups, 1, 1))
    return y.transpose(0, 1)


def gpt_oss_dense(root: Path, p: Product) -> torch.Tensor:
    """Many tokens, sorted by expert before: tiles of 32 rows and 64 columns."""
    _, size, weights = _gpt_oss_weights(p)
    order = p.ids.reshape(-1).argsort(stable=True)
    x = p.x.repeat_interleave(p.top, 0)[order].contiguous()
    offsets = torch.zeros(p.E + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(p.ids.reshape(-1), minlength=p.E).cumsum(0)
    y = torch.full((p.T * p.top, p.N), float("nan"))
    kernel = _gpt_oss(root).gptoss_f32_mf4w_moe_dense_matmul
    groups = (p.N // 64, -(-p.T * p.top // 32), p.E)
    _launch(kernel, [_bytes("=5I", p.K, p.N, size, size, size), offsets, x, *weights, y], groups, (128, 1, 1))
    out = torch.empty_like(y)
    out[order] = y
    return out.view(p.T, p.top, p.N)


@dataclass(frozen=True)
class Yardstick:
    """A kernel that takes ``many`` tokens or few; ``error`` of the largest result is what its own formats allow."""

    name: str
    checkout: str
    run: Callable[[Path, Product], torch.Tensor]
    error: float
    many: bool = False


YARDSTICKS = (
    Yardstick("MLX gather_qmv", "mlx", mlx_gather_qmv, 2**-7),
    Yardstick("ggml mul_mv_id", "ggml", ggml_mul_mv_id, 1e-5),
    Yardstick("gpt-oss moe_matmul", "gpt-oss", gpt_oss_matmul, 1e-5),
    Yardstick("MLX gather_qmm_rhs", "mlx", mlx_gather_qmm_rhs, 2**-7, many=True),
    Yardstick("ggml mul_mm_id", "ggml", ggml_mul_mm_id, 2**-9, many=True),
    Yardstick("gpt-oss moe_dense_matmul", "gpt-oss", gpt_oss_dense, 1e-5, many=True),
)


def _commit(folder: Path) -> str:
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()[:12] if done.returncode == 0 else "no commit known"


def missing(checkouts: Path, y: Yardstick) -> str:
    """Why a yardstick cannot run, or nothing."""
    folder = checkouts / y.checkout / FOLDERS[y.checkout]
    return "" if folder.is_dir() else f"no checkout of {y.checkout}: {folder} is not there"


def counted(y: Yardstick, checkouts: Path, p: Product) -> list[metal.Report]:
    """Counters of the launches of one product. Raises AssertionError if the result is not the product."""
    with metal.counting() as reports:
        got = y.run(checkouts / y.checkout, p)
    _judge(y.name, got.double(), p.expected(), y.error)
    return reports


def _judge(name: str, got: torch.Tensor, expected: torch.Tensor, most: float) -> None:
    error = float((got - expected).abs().max() / expected.abs().max())
    if not error <= most:
        raise AssertionError(f"{name}: the error is {error:.3g} of the largest result, {most:.3g} is allowed")


# ---- What is counted of them, and of fp4_moe here.


def own_layer(p: Product) -> tuple[list[metal.Report], int]:
    """Counters of fp4_moe on a layer of two products, and how often it multiplies a weight.

    The up product has 2 N rows and K columns, the down product K rows and N columns.
    """
    from torch_attnkit import simulate

    g = torch.Generator().manual_seed(1)
    random_bytes = lambda *shape: torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    scale = lambda *shape: torch.randint(120, 126, shape, generator=g, dtype=torch.uint8)
    up = random_bytes(p.E, 2 * p.N, p.K // 2), scale(p.E, 2 * p.N, p.K // _BLOCK)
    down = random_bytes(p.E, p.K, p.N // 2), scale(p.E, p.K, p.N // _BLOCK)
    call = (p.x.bfloat16(), torch.full((p.T, p.top), 1 / p.top), p.ids, *up, *down)
    options: dict[str, Any] = {"format": "mxfp4", "swiglu": "gptoss", "limit": 7.0, "interleaved": True}
    with metal.counting() as reports, simulate("metal"):
        got = torch.ops.attnkit.fp4_moe(*call, **options)
    expected = torch.ops.attnkit.fp4_moe(call[0].double(), *call[1:], **options)
    _judge("fp4_moe", got.double(), expected, 2**-6)
    return reports, 3 * p.uses


def own_products(p: Product) -> dict[str, tuple[list[metal.Report], int]]:
    """The two products of fp4_moe, each of K columns as a product of others has, and their uses.

    The up product has 2 N rows, and with it is counted what sorts and rounds; the down product N rows, and with it is
    counted the sum over a token's experts.
    """
    up, _ = own_layer(p)
    down, _ = own_layer(product(p.E, p.K, p.N, p.T, p.top))
    begin = lambda reports: next(i for i, r in enumerate(reports) if r.kernel.endswith("_down"))
    return {"up": (up[: begin(up)], 2 * p.uses), "down": (down[begin(down) :], p.uses)}


def _rows(reports: Sequence[metal.Report], uses: int, weights: int) -> dict[str, str]:
    """What the launches did, a use of a weight where that is the measure."""
    total = lambda name: sum(getattr(r, name) for r in reports)
    lines = [line for r in reports for line in r.lines if line.space == "device"]
    ideal = sum(line.ideal for line in lines)
    each = lambda n: f"{n / uses:.3f}"
    work = total("flops") + total("integer") + total("conversions") + total("choices") + total("special")
    return {
        "launches": str(len(reports)),
        "device bytes a weight": f"{total('device_bytes') / weights:.3f}",
        "past the cache": f"{(total('memory_read') + total('memory_written')) / weights:.3f}",
        "lines / ideal": f"{sum(line.transactions for line in lines) / ideal:.2f}" if ideal else "-",
        "work a use": each(work),
        "flops": each(total("flops")),
        "integer": each(total("integer")),
        "conversions": each(total("conversions")),
        "choices": each(total("choices")),
        "matrix flops": each(total("matrix_flops")),
        "threadgroup bytes": each(total("threadgroup_read") + total("threadgroup_written")),
        "collectives": f"{32 * total('collectives') / uses:.4f}",
        "barriers": str(total("barriers")),
    }


def table(rows: dict[str, dict[str, str]]) -> Iterator[str]:
    names = list(next(iter(rows.values())))
    yield f"| | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for name, row in rows.items():
        yield f"| {name} | {' | '.join(row.values())} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, default=config.cache_dir() / "checkouts")
    parser.add_argument("--only", default="", help="part of a yardstick's name")
    parser.add_argument("--own", action="store_true", help="fp4_moe of this package instead")
    for name, size in (("experts", 8), ("rows", 2880), ("columns", 2880), ("top", 4), ("tokens", 1)):
        parser.add_argument(f"--{name}", type=int, default=size)
    given = parser.parse_args()
    p = product(given.experts, given.rows, given.columns, given.tokens, given.top)
    rows: dict[str, dict[str, str]] = {}
    touched = len(p.ids.unique()) * p.N * p.K
    if given.own:
        layer, uses = own_layer(p)
        rows["fp4_moe, both products"] = _rows(layer, uses, 3 * touched)
        for name, (reports, uses) in own_products(p).items():
            rows[f"fp4_moe, {name}"] = _rows(reports, uses, uses // p.uses * touched)
    for y in YARDSTICKS if not given.own else ():
        if given.only not in y.name or y.many != (p.T >= 32):
            continue
        if why := missing(given.checkouts, y):
            print(f"{y.name}: skipped, {why}")
            continue
        rows[f"{y.name} ({_commit(given.checkouts / y.checkout)})"] = _rows(
            counted(y, given.checkouts, p), p.uses, touched
        )
    print(f"{p.E} experts of {p.N} x {p.K}, {p.T} tokens, {p.top} each; counted in the simulator")
    for line in table(rows) if rows else ():
        print(line)
    if given.own:
        print(roofline.line(layer))
        least = 3 * touched * (1 / 2 + 1 / _BLOCK)  # bytes of the weights that are reached
        for chip in roofline.CHIPS:
            ratio = roofline.least(layer, chip)[0] / (least / (chip.memory * 1e3))
            print(f"modelled, not measured: {chip.name} {ratio:.3f} of the time that its memory takes for the weights")


if __name__ == "__main__":
    main()
