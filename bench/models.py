"""Layers of whole models with random weights, on the ops and as transformers runs them: ``python -m bench.models``.

GPT-OSS-20B, a few of its layers and a small vocabulary: one decode step behind a static cache and a prefill, through
``attnkit_model`` with MXFP4 experts, beside the same model in transformers' own way: eager attention, and experts by
grouped products on the bf16 numbers that the packed ones hold. Of DeepSeek-V4-Flash the MoE block alone: router,
experts and shared expert. Whether its attention runs is printed; ``bench.layers`` times it.

Results come first: both are compared with the model in float32, row by row. The median row's error of ours must be at
most ``_AS_GOOD`` times that of the other. A row for which rounding made a router choose another expert is far off, and
of such rows ours may have no more than chance allows.

Then both are timed as CUDA graphs that take turns. What no graph can hold is put outside of it for both: masks are
made before, as generate() does; a call sets the cache's length back; and of transformers' own way the layer of a
sliding window is one without a copy from the host. A model's other modules are transformers' own.

With ``--compile`` decode steps of GPT-OSS alone, under torch.compile beside the modules as they are (``bench.whole``).
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DynamicCache,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    StaticCache,
)
from transformers.cache_utils import StaticSlidingWindowLayer
from transformers.masking_utils import create_masks_for_generate
from transformers.utils.import_utils import is_flash_linear_attention_available

from bench import timing
from bench.__main__ import console, facts
from torch_attnkit.core import UnsupportedError, config
from torch_attnkit.core.target import target_of
from torch_attnkit.integrations.transformers import attnkit_model, round_experts_to_fp4
from torch_attnkit.kernels.batched_gemm import MOST_FEW
from torch_attnkit.warmup import asked_by, fill

VOCABULARY = 8192  # the first of 201,088 and 129,280
# Half of bfloat16's differences come from roundings that both share; the tests of the integration judge by the same.
_AS_GOOD = 1.25
_FAR = 4  # times the median error of transformers' rows: another expert was chosen
_ROWS = 64  # at least so many are compared, in as many draws of tokens as that takes
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Something to run: ``make(model, sample)`` gives the call. ``rows`` of results come from one."""

    name: str
    rows: int
    make: Callable[..., Run]
    choice: bool  # whether the largest number of a row is a token

    def results(self, model: Any) -> torch.Tensor:
        """Rows of results (R, V) of as many draws as ``_ROWS`` takes."""
        samples = range(-(-_ROWS // self.rows))
        return torch.cat([self.make(model, sample)().flatten(0, 1) for sample in samples])


def gpt_oss_config(layers: int, **changes: Any) -> GptOssConfig:
    """GPT-OSS-20B as published, but for its number of layers and its vocabulary."""
    sizes = dict(num_local_experts=32, vocab_size=VOCABULARY, num_hidden_layers=layers)
    return GptOssConfig(**{**sizes, **changes})


def deepseek_v4_config(**changes: Any) -> DeepseekV4Config:
    """Two layers of DeepSeek-V4-Flash: one that routes by token, one by score."""
    sizes = dict(
        vocab_size=VOCABULARY, num_hidden_layers=2, mlp_layer_types=["hash_moe", "moe"],
        layer_types=["sliding_attention", "compressed_sparse_attention"],
    )  # fmt: skip
    return DeepseekV4Config(**{**sizes, **changes})


def qwen3_5_config(**changes: Any) -> Qwen3_5MoeTextConfig:
    """A layer of linear attention of Qwen3.5-35B; experts are few, which nothing here runs."""
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=2048, num_hidden_layers=1, layer_types=["linear_attention"], num_experts=2,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    return Qwen3_5MoeTextConfig(**{**sizes, **changes})


@torch.no_grad()
def built(
    model_class: Any, settings: Any, device: str, dtype: torch.dtype = torch.bfloat16, *, experts: str | None = "mxfp4"
) -> Any:
    """A model in eval mode whose activations keep their size; experts' weights are numbers of ``experts``."""
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class._from_config(settings, dtype=dtype, attn_implementation="eager").eval()
    for name, p in model.named_parameters():
        if "norm" in name:
            p.normal_(1.0, 0.1)
        elif p.ndim < 2:
            p.normal_(0.0, 0.3)
        else:
            transposed = settings.model_type == "gpt_oss" and ".experts." in name and "bias" not in name
            p.normal_(0.0, p.shape[-2 if transposed else -1] ** -0.5)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):  # float32 in every checkpoint
            module.e_score_correction_bias = torch.randn(module.num_experts, device=device) * 0.1
        if hasattr(module, "tid2eid"):
            scores = torch.rand(settings.vocab_size, module.num_experts, device=device)
            module.tid2eid = scores.topk(module.top_k).indices
    if experts is not None:
        round_experts_to_fp4(model, experts)
    return model.requires_grad_(False)


def ours_of(theirs: Any, experts: str | None = "mxfp4") -> Any:
    return attnkit_model(copy.deepcopy(theirs), experts=experts)


def exact_of(theirs: Any) -> Any:
    """The same numbers in float32, one expert after the other: what both are measured by."""
    exact = copy.deepcopy(theirs).float()
    for module in exact.modules():  # a block alone has no method for it
        if hasattr(module, "is_transposed") and hasattr(module, "is_concatenated"):
            module.config = copy.deepcopy(module.config)
            module.config._experts_implementation = "eager"
    return exact


# GPT-OSS: caches, a decode step, a prefill.


class _Window(StaticSlidingWindowLayer):
    """The library's layer copies an index from the host in each step, which no CUDA graph can hold. A model that
    attnkit_model was given writes to the layer as it is."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if key_states.shape[2] > 1 or self.cumulative_length_int < self.max_cache_len:
            return super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length_int += 1
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            kept.copy_(torch.cat((kept[:, :, 1:], new), 2))
        return self.keys, self.values


def _cache(model: Any, length: int) -> StaticCache:
    cache = StaticCache(model.config, max_cache_len=length)
    if model.config._attn_implementation == "attnkit":
        return cache
    for layer in cache.layers:
        if type(layer) is StaticSlidingWindowLayer:
            layer.__class__ = _Window
    return cache


def _set_length(cache: StaticCache, length: int) -> None:
    lengths = [layer.cumulative_length for layer in cache.layers]
    torch._foreach_copy_(lengths, [torch.full_like(lengths[0], length)] * len(lengths))  # one launch, and one of full
    for layer in cache.layers:
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = length


def _masks(model: Any, ids: torch.Tensor, cache: StaticCache) -> Any:
    like = torch.empty(*ids.shape, model.config.hidden_size, dtype=model.dtype, device=model.device)
    return create_masks_for_generate(model.config, like, None, cache)


def _call(model: Any, cache: StaticCache, length: int, ids: torch.Tensor, masks: Any, positions: torch.Tensor) -> Run:
    """What runs ``ids`` behind the first ``length`` tokens of ``cache``, as often as one likes: logits (B, T, V)."""

    def run() -> torch.Tensor:
        _set_length(cache, length)
        out = model(ids, attention_mask=masks, position_ids=positions, past_key_values=cache)
        logits: torch.Tensor = out.logits
        return logits

    return run


def decode(batch: int, context: int) -> Case:
    """A step of ``batch`` sequences, each behind ``context`` tokens whose keys and values are random."""

    def make(model: Any, sample: int = 0) -> Run:
        c, device = model.config, model.device
        torch.manual_seed(sample)
        ids = torch.randint(c.vocab_size, (batch, 1), device=device)
        cache = _cache(model, context + 1)
        cache.early_initialization(batch, c.num_key_value_heads, c.head_dim, model.dtype, device)
        for layer in cache.layers:
            for t in (layer.keys, layer.values):
                t.copy_(torch.randn(t.shape, dtype=torch.bfloat16, device=device))
        _set_length(cache, context)
        masks = _masks(model, ids, cache)
        positions = torch.full((1, 1), context, device=device)
        return _call(model, cache, context, ids, masks, positions)

    return Case(f"decode, batch {batch}, context {context}", batch, make, True)


def prefill(tokens: int) -> Case:
    def make(model: Any, sample: int = 0) -> Run:
        device = model.device
        torch.manual_seed(sample)
        ids = torch.randint(model.config.vocab_size, (1, tokens), device=device)
        cache = _cache(model, tokens)
        masks = _masks(model, ids, cache)
        positions = torch.arange(tokens, device=device)[None]
        return _call(model, cache, 0, ids, masks, positions)

    return Case(f"prefill, {tokens} tokens", tokens, make, True)


# DeepSeek-V4: the MoE block of a layer.


def moe(tokens: int, vocabulary: int = VOCABULARY) -> Case:
    def make(block: Any, sample: int = 0) -> Run:
        weight = block.gate.weight
        torch.manual_seed(sample)
        ids = torch.randint(vocabulary, (tokens, 1), device=weight.device)
        x = torch.randn(tokens, 1, weight.shape[1], dtype=torch.bfloat16, device=weight.device).to(weight.dtype)
        return lambda: block(x, input_ids=ids)

    return Case(f"MoE block, {tokens} tokens", tokens, make, False)


# Qwen3.5: a layer of linear attention.


def linear(batch: int, tokens: int, settings: Qwen3_5MoeTextConfig | None = None) -> Case:
    """A decode step of ``batch`` sequences behind random states, or with more ``tokens`` a prompt of each."""
    settings = settings or qwen3_5_config()

    def make(layer: Any, sample: int = 0) -> Run:
        weight = layer.in_proj_qkv.weight
        torch.manual_seed(sample)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=weight.device).to(weight.dtype)

        x = randn(batch, tokens, weight.shape[1])
        if tokens > 1:
            return lambda: layer(x, cache_params=DynamicCache(config=settings))
        cache = DynamicCache(config=settings)
        layer(randn(batch, 8, weight.shape[1]), cache_params=cache)  # states lie as the layer wants them
        for states in (cache.layers[0].conv_states, cache.layers[0].recurrent_states):
            states[0].copy_(randn(*states[0].shape))
        return lambda: layer(x, cache_params=cache)

    return Case(
        f"decode step, batch {batch}" if tokens == 1 else f"prompt, {batch} x {tokens}", batch * tokens, make, False
    )


# Judging and timing.


def judged(case: Case, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> tuple[bool, str]:
    """Whether the rows of ours (R, V) are as near to float32 as those of transformers, and by how much."""
    errors = [(t.float() - exact).abs().mean(-1) for t in (ours, theirs)]  # (R,) each
    error, other = (float(e.median()) for e in errors)
    far, their_far = (int((e > _FAR * other).sum()) for e in errors)
    # The difference of two counts of the same rare event has the variance 2 n.
    chance = their_far + 3 * math.sqrt(2 * max(their_far, 1))
    good = bool(ours.isfinite().all()) and error <= _AS_GOOD * other and far <= chance
    message = (
        f"median row's error {error:.3g} (transformers' {other:.3g}) of {float(exact.abs().mean()):.3g}, far off {far}"
        f" ({their_far}) of {len(exact)} rows"
    )
    if case.choice:
        a, b, c = (t.argmax(-1) for t in (ours, theirs, exact))
        counts = [int((x == y).sum()) for x, y in ((a, b), (a, c), (b, c))]
        message += f"; tokens equal in {counts[0]}, to float32's in {counts[1]} (transformers' {counts[2]})"
    return good, message


def peak(run: Run) -> int:
    """Bytes that a second run takes while it runs, on top of what is held before."""
    run()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def _captured(run: Run) -> tuple[timing.Run, str]:
    try:
        return timing.graph([run]), ""
    except Exception as failure:
        torch.cuda.synchronize()
        return timing.plain([run]), f" (no CUDA graph: {type(failure).__name__}: {str(failure).splitlines()[0][:160]})"


def timed(case: Case, models: dict[str, Any]) -> str:
    names = list(models)
    runs, remarks = zip(*(_captured(case.make(models[name])) for name in names), strict=True)
    us = timing.interleaved(list(runs))
    message = ", ".join(f"{name} {t:.1f} us{remark}" for name, t, remark in zip(names, us, remarks, strict=True))
    return f"{message}; transformers' time / ours {us[1] / us[0]:.2f}"


def launched(run: Run) -> list[Any]:
    """The kernels of one call as the profiler lists them, those that take most of the GPU's time first."""
    run()
    with torch.profiler.profile() as profiler:
        run()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.key_averages() if e.self_device_time_total > 0 and e.device_type.name == "CUDA"]
    return sorted(kernels, key=lambda e: -e.self_device_time_total)


