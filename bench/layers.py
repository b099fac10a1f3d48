"""DeepSeek-V4's attention on the ops and as transformers runs it: ``python -m bench.layers``.

One layer's attention of DeepSeek-V4-Flash or Pro, with all of its projections, norms, rotations and its compressor,
random weights and no experts: a decode step behind a cache of 128 K tokens, a prefill, and a prefill behind such a
cache. Layers are of three kinds: a window alone, entries of 4 tokens chosen by the indexer (CSA), and all entries of
128 tokens (HCA). One side went through ``attnkit_model``, the other is eager, the only attention that transformers has
for this model.

Results come first, as in ``bench.models``: each row's error beside the same module in float32 may be at most
``_AS_GOOD`` times that of transformers. The caches of both sides hold the same random numbers, written into them
directly, and are set back before each call, which costs nothing: the library's layers replace their tensors and write
to none. The position is one at which no entry gets complete, as in 3 of 4 steps, since the library then copies the
whole cache. Eager attention repeats keys for each head; where that does not fit into memory, its results and its time
are those of pieces behind one another, sequence by sequence, and the line says so.

``--peers`` adds the steps of the attention that FlashMLA, DeepGEMM and vLLM have kernels for, beside these kernels
(``bench.layer_steps``); with ``--no-eager`` they are all there is.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.masking_utils import create_sliding_window_causal_mask

from bench import layer_steps, models, timing
from bench.__main__ import facts
from bench.layer_inputs import KINDS, Shape, shape_of
from bench.models import Run, log
from torch_attnkit.core import config
from torch_attnkit.core.target import target_of
from torch_attnkit.integrations.transformers import attnkit_model
from torch_attnkit.warmup import asked_by, fill

SIZES: dict[str, dict[str, Any]] = {
    "flash": {},
    "pro": dict(hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, o_groups=16, index_topk=1024),
}
# Nothing of it is called: the experts, the vocabulary.
_NO_EXPERTS = dict(n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, vocab_size=64)
_PIECE = 256  # tokens
_LONG = 20e3  # microseconds, beyond which a call is not repeated in a graph: launches are nothing then
_NAMES = {"compressor": "head_dim", "indexer": "index_head_dim"}  # states of a cache, and what sizes them
State = dict[str, Any]


def layer_config(size: str, kind: str, **changes: Any) -> DeepseekV4Config:
    """A model of one layer as published, but for what is not attention."""
    only = dict(num_hidden_layers=1, layer_types=[KINDS[kind]], mlp_layer_types=["moe"])
    return DeepseekV4Config(**{**SIZES[size], **_NO_EXPERTS, **only, **changes})


def built(settings: DeepseekV4Config, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model, with everything in float32 that is so in a checkpoint: norms, sinks, position biases."""
    model = models.built(DeepseekV4ForCausalLM, settings, device, dtype, experts=None)
    for name, p in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            p.data = p.data.float()
    return model


@dataclass(frozen=True)
class Attention:
    """``tokens`` new ones of each of ``batch`` sequences, behind ``context`` tokens each."""

    batch: int
    tokens: int
    context: int
    choice = False  # rows are no logits

    @property
    def name(self) -> str:
        what = f"decode, batch {self.batch}" if self.tokens == 1 else f"prefill, {self.batch} x {self.tokens} tokens"
        return what + (f", behind {self.context}" if self.context else "")

    def make(self, model: Any, sample: int = 0) -> Run:
        """The whole call."""
        sequences = range(sample * self.batch, (sample + 1) * self.batch)
        return self._call(model, sequences, self.tokens)

    def pieces(self, model: Any, sample: int = 0) -> Run:
        """The same in pieces that eager attention has memory for."""
        sequences = range(sample * self.batch, (sample + 1) * self.batch)
        calls = [self._call(model, range(i, i + 1), _PIECE) for i in sequences]
        return lambda: torch.cat([call() for call in calls])

    def _call(self, model: Any, sequences: range, piece: int) -> Run:
        attention, hidden = model.model.layers[0].self_attn, _hidden(model, sequences, self.tokens)
        cache = filled(model, sequences, self.context)
        layer, before = cache.layers[0], _state(cache.layers[0])
        given = []
        for first in range(0, self.tokens, piece):
            part = hidden[:, first : first + piece]
            layer.cumulative_length = self.context + first
            given.append((part, _around(model, part, cache, self.context + first)))

        def run() -> torch.Tensor:
            _set_back(layer, before)
            outs = [attention(part, past_key_values=cache, **around)[0] for part, around in given]
            return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

        return run


def _hidden(model: Any, sequences: range, tokens: int) -> torch.Tensor:
    """What a norm hands to the attention, (B, T, N)."""
    return torch.cat([_random(i, 0, 1, tokens, model.config.hidden_size, like=model) for i in sequences])


def _random(sequence: int, index: int, *shape: int, like: Any) -> torch.Tensor:
    """The same for every dtype of the model. ``index`` tells the tensors of a sequence apart."""
    torch.manual_seed(sequence * 16 + index)
    return torch.randn(shape, dtype=torch.bfloat16, device=like.device).to(like.dtype)


