"""What a planned call costs before its kernel: ``python bench/overhead.py``.

Times ``torch.ops.attnkit.sdpa_decode`` with a kernel that does nothing next to a bare ``torch.library.custom_op`` of
the same signature, scales aside, that checks nothing and allocates the same outputs, in one run. The two alternate, and
the fastest of many short repeats counts, so that a busy machine disturbs neither more than the other.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import torch

import torch_attnkit  # noqa: F401  defines the ops
from torch_attnkit.core import dispatch

OUT, LSE = (2, 8, 128), (2, 8)


@torch.library.custom_op("attnkit_overhead::bare", mutates_args=())
def bare(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    sink: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = -1,
    sink_tokens: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The signature of sdpa_decode without its scales; nothing but its outputs."""
    return torch.empty(OUT), torch.empty(LSE)


def microseconds(calls: dict[str, Callable[[], Any]], repeats: int = 60, n: int = 500) -> dict[str, float]:
    """The best of ``repeats`` rounds of ``n`` calls each, the contenders taking turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(n):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / n * 1e6)
    return best


def main() -> None:
    torch.set_num_threads(1)
    q, kv = torch.randn(2, 8, 128), torch.randn(2, 2, 40, 128)
    args = (q, kv, kv.clone(), torch.tensor([40, 17], dtype=torch.int32))
    op, other = torch.ops.attnkit.sdpa_decode, torch.ops.attnkit_overhead.bare
    op(*args, scale=0.1)

    def launch_nothing(*_: Any) -> Any:
        return torch.empty(OUT), torch.empty(LSE)

    dispatch._PLANS["sdpa_decode"] |= dict.fromkeys(
        dispatch._PLANS["sdpa_decode"], dispatch.Plan(launch_nothing, "nothing")
    )
    calls = {
        "attnkit": lambda: op(*args, scale=0.1),
        "custom_op": lambda: other(*args, scale=0.1),
        "two empties": lambda: launch_nothing(),
    }
    print(f"torch {torch.__version__}, {platform.machine()}, microseconds a call")
    print(f"{'mode':16}{'attnkit':>10}{'custom_op':>12}{'two empties':>14}{'attnkit / custom_op':>22}")
    for mode, context in (
        ("grad", torch.enable_grad),
        ("no_grad", torch.no_grad),
        ("inference_mode", torch.inference_mode),
    ):
        with context():
            t = microseconds(calls)
        ratio = t["attnkit"] / t["custom_op"]
        print(f"{mode:16}{t['attnkit']:10.2f}{t['custom_op']:12.2f}{t['two empties']:14.2f}{ratio:22.2f}")


if __name__ == "__main__":
    main()
