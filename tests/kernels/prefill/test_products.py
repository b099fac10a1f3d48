"""How many tensor-core products the Blackwell kernels of many queries issue: those of the blocks that a query sees.

The number is worked out here from shapes and masks, without the kernels' own arithmetic of blocks: a tile needs a block
of keys if any of its queries sees any of its keys, and a product takes 32 bytes of what it sums over and has at most
256 columns. Heads of 512 need two CTAs for a tile, whose products one of them issues.
"""

from __future__ import annotations

import functools

import pytest
import torch

import torch_attnkit
from torch_attnkit import parity
from torch_attnkit.core import dispatch
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile
from torch_attnkit.oracle.attention import visible

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore")]
pytestmark += [pytest.mark.seconds(600), pytest.mark.sample(12)]

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "f8e4m3"])


def _normal(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@functools.cache
def _tiles(op: str, dims: tuple[int, ...], options: tuple, dtype: torch.dtype = BF16) -> dict[str, int]:
    """What the row compiles its kernel with: keys of a block, tiles of 128 rows, heads in a tile, pairs or not."""
    args, kwargs = MAKERS[op](*dims, dtype), dict(options)
    with compile.recording() as asked:
        dispatch.build(OPS[op], parity.bound(OPS[op], args, kwargs), Target("sm100", simulated=True))
    return dict(asked[0].signature)


def _needed(c: dict[str, int], seen: torch.Tensor, heads: int, dtype: torch.dtype = BF16) -> int:
    """Products for one sequence: ``seen`` (T, S) says which query sees which key, for each of ``heads`` query heads."""
    k = 32 // dtype.itemsize  # elements that one tcgen05.mma sums over
    tiles = c["tiles"] * (2 if c["pair"] else 1)  # which visit the same blocks
    tokens, products = 128 * tiles // c["group"], 0
    of_block = c["dim"] // k + -(-c["dim_v"] // 256) * c["tile_n"] // k
    for queries in seen.split(tokens) if len(seen) else ():
        # A tile whose queries see nothing visits one block, to find that out.
        blocks = max(1, sum(bool(keys.any()) for keys in queries.split(c["tile_n"], dim=1)))
        products += blocks * tiles * of_block
    return products * heads // c["group"]


def _counted(op: str, args: tuple, kwargs: dict) -> int:
    from torch_attnkit.sim import ptx

    with torch_attnkit.simulate("sm100"), ptx.counting() as launches:
        getattr(torch.ops.attnkit, op)(*args, **kwargs)
    return sum(launch.counters["by_opcode"].get("tcgen05.mma", 0) for launch in launches)


def _dense(
    tokens: int, keys: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, ...]:
    return _normal(dtype, 2, tokens, heads, dim), *(_normal(dtype, 2, keys, kv_heads, dim) for _ in "kv")


def _packed(heads: int, kv_heads: int, dim: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    q, k, v = _normal(dtype, 790, heads, dim), *(_normal(dtype, 700, kv_heads, dim) for _ in "kv")
    return q, k, v, torch.tensor([0, 5, 350, 350, 790]).int(), torch.tensor([0, 300, 300, 310, 700]).int()


def _cached(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    caches = (_normal(dtype, 3, kv_heads, 700, dim) for _ in "kv")
    return _normal(dtype, 3, tokens, heads, dim), *caches, torch.tensor([700, 20, 391], dtype=torch.int32)


MAKERS = {"flash_attention": _dense, "flash_attention_varlen": _packed, "sdpa_multi": _cached}
MASKS = {
    "full": dict(causal=False),
    "causal": dict(causal=True),
    "window": dict(causal=True, window=150),
    "both-sides": dict(causal=False, window=150),
    "sinks": dict(causal=True, window=100, sink_tokens=4),
}
_ALL = dict(window=-1, sink_tokens=0)


# (T, S, Hq, Hkv, D): full attention with D 128, and all with D 256, is done by pairs of CTAs.
DENSE = {
    "D64": ((300, 300, 2, 2, 64), MASKS),
    "D128": ((600, 600, 2, 2, 128), ("full", "causal")),
    "D256": ((300, 500, 1, 1, 256), ("causal", "window")),
    "group-of-4": ((300, 420, 4, 1, 64), ("causal", "sinks")),
    "group-of-3": ((150, 300, 3, 1, 64), ("both-sides",)),
}


@pytest.mark.parametrize(("name", "mask"), [(name, mask) for name, (_, masks) in DENSE.items() for mask in masks])
def test_dense(name, mask):
    _check_dense(DENSE[name][0], MASKS[mask])


def _check_dense(dims: tuple[int, ...], kwargs: dict, dtype: torch.dtype = BF16) -> None:
    tokens, keys, heads = dims[:3]
    c = _tiles("flash_attention", dims, tuple(kwargs.items()), dtype)
    positions = torch.arange(keys - tokens, keys)[None]  # (1, T)
    seen = visible(positions, keys, 0, keys, **_ALL | kwargs)[0]
    assert _counted("flash_attention", _dense(*dims, dtype), kwargs) == 2 * _needed(c, seen, heads, dtype)


@DTYPES
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_dense_heads_of_512(mask, dtype):
    """Pairs of pairs without a window, and pairs alone with one."""
    _check_dense((290, 420, 1, 1, 512), MASKS[mask], dtype)


def test_padded():
    """Lengths on the device: blocks before kv_start and behind kv_len are not visited."""
    args, kwargs = _dense(200, 700, 1, 1, 64), dict(causal=False)
    start, end = torch.tensor([0, 260], dtype=torch.int32), torch.tensor([130, 650], dtype=torch.int32)
    c = _tiles("flash_attention", (200, 700, 1, 1, 64), tuple(kwargs.items()))
    positions = torch.arange(500, 700).expand(2, 200)
    seen = visible(positions, 700, start[:, None], end[:, None], **_ALL | kwargs)
    counted = _counted("flash_attention", (*args, None, end, start), kwargs)
    assert counted == sum(_needed(c, of_one, 1) for of_one in seen)


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("dims", [(2, 2, 64), (4, 1, 128)], ids=["D64", "D128-group-of-4"])
def test_packed(dims, mask):
    """A sequence's blocks count from its own first key; one without keys, and one without queries, are among them."""
    _check_packed(dims, MASKS[mask])


@DTYPES
def test_packed_heads_of_512(dtype):
    _check_packed((1, 1, 512), MASKS["window"], dtype)


def _check_packed(dims: tuple[int, ...], kwargs: dict, dtype: torch.dtype = BF16) -> None:
    args = _packed(*dims, dtype)
    c, needed = _tiles("flash_attention_varlen", dims, tuple(kwargs.items()), dtype), 0
    for b in range(4):
        (q0, q1), (k0, k1) = (offsets[b : b + 2].tolist() for offsets in args[3:])
        positions = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[None]
        seen = visible(positions, k1 - k0, 0, k1 - k0, **_ALL | kwargs)[0]
        needed += _needed(c, seen, dims[0], dtype)
    assert _counted("flash_attention_varlen", args, kwargs) == needed


@pytest.mark.parametrize("mask", ["full", "causal", "sinks"])
@pytest.mark.parametrize("dims", [(16, 4, 1, 64), (70, 4, 1, 128), (33, 2, 2, 256)], ids=["D64", "D128", "D256"])
def test_in_a_cache(dims, mask):
    _check_cached(dims, MASKS[mask])


@DTYPES
def test_heads_of_512_in_a_cache(dtype):
    _check_cached((33, 2, 2, 512), MASKS["causal"], dtype)


def _check_cached(dims: tuple[int, ...], kwargs: dict, dtype: torch.dtype = BF16) -> None:
    args = _cached(*dims, dtype)
    c = _tiles("sdpa_multi", dims, tuple(kwargs.items()), dtype)
    lengths = args[3][:, None]
    positions = lengths - dims[0] + torch.arange(dims[0])  # (3, T)
    seen = visible(positions, 700, 0, lengths, **_ALL | kwargs)
    assert _counted("sdpa_multi", args, kwargs) == sum(_needed(c, of_one, dims[1], dtype) for of_one in seen)
