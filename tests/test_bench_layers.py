"""The bench of DeepSeek-V4's attention, on a CPU: it times the model's attention behind the model's own cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import torch_attnkit
from bench import layers, models

_SMALL = dict(
    hidden_size=64, num_attention_heads=4, head_dim=64, q_lora_rank=32, o_groups=2, o_lora_rank=16, sliding_window=8,
    index_n_heads=16, index_head_dim=32, index_topk=3, partial_rotary_factor=0.25, max_position_embeddings=4096,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
)  # fmt: skip


def built(kind, dtype=torch.float32, **changes):
    return layers.built(layers.layer_config("flash", kind, **_SMALL | changes), "cpu", dtype)


@pytest.mark.parametrize("size", layers.SIZES)
@pytest.mark.parametrize("kind", layers.KINDS)
def test_the_sizes_are_the_published_ones(size, kind):
    c = layers.layer_config(size, kind)
    heads, groups = (64, 8) if size == "flash" else (128, 16)
    assert (c.num_attention_heads, c.o_groups, c.head_dim, c.sliding_window, c.o_lora_rank) == (
        heads,
        groups,
        512,
        128,
        1024,
    )
    assert (c.index_n_heads, c.index_head_dim, c.index_topk) == (64, 128, heads * 8)
    assert c.layer_types == [layers.KINDS[kind]]


@torch.no_grad()
@pytest.mark.parametrize("kind", layers.KINDS)
def test_a_filled_cache_has_the_shapes_of_one_that_a_model_filled(kind):
    """Behind 38 tokens: windows that are full, entries, and tokens that wait for the next."""
    model = built(kind)
    own = DynamicCache(config=model.config)
    hidden = layers._hidden(model, range(2), 38)
    model.model.layers[0].self_attn(hidden, past_key_values=own, **layers._around(model, hidden, own, 0))
    (theirs,), (ours,) = own.layers, layers.filled(model, range(2), 38).layers

    def shapes(value):
        if isinstance(value, dict):
            return {k: shapes(v) for k, v in value.items()}
        return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value

    assert shapes(vars(ours)) == shapes(vars(theirs))


@torch.no_grad()
@pytest.mark.parametrize("kind", layers.KINDS)
@pytest.mark.parametrize("case", [layers.Attention(3, 1, 41), layers.Attention(1, 50, 0), layers.Attention(2, 23, 36)])
def test_pieces_are_the_whole_and_both_can_be_repeated(kind, case, monkeypatch):
    monkeypatch.setattr(layers, "_PIECE", 7)
    model = built(kind)
    whole, pieces = case.make(model, 1), case.pieces(model, 1)
    first = whole()
    assert first.shape == (case.batch, case.tokens, 64)
    assert torch.equal(first, whole())
    near = 8 * torch.finfo(torch.float32).eps * first.abs().max().item()  # sums in another order: seen up to 3.8 eps
    torch.testing.assert_close(pieces(), first, rtol=0, atol=near)
    torch.testing.assert_close(pieces(), first, rtol=0, atol=near)
    assert not torch.equal(case.make(model, 0)(), first)


@torch.no_grad()
@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", layers.KINDS)
def test_ours_is_judged_right_and_a_wrong_one_wrong(kind, monkeypatch):
    monkeypatch.setattr(layers, "_PIECE", 16)
    theirs = built(kind, torch.bfloat16)
    ours = models.ours_of(theirs, experts=None)
    wanted = dict(window=2, csa=4, hca=2)[kind]
    for case in (layers.Attention(2, 1, 101), layers.Attention(1, 70, 0), layers.Attention(1, 70, 40)):
        with torch_attnkit.record() as recorded:
            case.make(ours)()
        assert sum(recorded.calls.values()) == wanted
        good, message = layers.judged(case, ours, theirs)
        assert good and "far off" in message, (case.name, message)
    attention = ours.model.layers[0].self_attn
    attention.sinks.data = attention.sinks.data + 3
    assert not layers.judged(case, ours, theirs)[0]


@torch.no_grad()
def test_a_comparison_says_what_is_wrong_and_what_failed(monkeypatch, capsys):
    """What needs a GPU is replaced: time."""
    monkeypatch.setattr(layers, "timed", lambda case, sides: f"a time of {', '.join(sides)}")
    monkeypatch.setattr(models.console, "_width", 500)
    theirs = built("csa", torch.bfloat16)
    assert layers.compare("tiny", theirs, [layers.Attention(2, 1, 40)]) == 0
    message = capsys.readouterr().out
    assert "decode, batch 2, behind 40: right: median row's error" in message
    assert "a time of ours, transformers" in message

    def fails(case, model, sample=0):
        raise ValueError("no such kernel")

    monkeypatch.setattr(layers.Attention, "make", fails)
    assert layers.compare("tiny", theirs, [layers.Attention(2, 1, 40)]) == 1
    assert "FAILED: ValueError: no such kernel" in capsys.readouterr().out


def test_what_does_not_fit_runs_in_pieces(monkeypatch):
    class Case:
        def make(self, model):
            return lambda: torch.empty(0) if model == "fits" else throw()

        def pieces(self, model):
            return "pieces"

    def throw():
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert layers.fitting(Case(), "fits")[1] == ""
    assert layers.fitting(Case(), "does not")[0] == "pieces"


@pytest.mark.seconds(240)
@torch.no_grad()
@pytest.mark.proof
def test_the_kernels_of_the_layers_are_found_without_their_weights():
    cases = list(layers._cases("1,128", 4096, 131072))
    assert [c.name for c in cases][2:] == ["prefill, 1 x 4096 tokens", "prefill, 1 x 4096 tokens, behind 131072"]
    found = layers.kernels([layers.layer_config("flash", kind) for kind in layers.KINDS], cases, "sm90")
    assert len(found) == len(set(found))
    assert {r.family for r in found} == {"sparse", "indexer", "topk", "batched_gemm"}


@pytest.mark.simulator
@pytest.mark.filterwarnings("ignore")
@pytest.mark.seconds(300)
@pytest.mark.proof
@torch.no_grad()
@pytest.mark.parametrize("kind", layers.KINDS)
def test_layers_are_right_on_simulated_kernels_of_hopper(kind, monkeypatch):
    """A decode step and a prefill, both behind a cache, of sizes that the kernels have."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    monkeypatch.setattr(models, "_ROWS", 8)
    theirs = built(kind, torch.bfloat16, head_dim=128, index_head_dim=64)
    ours = models.ours_of(theirs, experts=None)
    for case in (layers.Attention(8, 1, 101), layers.Attention(1, 20, 60)):
        with torch_attnkit.simulate("sm90"), torch_attnkit.record() as recorded:
            got = case.make(ours)().flatten(0, 1)
        assert {on for _, on in recorded.calls} == {"sm90 (simulated)"}
        wanted, exact = (case.pieces(m)().flatten(0, 1) for m in (theirs, models.exact_of(theirs)))
        good, message = models.judged(case, got, wanted, exact)
        assert good, f"{case.name}: {message}"
