"""The counters of docs/lab/roadmap.md's "Before and after": what steps ask of a B200 apart, and as one."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.formats import kv_cache, mxfp4
from torch_attnkit.ops.fp4_moe import cases

# Warnings of the compiler are its own affair.
pytestmark = [pytest.mark.simulator, pytest.mark.proof, pytest.mark.filterwarnings("default")]
A = torch.ops.attnkit
NVFP4 = torch.tensor(731.37)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def counted(op, *args, **kwargs) -> list[dict[str, int]]:
    """Each launch's bytes read and written, warp instructions and operations of tensor cores."""
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    with torch_attnkit.simulate("sm100"), ptx.counting() as launches:
        op(*args, **kwargs)
    return [
        dict(
            read=c["global_read"] + c["tma_read"] + c["cp_async"], written=c["global_written"] + c["tma_written"],
            instructions=c["instructions"], flops=sum(c["flops"].values()),
        )
        for c in (launch.counters for launch in launches)
    ]  # fmt: skip


def total(launches: list[dict[str, int]], name: str) -> int:
    return sum(launch[name] for launch in launches)


def pro() -> dict:
    """Four tokens of DeepSeek-V4-Pro's sparse attention: 128 heads of 512, 128 keys of the window and 1024 entries."""
    gen = torch.Generator().manual_seed(3)
    return dict(
        q=normal(4, 128, 512), swa_kv=normal(1, 128, 512, seed=1), window=128,
        swa_end=torch.full((4,), 128, dtype=torch.int32), compressed_kv=normal(1, 2048, 512, seed=2),
        topk_indices=torch.rand(4, 2048, generator=gen).argsort(1)[:, :1024].int(),
    )  # fmt: skip


@pytest.mark.parametrize("heads", [64, 128])
def test_heads_and_keys_are_one_launch(heads):
    """D1.5, D2, P4, P8: 1152 keys, shared by all heads."""
    cache = normal(1, 1, 1152, 512, seed=1)
    (launch,) = counted(A.sdpa_decode, normal(1, heads, 512), cache, cache, torch.tensor([1152], dtype=torch.int32))
    assert launch["read"] <= 4.0e6 and launch["flops"] == 2 * 2 * heads * 1152 * 512


def test_the_first_product_of_experts_writes_codes():
    """P3: the second launch of three writes h, of which 114 slots of 128 have an expert."""
    dims = dict(Tq=64, N=256, M=256, E=8, K=2, blk=16)
    wide, codes = (
        counted(A.fp4_moe, *args, **kwargs)
        for args, kwargs in (
            cases.make(dims | dict(act=act), torch.bfloat16, (), torch.Generator().manual_seed(0)) for act in (0, 1)
        )
    )
    assert len(wide) == len(codes) == 3
    assert (wide[1]["written"], codes[1]["written"]) == (114 * 256 * 2, 114 * (256 // 2 + 256 // 16))


def test_attention_leaves_codes():
    """P6: normalised, rotated and packed in the epilogue."""
    case, angle = pro(), torch.rand(4, 32, generator=torch.Generator().manual_seed(0))
    rotated = dict(cos=angle.cos(), sin=angle.sin())
    result = A.sparse_fmha_with_swa(**case)[0]
    apart = counted(A.sparse_fmha_with_swa, **case)
    apart += counted(A.inverse_rope_fp4, result, *rotated.values(), format="nvfp4", global_scale=NVFP4)
    fused = counted(A.sparse_fmha_inverse_rope_fp4, **case, **rotated, o_format="nvfp4", o_global=NVFP4)
    assert (len(apart), len(fused)) == (2, 1)
    assert total(fused, "written") == 4 * 128 * (512 // 2 + 512 // 16) < total(apart, "written") / 4
    for name in ("read", "instructions"):
        assert total(fused, name) < total(apart, name)


@pytest.mark.parametrize(("format", "share"), [("fp8", 0.71), ("mxfp4", 0.57), ("nvfp4", 0.58)])
def test_encoded_rows_are_fewer_bytes(format, share):
    """P7: of all bytes, q among them. Decoding takes twice to three times the instructions."""
    case = pro()
    scale = torch.tensor(700.0) if format == "nvfp4" else None
    rows = {name: kv_cache.encode_rows(case[name], format, 64, scale) for name in ("swa_kv", "compressed_kv")}
    (wide,) = counted(A.sparse_fmha_with_swa, **case)
    (narrow,) = counted(A.sparse_fmha_with_swa, **case | rows, format=format, global_scale=scale)
    assert narrow["flops"] == wide["flops"] and narrow["read"] <= share * wide["read"]
    assert narrow["instructions"] <= 3 * wide["instructions"]


def test_the_indexer_multiplies_codes():
    """P10: 4 tokens of 64 heads over 4096 keys of MXFP4, all of it on tensor cores; then the 1024 best."""
    (q, q_scale), (k, k_scale) = mxfp4.quantize(normal(4, 64, 128)), mxfp4.quantize(normal(1, 4096, 128, seed=1))
    w, k_len = normal(4, 64, seed=2).float(), torch.full((4,), 4096, dtype=torch.int32)
    (scores,) = counted(A.indexer_scores, q, k, w, k_len, None, None, q_scale, k_scale, format="mxfp4")
    assert scores["flops"] == 2 * 4 * 64 * 4096 * 128
    (best,) = counted(A.indexer_topk, torch.zeros(4, 4096), k_len, topk=1024)
    assert best["flops"] == 0
