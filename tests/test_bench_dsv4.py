"""Peers of DeepSeek-V4's attention: what their adapters hand over, judged by plain stand-ins for the peers' kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench import peers, run
from bench.inputs import Inputs
from bench.peers import deepgemm, flashmla, torch_bmm, torch_compile, torch_rows, vllm_cache, vllm_ops, vllm_topk
from bench.same import difference
from torch_attnkit import parity
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.formats import kv_cache

NAMES = ("sparse_fmha_with_swa", "indexer_scores", "indexer_topk", "kv_cache_write", "kv_cache_gather")


def rounding(terms):
    """How far apart, relative to their norm, two results in bf16 may be that were sums of ``terms`` numbers in float32.

    The sums differ by 2^-24 a term at most; where a step of bf16, 2^-8 of a number or more, begins between them, which
    is so in 2^-16 a term of the elements, the results differ by that step, 2^-7 of the number at most.
    """
    return 2.0**-7 * (terms * 2.0**-16) ** 0.5


ATTENDED = rounding(512 + 128)  # products of D 512, and at most as many keys as a parity case has


def made(name, dims, features=(), dtype=torch.bfloat16):
    """Arguments of a call, and what the reference makes of them, or returns; ``dims`` are changes of a parity case.

    Products are summed in float32, also those of E4M3, which the oracle otherwise sums as Hopper's tensor cores do.
    """
    op, cases = OPS[name], OPS[name].module("cases")
    base = next(iter(cases.PARITY.values()))
    args, kwargs = cases.make(base | dims, dtype, features, torch.Generator().manual_seed(0))
    if not op.mutated:
        found = op.module("reference").reference(*args, **kwargs)
        return args, kwargs, found[0] if isinstance(found, tuple) else found
    results = parity.reference_of(op, args, kwargs, double=False)
    return args, kwargs, results[len(op.mutated) if op.outnames else 0]


def attended(q, kv, index, seen, scale, sink):
    """Attention of q (T, H, D) over the first ``seen`` rows that each of ``index`` (T, K) names."""
    listed = (torch.arange(index.shape[1]) < seen[:, None]) & (index >= 0)
    keys = kv[index.clamp(min=0).long()].float()  # (T, K, D)
    scores = torch.einsum("thd,tkd->thk", q.float(), keys) * scale
    scores = scores.masked_fill(~listed[:, None], -torch.inf)
    extra = q.new_full(q.shape[1:2], -torch.inf) if sink is None else sink
    shares = torch.cat((scores, extra.float()[None, :, None].expand(len(q), -1, 1)), 2).softmax(2)[..., :-1]
    return torch.einsum("thk,tkd->thd", shares.nan_to_num(), keys)


def sparse_prefill(q, kv, index, scale, d_v, sink, seen, out):
    assert q.shape[1] in (64, 128) and index.shape[2] % 128 == 0 and index.dtype == torch.int32
    assert kv.shape[1:] == (1, 512) and out.shape == q.shape and d_v == 512
    out.copy_(attended(q, kv[:, 0], index[:, 0], seen, scale, sink))


def unpaged(pages):
    """Rows (Np * 64, D) that FP8 pages hold."""
    assert pages.shape[1:] == (64, 1, 584) and pages.stride()[:3] == (65 * 576, 584, 584)
    bytes = pages.as_strided((len(pages), 64 * 584), (65 * 576, 1))
    codes, scales = bytes[:, : 64 * 576].reshape(-1, 64, 576), bytes[:, 64 * 576 :].reshape(-1, 64, 8)
    return kv_cache.decode_rows(torch.cat((codes, scales), 2), "fp8", 512, 64, dtype=torch.float32).flatten(0, 1)


def sparse_decode(q, kv, index, seen, sink, plan, splits, *more):
    kv2, index2, seen2, d_v, scale, out = more
    assert d_v == 512 and q.shape[1] == 1 and index.shape[2] % 64 == 0 and (plan is None) == (splits is None)
    rows, lists = unpaged(kv), torch.where(torch.arange(index.shape[2]) < seen[:, None], index[:, 0], -1)
    if kv2 is not None:
        more = torch.where(torch.arange(index2.shape[2]) < seen2[:, None], index2[:, 0], -1)
        lists = torch.cat((lists, torch.where(more < 0, -1, more + len(rows))), 1)
        rows = torch.cat((rows, unpaged(kv2)))
    out[:, 0] = attended(q[:, 0], rows, lists, torch.full((len(q),), lists.shape[1]), scale, sink)
    return out, None, 1, 2


@pytest.fixture
def flash_mla(monkeypatch):
    library = SimpleNamespace(sparse_prefill_fwd=sparse_prefill, sparse_decode_fwd=sparse_decode)
    monkeypatch.setattr(flashmla, "library", lambda: library)


FEATURES = [
    (), ("sink",), ("compressed", "sink"), ("compressed", "topk"), ("compressed", "topk", "compressed_len", "sink"),
    ("compressed", "request_ids", "compressed_len"),
]  # fmt: skip


@pytest.mark.parametrize("heads", (3, 64, 65))
@pytest.mark.parametrize("features", FEATURES)
def test_flash_mla_sees_what_the_op_sees(features, heads, flash_mla):
    args, kwargs, wanted = made("sparse_fmha_with_swa", dict(D=512, Hq=heads, window=16), features)
    got = flashmla.adapt("sparse_fmha_with_swa", args, kwargs)()
    assert got.shape == wanted.shape and difference("sparse_fmha_with_swa", args, wanted, got) <= ATTENDED
    assert flashmla.adapt("sparse_fmha_with_swa", args, kwargs | dict(normalize=False)) is None
    half = (args[0].half(), *args[1:])
    assert flashmla.adapt("sparse_fmha_with_swa", half, kwargs) is None


@pytest.mark.parametrize("features", FEATURES)
def test_flash_mla_reads_rows_of_fp8(features, flash_mla):
    """Rows as kv_cache_write writes them; here the op gets what they hold."""
    args, kwargs, _ = made("sparse_fmha_with_swa", dict(D=512, Hq=4, S=70, window=16), features)
    rows = [None if t is None else kv_cache.encode_rows(t, "fp8", 64) for t in (args[1], args[3])]
    held = [None if t is None else kv_cache.decode_rows(t, "fp8", 512, 64, dtype=torch.bfloat16) for t in rows]
    plain = (args[0], held[0], args[2], held[1], *args[4:])
    wanted = parity.reference_of(OPS["sparse_fmha_with_swa"], plain, kwargs, double=False)[0]
    coded = (args[0], rows[0], args[2], rows[1], *args[4:])
    got = flashmla.adapt("sparse_fmha_with_swa", coded, kwargs | dict(format="fp8"))()
    assert difference("sparse_fmha_with_swa", args, wanted, got) <= ATTENDED
    assert flashmla.adapt("sparse_fmha_with_swa", coded, kwargs | dict(format="mxfp4")) is None


def in_pages(rows, page):
    """Rows (R, S, D) in pages in random order (Np, page, D), and the table (R, M)."""
    R, S, D = rows.shape
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -S % page)).view(-1, page, D)
    order = torch.randperm(len(rows))
    cache = torch.empty_like(rows)
    cache[order] = rows
    return cache, order.view(R, -1).int()


@pytest.mark.parametrize("features", FEATURES)
def test_flash_mla_follows_tables_of_pages(features, flash_mla):
    args, kwargs, wanted = made("sparse_fmha_with_swa", dict(D=512, Hq=4, S=40, C=12, window=16), features)
    near, near_table = in_pages(args[1], 10)
    far, far_table = (None, None) if args[3] is None else in_pages(args[3], 4)
    tables = (args[0], near, args[2], far, *args[4:8], near_table, far_table, None)
    got = flashmla.adapt("sparse_fmha_with_swa", tables, kwargs)()
    assert difference("sparse_fmha_with_swa", args, wanted, got) <= ATTENDED


def mqa_logits(q, keys, weights, first, last, clean):
    k, scale = keys
    assert q.shape[1:] == (64, 128) and scale.shape == k.shape[:1] and weights.dtype == torch.float32 and not clean
    scores = (torch.einsum("thd,sd->ths", q.float(), k.float()).relu() * weights[..., None]).sum(1) * scale
    position = torch.arange(len(k))
    return scores.masked_fill((position < first[:, None]) | (position >= last[:, None]), 7.0)  # garbage


def paged_mqa_logits(q, pages, weights, lengths, table, plan, most, clean):
    assert q.shape[1] == 1 and pages.shape[1:] == (64, 1, 132) and plan == "plan" and lengths.shape == (len(q), 1)
    bytes = pages.view(len(pages), -1)
    codes = bytes[:, : 64 * 128].contiguous().view(torch.float8_e4m3fn).view(-1, 64, 128)
    scales = bytes[:, 64 * 128 :].contiguous().view(torch.float32)
    rows = []
    for t in range(len(q)):
        k, scale = codes[table[t].long()].flatten(0, 1), scales[table[t].long()].flatten()
        rows.append(mqa_logits(q[t], (k, scale), weights[t : t + 1], lengths[t] * 0, lengths[t], clean))
    return torch.cat(rows)[:, :most]


@pytest.fixture
def deep_gemm(monkeypatch):
    library = SimpleNamespace(
        fp8_mqa_logits=mqa_logits, fp8_paged_mqa_logits=paged_mqa_logits, get_num_sms=lambda: 132,
        get_paged_mqa_logits_metadata=lambda lengths, page, sms: "plan",
    )  # fmt: skip
    monkeypatch.setattr(deepgemm, "library", lambda: library)


@pytest.mark.parametrize(
    ("dims", "features"),
    [(dict(Tq=5, R=1), ()), (dict(Tq=1, R=1), ()), (dict(Tq=3, R=3), ()), (dict(Tq=3, R=3, q_scale=1), ("paged",))],
)
def test_deep_gemm_scores_what_the_op_scores(dims, features, deep_gemm):
    sizes = dict(S=192, Hi=64, Qb=128, Ps=64, bits=8)
    args, kwargs, wanted = made("indexer_scores", sizes | dims, features)
    got = deepgemm.adapt("indexer_scores", args, kwargs)()
    off = difference("indexer_scores", args, wanted, got)
    assert got.shape == wanted.shape and off <= (128 + 64) * 2.0**-24  # products of a row, heads
    assert difference("indexer_scores", args, wanted, got * 1.1) == pytest.approx(0.1, rel=1e-4)
    assert deepgemm.adapt("indexer_scores", args, kwargs | dict(format="mxfp4")) is None
    several, kwargs, _ = made("indexer_scores", sizes | dict(Tq=6, R=2))
    assert deepgemm.adapt("indexer_scores", several, kwargs) is None


def test_scores_by_torch_compile_are_the_ops():
    args, kwargs, wanted = made("indexer_scores", dict(Tq=6, R=2, S=37, Hi=4, Qb=64, bits=16))
    got = torch_compile.OWN["indexer_scores"](*args, **kwargs)
    # Each product is rounded to bf16, by half a step at most, before heads are weighted and added up.
    q, k, weights, *more = args
    most = OPS["indexer_scores"].module("reference").reference(q, k, weights.abs(), *more, **kwargs)
    seen = wanted.isfinite()
    limit = (2.0**-8 * most[seen].norm() / wanted[seen].norm()).item()
    off = difference("indexer_scores", args, wanted, got)
    assert off <= limit
    assert torch_compile.adapt("indexer_scores", made("indexer_scores", dict(bits=8))[0], dict(format="fp8")) is None


def chosen(scores, lengths, out, K):
    """In another order than the op's, and of equal scores the last."""
    for t, n in enumerate(lengths.tolist()):
        order = scores[t, :n].sort(stable=True).indices[-K:]
        out[t, : len(order)] = order.int()


