"""q, k and v as one product: where it runs, and that everything that looks at the three modules goes on working."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tests.peers import families
from tests.peers.test_transformers_plain import STANDS_IN, offloaded
from tests.peers.tiny_models import build, frozen, modules, tokens
from torch_attnkit.integrations.transformers import attnkit_model
from torch_attnkit.integrations.transformers.joined import PROJECTIONS, Joined, joinable

LAYERS = 2


class _Products(TorchDispatchMode):
    """How many products with a matrix run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def logits(model: Any) -> tuple[torch.Tensor, int]:
    """Logits of 12 tokens, and how many products that took."""
    with _Products() as products:
        found = model(tokens(2, 12)).logits
    return found, products.count


def joined(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, Joined) and m.attnkit_weight is not None]


def adjacent(attention: Any) -> bool:
    """By addresses alone: whether the three weights lie behind one another."""
    q, k, v = (getattr(attention, name).weight for name in PROJECTIONS)
    return q.data_ptr() + q.nbytes == k.data_ptr() and k.data_ptr() + k.nbytes == v.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["f64", "f32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3"])
def test_one_product_for_three_gives_the_same_numbers(family, dtype):
    """Of GPT-OSS with biases. The model's own three run behind a hook that does nothing."""
    model = frozen(attnkit_model(build(family)).to(dtype))
    fused, fewer = logits(model)
    for attention in joined(model):
        attention.q_proj.register_forward_hook(lambda *_: None)
    own, more = logits(model)
    assert more - fewer == 2 * LAYERS == 2 * len(joined(model))
    assert float((fused - own).abs().max()) <= 4 * torch.finfo(dtype).eps * float(own.abs().max())


def test_names_shapes_and_parameters_stay_and_memory_is_one():
    model = build("gpt_oss")
    before, state = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    attnkit_model(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is p for name, p in before.items())
    assert all(torch.equal(v, state[k]) and v.is_contiguous() for k, v in model.state_dict().items())
    assert len(joined(model)) == LAYERS and all(adjacent(a) for a in joined(model))
    model.attnkit_restore()
    assert not modules(model, "Joined") and all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    memory = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(memory)) == len(memory) and all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


# What gives parameters other memory.


def _pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _stored(model: Any) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


MOVES: dict[str, Callable[[Any], Any]] = {
    "cast": lambda model: model.double().float(),
    "copy": copy.deepcopy,
    "pickle": _pickled,
    "torch.save": _stored,
    "a second call": attnkit_model,
    "load_state_dict": lambda model: model.load_state_dict(build("gpt_oss").state_dict()) and model,
}


@pytest.mark.parametrize("move", MOVES)
def test_moved_casted_and_copied_models_are_joined_again(move):
    model = frozen(attnkit_model(build("gpt_oss")))
    expected, products = logits(model)
    moved = MOVES[move](model)
    found, again = logits(moved)
    assert torch.equal(expected, found) and again == products
    assert len(joined(moved)) == LAYERS and all(adjacent(a) for a in joined(moved))
    own = {t.untyped_storage().data_ptr() for t in model.parameters()}
    assert moved is model or not own & {t.untyped_storage().data_ptr() for t in moved.parameters()}


