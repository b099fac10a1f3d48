"""Calls shared among all GPUs of this machine beside one of them: ``python -m bench.several_gpus``.

A decode step over 131072 keys, whose keys are shared (``cp_decode``), and NVFP4 experts of DeepSeek-V4-Flash at 128 and
8192 tokens, whose experts are (``ep_moe``, both ways). One process a GPU over NCCL; every process draws the same
numbers and keeps its part of them.

Results come first: what one GPU gives and what all give are both judged by the reference, in every process. Then both
are timed, taking turns, as CUDA graphs where a graph can hold them: own tokens wait for counts on the host, so there
the host issues the calls. A round starts behind a barrier and lasts milliseconds; its time is that of the slowest
process, and for one GPU that of the fastest; the median over rounds is reported. One set of inputs is enough, for it
is many times larger than the caches. Bytes are what a process sends to others in a call: an all-gather sends its part
to each, an all-reduce 2 (P - 1) / P of its tensor, as rings do. "A share alone" is the op on a process's keys or
experts without anything sent: what it leaves of the time of all is what sharing costs.

``--gloo`` judges the same calls at tiny sizes on a CPU, and times nothing. ``--prepare sm90`` compiles on any machine.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench import timing
from bench.__main__ import console, facts
from bench.gate import gate
from bench.inputs import Inputs
from torch_attnkit.core import config
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.target import target_of
from torch_attnkit.cuda.compile import GPU_ARCH
from torch_attnkit.integrations.distributed import cp_decode, ep_moe
from torch_attnkit.warmup import asked_by, fill

_ROUNDS = 16
_ROUND_SECONDS = 5e-3  # of a round at least: processes begin some microseconds apart
_PATIENCE = datetime.timedelta(minutes=30)  # of a collective: the other process may be compiling
Call = Callable[[], Any]


@dataclass(frozen=True)
class Shared:
    """A call of an op by one process, and the same by all: ``whole`` makes of a share what ``one`` returns.

    ``local_args`` are arguments of the op with the keys or experts of this process, ``share`` is what the op does of
    the work with them, and sends nothing.
    """

    size: str
    op: str
    args: tuple[Any, ...]
    local_args: tuple[Any, ...]
    kwargs: dict[str, Any]
    all: Call
    share: Call
    whole: Callable[[Any], Any]
    waits: bool = False  # for the device: no graph holds it

    def one(self) -> Any:
        return getattr(torch.ops.attnkit, self.op)(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Here:
    """This process."""

    device: torch.device
    rank: int
    world: int
    small: bool

    def part(self, tensor: torch.Tensor | None, dim: int = 0) -> torch.Tensor | None:
        """This process's of as many equal parts as there are processes, in memory of its own if need be."""
        return None if tensor is None else tensor.chunk(self.world, dim)[self.rank].contiguous()


def decode(here: Here, inputs: dict[str, Inputs]) -> Shared:
    """One query token of 32 heads over keys and values of 8, D 128, bf16."""
    given = inputs["sdpa_decode"]
    tiny = dict(B=1, Hq=4, Hkv=2, S=96 * here.world, D=64, Dv=64)
    dims = tiny if here.small else given.cases.BENCH["1x131072"]
    args, kwargs = given.first(dims)
    q, k, v, kv_len = args[:4]
    local_args = (q, here.part(k, 2), here.part(v, 2), kv_len)  # keys and values (1, Hkv, S / P, D)
    call = lambda: cp_decode(*local_args)
    length = (kv_len - here.rank * local_args[1].shape[2]).clamp(0, local_args[1].shape[2])  # of the keys here
    share = lambda: torch.ops.attnkit.sdpa_decode(*local_args[:3], length, **kwargs)
    return Shared(f"{dims['S']} keys", "sdpa_decode", args, local_args, kwargs, call, share, lambda out: out)