@pytest.fixture
def general(monkeypatch):
    library = SimpleNamespace(
        cooperative_topk=lambda x, n, out, workspace, K, most: chosen(x, n, out, K),
        persistent_topk=lambda x, n, out, workspace, K, most: chosen(x, n, out, K),
        top_k_per_row_prefill=lambda x, first, n, out, rows, s0, s1, K: chosen(x, n, out, K),
        top_k_per_row_decode=lambda x, each, n, out, rows, s0, s1, K: chosen(x, n, out, K),
    )
    monkeypatch.setattr(vllm_ops, "general", lambda: library)


@pytest.mark.parametrize("features", ((), ("k_len",)))
@pytest.mark.parametrize("ties", (0, 1))
@pytest.mark.parametrize("by", ("torch_topk", "cooperative", "persistent", "per_row", "per_row_decode"))
def test_choices_are_compared_as_sets_of_scores(by, ties, features, general):
    args, kwargs, wanted = made("indexer_topk", dict(Tq=5, S=700, K=512, ties=ties), features, torch.float32)
    call = getattr(vllm_topk, by)("indexer_topk", args, kwargs)
    if by == "torch_topk" and features:
        assert call is None
        return
    got = call()
    assert difference("indexer_topk", args, wanted, got) == 0
    wrong = got.clone()
    wrong[2, 0] = wrong[2, 1]
    assert difference("indexer_topk", args, wanted, wrong) == pytest.approx(0.2)
    wrong[3] = -1
    assert difference("indexer_topk", args, wanted, wrong) == pytest.approx(0.4)
    short = (args[0].bfloat16(), *args[1:])
    assert by == "torch_topk" or getattr(vllm_topk, by)("indexer_topk", short, kwargs) is None