def shares(run: Run) -> str:
    """The kernels that take most of the GPU's time in one call, each with its share."""
    kernels = launched(run)
    total = sum(e.self_device_time_total for e in kernels)
    largest = "; ".join(f"{e.self_device_time_total / total:.0%} {e.count} x {e.key[:60]}" for e in kernels[:8])
    return f"{total:.0f} us in {sum(e.count for e in kernels)} kernels: {largest}"


def log(message: str) -> None:
    console.print(message, soft_wrap=True, highlight=False, markup=False)


@contextlib.contextmanager
def part(name: str) -> Iterator[list[Exception]]:
    """A part of the bench that may fail: what comes after it goes on, and the list says that it did."""
    failed: list[Exception] = []
    try:
        yield failed
    except Exception as failure:
        failed.append(failure)
        traceback.print_exc()
        log(f"{name}: FAILED: {type(failure).__name__}: {failure}")


def megabytes(model: nn.Module) -> float:
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers())) / 1e6


def compare(title: str, theirs: Any, ours: Any, cases: list[Case], profile: bool = False) -> int:
    """Print the lines of one model or block; how many cases are wrong or failed."""
    models = {"ours": ours, "transformers": theirs}
    failures = 0
    log(f"{title}: weights {megabytes(ours):.0f} MB, in bf16 {megabytes(theirs):.0f} MB")
    exact = exact_of(theirs)
    for case in cases:
        with part(f"  {case.name}") as failed:
            good, message = judged(case, *(case.results(model) for model in (ours, theirs, exact)))
            failures += not good
            log(f"  {case.name}: {'right' if good else 'WRONG'}: {message}")
            if good:
                peaks = ", ".join(f"{name} {peak(case.make(model)) / 1e6:.0f} MB" for name, model in models.items())
                log(f"    {timed(case, models)}; memory besides weights and cache: {peaks}")
            for name, model in models.items() if profile else ():
                log(f"    {name}: {shares(case.make(model))}")
        failures += len(failed)
        torch.cuda.empty_cache()
    return failures


