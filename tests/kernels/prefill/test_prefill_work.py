"""flash_attention on a simulated B200: how right it is, and how much work it does beside flash-attn-4's kernel."""

from __future__ import annotations

import collections

import pytest
import torch

import torch_attnkit

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore")]
pytestmark += [pytest.mark.seconds(600), pytest.mark.sample(8)]


def _inputs(tokens: int, dim: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(1, tokens, 2, dim, generator=gen).bfloat16() for _ in range(3)]


def _work(launches) -> dict[str, int]:
    """Totals over launches: warp instructions, tensor operations, bytes of tensor copies, barrier instructions."""
    total: collections.Counter[str] = collections.Counter()
    for launch in launches:
        counted = launch.counters
        total["instructions"] += counted["instructions"]
        total["flops"] += sum(counted["flops"].values())
        total["tma"] += counted["tma_read"]
        total["barriers"] += sum(counted["by_opcode"].get(name, 0) for name in ("bar", "barrier", "mbarrier"))
    return total


# Warp instructions and barriers of ours on 1024 tokens and 2 heads, of causal and of full attention. A simulator counts
# the same everywhere: a larger number is a change of the kernel, or of the compiler, and has to be meant.
WORK = {
    (64, True): (373_536, 3840), (64, False): (533_672, 5376), (128, True): (355_424, 3776),
    (128, False): (494_536, 5568), (256, True): (367_290, 5184), (256, False): (482_464, 7056),
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize(("dim", "causal"), WORK)
def test_no_more_work_than_flash_attention_4(dim, causal):
    """0.71 to 0.96 of its instructions, 0.80 to 1.00 of its barriers, as many products and bytes."""
    pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
    from torch_attnkit.sim import ptx

    q, k, v = _inputs(1024, dim)
    with torch_attnkit.simulate("sm100"), ptx.counting() as launches:
        torch.ops.attnkit.flash_attention(q, k, v, causal=causal)
    ours = _work(launches)
    with ptx.device("sm100"), ptx.counting() as launches:
        from flash_attn.cute import flash_attn_func

        flash_attn_func(q, k, v, causal=causal)
    theirs = _work(launches)
    assert ours["flops"] <= theirs["flops"]
    assert ours["tma"] <= theirs["tma"]
    assert ours["instructions"] < theirs["instructions"] and ours["barriers"] < theirs["barriers"]
    instructions, barriers = WORK[dim, causal]
    assert ours["instructions"] <= instructions and ours["barriers"] <= barriers


@pytest.mark.proof
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_cosine_with_float64(dim):
    """One launch whatever the number of keys, with every feature on."""
    from torch_attnkit.sim import ptx

    gen = torch.Generator().manual_seed(1)
    sink = torch.randn(2, generator=gen)
    for tokens in (128, 640, 1152):
        q, k, v = _inputs(tokens, dim)
        options = dict(causal=True, window=tokens // 2, sink_tokens=4, softcap=30.0)
        wanted = torch.ops.attnkit.flash_attention(q.double(), k.double(), v.double(), sink, **options)[0]
        with torch_attnkit.simulate("sm100"), ptx.counting() as launches:
            out = torch.ops.attnkit.flash_attention(q, k, v, sink, **options)[0]
        assert len(launches) == 1
        assert torch.cosine_similarity(out.double().flatten(), wanted.flatten(), 0) >= 0.999997


@pytest.mark.parametrize("seed", [0, 1])
def test_pairs_of_ctas_take_several_tiles(seed, monkeypatch):
    """Heads of 512 on four multiprocessors, checked: two pairs for six tiles of a head each, padded on both sides."""
    from torch_attnkit.cuda import driver
    from torch_attnkit.sim import ptx

    monkeypatch.setattr(driver, "sm_count", lambda device: 4)
    gen = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, n, 2, 512, generator=gen).bfloat16() for n in (333, 400, 400))
    ends = torch.tensor([370], dtype=torch.int32), torch.tensor([60], dtype=torch.int32)
    options = dict(causal=True, window=90)
    wanted = torch.ops.attnkit.flash_attention(q.double(), k.double(), v.double(), None, *ends, **options)[0]
    with torch_attnkit.simulate("sm100"), ptx.settings(check=True, seed=seed), ptx.counting() as launches:
        out = torch.ops.attnkit.flash_attention(q, k, v, None, *ends, **options)[0]
    assert [launch.grid[0] for launch in launches] == [4]
    assert not launches[0].notes
    assert torch.cosine_similarity(out.double().flatten(), wanted.flatten(), 0) >= 0.999997


@pytest.mark.parametrize(("dim", "keys"), [(64, 900), (256, 1290)])
def test_factors_are_read_before_they_are_overwritten(dim, keys):
    """Checked, with scores that grow along the keys: blocks rescale the output, more of them than factors are kept."""
    from torch_attnkit.sim import ptx

    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, 2, dim, generator=gen) for n in (200, keys, keys))
    k = k * torch.linspace(0.2, 6, keys)[:, None, None]
    q, k, v = (x.bfloat16() for x in (q, k, v))
    wanted = torch.ops.attnkit.flash_attention(q.double(), k.double(), v.double())[0]
    with torch_attnkit.simulate("sm100"), ptx.settings(check=True, seed=3):
        out = torch.ops.attnkit.flash_attention(q, k, v)[0]
    assert torch.cosine_similarity(out.double().flatten(), wanted.flatten(), 0) >= 0.99999