@pytest.mark.parametrize("tokens", (3, 33))
def test_a_selection_in_two_launches_chooses_the_same_entries(tokens, deep_gemm, general):
    dims = dict(Tq=tokens, R=tokens, S=1024, Hi=64, Qb=128, Ps=64, bits=8, K=512, full=1)
    args, kwargs, wanted = made("indexer_select", dims, ("paged",))
    got = deepgemm.select("indexer_select", args, kwargs)()
    off = difference("indexer_select", args, wanted, got)
    assert off <= 1 / wanted.numel(), "at most one entry, whose score the sums of float32 have beside another's"
    wrong = got.clone()
    wrong[0] = torch.where(torch.isin(torch.arange(1024), wanted[0]), -1, torch.arange(1024))[-512:].int()
    assert difference("indexer_select", args, wanted, wrong) > 0.3 / tokens
    assert deepgemm.select("indexer_scores", args, kwargs) is None
    assert deepgemm.select("indexer_select", args, kwargs | dict(format="mxfp4")) is None


def concat_and_cache(kv, rope, cache, slot, kind, scale):
    assert slot.dtype == torch.int64 and cache.shape[1] == 1 and kind == "auto"
    kept = slot >= 0
    cache[slot[kept], 0] = torch.cat((kv, rope), 1)[kept]


