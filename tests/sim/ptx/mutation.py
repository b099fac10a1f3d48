"""Attention kernels with their synchronisation taken out, one instruction at a time: what notices?

``python tests/sim/ptx/mutation.py ours`` and ``... flash_attention_4`` run the whole study and print its table.
"""

from __future__ import annotations

import collections
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

SEEDS = (0, 1, 2)  # 0: asynchronous operations complete at once; the others: as late and as badly ordered as is legal
_SYNCHRONISES = re.compile(
    r"(?:@!?%?\w+\s+)?(mbarrier\.(?:init|try_wait|arrive)|bar(?:rier)?\.(?:sync|arrive|warp|cluster)|fence|"
    r"tcgen05\.(?:wait|commit|fence)|wgmma\.(?:fence|commit_group|wait_group)|"
    r"cp\.async\.(?:bulk\.)?(?:commit_group|wait_group))"
)


@dataclass(frozen=True)
class Removal:
    """One instruction. ``indices``: the statements that go, with a wait the branch back of its loop. ``name``: the
    opcode and its number among those of that opcode."""

    name: str
    indices: tuple[int, ...]
    where: str
    text: str


def removals(statements: list[tuple[int, str, str, int]]) -> Iterator[Removal]:
    seen: collections.Counter[str] = collections.Counter()
    for i, (line, text, file, source) in enumerate(statements):
        found = _SYNCHRONISES.match(text)
        if not found:
            continue
        opcode, indices = found[1], [i]
        if opcode == "mbarrier.try_wait":
            following = [s[1] for s in statements[i + 1 : i + 3]]
            assert re.match(r"@\w+ bra", following[0]) and following[1].startswith("bra"), following
            indices.append(i + 2)
        seen[opcode] += 1
        where = f"{Path(file).name}:{source}" if source else f"PTX line {line}"
        yield Removal(f"{opcode} {seen[opcode]}", tuple(indices), where, text)


@dataclass
class Study:
    """A kernel that ``run`` calls; ``wanted``: its results, of one shape each."""

    inside: Callable[[], AbstractContextManager[object]]
    runs: list[Callable[[], torch.Tensor]]
    wanted: list[torch.Tensor]

    def __enter__(self) -> Study:
        from torch_attnkit.sim import ptx

        self.ptx = ptx
        self._context = self.inside()
        self._context.__enter__()
        with ptx.counting() as launches:
            results = [run() for run in self.runs]
        self.errors = [self._error(*pair) for pair in zip(results, self.wanted, strict=True)]
        self.executed = [sum(n) for n in zip(*(c.counters["executed"] for c in launches), strict=True)]
        self.removals = list(removals(self._statements(launches[0].kernel)))
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.__exit__(*exception)

    @staticmethod
    def _statements(kernel: str) -> list[tuple[int, str, str, int]]:
        from torch_attnkit.sim.ptx import launch

        program = next(p for p in reversed(launch._programs) if kernel in p._kernels)
        return program.kernel(kernel).statements

    @staticmethod
    def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
        error = (got.double() - wanted).abs().max().item()
        return float("inf") if error != error else error

    def caught(self, *removed: Removal) -> str:
        """What noticed that the instructions were missing: deadlock, check, error or result; empty when nothing did."""
        indices = tuple(i for r in removed for i in r.indices)
        for run, wanted, usual in zip(self.runs, self.wanted, self.errors, strict=True):
            for seed in SEEDS:
                try:
                    with self.ptx.settings(check=True, seed=seed, limit=4_000_000, removed=indices):
                        result = run()
                except self.ptx.PtxDeadlock:
                    return "deadlock"
                except self.ptx.CheckError:
                    return "check"
                except self.ptx.PtxError:
                    return "error"
                if self._error(result, wanted) > 2 * usual:
                    return "result"
        return ""


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64, positions aligned at the end; (B, T, H, D) all."""
    T, S = q.shape[1], k.shape[1]
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k.double()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.ones(T, S, dtype=torch.bool).tril(S - T), -torch.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.double())


def _inputs(T: int, S: int, H: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, n, H, 128).bfloat16() for n in (T, S, S)]


def ours() -> Study:
    """flash_attention of sm90, head dim 128, causal, on two multiprocessors: several tiles for each CTA."""
    inputs = [_inputs(300, 700, 2), _inputs(300, 300, 2)]

    @contextmanager
    def inside() -> Iterator[None]:
        from torch_attnkit import simulate
        from torch_attnkit.cuda import driver

        usual, driver._SIMULATED_SMS = driver._SIMULATED_SMS, 2
        driver.sm_count.cache_clear()
        try:
            with simulate("sm90"):
                yield
        finally:
            driver._SIMULATED_SMS = usual
            driver.sm_count.cache_clear()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.attnkit.flash_attention(q, k, v, causal=True)[0]
        return out

    return Study(inside, [lambda i=i: call(*i) for i in inputs], [_attention(*i) for i in inputs])  # type: ignore[misc]


def flash_attention_4() -> Study:
    """FlashAttention-4's forward of sm100, head dim 128, causal, with the scheduler that gives a CTA several tiles."""
    inputs = _inputs(640, 640, 2)

    @contextmanager
    def inside() -> Iterator[None]:
        from torch_attnkit.sim import ptx

        with ptx.device("sm100"):
            from flash_attn.cute import utils

            usual, utils._fa_clc_enabled = utils._fa_clc_enabled, True
            try:
                yield
            finally:
                utils._fa_clc_enabled = usual

    def call() -> torch.Tensor:
        from flash_attn.cute import flash_attn_func

        out: torch.Tensor = flash_attn_func(*inputs, causal=True)[0]
        return out

    return Study(inside, [call], [_attention(*inputs)])


def main(which: str) -> None:
    with {"ours": ours, "flash_attention_4": flash_attention_4}[which]() as study:
        table: collections.Counter[tuple[str, str]] = collections.Counter()
        for r in study.removals:
            how = study.caught(r) if study.executed[r.indices[0]] else "not executed"
            table[r.name.split()[0], how or "SURVIVES"] += 1
            if how in ("", "not executed"):
                print(f"{how or 'survives'}: {r.name} ({r.where}) {r.text[:80]}", flush=True)
        for (opcode, how), n in sorted(table.items()):
            print(f"{opcode:28} {how:12} {n}")
        total = sum(table.values())
        kept = sum(n for (_, how), n in table.items() if how == "SURVIVES")
        idle = sum(n for (_, how), n in table.items() if how == "not executed")
        print(f"caught {total - kept - idle} of {total - idle} executed")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
