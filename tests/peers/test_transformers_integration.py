"""The attention of transformers models on our ops, against their eager attention, in float64.

In float64 the two do the same arithmetic in another order and agree to AGREE of the largest number. Some models take
the softmax of their attention in float32 whatever the model dtype; that cast is switched off here for both. The
weights of DeepSeek-V4's routers come from our ops on both sides, because those are float32.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import DynamicCache, StaticCache
from transformers.generation.configuration_utils import CompileConfig

import torch_attnkit
from tests.peers.tiny_models import DECODERS, ENCODERS, build, tokens
from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.transformers import attnkit_model, masks, register, round_experts_to_fp4, routers
from torch_attnkit.integrations.transformers.attention import attention

AGREE = 1e-10
PLAIN = tuple(name for name in DECODERS if name != "deepseek_v4")  # served by the attention function alone
WINDOWED = ("mistral", "gemma3", "gpt_oss")
families = pytest.mark.parametrize("family", PLAIN)


@pytest.fixture(autouse=True)
def _softmax_keeps_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = F.softmax
    monkeypatch.setattr(
        F, "softmax", lambda x, dim=None, dtype=None: softmax(x, dim, dtype=None if x.dtype == torch.float64 else dtype)
    )


@cache
def compiled_pair(family: str):
    """The same with packed experts where there are any: the eager ones look at the data, which no graph can."""
    if family != "gpt_oss":
        return pair(family)
    eager = round_experts_to_fp4(build(family), "mxfp4")
    for module in eager.modules():
        module.__class__ = routers.SWAPS.get(type(module), type(module))
    ours = attnkit_model(build(family), experts="mxfp4")
    return eager.double().requires_grad_(False), ours.double().requires_grad_(False)


@cache
def pair(family: str, **changes):
    """(eager, ours), both in float64. Nobody may change them."""
    eager = build(family, **changes)
    if family == "deepseek_v4":
        ours = attnkit_model(build(family, **changes))
        for module in eager.modules():
            module.__class__ = routers.SWAPS.get(type(module), type(module))
    else:
        ours = build(family, attention="attnkit", **changes)
    return eager.double().requires_grad_(False), ours.double().requires_grad_(False)


def same(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    assert theirs.shape == ours.shape and bool(theirs.isfinite().all())
    assert float((theirs - ours).abs().max()) <= AGREE * float(theirs.abs().max())


def ran(recorded: torch_attnkit.record) -> set[str]:
    return {op for op, _ in recorded.calls}


def generate(model, ids, mask, new, **kwargs):
    """Tokens (B, T + new) and the logits of every step (B, new, V)."""
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new, output_logits=True,
        return_dict_in_generate=True, disable_compile=True, **kwargs,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, 1)


def padded(ids: torch.Tensor) -> torch.Tensor:
    """An attention_mask (2, T) whose rows start late, each at a place of its own."""
    mask = torch.ones_like(ids)
    mask[0, :1] = 0
    mask[1, : ids.shape[1] // 3] = 0
    return mask


def both_generate(family, ids, mask, new, **kwargs):
    eager, ours = pair(family)
    tokens_eager, logits_eager = generate(eager, ids, mask, new, **kwargs)
    with torch_attnkit.record() as recorded:
        tokens_ours, logits_ours = generate(ours, ids, mask, new, **kwargs)
    assert torch.equal(tokens_eager, tokens_ours)
    same(logits_eager, logits_ours)
    return recorded, ours


@pytest.mark.parametrize("family", (*PLAIN, *ENCODERS))
def test_a_forward_pass_equals_eager_and_runs_flash_attention(family):
    eager, ours = pair(family)
    ids = tokens(2, 20)
    with torch_attnkit.record() as recorded:
        out = ours(ids)[0]
    same(eager(ids)[0], out)
    assert ran(recorded) == {"flash_attention"}


@families
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("left_padding", [False, True], ids=["whole", "padded"])
def test_generate_equals_eager(family, kind, left_padding):
    """A prompt of 20 is longer than every window. The first step is flash_attention, the others are sdpa_decode."""
    ids = tokens(2, 20)
    mask = padded(ids) if left_padding else torch.ones_like(ids)
    kwargs = {} if kind == "dynamic" else dict(cache_implementation="static")
    recorded, ours = both_generate(family, ids, mask, 6, **kwargs)
    layers = sum(t != "linear_attention" for t in getattr(ours.config, "layer_types", None) or [""] * 2)
    assert recorded.calls == {("flash_attention", "reference"): layers, ("sdpa_decode", "reference"): 5 * layers}


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_prompt_shorter_than_the_window_grows_past_it(family, kind):
    ids = tokens(2, 5)
    kwargs = {} if kind == "dynamic" else dict(cache_implementation="static")
    both_generate(family, ids, padded(ids), 12, **kwargs)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_prompt_in_chunks_equals_eager(family, kind):
    """Behind a static cache only the device knows where a chunk starts: sdpa_multi."""
    ids, results = tokens(2, 20), []
    for model in pair(family):
        filled = (
            DynamicCache(config=model.config)
            if kind == "dynamic"
            else StaticCache(config=model.config, max_cache_len=32)
        )
        model(ids[:, :12], past_key_values=filled)
        with torch_attnkit.record() as recorded:
            results.append(model(ids[:, 12:], past_key_values=filled).logits)
    same(*results)
    # A static window is as long as the window, and the host knows where it is.
    expected = {"flash_attention"} if kind == "dynamic" or family == "gpt_oss" else set()
    assert ran(recorded) == expected | ({"sdpa_multi"} if kind == "static" else set())


def test_chunked_prefill_of_generate_with_a_static_cache_and_left_padding():
    ids = tokens(2, 18)
    recorded, _ = both_generate("llama", ids, padded(ids), 4, prefill_chunk_size=4, cache_implementation="static")
    assert ran(recorded) == {"sdpa_multi", "sdpa_decode"}


def test_a_cache_that_keeps_more_than_the_window_is_windowed_by_position():
    ids, results = tokens(2, 20), []
    for model in pair("gpt_oss"):
        filled = DynamicCache()
        model(ids[:, :12], past_key_values=filled)
        results.append(model(ids[:, 12:], past_key_values=filled).logits)
    same(*results)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v4"])
def test_beams_equal_eager(family):
    eager, ours = pair(family)
    ids = tokens(2, 12)
    kwargs = dict(attention_mask=padded(ids), num_beams=3, do_sample=False, max_new_tokens=6)
    assert torch.equal(eager.generate(ids, **kwargs), ours.generate(ids, **kwargs))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("guess", ["model", "prompt"])
def test_guessed_tokens_are_verified_as_eager_does(family, guess):
    """Several queries at once in the middle of a sequence, and a cache that is cut back."""
    ids, results = tokens(1, 8, seed=3).repeat(1, 2), []
    for model, implementation in zip(pair(family), ("eager", "attnkit"), strict=True):
        helper = build(family, implementation, num_hidden_layers=1 if family == "llama" else 2).double()
        kwargs = dict(assistant_model=helper) if guess == "model" else dict(prompt_lookup_num_tokens=3)
        results.append(model.generate(ids, do_sample=False, max_new_tokens=10, **kwargs))
    assert torch.equal(*results) and int(results[0].min()) > 0  # the helper takes a 0 for padding


@pytest.mark.parametrize("family", (*DECODERS, *ENCODERS))
def test_right_padding_leaves_valid_tokens_as_eager_has_them(family):
    """What padding tokens get is nobody's: eager attends all keys there, we attend none or the padding itself."""
    eager, ours = pair(family)
    ids = tokens(3, 20)
    mask = torch.ones_like(ids)
    mask[1, 13:] = mask[2, 4:] = 0
    valid = mask.bool()
    same(eager(ids, attention_mask=mask)[0][valid], ours(ids, attention_mask=mask)[0][valid])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("rows", [1, 2])