def gather_cache(cache, out, table, ends, count, starts):
    assert table.dtype == torch.int32 and ends.tolist() == [0, len(out)] and count == 1
    out.copy_(cache[table[0].long(), 0])


@pytest.mark.parametrize("adapter", (vllm_cache, torch_rows))
def test_rows_of_numbers_are_the_ops(adapter, monkeypatch):
    library = SimpleNamespace(concat_and_cache_mla=concat_and_cache, cp_gather_cache=gather_cache)
    monkeypatch.setattr(vllm_ops, "caches", lambda: library)
    sizes = dict(R=7, D=512, Nc=20, rope=64, fmt=0, full=1)
    args, kwargs, wanted = made("kv_cache_gather", sizes)
    got = adapter.adapt("kv_cache_gather", args, kwargs)()
    assert torch.equal(got, wanted)
    args, kwargs, wanted = made("kv_cache_write", sizes)
    assert torch.equal(adapter.adapt("kv_cache_write", args, kwargs)(), wanted)
    for op in ("kv_cache_gather", "kv_cache_write"):
        args, kwargs, _ = made(op, sizes | dict(fmt=1))
        assert adapter.adapt(op, args, kwargs) is None


@pytest.mark.parametrize("blk", (0, 16, 32))
def test_products_of_groups_by_torch_are_the_ops(blk):
    args, kwargs, wanted = made("grouped_output_projection", dict(Tq=5, G=3, Kn=96, R=7, blk=blk))
    got = torch_bmm.adapt("grouped_output_projection", args, kwargs)()
    assert got.dtype == wanted.dtype and difference("grouped_output_projection", args, wanted, got) <= rounding(96)
    assert torch_bmm.adapt("grouped_output_projection", args, kwargs | dict(dtype=torch.float32)) is None


def test_a_peer_that_is_not_there_says_so(monkeypatch):
    monkeypatch.setattr(vllm_ops.importlib.util, "find_spec", lambda name: None)
    calls = {
        "FlashMLA": made("sparse_fmha_with_swa", dict(D=512)),
        "DeepGEMM": made("indexer_scores", dict(bits=8, Qb=128, Tq=3, R=3)),
        "vLLM persistent": made("indexer_topk", dict(K=512, ties=0), dtype=torch.float32),
        "vLLM cache": made("kv_cache_write", dict(D=512, fmt=0)),
    }
    for (name, (args, kwargs, _)), op in zip(calls.items(), NAMES, strict=False):
        with pytest.raises(ImportError, match="is not installed"):
            next(p for p in peers.ALL if p.name == name).adapt(op, args, kwargs)


def test_everything_is_called_once_before_it_is_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(run, "Inputs", lambda op, dtype: Inputs(op, dtype, "cpu"))
    called = []

    class Fake(peers.Peer):
        def adapt(self, op, args, kwargs):
            if self.name == "absent":
                raise ImportError("it is not installed")
            return None if self.name == "other" else lambda: called.append(len(args[0]))

    monkeypatch.setattr(peers, "ALL", tuple(Fake(name, "") for name in ("right", "other", "absent")))
    found = dict(run.prepare(OPS["indexer_topk"], torch.bfloat16, "1x2048"))
    assert found == {"1x2048-512": {"absent": "ImportError: it is not installed"}} and called == [1]


def test_a_peer_is_timed_if_it_computed_the_same_and_else_it_is_said_why(monkeypatch):
    args, kwargs, wanted = made("indexer_topk", dict(K=20, ties=0), dtype=torch.float32)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    class Fake(peers.Peer):
        def adapt(self, op, args, kwargs):
            if self.name == "absent":
                raise ImportError("it is not installed")
            if self.name == "other":
                return None
            return lambda: wanted.flip(1) if self.name == "right" else wanted - 1

    rivals, missing = {}, {}
    for name in ("right", "wrong", "absent", "other"):
        run._prepare(Fake(name, ""), OPS["indexer_topk"], args, [args, args], kwargs, (wanted,), rivals, missing)
    assert list(rivals) == ["right"] and len(rivals["right"]) == 2
    assert missing == {
        "wrong": "computes something else here (difference 1)", "absent": "ImportError: it is not installed"
    }  # fmt: skip
