"""Products of groups in the simulator: borders of tiles, rows that do not fit chunks, what lies beyond the operands."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.cuda import driver
from torch_attnkit.kernels.batched_gemm.sm90 import plan
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(300)]

op = torch.ops.attnkit.grouped_output_projection


def simulated(*args, **kwargs):
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True):
        return op(*args, **kwargs)


def integers(*shape: int) -> torch.Tensor:
    """Numbers whose products and sums are exact in float32 and in bfloat16."""
    return torch.randint(-1, 2, shape).bfloat16()


def inside(t: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """``t`` in a buffer of NaN, with so many elements before and after each row."""
    buffer = torch.full((*(n + 1 for n in t.shape[:-1]), before + t.shape[-1] + after), torch.nan, dtype=t.dtype)
    view = buffer[tuple(slice(0, n) for n in t.shape[:-1])][..., before : before + t.shape[-1]]
    return view.copy_(t)


@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64, 65, 129])
def test_tiles_have_borders_and_nothing_beyond_the_operands_is_read(tokens):
    for k, n in ((64, 128), (72, 129), (136, 65)):
        o, w = integers(tokens, 2, k), integers(2, n, k)
        got = simulated(inside(o, 0, 8), inside(w, 8, 0))
        assert torch.equal(got, torch.einsum("tgk,grk->tgr", o.float(), w.float()).bfloat16())


@pytest.mark.parametrize(("before", "after", "k"), [(1, 2, 64), (8, 5, 64), (0, 0, 27), (4, 4, 1)])
def test_rows_that_are_no_whole_chunks(before, after, k):
    o, w = integers(5, 3, k), integers(3, 10, k)
    want = torch.einsum("tgk,grk->tgr", o.float(), w.float()).half()
    assert torch.equal(simulated(inside(o, before, after), w, dtype=torch.float16), want)
    assert torch.equal(simulated(o, inside(w, before, after), dtype=torch.float16), want)


def test_nan_stays_in_its_row_and_its_column():
    o, w = integers(20, 2, 64), integers(2, 12, 64)
    o[3, 0, 5], w[1, 7, 9] = torch.nan, torch.nan
    nan = simulated(o, w).isnan()
    want = torch.zeros(20, 2, 12, dtype=torch.bool)
    want[3, 0], want[:, 1, 7] = True, True
    assert torch.equal(nan, want)


@pytest.mark.sample(4)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("sizes", plan.TILES)
def test_every_tile_of_wgmma(sizes, pair, monkeypatch):
    """Two tiles of tokens, the second cut; of the features an odd number; K ends amid a stage; blocks have several."""
    tile = plan.Tile(*sizes, pair)
    monkeypatch.setattr(plan, "tile", lambda problem, sms: tile)
    monkeypatch.setattr(driver, "sm_count", lambda device: 2)
    o, w = integers(tile.tokens + 9, 2, 200), integers(2, 2 * tile.features + 8, 200)
    got = simulated(inside(o, 0, 8), inside(w, 8, 0))
    assert torch.equal(got, torch.einsum("tgk,grk->tgr", o.float(), w.float()).bfloat16())


@pytest.mark.parametrize("at", [0, 1])
def test_one_group_amid_others(at):
    """An axis of one has any stride, and starts anywhere; TMA takes neither."""
    o, w = integers(5, 2, 72), integers(2, 24, 72)
    one = slice(at, at + 1)
    got = simulated(inside(o, 0, 1)[:, one, :64], inside(w, 8, 8)[one, :, 4:68])
    assert torch.equal(got, torch.einsum("tgk,grk->tgr", o[:, one, :64].float(), w[one, :, 4:68].float()).bfloat16())