def test_packed_sequences_equal_eager_and_run_varlen(family, rows):
    eager, ours = pair(family)
    ids = tokens(rows, 23)
    lengths = [(11, 12), (3, 20)][:rows]
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    kwargs = dict(position_ids=position_ids, use_cache=False)
    with torch_attnkit.record() as recorded:
        out = ours(ids, **kwargs).logits
    same(eager(ids, **kwargs).logits, out)
    same(ours(ids[:1, 11:], use_cache=False).logits, out[:1, 11:])
    assert ran(recorded) - {"flash_attention"} == {"flash_attention_varlen"}


def test_a_decoder_made_bidirectional_equals_eager():
    eager, ours = pair("llama", is_causal=False)
    ids = tokens(2, 12)
    mask = padded(ids)
    valid = mask.bool()
    for kwargs in ({}, dict(is_causal=False)):
        a = eager(ids, attention_mask=mask, use_cache=False).logits
        b = ours(ids, attention_mask=mask, use_cache=False, **kwargs).logits
        same(a[valid], b[valid])


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_decode_step_is_one_graph_and_equals_eager(family, backend):
    """generate() with a static cache, whose masks are made outside the compiled forward."""
    eager, ours = compiled_pair(family)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ids = tokens(2, 12)
    config = CompileConfig(fullgraph=True, dynamic=None, backend=backend, mode=None)
    config._compile_all_devices = True
    kwargs = dict(attention_mask=padded(ids), do_sample=False, max_new_tokens=6, cache_implementation="static")
    compiled = ours.generate(ids, compile_config=config, **kwargs)
    # A static window of transformers counts its tokens on the host, so that its second step is traced anew.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if family == "gpt_oss" else 1)
    assert torch.equal(compiled, eager.generate(ids, disable_compile=True, **kwargs))


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "modernbert"])
def test_a_compiled_forward_checks_the_mask_in_the_graph(family):
    eager, ours = compiled_pair(family)
    torch._dynamo.reset()
    cached = {} if family in ENCODERS else dict(use_cache=False)
    forward = torch.compile(lambda i, m: ours(i, attention_mask=m, **cached)[0], backend="eager", fullgraph=True)
    ids = tokens(2, 12)
    mask = padded(ids)
    valid = mask.bool()
    same(eager(ids, attention_mask=mask, **cached)[0][valid], forward(ids, mask)[valid])
    mask[0, 5] = 0
    with pytest.raises(RuntimeError, match="attention_mask hides tokens between or behind the valid ones"):
        forward(ids, mask)


