"""What a planned call costs the host: ``python -m bench.overhead [--peers]``.

Without a GPU it times ``torch.ops.attnkit.sdpa_decode`` with a kernel that does nothing next to a bare
``torch.library.custom_op`` of the same signature, scales aside, that checks nothing and allocates the same outputs, and
small calls of the CPU's own kernels: by C++ where ``csrc/dispatch`` is built, by C++ once torch has read the arguments,
and by Python alone. On a GPU it times real calls of several ops in these three ways, next to ``torch.add`` and, with
``--peers``, to FlashInfer's ``run()`` where that is installed. The contenders alternate, and the fastest of many short
repeats counts, so that a busy machine disturbs none more than another.
"""

from __future__ import annotations

import functools
import platform
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch

import torch_attnkit  # noqa: F401  defines the ops
from bench import timing
from bench.inputs import Inputs
from bench.peers import flashinfer_peer
from torch_attnkit.core import dispatch, native

OUT, LSE = (2, 8, 128), (2, 8)
LINES = (  # of a decode step: short kernels, which the host must keep ahead of
    ("sdpa_decode", "1x1024"),
    ("sdpa_decode", "16x8192"),
    ("sdpa_decode_paged", "1x8192-page64"),
    ("sdpa_decode_paged", "16x8192-page16"),
    ("sdpa_decode", "mla-16h-1x8192"),
    ("sdpa_decode", "mla-128h-16x8192"),
    ("gated_rmsnorm", "qwen3_next-1"),
    ("route_sqrt_softplus", "256-1"),
    ("route_softmax", "gptoss-1"),
    ("nvfp4_quantize", "1x7168"),
    ("kv_cache_write", ""),
)
MODES = (("grad", torch.enable_grad), ("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode))


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


def read_by_torch(packet: Any) -> Callable[..., Any]:
    """The call of a packet as torch's own makes it, whoever runs the op then."""
    return types.MethodType(torch._ops.OpOverloadPacket.__call__, packet)


def on_the_cpu() -> None:
    """Small calls that ``csrc/cpu`` serves where it is built, by C++ and by Python, and what PyTorch routes by."""
    logits, y, w = torch.randn(2, 8), torch.randn(2, 8, 64), torch.ones(64)
    cache, lengths = torch.randn(2, 2, 40, 64), torch.tensor([40, 17], dtype=torch.int32)
    ids, table = torch.tensor([0, 1]), torch.tensor([[0, 1], [2, 3]])
    ops = torch.ops.attnkit
    of: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "route_softmax": ((logits,), dict(topk=4)),
        "route_sqrt_softplus": ((logits,), dict(topk=4)),
        "route_hash": ((logits, ids, table), {}),
        "gated_rmsnorm": ((y, y, w), {}),
        "sdpa_decode": ((y, cache, cache, lengths), {}),
    }

    def calls(way: Callable[[Any], Any]) -> dict[str, Callable[[], Any]]:
        return {n: functools.partial(way(getattr(ops, n)), *args, **kwargs) for n, (args, kwargs) in of.items()}

    torchs = {f"{n} (torch)": call for n, call in calls(read_by_torch).items()}
    eager = {"topk, softmax": lambda: torch.softmax(torch.topk(logits, 4)[0], 1), "add": lambda: torch.add(y, y)}
    with torch.no_grad():
        found = microseconds(eager | calls(lambda op: op) | torchs, n=100)
        with native.off():
            python = microseconds(calls(lambda op: op), n=100)
    print(f"torch.no_grad, eager calls by {native.word}, with arguments read by torch, and with that off")
    for name in of:
        print(f"{name:22}{found[name]:10.2f}{found[f'{name} (torch)']:10.2f}{python[name]:10.2f}")
    for name in eager:
        print(f"{name:22}{found[name]:10.2f}")


def without_a_gpu() -> None:
    torch.set_num_threads(1)
    on_the_cpu()
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
    for mode, context in MODES:
        with context():
            t = microseconds(calls)
        ratio = t["attnkit"] / t["custom_op"]
        print(f"{mode:16}{t['attnkit']:10.2f}{t['custom_op']:12.2f}{t['two empties']:14.2f}{ratio:22.2f}")


def line(name: str, case: str, peers: bool) -> None:
    """Host microseconds of one call: by C++, by Python alone, ``torch.add`` of small tensors, and a peer."""
    op = dispatch.OPS[name]
    table = dict(op.module("cases").BENCH)
    args, kwargs = Inputs(op, torch.bfloat16).first(table[case or next(iter(table))])
    call = getattr(torch.ops.attnkit, name)
    by_torch = read_by_torch(call)
    small = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {
        "C++": lambda: call(*args, **kwargs),
        "read by torch": lambda: by_torch(*args, **kwargs),
        "torch.add": lambda: torch.add(small, small),
    }
    try:
        peer = flashinfer_peer.adapt(name, args, kwargs) if peers else None
    except (ImportError, RuntimeError) as error:  # not installed, or not to be built here
        print(f"    no FlashInfer: {str(error)[:100]}")
        peer = None
    if peer is not None:
        calls["FlashInfer"] = peer
    before = native.extension.repeated(f"attnkit::{name}", "CUDA") if native.extension else 0
    for mode, context in (MODES[0], MODES[2]):
        with context():
            for _ in range(3):
                calls["C++"]()
            times = dict(zip(calls, timing.host([[c] for c in calls.values()]), strict=True))
            with native.off():
                times["Python"] = timing.host([[calls["C++"]]])[0]
        ours = times["C++"]
        found = "".join(f"{n} {t:7.2f}   " for n, t in times.items())
        print(f"{name:22}{case:20}{mode:16}{found}{ours / times['torch.add']:6.2f} of torch.add", flush=True)
    if native.extension and native.extension.repeated(f"attnkit::{name}", "CUDA") == before:
        print(f"    not by C++: {dispatch.UNREPEATED.get(name)}")


def main() -> None:
    if not torch.cuda.is_available():
        return without_a_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, host: {native.word}; microseconds a call")
    for name, case in LINES:
        line(name, case, "--peers" in sys.argv)


if __name__ == "__main__":
    main()
