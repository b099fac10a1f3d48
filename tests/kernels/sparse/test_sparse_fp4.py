"""Results in FP4: to the bit what the kernel's own numbers give when they are quantised by the reference."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.ops.inverse_rope_fp4.reference import reference as quantised

from .test_sparse_work import (
    fp8_in_turn,
    from_the_l2,
    in_a_cluster,
    in_clusters,
    in_turn,
    normal,
    two_head_blocks,
)  # fmt: skip

# Warnings of the compiler are its own affair.
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("default"), pytest.mark.seconds(300)]
A = torch.ops.attnkit


def angles(tokens: int, pairs: int, dtype: torch.dtype = torch.float32) -> dict:
    angle = 7 * torch.rand(tokens, pairs, generator=torch.Generator().manual_seed(5))
    return dict(cos=angle.cos().to(dtype), sin=angle.sin().to(dtype))


def agrees(case: dict, pairs: int, dtype: torch.dtype = torch.float32, seed: int = 1, **of_codes) -> None:
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    case = {name: value for name, value in case.items() if name != "normalize"}
    turned = angles(len(case["q"]), pairs, dtype)
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True, seed=seed):
        got = A.sparse_fmha_inverse_rope_fp4(**case, **turned, **of_codes)
        out = A.sparse_fmha_with_swa(**case)[0]
    names = {"o_global": "global_scale", "o_format": "format"}
    want = quantised(out, *turned.values(), **{names.get(n, n): v for n, v in of_codes.items()})
    assert torch.equal(got[0], want[0]), f"{int((got[0] != want[0]).sum())} of {got[0].numel()} bytes of codes"
    assert torch.equal(got[1], want[1]), f"{int((got[1] != want[1]).sum())} of {got[1].numel()} scales"
    assert got[0].unique().numel() > 100 and got[1].unique().numel() > 1, "results of which codes are not much"


NVFP4 = dict(o_format="nvfp4", o_global=torch.tensor(731.37))
MXFP4 = dict(o_format="mxfp4")
SWIZZLED = dict(scale_layout="128x4")


@pytest.mark.sample(24)
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("case", "groups"),
    [(in_turn, 7), (in_a_cluster, 4), (in_clusters, 10), (two_head_blocks, 3), (from_the_l2, 1), (fp8_in_turn, 1)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_codes_are_those_of_the_numbers_that_attention_gives(case, groups, format, layout):
    kwargs = NVFP4 if format == "nvfp4" else MXFP4
    agrees(case(), 32, groups=groups, scale_layout=layout, **kwargs)


@pytest.mark.sample(6)
@pytest.mark.parametrize("tokens", [3, 134])
@pytest.mark.parametrize("pairs", [5, 0, 64])
def test_pairs_of_any_number_are_rotated(tokens, pairs):
    """By angles in the model dtype; a token of three heads, of which a cluster has half a warp of chunks, or a CTA."""
    case = dict(q=normal(tokens, 3, 128), swa_kv=normal(1, 90, 128, seed=1))
    case |= dict(swa_end=torch.full((tokens,), 90, dtype=torch.int32))
    agrees(case, pairs, torch.bfloat16, **(MXFP4 if pairs == 5 else {}))