def test_without_a_mask_a_compiled_forward_may_hold_packed_sequences():
    _, ours = pair("llama")
    torch._dynamo.reset()
    forward = torch.compile(lambda i: ours(i, use_cache=False)[0], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="while tracing, pass a 2-D attention_mask"):
        forward(tokens(2, 12))


def test_gradients_reach_the_inputs_but_not_through_the_op():
    model = build("llama", attention="attnkit").train()
    loss = model(tokens(2, 6)).logits.sum()
    with pytest.raises(NotImplementedError, match="flash_attention has no backward"):
        loss.backward()


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_bfloat16_is_as_close_to_float64_as_eager(family):
    """Mean errors: half of bfloat16's differences come from roundings that both share."""
    ids = tokens(2, 20)
    exact = pair(family)[0](ids).logits
    errors = []
    for kind in ("eager", "attnkit"):
        model = build(family, attention=kind).to(torch.bfloat16).requires_grad_(False)
        sequence, logits = generate(model, ids, padded(ids), 3)
        assert sequence.shape == (2, 23) and bool(logits.isfinite().all())
        errors.append(float((model(ids).logits.double() - exact).abs().mean()))
    assert errors[1] <= 1.25 * errors[0]


# What the ops cannot express.


def test_holes_are_refused_by_name_and_with_advice():
    _, ours = pair("llama")
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 4] = 0
    with pytest.raises(UnsupportedError, match=r"attention_mask has holes .* accepted: causal .*'eager'$"):
        ours(ids, attention_mask=mask)


def test_decoding_behind_right_padding_is_refused():
    _, ours = pair("llama")
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with pytest.raises(UnsupportedError, match="holes"):
        generate(ours, ids, mask, 2)


def test_a_decode_step_whose_token_is_masked_is_refused():
    _, ours = pair("llama")
    cached = DynamicCache(config=ours.config)
    ours(tokens(1, 4), past_key_values=cached)
    with pytest.raises(UnsupportedError, match="hides the newest token"):
        ours(tokens(1, 1), past_key_values=cached, attention_mask=torch.tensor([[1, 1, 1, 1, 0]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool], ids=["float64", "bool"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v4"])
def test_a_mask_of_four_axes_is_refused(family, dtype):
    _, ours = pair(family)
    dense = torch.ones(2, 1, 12, 12, dtype=dtype)
    with pytest.raises(UnsupportedError, match=r"a dense (float64|bool) mask of shape \(2, 1, 12, 12\)"):
        ours(tokens(2, 12), attention_mask=dense)


def test_dropout_is_refused():
    model = build("llama", attention="attnkit", attention_dropout=0.1).train()
    with pytest.raises(UnsupportedError, match=r"dropout is 0\.1, accepted: 0"):
        model(tokens(1, 4))


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "bert", "deepseek_v4"])
def test_attention_weights_are_refused(family):
    _, ours = pair(family)
    with pytest.raises(UnsupportedError, match="output_attentions is True, accepted: False"):
        ours(tokens(1, 4), output_attentions=True)


def test_a_deepseek_v4_that_was_not_replaced_is_refused():
    model = build("deepseek_v4", attention="attnkit")
    with pytest.raises(UnsupportedError, match=r"DeepseekV4Attention .*call attnkit_model\(model\) first"):
        model(tokens(2, 20))


def direct(mask=None, module=None, T=3, S=3, **kwargs):
    q, k = torch.randn(2, 4, T, 8, dtype=torch.float64), torch.randn(2, 2, S, 8, dtype=torch.float64)
    return attention(module or SimpleNamespace(is_causal=True), q, k, k.clone(), mask, **kwargs)[0]


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices", "sinks"])
def test_what_the_attention_function_does_not_know_is_refused(name):
    with pytest.raises(UnsupportedError, match=f"{name} is given, accepted: None"):
        direct(**{name: torch.ones(1)})


def test_a_window_without_its_mask_is_refused():
    with pytest.raises(UnsupportedError, match="sliding_window is 4, but the mask is None"):
        direct(sliding_window=4)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (dict(sliding_window=4), "window 4, 3 queries and 3 keys.* window -1, 3 queries and 3 keys"),
        (dict(bidirectional=True, is_causal=True), "is_causal=True.* is_causal=False"),
        (dict(S=5), "5 keys.* 3 keys"),
        (dict(T=1), "1 queries.* 3 queries"),
    ],
)
def test_a_call_that_its_mask_was_not_made_for_is_refused(call, found):
    utils = transformers.masking_utils
    bidirectional = call.pop("bidirectional", False)
    function = utils.bidirectional_mask_function if bidirectional else utils.causal_mask_function
    mask = masks.mask(2, 3, 3, attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]), mask_function=function)
    with pytest.raises(UnsupportedError, match=found):
        direct(mask, **call)


