"""Two processes share what one would do alone: the keys of a decode step, the tokens of a prefill, heads, and experts.

Keys: each process holds half of the cache of every sequence and attends its half; outputs and log-sum-exps are
gathered and merged, Dv + 1 numbers a head, however long the cache is. A sequence that is shorter than the first half
leaves the second process nothing to attend. Tokens: keys and values are gathered, and the process that has the first
quarter of the tokens has the last one too. Heads: DTensors, placed by ``torch.distributed.tensor``. Experts: both
processes have all tokens and half of the experts, and add up. The yardstick is one process with everything.

    torchrun --nproc-per-node 2 examples/two_processes.py

runs on a CPU over gloo; with GPUs, one process a GPU over NCCL.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import torch_attnkit  # defines torch.ops.attnkit.*
from torch_attnkit.integrations.distributed import cp_decode, cp_prefill, ep_moe, from_head_tail, head_tail

ops = torch.ops.attnkit

B, T, HQ, HKV, S, D = 3, 64, 8, 2, 64, 64
LENGTHS = (64, 41, 5)
TOKENS, N, M, E, K = 16, 128, 64, 8, 2


def off(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    difference = float((got - want).abs().max() / want.abs().max())
    if dist.get_rank() == 0:
        print(f"{name}: off by {difference:.0e} of the largest")
    assert difference < 1e-2, f"{name}: {difference}"


def decode(normal, rank: int, world: int) -> None:
    q, sink = normal(B, HQ, D), normal(HQ).float()
    k, v = normal(B, HKV, S, D), normal(B, HKV, S, D)
    kv_len = torch.tensor(LENGTHS, dtype=torch.int32, device=q.device)
    local = slice(rank * S // world, (rank + 1) * S // world)
    out, _ = cp_decode(q, k[:, :, local], v[:, :, local], kv_len, sink, window=40)
    off("keys shared", out, ops.sdpa_decode(q, k, v, kv_len, sink, window=40)[0])


def prefill(normal) -> None:
    q, k, v = normal(B, T, HQ, D), normal(B, T, HKV, D), normal(B, T, HKV, D)
    out, _ = cp_prefill(*map(head_tail, (q, k, v)))
    off("tokens shared", from_head_tail(out), ops.flash_attention(q, k, v, causal=True)[0])


def heads(normal, world: int) -> None:
    mesh = init_device_mesh(normal(1).device.type, (world,))
    q, k, v = normal(B, T, HQ, D), normal(B, T, HKV, D), normal(B, T, HKV, D)
    out, _, _ = ops.flash_attention(*(distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)), causal=True)
    assert out.placements == (Shard(2),) and out.to_local().shape[2] == HQ // world
    off("heads shared", out.full_tensor(), ops.flash_attention(q, k, v, causal=True)[0])


def experts(normal, rank: int, world: int) -> None:
    x, weights = normal(TOKENS, N), normal(TOKENS, K).float().softmax(-1)
    indices = (torch.arange(TOKENS * K, device=x.device).view(TOKENS, K) * 3) % E
    w13, w13_scale = ops.mxfp4_quantize(normal(E, 2 * M, N))
    w2, w2_scale = ops.mxfp4_quantize(normal(E, N, M))
    everything = (w13, w13_scale, w2, w2_scale)
    want = ops.fp4_moe(x, weights, indices, *everything, format="mxfp4")
    local = [part.chunk(world)[rank] for part in everything]
    off("experts shared, all tokens", ep_moe(x, weights, indices, *local, format="mxfp4"), want)
    own = [part.chunk(world)[rank] for part in (x, weights, indices)]
    out = ep_moe(*own, *local, tokens="own", format="mxfp4")
    off("experts shared, own tokens", out, want.chunk(world)[rank])


def main() -> None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    gen = torch.Generator().manual_seed(0)  # every process draws the same numbers
    normal = lambda *shape: torch.randn(*shape, generator=gen).to(device, torch.bfloat16)
    decode(normal, rank, world)
    prefill(normal)
    heads(normal, world)
    experts(normal, rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
