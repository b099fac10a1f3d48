"""Kernels of sm120 and others', in the simulator and in machine code: ``python -m bench.counted prefill|fp4``.

prefill: flash-attn-4's, 512 queries and keys of one head in bf16. A tile is 128 queries by 64 keys; bytes of shared
memory are what loads read in the whole call. fp4: FlashInfer's product for sm_120 ("b12x", CuTeDSL; 0.7.2.post1, ``pip
install --no-deps flashinfer-python``), NVFP4 by NVFP4 with scales in the 128x4 layout. A tile is 128 x 128 x 128.

Both sides are right by float64. Instructions of a tile are those of the loop with its products after ptxas, of all
warps that multiply: theirs of FP4 has one more that copies, in a loop of its own. No count is a time.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

import torch_attnkit
from torch_attnkit.cuda import inspect
from torch_attnkit.formats.scale_layout import to_128x4
from torch_attnkit.sim import ptx
from torch_attnkit.sim.ptx import launch

TARGET, CUBIN = "sm120", "sm_120a"
TOKENS, QUERIES, KEYS = 512, 128, 64
_PRODUCT = 16 * 8 * 16  # multiplications of an mma.m16n8k16


class Loop(NamedTuple):
    instructions: int
    products: int


def disassembled(image: bytes) -> str:
    tool = inspect.nvdisasm()
    assert tool is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def loops(text: str) -> list[Loop]:
    """The loops of machine code that have products in them, shortest first."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
    branches = [(i, labels[to[1]]) for i, x in enumerate(code) if (to := re.search(r"\bBRA\b.*\(?\.(L_x_\d+)", x))]
    products = lambda begin, end: sum("HMMA" in x or "OMMA" in x for x in code[begin:end])
    found = []
    for end, begin in branches:
        if begin <= end and products(begin, end):
            found.append(Loop(end + 1 - begin, products(begin, end)))
    return sorted(found)


@contextmanager
def noting() -> Iterator[list[launch.Program]]:
    """The programs that run."""
    ran: list[launch.Program] = []
    kernel = launch.Program.kernel

    def noted(program: launch.Program, name: str) -> object:
        ran.append(program)
        return kernel(program, name)

    with mock.patch.object(launch.Program, "kernel", noted):
        yield ran


def flash_attn_4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    with ptx.device(TARGET):
        from flash_attn.cute import flash_attn_func

        out: torch.Tensor = flash_attn_func(q, k, v, causal=causal)[0]
    return out


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    with torch_attnkit.simulate(TARGET):
        out: torch.Tensor = torch.ops.attnkit.flash_attention(q, k, v, causal=causal)[0]
    return out


