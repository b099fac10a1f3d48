"""What a user of vLLM gets with and without this package: ``python -m bench.serve MODEL``.

Models have the widths and vocabularies that were published, and weights drawn by name: no checkpoint, no tokenizer and
no network are needed, only vLLM 0.32 beside this tree. Every case runs in a process of its own, on the same weights and
prompts; records, logs and configurations lie in ``--out``.

    vllm                vLLM's own choice: FlashAttention, and Triton's kernels for MXFP4 experts, Marlin for NVFP4
    attnkit             attention by CUSTOM, and FP4 experts by --quantization attnkit_mxfp4 or attnkit_nvfp4
    attnkit-attention   attention by CUSTOM, experts as vLLM has them (GPT-OSS, Qwen3-MoE)
    vllm-triton         attention by TRITON_ATTN

If asked for: vllm-invariant and attnkit-invariant with VLLM_BATCH_INVARIANT, vllm-drafts, attnkit-drafts and
attnkit-invariant-drafts with tokens that are drafted from n-grams of the text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from . import load, table
from .models import MODELS

ROOT = Path(__file__).resolve().parent.parent.parent
_LEAST = 30  # seconds that a case takes at least
_JUDGE = 60  # seconds that are kept for float32
_LOG_LINES = 25  # last lines of the log of a case that failed
console = Console(width=220 if not sys.stdout.isatty() else None)


def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}; tiny ones run on a CPU, too.")],
    layers: Annotated[int, typer.Option(help="The first layers alone; 0: all of the model's.", min=0)] = 0,
    cases: Annotated[str, typer.Option(help=f"Of {', '.join(load.CASES)}; by default the first four.")] = "",
    parts: Annotated[str, typer.Option(help=f"Of {', '.join(load.PARTS)}.")] = ",".join(load.USUAL),
    profile: Annotated[bool, typer.Option(help="Also count kernels and launches of steps, on one GPU.")] = False,
    judge: Annotated[bool, typer.Option(help="Also compare log-probabilities with float32.")] = False,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share the model.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32; by default float32 on a CPU alone.")] = "",
    kv_cache: Annotated[str, typer.Option(help="vLLM's word for the dtype of keys and values: auto, fp8.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="A folder for records and logs; by default a temporary one.")] = None,
    baseline: Annotated[bool, typer.Option(help="Put records into bench/baselines/<device>/.")] = False,
    budget: Annotated[float, typer.Option(help="Seconds; a case that may not end within them is left out.")] = 570,
) -> None:
    """Serve a model with and without this package, and compare times, and with --judge results."""
    began = time.perf_counter()
    if model not in MODELS:
        raise typer.BadParameter(f"model is {model!r}, accepted: {', '.join(MODELS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and (baseline or not model.endswith("tiny")):
        tiny = ", ".join(name for name in MODELS if name.endswith("tiny"))
        raise typer.BadParameter(f"there is no CUDA device, accepted on a CPU: {tiny}, without --baseline")
    if profile and tensor_parallel > 1:
        raise typer.BadParameter("--profile counts what one process does, accepted: --tensor-parallel 1")
    folder = out if out is not None else Path(tempfile.mkdtemp(prefix="bench-serve-"))
    run = load.Run(
        model, "", str(folder.resolve()), device, layers, chosen("parts", parts, load.PARTS), profile, judge,
        tensor_parallel, dtype or ("float32" if device == "cpu" else "bfloat16"), device == "cpu", kv_cache,
    )  # fmt: skip
    for packed in (True, False):
        run.served.save(folder / ("packed" if packed else "dense"), packed=packed)
    names, left_out = load.cases_of(run.served, device, list(chosen("cases", cases, tuple(load.CASES))))
    for name, why in left_out.items():
        echo(f"{name}: left out, {why}")
    records, failed = served(run, names, began + budget)
    judged = judged_of(run, records, began + budget) if judge else {}
    show(run, records, judged)
    if baseline:
        given = " ".join(sys.argv[1:])
        if out is not None:  # where that lay is nobody's concern
            given = given.replace(str(out), out.name)
        merge(run, records, f"python -m bench.serve {given}")
    echo(f"{time.perf_counter() - began:.0f} s; records and logs are in {folder.name}")
    raise typer.Exit(bool(failed) or not records)


def chosen(option: str, text: str, accepted: tuple[str, ...]) -> tuple[str, ...]:
    """The words of an option that takes several."""
    names = tuple(name for name in text.split(",") if name)
    if odd := [name for name in names if name not in accepted]:
        raise typer.BadParameter(f"--{option} has {', '.join(odd)}, accepted: {', '.join(accepted)}")
    return names


def echo(message: str) -> None:
    console.print(message, soft_wrap=True, highlight=False, markup=False)


def served(run: load.Run, names: list[str], end: float) -> tuple[table.Records, list[str]]:
    """The records of the cases, and which of them failed; a case that may not end in time is not begun."""
    records: table.Records = {}
    failed: list[str] = []
    longest = _LEAST
    for name in names:
        began = time.perf_counter()
        left = end - began - (_JUDGE if run.judge else 0)
        if left < longest:
            echo(f"{name}: left out, {left:.0f} s are left and the longest case took {longest:.0f} s")
            continue
        this = dataclasses.replace(run, case=name)
        file = Path(run.folder) / f"{name}.json"
        file.unlink(missing_ok=True)
        code = child(["bench.serve.served", this.text()], file.with_suffix(".log"), left)
        seconds = time.perf_counter() - began
        longest = max(longest, seconds)
        echo(f"{name}: {'ended' if code == 0 else 'FAILED' if code else 'stopped'} after {seconds:.0f} s")
        if code != 0:
            failed.append(name)
            echo("\n".join(file.with_suffix(".log").read_text(errors="replace").splitlines()[-_LOG_LINES:]))
        if file.exists():
            records[name] = json.loads(file.read_text())
    return records, failed


def child(command: list[str], log: Path, limit: float) -> int | None:
    """Run a module in a process of its own, with its output in ``log``: its status, None where it was stopped."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(max(1.0, limit))
        except subprocess.TimeoutExpired:
            return None
        finally:  # with the workers that it forked
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def judged_of(run: load.Run, records: table.Records, end: float) -> dict[str, Any]:
    names = [name for name, record in records.items() if "judged" in record]
    file = Path(run.folder) / "judge.json"
    file.unlink(missing_ok=True)
    if names:
        log = file.with_suffix(".log")
        code = child(["bench.serve.judge", run.text(), ",".join(names)], log, end - time.perf_counter())
        if code != 0:
            echo(f"float32: {'stopped' if code is None else 'FAILED'}")
            echo("\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]))
    if not file.exists():
        return {}
    judged = json.loads(file.read_text())["judged"]
    for name, found in judged.items():
        records[name]["distance"] = found
        (Path(run.folder) / f"{name}.json").write_text(json.dumps(records[name], indent=1) + "\n")
    return judged


def show(run: load.Run, records: table.Records, judged: dict[str, Any]) -> None:
    echo(table.heading(records))
    title = f"{run.model}, {run.served.sizes['num_hidden_layers']} layers, {run.dtype}"
    if run.kv_cache != "auto":
        title += f", keys and values in {run.kv_cache}"
    if run.tensor_parallel > 1:
        title += f", shared by {run.tensor_parallel}"
    if records:
        console.print(table.speed(title, records))
    for found in (table.invariance(title, records), table.drafts(title, records)):
        if found is not None:
            console.print(found)
    if judged:
        console.print(table.distances(title, judged))
    for found in table.profiles(title, records):
        console.print(found)


def merge(run: load.Run, records: table.Records, command: str) -> None:
    """Put the records into the device's baseline of the model; cases that did not run now stay as they were."""
    whole = {name: record for name, record in records.items() if "facts" in record}
    if not whole:
        return
    device = next(iter(whole.values()))["facts"]["device"].lower().replace(" ", "-")
    shared = f"-{run.tensor_parallel}-gpus" if run.tensor_parallel > 1 else ""
    rare = [f"-{run.layers}-layers"] if run.layers else []
    rare += [f"-{part}" for part in load.PARTS if part in run.parts and part not in load.USUAL]
    if run.kv_cache != "auto":
        rare.append(f"-{run.kv_cache}")
    file = ROOT / "bench" / "baselines" / device / f"serve-{run.model}{shared}{''.join(rare)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(file.read_text())["cases"] if file.exists() else {}
    new = {
        name: {"command": command} | {k: v for k, v in record.items() if k != "judged"} | {"parts": parts_of(record)}
        for name, record in whole.items()
    }
    merged = {name: (old | new)[name] for name in load.CASES if name in old | new}
    file.write_text(json.dumps({"model": run.model, "cases": merged}, indent=1) + "\n")
    echo(f"baseline {file.relative_to(ROOT)} holds {', '.join(merged)}")


def parts_of(record: dict[str, Any]) -> dict[str, Any]:
    """What was measured, without texts."""
    return {name: table.without_texts(part) for name, part in record["parts"].items()}


if __name__ == "__main__":
    typer.run(main)
