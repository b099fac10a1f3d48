"""Decode steps of GPT-OSS-20B as a whole under torch.compile: ``python -m bench.models --layers 24 --compile``.

Three contenders with the same weights, each as a CUDA graph, in turns: ``compiled``, the model that attnkit_model made
with MXFP4 experts, under torch.compile; ``modules``, the same without a compiler; ``transformers``, its own way: eager
attention, for it has no other for GPT-OSS that needs no download, and experts by grouped products on the bf16 numbers
that the packed ones hold; ``--compile-theirs`` adds that under torch.compile. Weights are random, made on the GPU.

In float32 such a model fits beside no other, so results are compared with those of transformers: compiled ones may be
off by ``_AS_GOOD`` times what those of the modules are, and these by ``_ALIKE`` of the logits. Without ``--compile``
the bench judges fewer layers by float32.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from transformers import GptOssForCausalLM

from bench import models, timing
from torch_attnkit.integrations.transformers import attnkit_model

VOCABULARY = 201_088
BATCHES = (1, 8, 64)
_AS_GOOD = 1.5  # rows whose routers chose otherwise make medians of few rows uneven
_ALIKE = 0.7  # results that have nothing in common differ by 1.4 of their mean
_ROWS = 32
_SHOWN = 40  # kernels of a step that are listed


def packed_of(theirs: Any) -> Any:
    """``theirs`` on the ops, with experts in MXFP4. The weights that are packed are not copied before."""
    experts = [m for m in theirs.modules() if hasattr(m, "is_transposed") and hasattr(m, "is_concatenated")]
    shared = {id(p): p for module in experts for p in module.parameters(recurse=False)}
    return attnkit_model(copy.deepcopy(theirs, shared), experts="mxfp4")


def contenders(theirs: Any, how: dict[str, Any], compile_theirs: bool) -> dict[str, Any]:
    """The models by name, ``how`` being arguments of torch.compile."""
    ours = packed_of(theirs)
    found = {"compiled": torch.compile(ours, fullgraph=True, dynamic=False, **how), "modules": ours}
    found["transformers"] = theirs
    if compile_theirs:
        found["transformers, compiled"] = torch.compile(theirs, dynamic=False, **how)
    return found


def rows(case: models.Case, model: Any) -> torch.Tensor:
    """Rows of results (R, V) of as many draws as ``_ROWS`` takes."""
    samples = range(-(-_ROWS // case.rows))
    return torch.cat([case.make(model, sample)().flatten(0, 1) for sample in samples])


def judged(compiled: torch.Tensor, modules: torch.Tensor, theirs: torch.Tensor) -> tuple[bool, str]:
    """Whether rows (R, V) of the compiled model are as near to those of transformers as without a compiler."""
    size = float(theirs.float().abs().mean())
    off, plain = (float((t.float() - theirs.float()).abs().mean(-1).median()) for t in (compiled, modules))
    good = bool(compiled.isfinite().all()) and off <= _AS_GOOD * plain + 1e-6 * size and plain <= _ALIKE * size
    same = [int((t.argmax(-1) == theirs.argmax(-1)).sum()) for t in (compiled, modules)]
    message = (
        f"median row is {off:.3g} from transformers' (modules {plain:.3g}) of {size:.3g}; tokens equal in {same[0]}"
        f" ({same[1]}) of {len(theirs)}"
    )
    return good, message


def launches(run: timing.Run, layers: int) -> list[str]:
    """What a captured step launches: the number, and the kernels that take most of the time."""
    kernels = models.launched(run.go)
    count, total = (
        sum(n) / run.calls for n in zip(*((e.count, e.self_device_time_total) for e in kernels), strict=True)
    )
    lines = [f"{count:.0f} launches, {total:.0f} us in them; {count / layers:.1f} launches a layer"]
    for e in kernels[:_SHOWN]:
        lines.append(f"{e.count / run.calls:7.1f} x {e.self_device_time_total / e.count:7.2f} us  {e.key[:90]}")
    return lines


def compare(found: dict[str, Any], cases: list[models.Case], layers: int, listed: bool) -> int:
    """Print the lines of all cases; how many are wrong or failed."""
    failures, start = 0, time.perf_counter()
    for case in cases:
        torch._dynamo.reset()
        with models.part(f"  {case.name}") as failed:
            good, message = judged(*(rows(case, found[name]) for name in ("compiled", "modules", "transformers")))
            failures += not good
            models.log(f"  {case.name}: {'right' if good else 'WRONG'}: {message}")
            if good:
                _log_times(case, found, layers, listed)
        failures += len(failed)
        torch.cuda.empty_cache()
        models.log(f"  {time.perf_counter() - start:.0f} s")
    return failures


def _log_times(case: models.Case, found: dict[str, Any], layers: int, listed: bool) -> None:
    runs, remarks = zip(*(models._captured(case.make(model)) for model in found.values()), strict=True)
    us = timing.interleaved(list(runs))
    times = [f"{name} {t:.0f} us{remark}" for name, t, remark in zip(found, us, remarks, strict=True)]
    models.log(f"    {', '.join(times)}; transformers' time / compiled {min(us[2:]) / us[0]:.2f}")
    for name, run in zip(found, runs, strict=True) if listed else ():
        for line in launches(run, layers):
            models.log(f"    {name}: {line}")


def compare_gpt_oss(
    layers: int, cases: list[models.Case], how: dict[str, Any], compile_theirs: bool, listed: bool
) -> int:
    settings = models.gpt_oss_config(layers, vocab_size=VOCABULARY)
    theirs = models.built(GptOssForCausalLM, settings, "cuda")
    found = contenders(theirs, how, compile_theirs)
    models.log(
        f"GPT-OSS-20B, {layers} of 24 layers, vocabulary {VOCABULARY}, torch.compile({how}): weights"
        f" {models.megabytes(found['modules']):.0f} MB beside {models.megabytes(theirs):.0f} MB in bf16 under"
        f" {models._own_way(theirs)}"
    )
    return compare(found, cases, layers, listed)