def counted(run: Callable[..., torch.Tensor], dim: int, causal: bool) -> tuple[list[str], list[float]]:
    """Cells of a row, and what is compared: instructions with masks and without, bytes, stack."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, 1, dim).to(torch.bfloat16) for _ in range(3))
    with noting() as ran, ptx.counting() as launches:
        out = run(q, k, v, causal)
    heads = [t.transpose(1, 2).double() for t in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=causal)
    assert (out.double().transpose(1, 2) - exact).abs().max() < 2**-6 * exact.abs().max()
    image = inspect.assemble(ran[-1].text, CUBIN)
    (resources,) = inspect.taken([image])
    tile = 2 * QUERIES * KEYS * dim / _PRODUCT
    plain, *masked = loops(disassembled(image))
    each = [loop.instructions * tile / loop.products for loop in (plain, *masked)]
    shared = launches[0].counters["shared_read"]
    cells = [
        f"{each[0]:.0f}",
        f"{each[-1]:.0f}" if causal else "",
        f"{shared / 1e6:.2f} MB",
        f"{resources.registers}",
        f"{resources.stack}",
    ]
    return cells, [each[0], each[-1], shared]


def prefill() -> Table:
    """Of each head size, with all keys and causal: theirs, ours and ours over theirs."""
    table = Table("D", "keys", "", "a tile", "a tile at the diagonal", "shared read", "registers", "stack")
    for dim in (64, 128):
        for causal in (False, True):
            (their_cells, theirs), (our_cells, our) = (counted(run, dim, causal) for run in (flash_attn_4, ours))
            call = str(dim), "causal" if causal else "all"
            table.add_row(*call, "flash-attn-4", *their_cells)
            table.add_row(*call, "ours", *our_cells)
            ratios = [f"{a / b:.2f}" for a, b in zip(our, theirs, strict=True)]
            table.add_row(*call, "ours / theirs", ratios[0], ratios[1] if causal else "", ratios[2])
    return table


class Operand(NamedTuple):
    """Random NVFP4."""

    codes: torch.Tensor
    scales: torch.Tensor  # in the 128x4 layout
    exact: torch.Tensor  # what they stand for, in float64


def operand(rows: int, k: int) -> Operand:
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (rows, k // 16), dtype=torch.uint8)  # every finite positive scale
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat([magnitudes, -magnitudes])
    elements = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).reshape(rows, k)
    wide = scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
    return Operand(codes, to_128x4(scales), elements * wide)


@functools.cache
def b12x_module() -> Any:
    """FlashInfer's, without the ``__init__`` of its packages, which ask for a GPU's tools."""
    found = importlib.util.find_spec("flashinfer")
    assert found is not None and found.submodule_search_locations, "flashinfer-python is not installed"
    folder = Path(found.submodule_search_locations[0])
    for name in ("flashinfer", "flashinfer.cute_dsl"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.parent.joinpath(*name.split(".")))]
        sys.modules[name] = package
    file = folder / "gemm/kernels/dense_blockscaled_gemm_sm120_b12x.py"
    spec = importlib.util.spec_from_file_location("b12x", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["b12x"] = module
    spec.loader.exec_module(module)
    return module


def b12x(a: Operand, b: Operand, divisor: float) -> torch.Tensor:
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack, make_ptr

    module = b12x_module()
    point = lambda t: make_ptr(cutlass.Float8E4M3FN, t.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)
    (m, k), n = a.exact.shape, len(b.exact)
    alpha, out = torch.tensor([1 / divisor]), torch.empty(m, n, dtype=torch.bfloat16)
    with ptx.device(TARGET), ptx.visible(a.codes, a.scales, b.codes, b.scales, alpha, out):
        scales = [point(t.scales) for t in (a, b)]
        tensors = [from_dlpack(t, assumed_align=16) for t in (a.codes, b.codes, out)]
        sizes = [cutlass.Int64(-(-size // each)) for size, each in ((m, 128), (n, 128), (k, 64))]
        kernel = module.DenseGemmKernel(16, (128, 128), (1, 1), enable_pdl=False)
        stream, arguments = cuda.CUstream(0), (*tensors, *sizes)
        run = cute.compile(kernel.wrapper, *arguments, 1, *scales, from_dlpack(alpha), 170, stream)
        run(*arguments, *scales, from_dlpack(alpha), stream)
    return out


def our_fp4(a: Operand, b: Operand, divisor: float) -> torch.Tensor:
    with torch_attnkit.simulate(TARGET):
        out: torch.Tensor = torch.ops.attnkit.grouped_output_projection(
            a.codes[:, None], b.codes[None], a.scales[None], b.scales[None], torch.tensor(divisor), format="nvfp4",
            scale_layout="128x4", dtype=torch.bfloat16,
        )  # fmt: skip
    return out[:, 0]


def fp4() -> Table:
    """Theirs, ours and ours over theirs."""
    table = Table("m x n x k", "", "a tile", "mma", "ldmatrix", "copied", "shared wavefronts", "registers", "stack")
    for m, n, k in ((128, 128, 1024), (256, 256, 2048)):
        torch.manual_seed(0)
        a, b = operand(m, k), operand(n, k)
        exact, rows = a.exact @ b.exact.T / 512, []
        for name, run in (("b12x", b12x), ("ours", our_fp4)):
            with noting() as ran, ptx.counting() as launches:
                out = run(a, b, 512.0)
            assert (out.double() - exact).abs().max() < 2**-7 * exact.abs().max()
            image, counts = inspect.assemble(ran[-1].text, CUBIN), launches[-1].counters
            (resources,) = inspect.taken([image])
            loop = min(loops(disassembled(image)), key=lambda loop: loop.instructions / loop.products)
            tile = 128**3 / (16 * 8 * 64) * loop.instructions / loop.products
            by_opcode = counts["by_opcode"]
            copied = counts["tma_read"] + counts["cp_async"]
            rows.append([tile, by_opcode["mma"], by_opcode["ldmatrix"], copied, counts["shared_wavefronts"]])
            stated = [f"{x:.0f}" for x in rows[-1]]
            table.add_row(f"{m} x {n} x {k}", name, *stated, f"{resources.registers}", f"{resources.stack}")
        table.add_row("", "ours / theirs", *(f"{y / x:.2f}" for x, y in zip(*rows, strict=True)), "", "")
    return table


WHAT: dict[str, Callable[[], Table]] = {"prefill": prefill, "fp4": fp4}


def main(what: Annotated[str, typer.Argument(help="One of " + ", ".join(WHAT))] = "prefill") -> None:
    """Print the table."""
    table = WHAT[what]()
    table.title = f"warp instructions of machine code ({CUBIN}), counted in the simulator; no count is a time"
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
