"""FlashInfer's CuTeDSL experts for Blackwell beside ``fp4_moe``, counted in the PTX simulator.

FlashInfer's two kernels, the gathering product with SwiGLU and the product with finalize, run as they are written; of
FlashInfer only these files are imported, from a folder, and nothing of them is in this repository:

    pip install --no-deps --target FOLDER flashinfer-python
    python -m bench.peers.flashinfer_experts --flashinfer FOLDER

NVFP4 by NVFP4, every expert with as many tokens. Both results are compared with the reference before counts are
printed. Theirs begin with tokens that are quantised and slots that are sorted and padded to tiles of 128, so our first
launch, which does both, stands in a line of its own; our sums over a token's experts are counted, as theirs are. Theirs
are added to the output in bf16, in any order. A count is no time.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torch_attnkit
from torch_attnkit.formats import nvfp4, scale_layout
from torch_attnkit.ops.fp4_moe.reference import reference
from torch_attnkit.sim import ptx

_BLACKWELL = "fused_moe.cute_dsl.blackwell"
_PACKAGES = ("", "jit", "quantization", "cute_dsl", "fused_moe", "fused_moe.cute_dsl", _BLACKWELL)
_TILE = 128  # rows of their scales' layout, to multiples of which they pad an expert's tokens or to twice that
_INTERLEAVE = 64  # rows of up, then as many of gate, in their first product's weights


@dataclass(frozen=True)
class Tactic:
    """Rows and columns of a work tile, of the first and the second product; 256 rows are two CTAs."""

    rows: int = 128
    up: int = 128
    down: int = 128

    def __str__(self) -> str:
        return f"{self.rows} x {self.up}, {self.rows} x {self.down}"


@dataclass
class Layer:
    """A call of ``fp4_moe`` with NVFP4 weights and tokens, of which every expert has as many."""

    args: tuple[Any, ...]
    call_options: dict[str, Any]
    expected: torch.Tensor  # (Tq, N)


def layer(experts: int, each: int, top_k: int, hidden: int, intermediate: int) -> Layer:
    g = torch.Generator().manual_seed(1)
    tokens = -(-experts * each // top_k)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    indices = (torch.arange(tokens * top_k) % experts).view(tokens, top_k).int()
    weights = torch.rand(tokens, top_k, generator=g) / top_k
    matrices: list[torch.Tensor] = []
    globals_: list[torch.Tensor] = []
    for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate)):
        w = torch.randn(experts, rows, columns, generator=g) * columns**-0.5
        globals_.append(nvfp4.global_scale(w, 1))
        codes, scale = nvfp4.quantize(w, globals_[-1].view(-1, 1))
        matrices += [codes, scale.view(torch.uint8)]
    x_global, h_global = nvfp4.global_scale(x), torch.tensor(500.0)
    args = (x, weights, indices, *matrices, *globals_, None, None, x_global, h_global)
    call_options = {"format": "nvfp4", "activations": "nvfp4"}
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16 else a for a in args]
    return Layer(args, call_options, reference(*double, **call_options))


def judge(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """A code of h may differ where a reciprocal is approximate: a sixth of a block's largest number at most."""
    error = float((got.double() - wanted).norm() / wanted.norm())
    if not error <= 0.02:
        raise AssertionError(f"{name}: the relative error is {error:.3g}, 0.02 is allowed")


# ---- Ours.


def own(p: Layer) -> list[ptx.Launch]:
    """The launches of a call; the first one sorts and quantises."""
    with torch_attnkit.simulate("sm100"), ptx.counting() as launches:
        got = torch.ops.attnkit.fp4_moe(*p.args, **p.call_options)
    judge("fp4_moe", got, p.expected)
    return list(launches)


# ---- Theirs: fused_moe.py and moe_utils.py of FlashInfer say how they are launched.


