"""PyTorch's counter of operations counts ours: what the masks of the references and the bench's formulas say."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from torch_attnkit import flops
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.oracle import pairs
from torch_attnkit.oracle.attention import visible
from torch_attnkit.warmup import bench_inputs

ROOT = Path(__file__).resolve().parent.parent
ops = torch.ops.attnkit
# Small cases of the bench, whose formulas were written for its reports.
_ATTENTION = dict(Hq=4, Hkv=2, D=16, Dv=16)
BENCHED = {
    "flash_attention": [
        dict(B=2, T=9, S=9, Hq=4, Hkv=2, D=16, Dv=8, causal=1),
        dict(B=1, T=20, S=20, causal=1, window=6, **_ATTENTION),
        dict(B=1, T=5, S=7, causal=0, **_ATTENTION),
    ],
    "flash_attention_varlen": [dict(B=5, L=12, causal=c, **_ATTENTION) for c in (0, 1)],
    "sdpa_decode": [
        dict(B=3, Hq=4, Hkv=2, S=20, D=16, Dv=8),
        dict(B=3, S=20, ragged=1, **_ATTENTION),
        dict(B=3, S=20, window=7, sink=1, **_ATTENTION),
    ],
    "sdpa_decode_paged": [dict(B=2, Np=6, Ps=4, Mp=3, window=7, **_ATTENTION)],
    "flash_attention_paged": [dict(B=5, L=t, S=12, Ps=4, **_ATTENTION) for t in (1, 7)],
    "sdpa_multi": [dict(B=2, T=4, S=20, causal=c, **_ATTENTION) for c in (0, 1)],
    "fp4_moe": [dict(Tq=5, N=64, M=32, E=4, K=2, blk=16, act=0)],
    "grouped_output_projection": [dict(Tq=5, G=2, Kn=64, R=8, blk=blk) for blk in (0, 16, 32)],
    "sparse_fmha_with_swa": [dict(Tq=4, Hq=3, R=2, S=20, C=12, K=5, D=16, window=8, topk=1, compressed=1)],
}


def counted(name: str, *args, **kwargs) -> int:
    with FlopCounterMode(display=False) as counter:
        getattr(ops, name)(*args, **kwargs)
    return counter.get_total_flops()


def formula(name: str, *args, **kwargs) -> int:
    return flops.formula(OPS[name])(*args, **kwargs)


@pytest.mark.parametrize(
    ("name", "dims"),
    [(name, dims) for name, cases in BENCHED.items() for dims in cases],
    ids=lambda v: "-".join(f"{k}{n}" for k, n in v.items()) if isinstance(v, dict) else v,
)
def test_a_call_counts_what_the_bench_says(name, dims):
    args, kwargs = bench_inputs(OPS[name], dims, torch.float32, torch.Generator().manual_seed(0))
    assert counted(name, *args, **kwargs) == OPS[name].module("cases").flops(dims) > 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [-1, 0, 1, 3, 50])
def test_pairs_are_those_of_the_mask(causal, window):
    """All short sequences: queries before the first key, lengths of 0, starts at the end, sinks beyond it."""
    judged = 0
    for T, S in itertools.product((1, 4), (1, 6)):
        for position, begin, end, sinks in itertools.product((-2, 0, S - T), (0, 2, S), (0, 3, S), (0, 2, 9)):
            pos = torch.arange(position, position + T)[None]
            keep = visible(pos, S, min(begin, S), min(end, S), causal=causal, window=window, sink_tokens=sinks)
            sequence = (T, position, min(begin, S), min(end, S))
            assert pairs.seen(sequence, causal, window, sinks) == int(keep.sum()), (sequence, sinks)
            judged += int(keep.sum())
    assert judged > 0


def test_lengths_count_and_not_the_size_of_the_cache():
    q, k = torch.randn(2, 4, 16), torch.randn(2, 2, 50, 16)
    length, start = (torch.tensor(n, dtype=torch.int32) for n in ([20, 7], [5, 0]))
    assert counted("sdpa_decode", q, k, k, length) == 4 * 4 * (20 + 7) * 16
    assert counted("sdpa_decode", q, k, k, length, None, start) == 4 * 4 * (15 + 7) * 16
    assert counted("sdpa_decode", q, k, k, length, None, start, window=3, sink_tokens=2) == 4 * 4 * (5 + 5) * 16


def test_a_block_that_is_longer_than_its_sequence_counts_what_is_there():
    q, k = torch.randn(2, 4, 2, 16), torch.randn(2, 2, 10, 16)
    length = torch.tensor([2, 0], dtype=torch.int32)
    assert counted("sdpa_multi", q, k, k, length) == 4 * 2 * (1 + 2) * 16
    assert counted("sdpa_multi", q, k, k, length, causal=False) == 4 * 2 * (2 + 2) * 16


def test_padding_of_keys_counts_nothing():
    q, k = torch.randn(1, 3, 2, 16), torch.randn(1, 6, 2, 16)
    kv_len = torch.tensor([4], dtype=torch.int32)
    assert counted("flash_attention", q, k, k, kv_len=kv_len, causal=True) == 4 * 2 * (4 + 4 + 4) * 16


def test_entries_that_are_absent_count_nothing():
    q, near, far = torch.randn(2, 3, 16), torch.randn(1, 20, 16), torch.randn(1, 12, 16)
    end, length = (torch.tensor(n, dtype=torch.int32) for n in ([3, 20], [12, 4]))
    chosen = torch.tensor([[0, 11, -1], [2, 5, 9]], dtype=torch.int32)
    unit = 4 * 3 * 16
    assert counted("sparse_fmha_with_swa", q, near, end, window=8) == unit * (3 + 8)
    assert counted("sparse_fmha_with_swa", q, near, end, far, window=8) == unit * (3 + 8 + 24)
    assert counted("sparse_fmha_with_swa", q, near, end, far, None, length, window=8) == unit * (3 + 8 + 16)
    assert counted("sparse_fmha_with_swa", q, near, end, far, chosen, length, window=8) == unit * (3 + 8 + 2 + 1)
    angles = torch.ones(2, 4)
    rotated = counted("sparse_fmha_inverse_rope_fp4", q, near, end, angles, angles, far, chosen, length, window=8)
    assert rotated == unit * (3 + 8 + 2 + 1)


def test_scores_count_products_alone():
    q, k, weights = torch.randn(2, 3, 32), torch.randn(1, 9, 32), torch.rand(2, 3)
    length = torch.tensor([4, 9], dtype=torch.int32)
    assert counted("indexer_scores", q, k, weights, length) == 2 * 3 * 32 * 13
    assert counted("indexer_select", q, k, weights, length, topk=2) == 2 * 3 * 32 * 13
    (q8, qs), (k8, ks) = (ops.mxfp4_quantize(t) for t in (q, k))
    packed = counted("indexer_scores", q8, k8, weights, length, None, None, qs, ks, format="mxfp4")
    assert packed == 2 * 3 * 32 * 13


def test_choices_without_an_expert_count_nothing():
    args, kwargs = bench_inputs(OPS["fp4_moe"], BENCHED["fp4_moe"][0], torch.float32, torch.Generator().manual_seed(0))
    args[2][1, 0] = -1
    assert counted("fp4_moe", *args, **kwargs) == 6 * 9 * 64 * 32


def test_of_fake_tensors_what_fits_counts():
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = torch.randn(5, 2, 16)
    assert formula("flash_attention_varlen", *[packed] * 3, *[offsets] * 2) == 4 * 2 * (4 + 9) * 16
    with FakeTensorMode():
        q, k, n = torch.randn(2, 4, 16), torch.randn(2, 2, 50, 16), torch.ones(2, dtype=torch.int32)
        assert counted("sdpa_decode", q, k, k, n) == 4 * 4 * 100 * 16
        packed, offsets = torch.randn(5, 2, 16), torch.ones(3, dtype=torch.int32)
        assert counted("flash_attention_varlen", *[packed] * 3, *[offsets] * 2) == 4 * 2 * 25 * 16
        hints = dict(max_seqlen_q=3, max_seqlen_k=3)
        assert counted("flash_attention_varlen", *[packed] * 3, *[offsets] * 2, **hints) == 4 * 2 * 18 * 16


def test_ops_without_products_count_nothing():
    assert counted("route_softmax", torch.randn(3, 8), topk=2) == 0
    with FlopCounterMode(display=False) as counter:  # nor does what their references are made of
        ops.gated_rmsnorm(*[torch.randn(4, 8)] * 2, torch.randn(8))
    assert counter.get_total_flops() == 0


@pytest.mark.parametrize(
    "imports",
    [
        "import torch_attnkit; assert 'torch.utils.flop_counter' not in sys.modules;"
        " import torch.utils.flop_counter as c",
        pytest.param("import torch.utils.flop_counter as c; import torch_attnkit", marks=pytest.mark.proof),
        pytest.param(
            "import importlib.util, torch_attnkit; importlib.util.find_spec('torch.utils.flop_counter');"
            " from torch.utils import flop_counter as c",
            marks=pytest.mark.proof,
        ),
    ],
    ids=["first", "last", "looked for"],
)
def test_formulas_are_there_whichever_is_imported_first(imports):
    code = (
        f"import sys, torch; before = list(sys.meta_path); {imports}; import inspect\n"
        "ops = torch.ops.attnkit\n"
        "assert ops.sdpa_decode in c.flop_registry and ops.route_hash not in c.flop_registry\n"
        "left = [f for f in sys.meta_path if getattr(f, 'name', None) != 'torch.distributed.tensor']\n"
        "assert left == before and 'FlopCounterMode' in inspect.getsource(c)\n"
        "assert vars(c.__loader__).keys() == {'name', 'path'}, vars(c.__loader__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