@dataclass(frozen=True)
class Cases:
    gpt_oss: list[Case]
    deepseek_v4: list[Case]
    qwen3_5: list[Case]


def kernels(layers: int, cases: Cases, arch: str) -> list[Any]:
    """What will be asked for, found on tensors without data; kernels of Qwen3.5 are compiled when they are called."""
    with FakeTensorMode(allow_non_fake_inputs=True), asked_by(arch) as asked:
        if cases.gpt_oss:
            model = attnkit_model(built(GptOssForCausalLM, gpt_oss_config(min(layers, 2)), "cpu"), experts="mxfp4")
        for case in cases.gpt_oss:
            case.make(model)()
            _ask_products(model, case.rows)
        if cases.deepseek_v4:
            model = attnkit_model(built(DeepseekV4ForCausalLM, deepseek_v4_config(), "cpu"), experts="mxfp4")
            for layer in model.model.layers:
                for case in cases.deepseek_v4:
                    case.make(layer.mlp)()
    return list(asked.kernels)


def _ask_products(model: Any, tokens: int) -> None:
    """The products of so many tokens, if they are few: on tensors without data the model takes the library's."""
    layer = model.model.layers[0]
    attention, router = layer.self_attn, layer.mlp.router
    given = [[module.weight, module.bias] for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
    joined = [torch.cat(tensors) for tensors in zip(*given, strict=True)]
    if tokens <= MOST_FEW:
        for weight, bias in (joined, (attention.o_proj.weight, attention.o_proj.bias), (router.weight, router.bias)):
            torch.ops.attnkit.linear_decode(weight.new_empty(tokens, weight.shape[1]), weight, bias)


def _own_way(model: Any) -> str:
    c = model.config
    return f"transformers' {c._attn_implementation} attention and {c._experts_implementation} experts"


def compare_gpt_oss(layers: int, cases: Cases, profile: bool) -> int:
    theirs = built(GptOssForCausalLM, gpt_oss_config(layers), "cuda")
    title = f"GPT-OSS-20B, {layers} of 24 layers, beside {_own_way(theirs)}"
    return compare(title, theirs, ours_of(theirs), cases.gpt_oss, profile)


def compare_deepseek_v4(cases: Cases, profile: bool) -> int:
    theirs = built(DeepseekV4ForCausalLM, deepseek_v4_config(), "cuda")
    ours, failures = ours_of(theirs), 0
    try:
        ours(torch.ones(1, 8, dtype=torch.long, device=ours.device))
        log("DeepSeek-V4-Flash: its attention ran on the ops; bench.layers compares it")
    except UnsupportedError as refusal:
        log(f"DeepSeek-V4-Flash: not compared as a whole: {refusal}")
    for kind, a, b in zip(("hash router", "top-k router"), theirs.model.layers, ours.model.layers, strict=True):
        title = f"DeepSeek-V4-Flash, MoE block of one layer, {kind}, beside {_own_way(theirs)}"
        failures += compare(title, a.mlp, b.mlp, cases.deepseek_v4, profile)
        torch.cuda.empty_cache()
    return failures


def compare_qwen3_5(cases: Cases, profile: bool) -> int:
    theirs = built(Qwen3_5MoeForCausalLM, qwen3_5_config(), "cuda", experts=None)
    ours = ours_of(theirs, None)
    way = "fla's kernels" if is_flash_linear_attention_available() else "plain PyTorch"
    title = f"Qwen3.5-35B, a layer of linear attention, beside transformers on {way}"
    blocks = [model.model.layers[0].linear_attn for model in (theirs, ours)]
    return compare(title, *blocks, cases.qwen3_5, profile)


def counts(option: str, text: str) -> list[int]:
    """The numbers of an option that takes several."""
    if re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text) is None:
        raise typer.BadParameter(f"{option} is {text!r}, accepted: numbers of at least 1 with commas between them")
    return [int(number) for number in text.split(",")]