def experts(count: int, tokens: str) -> Callable[[Here, dict[str, Inputs]], Shared]:
    """``count`` tokens in all, six of 256 experts each, N 4096 and M 2048, in NVFP4."""

    def make(here: Here, inputs: dict[str, Inputs]) -> Shared:
        given = inputs["fp4_moe"]
        tiny = dict(Tq=count // 16, N=64, M=64, E=4 * here.world, K=3, blk=16, act=0, limit=10)
        dims = tiny if here.small else given.cases.BENCH[f"deepseek_v4-nvfp4-{count}"]
        args, kwargs = given.first(dims)
        local_args = (*args[:3], *(here.part(t) for t in args[3:]))  # weights (E / P, ...) each
        size, held = f"{dims['Tq']} tokens", local_args[3].shape[0]
        local = torch.where(args[2] // held == here.rank, args[2] % held, -1)
        # Of own tokens this is the same work, though of tokens that lie with others.
        share = lambda: torch.ops.attnkit.fp4_moe(*args[:2], local, *local_args[3:], **kwargs)
        if tokens == "replicated":
            call = lambda: ep_moe(*local_args, **kwargs)
            return Shared(f"{size}, all everywhere", "fp4_moe", args, local_args, kwargs, call, share, lambda out: out)
        own = [here.part(t) for t in args[:3]]  # (Tq / P, ...) each

        def gathered(out: torch.Tensor) -> torch.Tensor:
            parts = [torch.empty_like(out) for _ in range(here.world)]
            dist.all_gather(parts, out)
            return torch.cat(parts)

        call = lambda: ep_moe(*own, *local_args[3:], tokens="own", **kwargs)
        return Shared(f"{size}, one's own", "fp4_moe", args, local_args, kwargs, call, share, gathered, waits=True)

    return make


LINES: dict[str, Callable[[Here, dict[str, Inputs]], Shared]] = {
    "decode": decode,
    "experts-128": experts(128, "replicated"),
    "experts-128-own": experts(128, "own"),
    "experts-8192": experts(8192, "replicated"),
    "experts-8192-own": experts(8192, "own"),
}


def kernels(arch: str, world: int) -> list[Any]:
    """What the lines ask to be compiled, found on tensors without data; of own tokens, as many as there are in all."""
    here = Here(torch.device("cpu"), 0, world, small=False)
    with FakeTensorMode(allow_non_fake_inputs=True), asked_by(arch) as asked:
        inputs = {op: Inputs(OPS[op], torch.bfloat16, "cpu") for op in ("sdpa_decode", "fp4_moe")}
        for make in LINES.values():
            shared = make(here, inputs)
            out = shared.one()
            getattr(torch.ops.attnkit, shared.op)(*shared.local_args, **shared.kwargs)
            if shared.op == "sdpa_decode":
                torch.ops.attnkit.merge_partials(*(torch.stack([o] * world) for o in out))
    return list(asked.kernels)


class Sent(TorchDispatchMode):
    """``nbytes``: what this process sends to others by the collectives in this block."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.nbytes += self._bytes(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _bytes(name: str, args: Any) -> int:
        rank, world = dist.get_rank(), dist.get_world_size()
        if name == "_allgather_base_":  # (output, input, ...)
            return int(args[1].nbytes * (world - 1))
        if name == "allreduce_":  # ([tensors], ...)
            return sum(2 * (world - 1) * t.nbytes // world for t in args[0])
        if name == "alltoall_base_":  # (output, input, group, parts of the output, parts of the input)
            parts = list(args[4]) or [args[1].shape[0] // world] * world
            row = args[1].nbytes // max(args[1].shape[0], 1)
            return int((sum(parts) - parts[rank]) * row)
        raise AssertionError(f"{name} is not counted")


def line(name: str, here: Here, inputs: dict[str, Inputs]) -> dict[str, Any]:
    """One line of the record, the same in every process but for words about an error."""
    shared = LINES[name](here, inputs)
    found: dict[str, Any] = {"case": name, "size": shared.size, "processes": here.world}
    why = ""
    with Sent() as sent:
        out = shared.all()  # outside of what may fail alone: the others would wait
    whole = shared.whole(out)
    try:
        for who, result in (("one", shared.one()), ("all", whole)):
            found[f"error_of_tolerance_{who}"] = gate(OPS[shared.op], shared.args, shared.kwargs, result)
    except Exception as failure:
        why = f"{type(failure).__name__}: {failure}"
        traceback.print_exc()
    found["bytes_sent"] = int(_most(sent.nbytes, here))
    if _most(float(bool(why)), here):
        return found | {"error": why or "another process says what"}
    return found if here.small else found | timed(shared, here)


def timed(shared: Shared, here: Here) -> dict[str, Any]:
    """Microseconds a call by one GPU, by all, and of a process's share alone, and how each was issued."""
    ways = {
        "one": _captured(shared.one, True, here),
        "all": _captured(shared.all, not shared.waits, here),
        "share": _captured(shared.share, True, here),
    }
    runs = [_longer(run, here) for run, _ in ways.values()]
    took: list[list[float]] = []
    for repetition in range(_ROUNDS):
        row = [0.0] * len(runs)
        for i in (range(len(runs)), reversed(range(len(runs))))[repetition % 2]:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier()
            before.record()
            runs[i].go()
            after.record()
            torch.cuda.synchronize()
            row[i] = before.elapsed_time(after) * 1e3 / runs[i].calls
        took.append(row)
    times = torch.tensor(took, dtype=torch.float64, device=here.device)  # (rounds, 3)
    parts = [torch.empty_like(times) for _ in range(here.world)]
    dist.all_gather(parts, times)
    each = torch.stack(parts).cpu()  # (P, rounds, 3)
    one = min(statistics.median(p) for p in each[:, :, 0].tolist())
    all_gpus, share = (statistics.median(each[:, :, i].amax(0).tolist()) for i in (1, 2))
    issued = {f"issued_{who}": how for who, (_, how) in ways.items()}
    return {"us_one": one, "us_all": all_gpus, "us_share": share, "ratio": one / all_gpus, **issued}


def _captured(call: Call, may: bool, here: Here) -> tuple[timing.Run, str]:
    """``call`` as a CUDA graph if every process could capture it, else as the host issues it."""
    if not may:
        return timing.plain([call]), "by the host: it waits for counts"
    why = ""
    try:
        run = timing.graph([call])
    except Exception as failure:
        torch.cuda.synchronize()
        why = f": {type(failure).__name__}: {str(failure).splitlines()[0][:160]}"
    if _most(float(bool(why)), here):
        return timing.plain([call]), f"by the host, no CUDA graph{why or ' in another process'}"
    return run, "CUDA graph"


def _longer(run: timing.Run, here: Here) -> timing.Run:
    """``run`` as often as fills a round; as often in every process, for the calls of one wait for the others'."""
    for _ in range(2):
        run.go()
    torch.cuda.synchronize()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run.go()
    after.record()
    torch.cuda.synchronize()
    times = math.ceil(_ROUND_SECONDS / (_most(before.elapsed_time(after), here) * 1e-3))

    def go() -> None:
        for _ in range(times):
            run.go()

    return timing.Run(go, run.calls * times, run)


def _most(number: float, here: Here) -> float:
    """The largest of what the processes have."""
    found = torch.tensor(float(number), dtype=torch.float64, device=here.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def summary_line(found: dict[str, Any]) -> str:
    name, count = f"{found['case']} ({found['size']})", found["processes"]
    if "error" in found:
        return f"{name}: WRONG: {found['error']}"
    errors = f"{found['error_of_tolerance_one']:.2f} and {found['error_of_tolerance_all']:.2f} of the tolerance"
    summary = f"{name}: right by one and by {count}, {errors}; {found['bytes_sent']:,} bytes sent by a process"
    if "ratio" not in found:
        return summary
    return (
        f"{summary}; one GPU {found['us_one']:.1f} us ({found['issued_one']}), {count} GPUs {found['us_all']:.1f} us"
        f" ({found['issued_all']}): {found['ratio']:.2f} x; a share alone {found['us_share']:.1f} us"
    )


def log(message: str) -> None:
    console.print(message, soft_wrap=True, highlight=False, markup=False)


def work(rank: int, world: int, folder: str, backend: str, only: str) -> None:
    """One process; the first one prints, and leaves the lines in ``folder``."""
    small = backend == "gloo"
    device = torch.device("cpu") if small else torch.device("cuda", rank)
    if small:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    rendezvous = f"file://{folder}/meeting"
    dist.init_process_group(
        backend, init_method=rendezvous, rank=rank, world_size=world, timeout=_PATIENCE,
        device_id=None if small else device,
    )  # fmt: skip
    here = Here(device, rank, world, small)
    inputs = {op: Inputs(OPS[op], torch.bfloat16, str(device)) for op in ("sdpa_decode", "fp4_moe")}
    lines = []
    with torch.no_grad():
        for name in LINES:
            if only in name:
                lines.append(line(name, here, inputs))
                if rank == 0:
                    log(summary_line(lines[-1]))
                    Path(folder, "lines").write_text(json.dumps(lines))  # as soon as it is there
    dist.barrier()  # who leaves first takes connections from who is still at work
    dist.destroy_process_group()


def main(
    gloo: Annotated[bool, typer.Option(help="Judge tiny sizes on a CPU, time nothing.")] = False,
    processes: Annotated[int, typer.Option(help="One a GPU; by default all GPUs, with --gloo two.")] = 0,
    case: Annotated[str, typer.Option(help="Only the lines whose name contains this.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    prepare: Annotated[str, typer.Option(help="Compile for this architecture, and no more: needs no GPU.")] = "",
) -> None:
    """Calls shared among GPUs beside one GPU: results first, then times and the bytes that are sent."""
    if prepare:
        if prepare not in GPU_ARCH:
            log(f"bench.several_gpus: --prepare is {prepare!r}, accepted: {', '.join(GPU_ARCH)}")
            raise typer.Exit(2)
        raise typer.Exit(bool(fill(kernels(prepare, processes or 2), config.cache_dir() / "cuda", console)))
    gpus = torch.cuda.device_count()
    world = processes or (2 if gloo else gpus)
    if world < 2 or not (gloo or world <= gpus):
        log(
            f"bench.several_gpus: found {gpus} CUDA GPUs for {max(world, 2)} processes, accepted: two or more, one a"
            " process; --gloo judges tiny sizes on a CPU"
        )
        raise typer.Exit(2)
    if not any(case in name for name in LINES):
        log(f"bench.several_gpus: no line has {case!r} in its name, accepted: {'; '.join(LINES)}")
        raise typer.Exit(2)
    record: dict[str, Any] = {"command": f"python -m bench.several_gpus {' '.join(sys.argv[1:])}".strip()}
    if gloo:
        log(f"{world} processes on a CPU over gloo, tiny sizes: results alone")
    else:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        record |= facts() | {"gpus": world, "nccl": nccl, "peer_access": torch.cuda.can_device_access_peer(0, 1)}
        direct = "" if record["peer_access"] else ", which cannot read each other's memory"
        log(f"{world} x {record['device']}{direct}: torch {torch.__version__}, NCCL {nccl}, commit {record['commit']}")
        arch = target_of(torch.device("cuda", 0)).arch
        fill(kernels(arch, world), config.cache_dir() / "cuda", console)  # side by side, before processes want them
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (world, folder, "gloo" if gloo else "nccl", case), nprocs=world)
        record["lines"] = json.loads(Path(folder, "lines").read_text())
    if json_file:
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    raise typer.Exit(any("error" in found for found in record["lines"]))


if __name__ == "__main__":
    typer.run(main)
