"""Which of transformers' language models run on the ops, found by trying: ``python -m tests.peers.families``.

Every class that AutoModelForCausalLM and AutoModelForSeq2SeqLM know, and a few encoders, are built small with random
weights, with eager attention and with "attnkit", and both are asked the same things (``CASES``). "attnkit" answers
as eager attention does, or refuses with an UnsupportedError; what must not be is an answer of another kind. ``--write
docs/models.md`` makes the page of the documentation.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache
from transformers.models.auto import modeling_auto

import torch_attnkit
from tests.peers.tiny_models import FAMILIES, tokens
from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.transformers import attnkit_model, round_experts_to_fp4

AGREE = 1e-5  # of the largest logit, in float32
MOST_PARAMETERS = 100_000_000
REPLACED = ("DeepseekV4ForCausalLM",)  # by attnkit_model
# Of these a config gets what its class has; other names, layers and sizes keep their defaults.
_SMALL = dict(
    vocab_size=128, hidden_size=32, d_model=32, n_embd=32, embedding_size=32, embedding_dim=32, word_embed_proj_dim=32,
    dim_model=32, num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, decoder_attention_heads=4,
    encoder_attention_heads=4, num_key_value_heads=2, head_dim=8, d_kv=8, rotary_dim=4, intermediate_size=64,
    n_inner=64, d_ff=64, decoder_ffn_dim=64, encoder_ffn_dim=64, ffn_dim=64, num_hidden_layers=2, n_layer=2,
    n_layers=2, num_layers=2, decoder_layers=2, encoder_layers=2, num_decoder_layers=2, max_position_embeddings=64,
    n_positions=64, max_seq_len=64, max_target_positions=64, num_experts=4, num_local_experts=4, n_routed_experts=4,
    moe_num_experts=4, num_experts_per_tok=2, moe_k=2, moe_intermediate_size=32, n_shared_experts=1, n_group=1,
    topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    index_n_heads=4, index_head_dim=16, index_topk=4, first_k_dense_replace=1, sliding_window=4, attention_window=4,
    attention_chunk_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, type_vocab_size=2,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, layer_types=None,
    use_sliding_window=True, max_window_layers=1,
)  # fmt: skip
# What a class needs besides, or instead.
_MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_expand=2, mamba_d_state=16, mamba_n_groups=1)
_GEMMA4 = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=128, global_head_dim=16)
PARTICULAR: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": _MAMBA | dict(attn_layer_indices=[1]),
    "CpmAntForCausalLM": dict(dim_head=8, prompt_length=4, prompt_types=4, segment_types=4),
    "DeepseekV4ForCausalLM": FAMILIES["deepseek_v4"][2],
    "Gemma3nForCausalLM": dict(
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4TextConfig": _GEMMA4,
    "GPTNeoForCausalLM": dict(attention_types=[[["global", "local"], 1]], window_size=4),
    "GraniteMoeHybridForCausalLM": _MAMBA | dict(layer_types=["mamba", "attention"]),
    "JambaForCausalLM": dict(attn_layer_period=2, attn_layer_offset=0),
    "Lfm2MoeForCausalLM": dict(layer_types=["conv", "full_attention"]),
    "KimiLinearForCausalLM": dict(num_experts_per_token=2, num_experts_per_tok=2, num_expert_group=1),
    "LongcatFlashForCausalLM": dict(expert_ffn_hidden_size=32, ffn_hidden_size=64, zero_expert_num=2, moe_topk=2),
    "Mamba2ForCausalLM": dict(num_heads=8),
    "MusicgenForCausalLM": dict(num_codebooks=1),
    "MusicgenMelodyForCausalLM": dict(num_codebooks=1),
    "RecurrentGemmaForCausalLM": dict(
        num_hidden_layers=3, block_types=["attention", "recurrent", "recurrent"], lru_width=32, attention_window_size=4
    ),
    "ReformerModelWithLMHead": dict(is_decoder=True, axial_pos_embds_dim=[16, 16], axial_pos_shape=[8, 8]),
    "XLMWithLMHeadModel": dict(emb_dim=32, n_words=128),
    "XmodForCausalLM": dict(default_language="en_XX"),
    "ZambaForCausalLM": dict(
        num_hidden_layers=3, layer_types=["mamba", "hybrid", "hybrid"], mamba_expand=2, n_mamba_heads=2
    ),
    "Zamba2ForCausalLM": dict(
        num_hidden_layers=3,
        layer_types=["mamba", "hybrid", "hybrid"],
        mamba_d_state=16,
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=1,
    ),
    "ZayaForCausalLM": dict(num_experts_per_tok=1),
}


# Encoders, of which there are more.
ENCODERS = (
    "AlbertModel", "BertModel", "ConvBertModel", "DebertaV2Model", "DistilBertModel", "ElectraModel", "FunnelModel",
    "IBertModel", "LayoutLMModel", "LongformerModel", "MegatronBertModel", "ModernBertModel", "MPNetModel",
    "NystromformerModel", "RemBertModel", "RobertaModel", "RoFormerModel", "SqueezeBertModel", "XLMRobertaModel",
)  # fmt: skip


def candidates() -> list[str]:
    """The classes that are tried, by name."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    pairs = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()
    return [name for name in dict.fromkeys((*causal, *pairs, *ENCODERS)) if isinstance(name, str)]