def _around(model: Any, hidden: torch.Tensor, cache: DynamicCache, first: int) -> dict[str, Any]:
    """What the model makes once for all of its layers: mask, positions, rotations."""
    positions = torch.arange(first, first + hidden.shape[1], device=hidden.device)[None]  # (1, T)
    mask = create_sliding_window_causal_mask(
        config=model.config, inputs_embeds=hidden, attention_mask=None, past_key_values=cache, position_ids=positions
    )
    rotary = model.model.rotary_emb
    rotations = {kind: rotary(hidden, position_ids=positions, layer_type=kind) for kind in rotary.layer_types}
    return dict(position_embeddings=rotations, position_ids=positions, attention_mask=mask)


def filled(model: Any, sequences: range, context: int) -> DynamicCache:
    """The library's cache of one layer as it is behind ``context`` tokens, of random numbers, one draw a sequence."""
    c, cache = model.config, DynamicCache(config=model.config)
    layer, counter = cache.layers[0], itertools.count(1)

    def rows(count: int, *shape: int) -> torch.Tensor:
        made = torch.empty(len(sequences), count, *shape, dtype=model.dtype, device=model.device)
        index = next(counter)
        for row, sequence in zip(made, sequences, strict=True):
            row.copy_(_random(sequence, index, count, *shape, like=model))
        return made  # (B, count, ...)

    keys = rows(min(context, c.sliding_window - 1), c.head_dim)[:, None]  # (B, 1, S, D)
    layer.lazy_initialization(keys, keys)
    layer.keys = layer.values = keys
    layer.cumulative_length = context
    for name in getattr(layer, "compressed_kv", {}) if context else ():
        dim, rate = getattr(c, _NAMES[name]), layer.compress_rate
        joined = hasattr(layer, "overlap_kv")  # windows overlap, and tokens have two series
        layer.compressed_kv[name], layer.entry_count[name] = rows(context // rate, dim), context // rate
        for kept in (layer.buffer_kv, layer.buffer_gate):
            kept[name] = rows(context % rate, dim * (2 if joined else 1))
        for kept in (layer.overlap_kv, layer.overlap_gate) if joined else ():
            kept[name] = rows(rate, dim)
    return cache


def _state(layer: Any) -> State:
    return {k: dict(v) if isinstance(v, dict) else v for k, v in vars(layer).items()}


def _set_back(layer: Any, state: State) -> None:
    vars(layer).update({k: dict(v) if isinstance(v, dict) else v for k, v in state.items()})


# Judging and timing.


def judged(case: Attention, ours: Any, theirs: Any) -> tuple[bool, str]:
    """As ``models.judged``, of so many draws as it takes to have rows enough."""
    samples = range(-(-models._ROWS // (case.batch * case.tokens)))

    def rows(model: Any, whole: bool) -> torch.Tensor:
        made = (case.make(model, sample) if whole else case.pieces(model, sample) for sample in samples)
        return torch.cat([run().flatten(0, 1) for run in made])  # (R, N)

    return models.judged(case, rows(ours, True), rows(theirs, False), rows(models.exact_of(theirs), False))


def fitting(case: Attention, model: Any) -> tuple[Run, str]:
    """The whole call, or its pieces where memory does not hold it."""
    try:
        run = case.make(model)
        run()
        torch.cuda.synchronize()
        return run, ""
    except torch.OutOfMemoryError:
        pass  # behind the handler: what it holds is freed only then
    torch.cuda.empty_cache()
    return case.pieces(model), " (out of memory as a whole: in pieces)"


def captured(run: Run) -> timing.Run:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    microseconds = (time.perf_counter() - start) * 1e6
    return timing.Run(run, 1) if microseconds > _LONG else timing.graph([run])


def timed(case: Attention, sides: dict[str, Any]) -> str:
    """Time and launches of each side."""
    runs, remarks = {}, {}
    for name, model in sides.items():
        runs[name], remarks[name] = fitting(case, model)
    us = timing.interleaved([captured(run) for run in runs.values()])
    counts = [sum(e.count for e in models.launched(run)) for run in runs.values()]
    each = zip(runs, us, counts, strict=True)
    message = ", ".join(f"{name} {t:.1f} us in {n} launches{remarks[name]}" for name, t, n in each)
    return f"{message}; transformers' time / ours {us[1] / us[0]:.2f}"


def compare(title: str, theirs: Any, cases: list[Attention], profile: bool = False) -> int:
    """Print the lines of one layer; how many cases are wrong or failed."""
    ours, failures = models.ours_of(theirs, experts=None), 0
    log(f"{title}: weights {models.megabytes(theirs.model.layers[0].self_attn):.0f} MB")
    for case in cases:
        with models.part(f"  {case.name}") as failed:
            good, message = judged(case, ours, theirs)
            failures += not good
            log(f"  {case.name}: {'right' if good else 'WRONG'}: {message}")
            torch.cuda.empty_cache()
            if good:
                log(f"    {timed(case, dict(ours=ours, transformers=theirs))}")
            if profile:
                log(f"    ours: {models.shares(case.make(ours))}")
        failures += len(failed)
        torch.cuda.empty_cache()
    return failures


def kernels(layers: list[DeepseekV4Config], cases: list[Attention], arch: str) -> list[Any]:
    """What all of it will ask to be compiled, found on tensors without data."""
    with FakeTensorMode(allow_non_fake_inputs=True), asked_by(arch) as asked:
        for settings in layers:
            model = attnkit_model(built(settings, "cpu"))
            for case in cases:
                case.make(model)()
    return list(asked.kernels)


def _cases(batches: list[int], tokens: int, context: int) -> Iterator[Attention]:
    for batch in batches:
        yield Attention(batch, 1, context)
    if tokens:
        yield Attention(1, tokens, 0)
        yield Attention(1, tokens, context)


def eager(wanted: dict[str, DeepseekV4Config], cases: list[Attention], profile: bool) -> int:
    """Whole layers beside transformers' own attention; how many cases are wrong or failed."""
    failures = 0
    for title, settings in wanted.items():
        with models.part(title) as failed:
            failures += compare(title, built(settings, "cuda"), cases, profile)
        failures += len(failed)
        torch.cuda.empty_cache()
    return failures


def composed(calls: list[tuple[str, Shape]], seconds: float) -> int:
    """Steps of layers beside the kernels that serve them; how many are wrong or failed."""
    failures, rows, start = 0, [], time.perf_counter()
    for title, shape in calls:
        if seconds and time.perf_counter() - start > seconds:
            log(f"  {title}, {shape.name}: not begun, {seconds:.0f} s are over")
            continue
        wrong, found = layer_steps.compare(shape, title)
        failures, rows = failures + wrong, rows + found
    models.console.print(layer_steps.table(rows))
    return failures


@torch.no_grad()
def main(
    sizes: Annotated[str, typer.Option(help=f"Of {', '.join(SIZES)}.")] = "flash,pro",
    kinds: Annotated[str, typer.Option(help=f"Of {', '.join(KINDS)}.")] = "window,csa,hca",
    batches: Annotated[str, typer.Option(help="Sequences of the decode steps.")] = "1,32,128",
    tokens: Annotated[int, typer.Option(help="Tokens of a prefill; 0: none.", min=0)] = 4096,
    context: Annotated[int, typer.Option(help="Tokens that the caches hold.", min=1)] = 131072,
    profile: Annotated[bool, typer.Option(help="Also say which kernels the time of a call goes to.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes that compile; by default one a core.", min=0)] = 0,
    with_eager: Annotated[bool, typer.Option("--eager/--no-eager", help="Beside transformers' own attention.")] = True,
    peers: Annotated[bool, typer.Option(help="Beside FlashMLA, DeepGEMM and vLLM, composed by hand.")] = False,
    seconds: Annotated[float, typer.Option(help="After which none of the latter is begun; 0: all are.")] = 0,
) -> None:
    """A layer's attention on the ops and as others run it: results beside float32 or float64, then times."""
    sized, each = sizes.split(","), kinds.split(",")
    for option, names, known in (("--sizes", sized, SIZES), ("--kinds", each, KINDS)):
        if unknown := [name for name in names if name not in known]:
            raise typer.BadParameter(f"{option} names {unknown[0]!r}, accepted: {', '.join(known)}")
    cases = list(_cases(models.counts("--batches", batches) if batches else [], tokens, context))
    if not torch.cuda.is_available():
        raise typer.BadParameter("the bench needs a CUDA device; simulated runs are not timed")
    start, record = time.perf_counter(), facts()
    log(f"{record['device']}: torch {torch.__version__}, commit {record['commit']}")
    layers = {f"DeepSeek-V4-{s}, {k}": layer_config(s, k) for s in sized for k in each}
    calls = [
        (title := f"DeepSeek-V4-{s}, {k}", shape_of(layers[title], k, c.batch, c.tokens, c.context))
        for s in sized
        for c in cases
        for k in each
    ]
    arch, folder, failures = target_of(torch.device("cuda")).arch, config.cache_dir() / "cuda", 0
    with models.part("compiling") as failed:
        needed = kernels(list(layers.values()), cases, arch) if with_eager else []
        needed += layer_steps.kernels([shape for _, shape in calls], arch) if peers else []
        failures += fill(list(dict.fromkeys(needed)), folder, models.console, jobs)
    failures += len(failed)
    parts: dict[str, Callable[[], int]] = {
        "beside transformers": lambda: eager(layers, cases, profile) if with_eager else 0,
        "beside the composed layer": lambda: composed(calls, seconds) if peers else 0,
    }
    for name, part in parts.items():
        with models.part(name) as failed:
            failures += part()
        failures += len(failed)
        log(f"{name}: {time.perf_counter() - start:.0f} s, {failures} failures")
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