@torch.no_grad()
def main(
    layers: Annotated[int, typer.Option(help="Layers of GPT-OSS-20B; every other one has a window.", min=1)] = 4,
    batches: Annotated[
        str, typer.Option(help="Sequences, or tokens of an MoE block, of the decode steps: 1,16, of --compile 1,8,64.")
    ] = "",
    tokens: Annotated[
        int, typer.Option(help="The context of a decode step, and the tokens of a prefill.", min=1)
    ] = 4096,
    profile: Annotated[bool, typer.Option(help="Also say which kernels the time of a call goes to.")] = False,
    only: Annotated[str, typer.Option(help="One of GPT-OSS, DeepSeek-V4, Qwen3.5.")] = "",
    compile: Annotated[
        bool, typer.Option("--compile", help="Instead: decode steps of GPT-OSS under torch.compile, full vocabulary.")
    ] = False,
    compile_theirs: Annotated[bool, typer.Option(help="With --compile: transformers' own way compiled, too.")] = False,
    mode: Annotated[str, typer.Option(help="Of torch.compile, such as max-autotune-no-cudagraphs.")] = "default",
    launches: Annotated[bool, typer.Option(help="With --compile: list what a captured step launches.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes that compile; by default one a core.", min=0)] = 0,
) -> None:
    """Whole models on the ops and in transformers' own way: results beside float32, then times."""
    from bench import whole  # which imports this module

    sizes = counts("--batches", batches or ("1,8,64" if compile else "1,16"))
    if not torch.cuda.is_available():
        raise typer.BadParameter("the bench needs a CUDA device; simulated runs are not timed")
    start = time.perf_counter()
    steps = [decode(b, tokens) for b in sizes]
    by_model = {
        "GPT-OSS": steps if compile else [*steps, prefill(tokens)],
        "DeepSeek-V4": [moe(t) for t in (*sizes, tokens)],
        "Qwen3.5": [*(linear(b, 1) for b in sizes), linear(1, tokens)],
    }
    if only and only not in by_model:
        raise typer.BadParameter(f"--only is {only!r}, accepted: {', '.join(by_model)}")
    wanted = "GPT-OSS" if compile else only
    cases = Cases(*([] if wanted and name != wanted else found for name, found in by_model.items()))
    record = facts()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, commit {record['commit']}"
    log(f"{record['device']}: {versions}")
    arch, folder = target_of(torch.device("cuda")).arch, config.cache_dir() / "cuda"
    parts: dict[str, Callable[[], int]] = {
        "compiling": lambda: fill(kernels(layers, cases, arch), folder, console, jobs),
        "GPT-OSS": lambda: compare_gpt_oss(layers, cases, profile),
        "DeepSeek-V4": lambda: compare_deepseek_v4(cases, profile),
        "Qwen3.5": lambda: compare_qwen3_5(cases, profile),
    }
    if wanted:
        parts = {"compiling": parts["compiling"], wanted: parts[wanted]}
    if compile:
        how = {"mode": mode}
        parts["GPT-OSS"] = lambda: whole.compare_gpt_oss(layers, steps, how, compile_theirs, launches)
    failures = 0
    for name, run in parts.items():
        with part(name) as failed:
            failures += run()
        failures += len(failed)
        torch.cuda.empty_cache()
        log(f"{time.perf_counter() - start:.0f} s, {failures} failures")
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
