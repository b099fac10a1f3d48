"""Every argument, output and axis has its words, and what some of them say of a value is what the op does with it."""

from __future__ import annotations

import dataclasses
import pydoc
import re

import pytest
import torch

import torch_attnkit
from torch_attnkit import arguments, manual
from torch_attnkit.core import dispatch
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.spec import parse
from torch_attnkit.oracle import meanings

ops = torch.ops.attnkit
INF, NAN = torch.inf, torch.nan
MOST = 200  # characters
CODE = re.compile(r"``?|\blambda\b|\bc\.(arg|dim)\b|\bself\b|\btorch\.|\bTensor\b|==|!=|<<|>>")
NAMES = {name for op in OPS.values() for name in (op.name, *op.argnames, *op.outnames)}


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def f64(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def nothing(out, lse):
    """Whether these queries saw no key."""
    return bool((out == 0).all()) and bool((lse == -INF).all())


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_sentence_for_each_argument_and_output(op):
    assert {*op.meaning} == {*op.argnames, *op.outnames}
    for name, sentence in op.meaning.items():
        assert sentence.endswith(".") and len(sentence) <= MOST, (name, len(sentence), sentence)
        assert sentence == " ".join(sentence.split()) and not CODE.search(sentence), (name, sentence)
        assert {word for word in re.findall(r"\w+", sentence) if "_" in word} <= NAMES, (name, sentence)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_words_for_each_axis(op):
    tensors = [parse(text) for text in op.dims.values()]
    named = {axis.name for spec in tensors for axis in spec.axes if axis.name}
    named |= {*op.derive, *(axis for row in op.kernels for axis in row.dims)}
    for line in manual.other_shapes(op):  # of the tensors that have other axes with some argument
        named |= set(re.findall(r"[A-Za-z]\w*", line[line.index("(") : line.index(")")]))
    assert {*op.axes} == named
    for axis, what in op.axes.items():
        assert not what.endswith(".") and len(what) <= 80 and not CODE.search(what), (axis, what)


def test_what_stands_in_the_shared_module_is_shared():
    groups = (meanings.ATTENTION, meanings.FP4, meanings.CACHE, meanings.REQUESTS, meanings.ROUTES, meanings.HEADS)
    for name, sentence in (entry for group in groups for entry in group.items()):
        assert sum(op.meaning.get(name) == sentence for op in OPS.values()) > 1, name
    for axis, what in meanings.AXES.items():
        assert sum(op.axes.get(axis) == what for op in OPS.values()) > 1, axis


def test_an_argument_without_a_sentence_and_a_sentence_without_an_argument_are_refused():
    op = OPS["merge_partials"]
    op.check_meaning()
    one_less = {name: sentence for name, sentence in op.meaning.items() if name != "sink"}
    with pytest.raises(ValueError, match="merge_partials: meaning has none for sink, accepted: a sentence for each"):
        dataclasses.replace(op, meaning=one_less).check_meaning()
    with pytest.raises(ValueError, match="meaning has none for lse,"):
        dataclasses.replace(op, meaning={n: w for n, w in op.meaning.items() if n != "lse"}).check_meaning()
    with pytest.raises(ValueError, match="meaning has one for window, which the schema has not"):
        dataclasses.replace(op, meaning=op.meaning | {"window": "Off."}).check_meaning()


def test_it_is_looked_at_when_ops_are_defined(tmp_path, monkeypatch):
    package = tmp_path / "mute_ops"
    (package / "hum").mkdir(parents=True)
    for init in (package, package / "hum"):
        (init / "__init__.py").touch()
    text = 'from torch_attnkit.core import Op\nOP = Op("hum(Tensor x) -> Tensor out", {"x": "N", "out": "N"})\n'
    (package / "hum" / "op.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(dispatch, "NAMESPACE", "attnkit_mute")
    with pytest.raises(ValueError, match="hum: meaning has none for x"):
        dispatch.load("mute_ops")
    assert "hum" not in OPS


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_help_describe_and_pages_show_them(op):
    shown = " ".join(pydoc.render_doc(getattr(ops, op.name)).split())
    described = " ".join(torch_attnkit.describe(op.name).split())
    page = manual.page(op, [])
    for a in (*arguments.arguments(op), *arguments.outputs(op)):
        head = f"{a.name}: {a.what}"
        assert f"{head}{f', default {a.default}' if a.default else ''} {a.meaning}" in shown
        assert f"{head}{f' (default {a.default})' if a.default else ''} {a.meaning}" in described
        assert re.search(rf"\| `{a.name}` \| .* \| {re.escape(a.meaning)} \|\n", page)
    for axis, what in op.axes.items():
        assert f"{axis}: {what}" in shown and f"{axis}: {what}" in described
        assert f"| `{axis}` | {what} |\n" in page
    for text in (shown, described, " ".join(page.split())):
        assert " ".join(arguments.CONTENTS.split()) in text


# What sentences say of values, against what is done. Float64 runs as the references.


def decode(kv_len=(6, 3), **kwargs):
    kv = [f64(2, 2, 6, 8, seed=s) for s in (1, 2)]
    return ops.sdpa_decode(f64(2, 4, 8), *kv, i32(*kv_len), **kwargs)


def test_window_and_sink_tokens():
    same(decode(window=-1), decode())
    assert nothing(*decode(window=0))
    same(decode(window=0, sink_tokens=2), decode(kv_len=(2, 2)))
    same(decode(window=2), decode(kv_start=i32(4, 1)))
    same(decode(sink_tokens=3), decode())
    for wrong in (dict(window=-2), dict(sink_tokens=-1), dict(softcap=-1.0), dict(softcap=NAN)):
        with pytest.raises(ValueError, match=f"sdpa_decode: {next(iter(wrong))} "):
            decode(**wrong)
    for wrong in (INF, NAN, 1e-40):
        with pytest.raises(ValueError, match="scale is .*, accepted: a number that float32 holds"):
            decode(scale=wrong)
    x = [t[:, None].expand(1, 5, 1, 8).contiguous() for t in f64(3, 1, 1, 8).unbind()]
    both = dict(window=2)  # of 5 queries and keys, without causal keys p - 1, p and p + 1
    counts = ops.flash_attention(x[0] * 0, x[1], x[2], **both)[1].exp()[0, :, 0]
    assert counts.round().tolist() == [2, 3, 3, 3, 2]


def test_lengths_and_starts():
    out, lse = decode(kv_len=(0, 3))
    assert nothing(out[0], lse[0]) and not nothing(out[1], lse[1])
    assert nothing(*decode(kv_start=i32(6, 3)))
    same(decode(kv_start=i32(0, 0)), decode())
    q, k, v = f64(1, 4, 8), f64(1, 2, 6, 8, seed=1), f64(1, 2, 6, 8, seed=2)
    want = ops.sdpa_decode(q, k, v, i32(3))
    k[:, :, 3:], v[:, :, 3:] = NAN, INF
    same(ops.sdpa_decode(q, k, v, i32(3)), want)
    with pytest.raises(ValueError, match=r"kv_len\[0\] is 7, accepted: 0 to 6"):
        decode(kv_len=(7, 0))
    # sdpa_multi: 2 of 4 query tokens stand before all keys.
    out, lse = ops.sdpa_multi(f64(1, 4, 2, 8), k, k, i32(2))
    assert nothing(out[:, :2], lse[:, :2]) and not nothing(out[:, 2:], lse[:, 2:])
    # flash_attention: kv_len moves no query, so all but the last two keys are before the first.
    q = f64(1, 2, 2, 8)
    keys = f64(1, 6, 2, 8)
    same(
        ops.flash_attention(q, keys, keys, kv_len=i32(3), causal=True)[:2],
        ops.flash_attention(q, keys[:, :3], keys[:, :3])[:2],
    )


def test_sink_scale_and_softcap():
    out, lse = decode()
    same(decode(sink=torch.full((4,), -INF)), (out, lse))
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    joined, left_out = decode(sink=sink)
    same((joined, left_out), (out * (lse.double() - sink).sigmoid()[..., None], lse))
    assert nothing(*decode(kv_len=(0, 0), sink=sink))
    same(decode(scale=8**-0.5), (out, lse))
    same(decode(softcap=0.0), (out, lse))
    q, k = f64(1, 1, 8), f64(1, 1, 1, 8, seed=1)
    score = (q[0, 0] @ k[0, 0, 0]) * 8**-0.5
    for cap, want in ((0.0, score), (0.3, 0.3 * (score / 0.3).tanh())):
        lse = ops.sdpa_decode(q, k, k, i32(1), softcap=cap)[1]
        torch.testing.assert_close(lse[0, 0].double(), want, rtol=1e-6, atol=1e-6)


def test_scales_of_tensors():
    half = torch.tensor(0.5)
    same(decode(q_scale=half, k_scale=torch.full((2, 2), 2.0)), decode())
    same((decode(v_scale=half)[0],), (decode()[0] / 2,))
    for wrong in (0.0, -1.0, INF, NAN):
        with pytest.raises(ValueError, match="k_scale.* accepted: finite numbers above 0"):
            decode(k_scale=torch.full((2, 2), wrong))


def test_pages_that_no_query_sees():
    q, pages = f64(2, 4, 8), f64(3, 4, 2, 8, seed=1)
    given = ops.sdpa_decode_paged(q, pages, pages, i32([0, 1], [2, 0]), i32(6, 3))
    same(ops.sdpa_decode_paged(q, pages, pages, i32([0, 1], [2, -1]), i32(6, 3)), given)
    same(
        ops.sdpa_decode_paged(q, pages, pages, i32([99, 1], [-1, -7]), i32(6, 0), window=2),
        ops.sdpa_decode_paged(q, pages, pages, i32([0, 1], [2, 0]), i32(6, 0), window=2),
    )
    with pytest.raises(ValueError, match=r"block_table\[0, 1\] is -1, accepted: 0 to 2"):
        ops.sdpa_decode_paged(q, pages, pages, i32([0, -1], [2, 0]), i32(6, 3))


def test_offsets_and_hints():
    q, k = f64(7, 2, 8), f64(6, 2, 8, seed=1)
    cu_q, cu_k = i32(0, 2, 5), i32(0, 6, 6)
    out, lse, _ = given = ops.flash_attention_varlen(q, k, k, cu_q, cu_k)
    assert nothing(out[2:], lse[2:])  # the second sequence has no keys, and two tokens are behind the last offset
    same(ops.flash_attention_varlen(q, k, k, cu_q, cu_k, max_seqlen_q=3, max_seqlen_k=6), given)
    for hint in (dict(max_seqlen_q=2), dict(max_seqlen_k=5)):
        with pytest.raises(ValueError, match="accepted: -1 or at least the longest"):
            ops.flash_attention_varlen(q, k, k, cu_q, cu_k, **hint)
    with pytest.raises(ValueError, match="offsets that start at 0 and never fall"):
        ops.flash_attention_varlen(q, k, k, i32(0, 3, 2), cu_k)


def test_partial_results():
    q, k, v = f64(1, 2, 2, 8), f64(1, 5, 2, 8, seed=1), f64(1, 5, 2, 8, seed=2)
    out, lse, none = ops.flash_attention(q, k, v)
    assert none.shape == (0,)
    top, lse_of_partial, row_sum = ops.flash_attention(q, k, v, normalize=False)
    same((top / row_sum[..., None].double(), lse_of_partial), (out, lse))
    with pytest.raises(ValueError, match="sink is accepted with normalize=True only"):
        ops.flash_attention(q, k, v, torch.zeros(2), normalize=False)
    parts = torch.stack((out[0], torch.full_like(out[0], NAN), torch.full_like(out[0], NAN)))
    sums = torch.stack((lse[0], torch.full_like(lse[0], -INF), torch.full_like(lse[0], INF)))
    same(ops.merge_partials(parts, sums), (out[0], lse[0]))
    assert nothing(*ops.merge_partials(parts[1:], sums[1:]))
    assert ops.merge_partials(parts, sums, dtype=torch.float32)[0].dtype == torch.float32


def test_choices_of_entries():
    scores = torch.tensor([[1.0, NAN, 2.0, 2.0, -INF, 2.0]], dtype=torch.float64)
    assert ops.indexer_topk(scores, topk=2).tolist() == [[2, 3]]
    assert ops.indexer_topk(scores, topk=8).tolist() == [[0, 2, 3, 5, -1, -1, -1, -1]]
    assert ops.indexer_topk(scores, i32(3), topk=3).tolist() == [[0, 2, -1]]
    assert ops.indexer_topk(scores, i32(0), topk=1).tolist() == [[-1]]
    q, k, w = f64(2, 3, 8), f64(2, 4, 8, seed=1), f64(2, 3, seed=2)
    found = ops.indexer_scores(q, k, w, i32(4, 0))
    assert found[0].isfinite().all() and (found[1] == -INF).all()
    want = (w[0, :, None] * (q[0] @ k[0].T).relu()).sum(0)
    torch.testing.assert_close(found[0], want.float())
    torch.testing.assert_close(ops.indexer_scores(q, k, w, i32(4, 0), i32(0, 1)), found)


def test_routes():
    logits = torch.tensor([[1.0, 3.0, 3.0, -INF]], dtype=torch.float64)
    weights, indices = ops.route_softmax(logits, topk=4, softmax_first=True, renormalize=True, route_scale=2.0)
    assert indices.tolist() == [[1, 2, 0, 3]] and weights[0, 3] == 0
    torch.testing.assert_close(weights.sum(), torch.tensor(2.0))
    weights, indices = ops.route_sqrt_softplus(logits, torch.tensor([0.0, 0.0, 0.0, 9.0]), topk=1, renormalize=False)
    assert indices.tolist() == [[3]] and weights.tolist() == [[0.0]]
    for wrong in (NAN, INF):
        with pytest.raises(ValueError, match="route_softmax: logits holds"):
            ops.route_softmax(torch.full((1, 4), wrong, dtype=torch.float64), topk=1)
    for topk in (0, 5):
        with pytest.raises(ValueError, match="topk must be between 1"):
            ops.route_softmax(logits, topk=topk)
    table = torch.tensor([[2, 2], [99, -1]])
    assert ops.route_hash(logits, torch.tensor([0]), table)[1].tolist() == [[2, 2]]


def test_global_scales():
    x = f64(3, 32)
    codes, scale = ops.nvfp4_quantize(x, torch.tensor(0.0))
    assert not (codes & 0x77).any() and not scale.any()
    codes, scale = ops.nvfp4_quantize(x, torch.tensor(INF))
    assert ((codes & 0x77) == 0x77).all() and (scale.view(torch.float8_e4m3fn).float() == 448).all()
    codes, scale = ops.nvfp4_quantize(x, torch.tensor(NAN))
    assert scale.view(torch.float8_e4m3fn).float().isnan().all()
    for wrong in (-1.0, 2.0**116):
        with pytest.raises(ValueError, match="global_scale is .* accepted: finite numbers above 0 up to"):
            ops.nvfp4_quantize(x, torch.tensor(wrong))
    same(ops.nvfp4_quantize(x), ops.nvfp4_quantize(x, torch.tensor(1.0)))
    codes = torch.tensor([[0x20] * 8], dtype=torch.uint8)  # 0 and 1 in turn
    one = torch.full((1, 1), 1.0).to(torch.float8_e4m3fn)
    for factor, of_one in ((0.0, INF), (INF, 0.0), (NAN, NAN)):
        got = ops.nvfp4_dequantize(codes, one, torch.tensor(factor))
        assert (got[:, ::2] == 0).all()
        torch.testing.assert_close(got[0, 1], torch.tensor(of_one), equal_nan=True)
    high = ops.mxfp4_dequantize(torch.full((1, 16), 0x22, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8))
    assert high.isnan().all()
    assert not ops.mxfp4_quantize(torch.zeros(1, 32))[1].any()


def test_rounding_of_scales():
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, 0] = 7.0  # between 6 and 8 scales of 1
    for rounding, scale, back in (("ceil", 128, 8.0), ("floor", 127, 6.0)):
        codes, found = ops.mxfp4_quantize(x, rounding=rounding)
        assert found.tolist() == [[scale]] and ops.mxfp4_dequantize(codes, found)[0, 0] == back


def test_slots():
    kv, cache = f64(3, 8), torch.zeros(5, 8, dtype=torch.float64)
    ops.kv_cache_write(kv, cache, i32(4, -1, 0))
    assert torch.equal(cache, torch.stack((kv[2], *torch.zeros(3, 8, dtype=torch.float64), kv[0])))
    got = ops.kv_cache_gather(cache, i32(0, -1, 0))
    assert torch.equal(got, torch.stack((kv[2], torch.zeros(8, dtype=torch.float64), kv[2])))
    with pytest.raises(ValueError, match="slot holds 1 more than once"):
        ops.kv_cache_write(kv, cache, i32(1, -1, 1))
    for wrong in (-2, 5):
        with pytest.raises(ValueError, match=rf"slot\[0\] is {wrong}, accepted: -1 to 4"):
            ops.kv_cache_write(kv[:1], cache, i32(wrong))
    new, k, v = f64(2, 3, 2), *torch.zeros(2, 2, 3, 3, 2, dtype=torch.float64).unbind()
    ops.paged_kv_cache_write(new, new, k, v, i32(-1, 4))  # 3 places a page
    assert torch.equal(k[1, 1], new[1]) and torch.equal(k, v) and k.count_nonzero() == new[1].numel()
    rows = torch.zeros(2, 64 + 2 * 16 + 4, dtype=torch.uint8)  # bytes: 64 of E4M3, 16 of bfloat16, a scale
    with pytest.raises(ValueError, match="head_dim must be given"):
        ops.kv_cache_gather(rows, i32(0), format="fp8", rope_dim=16)
    assert ops.kv_cache_gather(rows, i32(0), format="fp8", head_dim=80, rope_dim=16).dtype == torch.float32


def experts(indices, **kwargs):
    gen = torch.Generator().manual_seed(3)
    w13, w2 = (torch.randint(0, 256, s, generator=gen, dtype=torch.uint8) for s in ((2, 64, 16), (2, 32, 16)))
    scales = [torch.full(s, 120, dtype=torch.uint8) for s in ((2, 64, 1), (2, 32, 1))]
    weights = torch.tensor([[0.5, NAN]])
    x = torch.randn(1, 32, generator=gen, dtype=torch.float64)
    return ops.fp4_moe(x, weights, i32(indices), w13, scales[0], w2, scales[1], format="mxfp4", **kwargs)


def test_experts():
    assert (experts([-1, -1]) == 0).all() and experts([1, -1]).isfinite().all()
    same((experts([1, -1], limit=1e30),), (experts([1, -1]),))
    same((experts([1, -1], alpha=3.0),), (experts([1, -1]),))
    assert not torch.equal(experts([1, -1], swiglu="gptoss", alpha=3.0), experts([1, -1], swiglu="gptoss"))
    with pytest.raises(ValueError, match="limit must be positive"):
        experts([1, -1], limit=0.0)
    with pytest.raises(ValueError, match=r"indices\[0, 0\] is 2, accepted: -1 to 1"):
        experts([2, -1])


def test_windows_beside_lists():
    q, swa, far = f64(2, 2, 8), f64(1, 6, 8, seed=1), f64(1, 4, 8, seed=2)
    out, lse, _ = ops.sparse_fmha_with_swa(q, swa, i32(0, 5), window=3)
    assert nothing(out[0], lse[0]) and not nothing(out[1], lse[1])
    assert nothing(*ops.sparse_fmha_with_swa(q, swa, i32(5, 5), window=0)[:2])
    with pytest.raises(ValueError, match="window must be at least 0"):
        ops.sparse_fmha_with_swa(q, swa, i32(5, 5), window=-1)
    every = ops.sparse_fmha_with_swa(q, swa, i32(2, 5), far)[:2]
    same(ops.sparse_fmha_with_swa(q, swa, i32(2, 5), far, i32([3, 1, 0, 2], [0, 1, 2, 3]))[:2], every)
    few = ops.sparse_fmha_with_swa(q, swa, i32(2, 5), far, i32([3, -1, 0], [1, -1, -1]), i32(3, 1))[:2]
    same(few, ops.sparse_fmha_with_swa(q, swa, i32(2, 5), far, i32([0], [-1]))[:2])
    with pytest.raises(ValueError, match="topk_indices holds 1 more than once"):
        ops.sparse_fmha_with_swa(q, swa, i32(2, 5), far, i32([1, 1], [0, 1]))
