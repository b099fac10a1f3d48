"""python shares.py: decode context parallelism of our MLA backend, as far as one process can have it.

Each of two caches has every other row of the requests. What the layer says of each, out and LSE, goes through vLLM's
own combination of them, in PyTorch, and has to be what the layer says of the whole cache.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from refused import LATENTS
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.ops.dcp import _lse_weighted_combine

from torch_attnkit.integrations.vllm import mla

LENGTHS, PAGE, SHARES = (41, 1, 200), 16, 2


def main() -> None:
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        impl = mla.LatentImpl(**LATENTS)
    assert impl.supports_dcp and impl.can_return_lse_for_decode
    rows = [torch.randn(n, 576) for n in LENGTHS]
    q = torch.randn(len(rows), 8, 512), torch.randn(len(rows), 8, 64)
    whole, lse = attend(impl, q, rows)
    assert lse is None  # nobody asked for it
    impl.need_to_return_lse_for_decode = True
    parts = [attend(impl, q, [r[share::SHARES] for r in rows]) for share in range(SHARES)]
    out, lse = (torch.stack(t) for t in zip(*parts, strict=True))
    assert lse[1, 1].isneginf().all()  # the second share of one row
    merged = _lse_weighted_combine(out, lse, is_lse_base_on_e=impl.lse_base_on_e)
    torch.testing.assert_close(merged, whole, rtol=1e-4, atol=1e-5)
    other = _lse_weighted_combine(out, lse, is_lse_base_on_e=not impl.lse_base_on_e)
    assert (other - whole).abs().max() > 0.01
    print(f"{SHARES} shares of a latent cache merge to the whole")


def attend(impl: mla.LatentImpl, q: tuple[torch.Tensor, torch.Tensor], rows: list[torch.Tensor]) -> tuple:
    """Out (B, H, 512) and LSE of queries over a cache that has ``rows`` of each request."""
    pages = -(-max(map(len, rows)) // PAGE)
    table = torch.arange(len(rows) * pages, dtype=torch.int32).view(len(rows), pages)
    cache = torch.full((table.numel(), PAGE, 576), float("nan"))
    for b, r in enumerate(rows):
        slots = b * pages * PAGE + torch.arange(len(r))
        impl.do_kv_cache_update(r[:, :512], r[:, None, 512:], cache, slots, "auto", torch.ones(()))
    lengths = torch.tensor([len(r) for r in rows], dtype=torch.int32)
    step = SimpleNamespace(decode=mla.Decode(table, lengths, None))
    return impl.forward_mqa(q, cache, step, None)


if __name__ == "__main__":
    main()
