"""Results in FP4: to the bit what the kernel's own numbers give when they are quantised by the reference."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.cuda import driver
from torch_attnkit.formats.scale_layout import to_128x4
from torch_attnkit.ops.inverse_rope_fp4.reference import reference as quantised

from .test_sparse_work import (
    fp8_persistent,
    from_the_l2,
    in_a_cluster,
    in_clusters,
    normal,
    persistent,
    two_head_blocks,
)  # fmt: skip

# Warnings of the compiler are its own affair.
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("default"), pytest.mark.seconds(300)]
A = torch.ops.attnkit


def angles(tokens: int, pairs: int, dtype: torch.dtype = torch.float32) -> dict:
    angle = 7 * torch.rand(tokens, pairs, generator=torch.Generator().manual_seed(5))
    return dict(cos=angle.cos().to(dtype), sin=angle.sin().to(dtype))


def agrees(
    case: dict, pairs: int, dtype: torch.dtype = torch.float32, seed: int = 1, arch: str = "sm90", **of_codes
) -> None:
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    case = {name: value for name, value in case.items() if name != "normalize"}
    rotation = angles(len(case["q"]), pairs, dtype)
    with torch_attnkit.simulate(arch), ptx.settings(check=True, seed=seed):
        got = A.sparse_fmha_inverse_rope_fp4(**case, **rotation, **of_codes)
        out = A.sparse_fmha_with_swa(**case)[0]
    names = {"o_global": "global_scale", "o_format": "format"}
    want = quantised(out, *rotation.values(), **{names.get(n, n): v for n, v in of_codes.items()})
    assert torch.equal(got[0], want[0]), f"{int((got[0] != want[0]).sum())} of {got[0].numel()} bytes of codes"
    assert torch.equal(got[1], want[1]), f"{int((got[1] != want[1]).sum())} of {got[1].numel()} scales"
    assert got[0].unique().numel() > 100 and got[1].unique().numel() > 1, "results of which codes are not much"


NVFP4 = dict(o_format="nvfp4", o_global=torch.tensor(731.37))
MXFP4 = dict(o_format="mxfp4")
SWIZZLED = dict(scale_layout="128x4")


@pytest.mark.sample(47)
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("case", "groups"),
    [
        (persistent, 7), (in_a_cluster, 4), (in_clusters, 10), (two_head_blocks, 3), (from_the_l2, 1),
        (fp8_persistent, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_codes_are_those_of_the_numbers_that_attention_gives(case, groups, format, layout, arch):
    kwargs = NVFP4 if format == "nvfp4" else MXFP4
    agrees(case(), 32, groups=groups, scale_layout=layout, arch=arch, **kwargs)


@pytest.mark.sample(6)
@pytest.mark.parametrize("tokens", [3, 134])
@pytest.mark.parametrize("pairs", [5, 0, 64])
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_pairs_of_any_number_are_rotated(tokens, pairs, arch):
    """By angles in the model dtype; a token of three heads, of which a cluster has half a warp of chunks, or a CTA."""
    case = dict(q=normal(tokens, 3, 128), swa_kv=normal(1, 90, 128, seed=1))
    case |= dict(swa_end=torch.full((tokens,), 90, dtype=torch.int32))
    agrees(case, pairs, torch.bfloat16, arch=arch, **(MXFP4 if pairs == 5 else {}))


def of(tokens: int, heads: int, dim: int, keys: int) -> dict:
    """Tokens whose window has all keys."""
    end = torch.full((tokens,), keys, dtype=torch.int32)
    return dict(q=normal(tokens, heads, dim), swa_kv=normal(1, keys, dim, seed=1), swa_end=end, window=keys)


@pytest.mark.sample(21)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("given", "multiprocessors"),
    [
        ((2, 5, 128, 60), 1),  # a CTA of 16 heads: blocks of two and of four lanes
        ((2, 20, 256, 60), 1),  # of 32: a block of NVFP4 a lane, half a block of MXFP4
        ((1, 70, 512, 60), 2),  # of 64, two sides: two blocks of NVFP4 a lane
        ((1, 3, 128, 1000), 8),  # a cluster, of which some CTAs have no row
        ((1, 70, 512, 900), 8),  # a cluster of two sides
        ((1, 3, 128, 6000), 148),  # clusters, a row of which is half a warp's
        ((1, 70, 256, 3000), 148),  # clusters of two sides
    ],
    ids=str,
)
def test_a_b200_gives_codes_however_work_is_cut(given, multiprocessors, format, seed, monkeypatch):
    """On schedules that delay what is asynchronous: neither results nor checks depend on them."""
    monkeypatch.setattr(driver, "sm_count", lambda device: multiprocessors)
    agrees(of(*given), 20, seed=seed, arch="sm100", **(NVFP4 if format == "nvfp4" else MXFP4))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_attention_to_output_projection_is_two_launches(format):
    """On Blackwell, whose tensor cores take codes and the 128x4 layout as they are: nothing is moved in between, and
    numbers are those of the three ops in sequence."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    groups, rank, case, rotation = 2, 24, of(3, 4, 128, 40), angles(3, 32)
    gen = torch.Generator().manual_seed(7)
    weight = torch.randn(groups * rank, 256, generator=gen)
    o_global = torch.tensor(731.37) if format == "nvfp4" else None
    quantize = A.nvfp4_quantize if format == "nvfp4" else A.mxfp4_quantize
    codes_of_weight, scale_of_weight = quantize(weight)
    project = lambda codes, scale: A.grouped_output_projection(
        codes.view(3, groups, -1), codes_of_weight.view(groups, rank, -1), scale,
        torch.stack([to_128x4(s) for s in scale_of_weight.view(groups, rank, -1)]), o_global, format=format,
        scale_layout="128x4", dtype=torch.bfloat16,
    )  # fmt: skip
    how = dict(groups=groups, scale_layout="128x4")
    with torch_attnkit.simulate("sm100"):
        with ptx.counting() as fused:
            got = project(
                *A.sparse_fmha_inverse_rope_fp4(**case, **rotation, o_global=o_global, o_format=format, **how)
            )
        with ptx.counting() as apart:
            out = A.sparse_fmha_with_swa(**case)[0]
            want = project(*A.inverse_rope_fp4(out, *rotation.values(), o_global, format=format, **how))
    assert len(fused) == 2 and len(apart) == 3
    assert torch.equal(got, want) and got.unique().numel() > 50