def _fields(config_class: Any) -> dict[str, Any]:
    """Arguments that make a config, and those that it is composed of, small."""
    known = vars(config_class())
    fields = {k: v for k, v in _SMALL.items() if k in known and not isinstance(known[k], (list, tuple, dict))}
    if known.get("kv_lora_rank"):
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if known.get("layer_types"):  # every kind
        kinds = list(dict.fromkeys(known["layer_types"]))
        fields["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        fields["num_hidden_layers"] = len(fields["layer_types"])
    for part, part_class in config_class.sub_configs.items():
        if isinstance(known.get(part), transformers.PreTrainedConfig):
            fields[part] = _fields(type(known[part])) | PARTICULAR.get(part_class.__name__, {})
    return fields


def config_of(name: str) -> Any:
    """A small config of the class ``name``."""
    config_class = getattr(transformers, name).config_class
    fields = _fields(config_class)
    if name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and hasattr(config_class(), "is_decoder"):
        fields["is_decoder"] = True
    return config_class(**(fields | PARTICULAR.get(name, {})))


@torch.no_grad()
def build(name: str, attention: str) -> Any:
    """A float32 model of the class ``name`` in eval mode, the same for the same arguments."""
    config = config_of(name)
    config._attn_implementation, config._experts_implementation = attention, "eager"
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model_class(config_of(name)).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what is not set below
        model = model_class(config).eval().requires_grad_(False)
    gen = torch.Generator().manual_seed(0)
    for p in model.parameters():  # as large as what they are applied to, so that a wrong mask shows
        p.copy_(torch.randn(p.shape, generator=gen) * (0.3 if p.ndim < 2 else p.shape[-1] ** -0.5))
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None  # every run generates as many tokens as it is asked for
        model.generation_config.decoder_start_token_id = 1
    return model


def ours(name: str) -> Any:
    """The same model on the ops: attention by its setting, or where that refuses for it, by attnkit_model."""
    if name in REPLACED:
        return attnkit_model(build(name, "eager"))
    return build(name, "attnkit")


def padding(model: Any) -> torch.Tensor:
    """(2, 12): padding to the left of a prompt, to the right of what an encoder reads."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    return mask.flip(1) if model.config.is_encoder_decoder or type(model).__name__ in ENCODERS else mask


@torch.no_grad()
def forward(model: Any, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits of 12 tokens, or hidden states, but for padding: (2, 12, V), or (valid tokens, V)."""
    kwargs = {} if mask is None else dict(attention_mask=mask)
    if model.config.is_encoder_decoder:
        kwargs["decoder_input_ids"] = tokens(2, 9, seed=2)
    out = model(tokens(2, 12), **kwargs)[0]
    same_tokens = mask is not None and out.shape[:2] == mask.shape
    return out[mask.bool()] if same_tokens else out


def generate(model: Any, mask: torch.Tensor, new: int = 3, **kwargs: Any) -> torch.Tensor:
    """Logits (2, new, V) of the tokens that follow 12."""
    out = model.generate(
        tokens(2, 12), attention_mask=mask, do_sample=False, max_new_tokens=new, output_logits=True,
        return_dict_in_generate=True, disable_compile=True, **kwargs,
    )  # fmt: skip
    return torch.stack(out.logits, 1)


@torch.no_grad()
def _in_chunks(model: Any) -> torch.Tensor:
    """Logits of 5 tokens behind 7 that a cache holds."""
    ids, filled = tokens(2, 12), DynamicCache(config=model.config.get_text_config(decoder=True))
    model(ids[:, :7], past_key_values=filled, use_cache=True)
    return model(ids[:, 7:], past_key_values=filled, use_cache=True).logits


@torch.no_grad()
def _packed(model: Any) -> torch.Tensor:
    """Logits of rows that hold two sequences each."""
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(2, -1)
    return model(tokens(2, 12), position_ids=positions, use_cache=False).logits


_WHOLE = torch.ones(2, 12, dtype=torch.long)
# What both are asked.
CASES: dict[str, Callable[[Any], torch.Tensor]] = {
    "prompt": lambda model: forward(model, None),
    "padded prompt": lambda model: forward(model, padding(model)),
    "generation": lambda model: generate(model, _WHOLE, 6),
    "padded generation": lambda model: generate(model, padding(model), 6),
    "static cache": lambda model: generate(model, padding(model), 6, cache_implementation="static"),
    "prompt behind a cache": lambda model: _in_chunks(model),
    "packed sequences": lambda model: _packed(model),
}
DECODER_ALONE = ("prompt behind a cache", "packed sequences")


@dataclass
class Tried:
    """What came of one class: what was found in each case that eager attention has an answer to, and the ops that ran.

    ``error``: what eager attention said to the first of the others. ``experts``: what was found of a model whose
    experts are packed to MXFP4, "" for a model without experts modules.
    """

    name: str
    error: str = ""
    cases: dict[str, str] = field(default_factory=dict)
    ops: set[str] = field(default_factory=set)
    experts: str = ""

    @property
    def wrong(self) -> dict[str, str]:
        """Answers that are neither eager attention's nor a refusal."""
        found = self.cases | ({"experts": self.experts} if self.experts else {})
        return {case: what for case, what in found.items() if not what.startswith(("equal", "refused"))}


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _compare(theirs: torch.Tensor, answer: Callable[[], torch.Tensor], ops: set[str]) -> str:
    with torch_attnkit.record() as recorded:
        try:
            got = answer()
        except UnsupportedError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"fails: {_one_line(error)}"
    ops |= {op for op, _ in recorded.calls}
    if got.shape != theirs.shape:
        return f"wrong: shape {tuple(got.shape)} for {tuple(theirs.shape)}"
    off = float((theirs - got).abs().max() / theirs.abs().max())
    return "equal" if off <= AGREE else f"wrong: by {off:.1e}"


def attempt(name: str) -> Tried:
    """Ask both; every answer is compared with that of eager attention."""
    tried = Tried(name)
    try:
        eager = build(name, "eager")
    except Exception as error:
        tried.error = _one_line(error)
        return tried
    try:
        model: Any = ours(name)
    except Exception as error:  # some are refused while they are built
        model = error
    for case, ask in CASES.items():
        if case in DECODER_ALONE and eager.config.is_encoder_decoder:
            continue
        try:
            theirs = ask(eager)
            if not bool(theirs.isfinite().all()):
                raise ValueError("eager attention is not finite")
        except Exception as error:
            tried.error = tried.error or _one_line(error)
            continue

        def answer(ask: Callable[[Any], torch.Tensor] = ask) -> torch.Tensor:
            if isinstance(model, Exception):
                raise model
            return ask(model)

        tried.cases[case] = _compare(theirs, answer, tried.ops)
    if "prompt" in tried.cases and any(hasattr(module, "is_transposed") for module in eager.modules()):
        tried.experts = _packed_experts(name, tried.ops)
    return tried


def _packed_experts(name: str, ops: set[str]) -> str:
    """A model with experts in MXFP4 beside the same with the rounded numbers, under eager attention."""

    def answer() -> torch.Tensor:
        packed = attnkit_model(build(name, "eager"), experts="mxfp4")
        if name not in REPLACED:
            packed.set_attn_implementation("eager")
        return forward(packed, None)

    try:
        theirs = forward(round_experts_to_fp4(build(name, "eager"), "mxfp4"), None)
    except UnsupportedError as error:
        return f"refused: {error}"
    return _compare(theirs, answer, ops)


_HEAD = """\
<!-- Generated: python -m tests.peers.families --write docs/models.md -->
# Which models run

Every class that `AutoModelForCausalLM` and `AutoModelForSeq2SeqLM` of transformers {version} know, and {encoders}
encoders, built small with random weights in float32, on a CPU, with eager attention and with
`attn_implementation="attnkit"` (`attnkit_model` for {replaced}). Both were asked for {cases}.

**{tried} classes answered under eager attention. Of these {ran} ran on the ops with its answers, to {agree:g} of the
largest logit; {refused} were refused; {own} have no attention that the setting reaches and are as before; {wrong} were
wrong without a word.**

What is refused raises `torch_attnkit.UnsupportedError`; `attn_implementation="eager"` always is a way out, and the
words tell others. Equal is equal on a CPU. A GPU besides refuses sizes of heads that it has no kernel for:
[sdpa_decode](ops/sdpa_decode.md) and [flash_attention](ops/flash_attention.md) say which there are.

## Run on the ops

"all" is everything that the class has under eager attention. "FP4" says whether `attnkit_model(model, experts="mxfp4")`
runs its experts with `fp4_moe`, compared with the same experts of rounded weights.

| class | equal | refused, see below | FP4 |
|---|---|---|---|
"""


def _normalised(found: str) -> str:
    """A refusal without what differs from model to model."""
    found = found.removeprefix("refused: ")
    found = re.sub(
        r"mask: [\w-]+ takes the mask for a tensor \(\w+\)", "mask: MODEL takes the mask for a tensor", found
    )
    found = re.sub(r"attention: \w+ chooses", "attention: MODEL chooses", found)
    return re.sub(r"(read|recurrences of) recurrent_gemma", r"\1 MODEL", re.sub(r"\w+: model\.[\w.]+ ", "", found))


def page(results: list[Tried]) -> str:
    """docs/models.md of what was tried."""
    asked = [t for t in results if t.cases]
    ran = [t for t in asked if t.ops and "equal" in t.cases.values()]
    refused = [t for t in asked if "equal" not in t.cases.values()]
    own = [t for t in asked if t not in ran and t not in refused]
    footnotes: dict[str, int] = {}

    def number(found: str) -> int:
        return footnotes.setdefault(_normalised(found), len(footnotes) + 1)

    lines = []
    for t in sorted(ran, key=lambda t: t.name.lower()):
        equal = [case for case, found in t.cases.items() if found == "equal"]
        others: dict[int, list[str]] = defaultdict(list)
        for case, found in t.cases.items():
            if found != "equal":
                others[number(found)].append(case)
        rest = "; ".join(f"{', '.join(cases)} ({n})" for n, cases in others.items())
        experts = {"": "", "equal": "equal"}.get(t.experts) or (f"refused ({number(t.experts)})" if t.experts else "")
        lines.append(f"| {t.name} | {'all' if len(equal) == len(t.cases) else ', '.join(equal)} | {rest} | {experts} |")
    groups: dict[int, list[str]] = defaultdict(list)
    for t in sorted(refused, key=lambda t: t.name.lower()):
        for n in dict.fromkeys(number(found) for found in t.cases.values()):
            groups[n].append(t.name)
    lines += ["", "## Refused altogether", "", "| because | classes |", "|---|---|"]
    lines += [f"| ({n}) | {', '.join(names)} |" for n, names in sorted(groups.items())]
    lines += ["", "## The words", ""]
    lines += [f"{n}. {message}" for message, n in footnotes.items()]
    lines += ["", "## Attention that no setting of transformers reaches, or none", ""]
    lines += ["As before, with no op in it: " + ", ".join(sorted((t.name for t in own), key=str.lower)) + "."]
    lines += [
        "",
        "## Not tried",
        "",
        "What transformers said while the class was built small, or asked in eager attention.",
        "",
    ]
    lines += ["| class | why |", "|---|---|"]
    lines += [f"| {t.name} | {t.error.replace('|', ' ')} |" for t in results if not t.cases]
    head = _HEAD.format(
        version=transformers.__version__, encoders=len(ENCODERS), replaced=", ".join(REPLACED),
        cases=f"{len(CASES)} things ({', '.join(CASES)})", tried=len(asked), ran=len(ran), agree=AGREE,
        refused=len(refused), own=len(own), wrong=sum(bool(t.wrong) for t in asked),
    )  # fmt: skip
    return head + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="class names; all of them without")
    parser.add_argument("--write", type=Path, help="where the page goes")
    arguments = parser.parse_args()
    # What the models say of their own configs.
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results = []
    for name in arguments.names or candidates():
        results.append(attempt(name))
        rest = ", ".join(f"{case} {found}" for case, found in results[-1].cases.items() if found != "equal")
        print(f"{name}: {rest or results[-1].error or 'equal'}", file=sys.stderr)
    if arguments.write is not None:
        arguments.write.write_text(page(results), "utf-8")
    if found := {t.name: t.wrong for t in results if t.wrong}:
        sys.exit(f"wrong: {found}")


if __name__ == "__main__":
    main()
