"""Prefill of sm120 and flash-attn-4's, counted in the simulator and in machine code: ``python -m bench.counted``.

Both run 512 queries and keys of one head in bf16, right by float64. A tile is 128 queries by 64 keys. Its instructions
are those of the loop over keys after ptxas, of all warps. Bytes of shared memory are what loads read in the whole call.
No count is a time.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

import torch_attnkit
from torch_attnkit.cuda import inspect
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
    products = lambda begin, end: sum("HMMA" in x for x in code[begin:end])
    found = []
    for end, begin in branches:
        if begin <= end and products(begin, end):
            found.append(Loop(end + 1 - begin, products(begin, end)))
    return sorted(found)


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
    ran: list[launch.Program] = []
    kernel = launch.Program.kernel

    def noted(program: launch.Program, name: str) -> object:
        ran.append(program)
        return kernel(program, name)

    with ptx.counting() as launches, mock.patch.object(launch.Program, "kernel", noted):
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


def main() -> None:
    """Print the table: of each head size, with all keys and causal, theirs, ours and ours over theirs."""
    table = Table("D", "keys", "", "a tile", "a tile at the diagonal", "shared read", "registers", "stack")
    for dim in (64, 128):
        for causal in (False, True):
            (their_cells, theirs), (our_cells, our) = (counted(run, dim, causal) for run in (flash_attn_4, ours))
            call = str(dim), "causal" if causal else "all"
            table.add_row(*call, "flash-attn-4", *their_cells)
            table.add_row(*call, "ours", *our_cells)
            ratios = [f"{a / b:.2f}" for a, b in zip(our, theirs, strict=True)]
            table.add_row(*call, "ours / theirs", ratios[0], ratios[1] if causal else "", ratios[2])
    table.title = f"warp instructions of machine code ({CUBIN}), counted in the simulator; no count is a time"
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