class _Adapted(nn.Module):
    """What LoRA puts in a projection's place."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down, self.up = nn.Linear(base_layer.in_features, 2), nn.Linear(2, base_layer.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def _assign(attention: Any) -> None:
    attention.load_state_dict({k: v.clone() for k, v in attention.state_dict().items()}, assign=True)


def _merge(attention: Any) -> None:
    attention.v_proj.weight.data = attention.v_proj.weight.data * 2


def _adapt(attention: Any) -> None:
    attention.v_proj = frozen(_Adapted(attention.v_proj))


CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    **{
        what: (lambda a, stand_in=stand_in: stand_in(a.k_proj), what in ("a parametrisation", "a subclass"))
        for what, stand_in in STANDS_IN.items()
    },
    "assigned": (_assign, True),
    "other memory": (_merge, True),
    "an adapter": (_adapt, True),
    "another module": (lambda a: setattr(a, "k_proj", copy.deepcopy(a.k_proj)), True),
    "another attention": (lambda a: setattr(a.config, "_attn_implementation", "eager"), False),
}
del CHANGES["meta"]  # nothing runs with it


@pytest.mark.parametrize("change", CHANGES)
def test_what_stands_in_for_a_projection_is_called(change):
    """And memory that no projection uses any more is let go."""
    changed, lost = CHANGES[change]
    theirs, ours = frozen(build("llama")), frozen(attnkit_model(build("llama")))
    fewer = logits(ours)[1]
    with torch.random.fork_rng(devices=[]):
        for model in (theirs, ours):
            torch.manual_seed(0)
            for attention in modules(model, "LlamaAttention"):
                changed(attention)
    (expected, _), (found, more) = logits(theirs), logits(ours)
    assert float((expected - found).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert more >= fewer + 2 * LAYERS
    assert len(joined(ours)) == (0 if lost else LAYERS)


def test_products_that_want_gradients_are_the_models_own():
    model = attnkit_model(build("llama"))
    more = logits(model)[1]
    with torch.no_grad():
        assert logits(model)[1] == more - 2 * LAYERS
    model.model.layers[0].self_attn.v_proj.weight.requires_grad_(False)
    assert logits(model)[1] == more


def test_offloaded_weights_are_not_kept():
    model = frozen(attnkit_model(build("gpt_oss")))
    expected = logits(model)[0]
    assert torch.equal(logits(offloaded(model))[0], expected)
    assert not joined(model)


def test_int8_weights_of_torchao_take_the_place_of_joined_ones():
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    found = []
    for prepare in (lambda model: model, attnkit_model):
        model = prepare(frozen(build("llama")))
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig(version=2))
        found.append(model(tokens(2, 12)).logits)
    assert float((found[0] - found[1]).abs().max()) <= 1e-5 * float(found[0].abs().max()) and not joined(model)


def test_joined_models_are_saved_as_they_were(tmp_path):
    model = attnkit_model(build("gpt_oss"))
    model.save_pretrained(tmp_path)
    again, info = transformers.GptOssForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    state = build("gpt_oss").state_dict()
    assert all(torch.equal(v, state[k]) for k, v in again.state_dict().items())
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    assert all(torch.equal(v, state[k]) for k, v in load_file(tmp_path / "state.safetensors").items())
    assert len(joined(model)) == LAYERS


def test_a_compiled_graph_notices_other_memory():
    """torch itself looks at neither the memory of a parameter nor its numbers."""
    torch._dynamo.reset()
    model, mask = frozen(attnkit_model(build("llama"))), torch.ones(2, 12, dtype=torch.long)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)

    def both() -> int:
        kwargs = dict(attention_mask=mask, use_cache=False)
        assert torch.equal(compiled(tokens(2, 12), **kwargs).logits, model(tokens(2, 12), **kwargs).logits)
        return counter.frame_count

    assert both() == both() == 1
    attention = modules(model, "LlamaAttention")[1]
    attention.v_proj.weight.mul_(2)
    assert both() == 1
    attention.v_proj.weight.data = attention.v_proj.weight * 2
    assert both() == 2 and len(joined(model)) == LAYERS - 1
    targets = [[node.target for node in graph.graph.nodes] for graph in counter.graphs]
    assert targets[1].count(nn.functional.linear) == targets[0].count(nn.functional.linear) + 2


def test_modules_that_share_their_parameters_share_the_tensor():
    model = frozen(build("llama"))
    first, second = modules(model, "LlamaAttention")
    for name in PROJECTIONS:
        getattr(second, name).weight = getattr(first, name).weight
    expected = logits(model)[0]
    attnkit_model(model)
    assert float((logits(model)[0] - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert len(joined(model)) == LAYERS and adjacent(first)
    assert first.attnkit_weight.data_ptr() == second.attnkit_weight.data_ptr()


def test_attentions_over_something_else_keep_their_products():
    crossed = [m for m in families.build("BartForCausalLM", "eager").modules() if hasattr(m, "k_proj")]
    assert crossed and not any(joinable(m) for m in crossed)
    own = type("Mine", (nn.Module,), {})()
    assert not joinable(own)
    adapted = modules(build("llama"), "LlamaAttention")[0]
    assert joinable(adapted)
    adapted.k_proj = _Adapted(adapted.k_proj)
    assert not joinable(adapted)