def test_a_decode_step_of_a_layer_s_attention_is_five_launches():
    """On Blackwell, from the new key's row in its page to the output projection: the row, the indexer's scores, its
    choice, attention to codes, and their products. By the ops one by one it is the same, to the bit, in six."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    requests, heads, dim, page, groups, rank = 2, 4, 128, 16, 2, 24
    pages, entries = normal(4, page, dim), normal(requests, 40, dim, seed=1)
    tables = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    past = torch.tensor([20, 27], dtype=torch.int32)  # keys that are there before this step
    slot = tables[torch.arange(requests), past // page].long() * page + past % page
    new, rotation = normal(requests, dim, seed=2), angles(requests, 32)
    of_indexer = normal(requests, 4, 64, seed=3), normal(requests, 40, 64, seed=4), torch.rand(requests, 4)
    seen, request_ids = torch.tensor([31, 40], dtype=torch.int32), torch.arange(requests, dtype=torch.int32)
    weight, scales = A.mxfp4_quantize(normal(groups * rank, heads // groups * dim, seed=5).float())
    scales = torch.stack([to_128x4(s) for s in scales.view(groups, rank, -1)])
    how = dict(groups=groups, scale_layout="128x4")

    def step(fused: bool) -> torch.Tensor:
        cache = pages.clone()
        A.kv_cache_write(new, cache.view(-1, dim), slot)
        if fused:
            chosen = A.indexer_select(*of_indexer, seen, request_ids, topk=8)
        else:
            chosen = A.indexer_topk(A.indexer_scores(*of_indexer, seen, request_ids), seen, topk=8)
        attended = dict(
            q=normal(requests, heads, dim, seed=6), swa_kv=cache, swa_end=past + 1, compressed_kv=entries,
            topk_indices=chosen, compressed_len=seen, request_ids=request_ids, swa_block_table=tables, window=16,
        )  # fmt: skip
        if fused:
            codes, scale = A.sparse_fmha_inverse_rope_fp4(**attended, **rotation, o_format="mxfp4", **how)
        else:
            out = A.sparse_fmha_with_swa(**attended)[0]
            codes, scale = A.inverse_rope_fp4(out, *rotation.values(), format="mxfp4", **how)
        codes = codes.view(requests, groups, -1)
        return A.grouped_output_projection(
            codes, weight.view(groups, rank, -1), scale, scales, format="mxfp4", scale_layout="128x4",
            dtype=torch.bfloat16,
        )  # fmt: skip

    with torch_attnkit.simulate("sm100"), ptx.settings(check=True, seed=1):
        with ptx.counting() as fused:
            got = step(True)
        with ptx.counting() as apart:
            want = step(False)
    assert (len(fused), len(apart)) == (5, 6)
    assert torch.equal(got, want) and got.unique().numel() > 50