def test_a_model_may_leave_causality_to_the_mask():
    """As Moonshine does, which asks for is_causal only where it has no mask."""
    results = []
    for options in (dict(), dict(is_causal=False), dict(is_causal=True)):
        torch.manual_seed(0)
        results.append(direct(masks.mask(2, 3, 3), **options))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_mask_of_another_kind_is_refused_by_its_name():
    with pytest.raises(UnsupportedError, match="attention_mask is a dict; accepted: a 2-D attention_mask"):
        direct({"full_attention": None})


@pytest.mark.parametrize("options", [dict(), dict(is_causal=True)])
def test_a_causal_call_without_a_mask_is_refused(options):
    """Eager attention would hide nothing, SDPA the future; one query sees all keys in both."""
    with pytest.raises(UnsupportedError, match=r"the mask of 3 queries is None.* accepted: the mask that .*'eager'$"):
        direct(**options)
    assert direct(T=1, **options).shape == (2, 1, 4, 8)


def test_sequence_lengths_that_the_mask_does_not_know_are_refused():
    """The collator that packs without padding can hand them over; eager attention does not look at them."""
    _, ours = pair("llama")
    lengths = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = dict(cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=7, max_length_k=7)
    ids, position_ids = tokens(1, 12), torch.cat([torch.arange(5), torch.arange(7)])[None]
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q says that sequences are packed.* accepted: position_ids"):
        ours(ids, position_ids=position_ids, **packed)  # there is a cache, so that positions do not count
    known = ours(ids, position_ids=position_ids, use_cache=False, **packed).logits
    same(ours(ids[:, 5:], use_cache=False).logits, known[:, 5:])


def test_packed_sequences_have_the_same_sinks_and_are_cross_checked():
    """No model with sinks tells its mask about packed sequences, so this is the function itself."""
    utils = transformers.masking_utils
    sequences, position_ids = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[0, 1, 0, 1, 2]])
    function = utils.packed_sequence_compatibility_function(utils.causal_mask_function, position_ids, sequences)
    mask = masks.mask(1, 5, 5, mask_function=function)
    assert mask.cu_seqlens.tolist() == [0, 2, 5]
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, h, 5, 8, generator=gen, dtype=torch.float64) for h in (4, 2))
    module, sinks = SimpleNamespace(is_causal=True), torch.randn(4, generator=gen)
    whole = attention(module, q, k, k, mask, s_aux=sinks)[0]
    for a, b in ((0, 2), (2, 5)):
        alone = attention(module, q[:, :, a:b], k[:, :, a:b], k[:, :, a:b], masks.mask(1, b - a, b - a), s_aux=sinks)
        same(alone[0], whole[:, a:b])
    with pytest.raises(UnsupportedError, match="window 2,.* window -1,"):
        attention(module, q, k, k, mask, sliding_window=2)


def test_keys_that_are_not_contiguous_are_copied_and_others_are_not():
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 8, 5).transpose(2, 3)
    module = SimpleNamespace(is_causal=True)
    assert torch.equal(
        attention(module, q, k, k, None)[0], attention(module, q, k.contiguous(), k.contiguous(), None)[0]
    )


def test_registering_twice_changes_nothing():
    before = dict(transformers.AttentionInterface._global_mapping)
    register()
    assert transformers.AttentionInterface._global_mapping == before and before["attnkit"] is attention