def kernels(folder: Path) -> tuple[Any, Any]:
    """Their two classes. The packages around them, which want a GPU's libraries, are not imported."""
    root = folder / "flashinfer"
    for name in _PACKAGES:
        package = types.ModuleType(f"flashinfer.{name}".rstrip("."))
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    for name, what in (("jit.moe_utils", "gen_moe_utils_module"), ("api_logging", "flashinfer_api")):
        stand_in = types.ModuleType(f"flashinfer.{name}")
        setattr(stand_in, what, lambda function: function)
        sys.modules[stand_in.__name__] = stand_in
    up = importlib.import_module(f"flashinfer.{_BLACKWELL}.blockscaled_contiguous_gather_grouped_gemm_act_fusion")
    down = importlib.import_module(f"flashinfer.{_BLACKWELL}.blockscaled_contiguous_grouped_gemm_finalize_fusion")
    return (
        up.BlockScaledContiguousGatherGroupedGemmKernel,
        down.Sm100BlockScaledContiguousGroupedGemmFinalizeFusionKernel,
    )


def _interleaved(rows: torch.Tensor) -> torch.Tensor:
    """[gate; up] halves (E, 2 M, ...) to 64 rows of up, 64 of gate, and so on."""
    E, both = rows.shape[:2]
    halves = rows.view(E, 2, both // 2 // _INTERLEAVE, _INTERLEAVE, -1).flip(1)
    return halves.transpose(1, 2).reshape(E, both, -1).contiguous()


def _tiles(indices: torch.Tensor, experts: int, rows: int) -> dict[str, torch.Tensor]:
    """Slots by expert, padded to whole tiles, and what tiles are; padding is slot -1."""
    slots, owner, limit = [], [], []
    for e in range(experts):
        routed = (indices.reshape(-1) == e).nonzero().view(-1).int()
        for first in range(0, len(routed), rows):
            some = routed[first : first + rows]
            limit.append(len(owner) * rows + len(some))
            slots.append(torch.nn.functional.pad(some, (0, rows - len(some)), value=-1))
            owner.append(e)
    number = lambda values: torch.tensor(values, dtype=torch.int32)
    return {"slots": torch.cat(slots), "owner": number(owner), "limit": number(limit), "count": number([len(owner)])}


def theirs(classes: tuple[Any, Any], p: Layer, tactic: Tactic) -> list[ptx.Launch]:
    """Both products."""
    import cutlass.cute as cute
    from cutlass import Float4E2M1FN, Float8E4M3FN, Int64

    x, weights, indices, w13, s13, w2, s2, g13, g2, _, _, x_global, h_global = p.args
    (tokens, hidden), (experts, both, _), top_k = x.shape, w13.shape, indices.shape[1]
    codes, scale = nvfp4.quantize(x.float(), x_global)
    t = _tiles(indices, experts, tactic.rows)
    slots, block = len(t["slots"]), nvfp4.BLOCK
    h = torch.zeros(slots, both // 4, dtype=torch.uint8)
    h_scale = torch.zeros(slots * both // 2 // block, dtype=torch.uint8)
    out = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    cluster = (tactic.rows // _TILE, 1)
    up = classes[0](block, (tactic.rows, tactic.up), cluster, True, top_k)
    down = classes[1](block, (tactic.rows, tactic.down), cluster)
    clusters = 148 // cluster[0]

    def of(tensor: Any, kind: Any) -> Any:
        return cute.recast_ptr(tensor.iterator, dtype=kind)

    @cute.jit
    def run_up(
        a: Any, b: Any, a_scale: Any, b_scale: Any, c: Any, c_scale: Any, alpha: Any, tiles: Any, norm: Any, stream: Any
    ):
        up.wrapper(
            of(a, Float4E2M1FN), of(b, Float4E2M1FN), of(a_scale, Float8E4M3FN), of(b_scale, Float8E4M3FN),
            of(c, Float4E2M1FN), of(c_scale, Float8E4M3FN), alpha.iterator, *(t.iterator for t in tiles),
            norm.iterator, None, Int64(tokens), Int64(slots), Int64(both), Int64(hidden), Int64(experts),
            tactic.rows, block, clusters, stream,
        )  # fmt: skip

    @cute.jit
    def run_down(a: Any, b: Any, a_scale: Any, b_scale: Any, c: Any, alpha: Any, tiles: Any, factor: Any, stream: Any):
        down.wrapper(
            of(a, Float4E2M1FN), of(b, Float4E2M1FN), of(a_scale, Float8E4M3FN), of(b_scale, Float8E4M3FN),
            c.iterator, alpha.iterator, *(t.iterator for t in tiles), factor.iterator, None, Int64(slots),
            Int64(hidden), Int64(both // 2), Int64(experts), Int64(tokens), Int64(top_k), tactic.rows, block, clusters,
            stream,
        )  # fmt: skip

    tiles = (t["owner"], t["limit"], t["slots"], t["count"])
    first = (
        codes, _interleaved(w13), scale.view(torch.uint8), scale_layout.to_128x4(_interleaved(s13)), h, h_scale,
        1 / (x_global * g13), tiles, h_global.view(1),
    )  # fmt: skip
    second = (h, w2, h_scale, scale_layout.to_128x4(s2), out, 1 / (h_global * g2), tiles, weights)
    with ptx.counting() as launches:
        for function, tensors in ((run_up, first), (run_down, second)):
            stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
            run = ptx.compile(function, *tensors, stream, options="--enable-tvm-ffi")
            ptx.run(run, *tensors)
    judge("FlashInfer", out, p.expected)
    return list(launches)


# ---- What is counted of them.


def counts(launches: Iterable[ptx.Launch]) -> Counter[str]:
    total: Counter[str] = Counter()
    for launch in launches:
        c = launch.counters
        total["launches"] += 1
        total["tensor operations"] += sum(c["flops"].values())
        total["TMA read"] += c["tma_read"]
        total["read"] += c["tma_read"] + c["cp_async"] + c["global_read"]
        total["written"] += c["global_written"] + c["tma_written"]
        total["instructions"] += c["instructions"]
    return total


def table(rows: dict[str, Counter[str]]) -> Iterator[str]:
    names = ("launches", "tensor operations", "TMA read", "read", "written", "instructions")
    yield f"| | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for name, row in rows.items():
        yield f"| {name} | {' | '.join(f'{row[n]:,}' for n in names)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashinfer", type=Path, required=True, help="folder that has flashinfer/")
    parser.add_argument("--each", type=int, nargs="+", default=[1, 16, 128, 512], help="tokens of an expert")
    for name, size in (("experts", 8), ("top", 4), ("hidden", 512), ("intermediate", 256)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--all", action="store_true", help="with tiles of two CTAs and of 256 columns, too")
    parser.add_argument("--launches", action="store_true", help="a line for each launch")
    given = parser.parse_args()
    classes = kernels(given.flashinfer)
    tactics = [Tactic()] + ([Tactic(256), Tactic(128, 256, 256), Tactic(256, 256, 256)] if given.all else [])
    for each in given.each:
        p = layer(given.experts, each, given.top, given.hidden, given.intermediate)
        print(f"\n{given.experts} experts, {each} tokens each, {given.hidden} x {given.intermediate}\n")
        launches = own(p)
        rows = {"fp4_moe, sort and quantise": counts(launches[:1]), "fp4_moe, the rest": counts(launches[1:])}
        if given.launches:
            rows |= {f"- launch {i}": counts([launch]) for i, launch in enumerate(launches)}
        for tactic in tactics:
            found = theirs(classes, p, tactic)
            rows[f"FlashInfer, {tactic}"] = counts(found)
            if given.launches:
                rows |= {f"- {tactic}, {i}": counts([launch]) for i, launch in enumerate(found)}
        for line in table(rows):
            print(line, flush=True)


if __name__ == "__main__":
    main()
