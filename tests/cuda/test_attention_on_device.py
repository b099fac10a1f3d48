"""The attention ops on a GPU, in the ways they are used: graphs, streams, torch.compile, layouts, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.oracle.compare import check

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the compiler's own imports warn
    pytest.mark.hardware,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs an NVIDIA GPU with compute capability 9.0",
    ),
]
NAMES = (
    "sdpa_decode", "sdpa_decode_paged", "sdpa_multi", "flash_attention", "flash_attention_varlen",
    "flash_attention_paged",
)  # fmt: skip
DECODE = NAMES[:2]
PAGE = 16
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def normal(*shape: int, seed: int = 0, device: str = "cuda") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).bfloat16()


def ints(*values: int, device: str = "cuda") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def made(name: str, seed: int = 0, device: str = "cuda") -> tuple[list[Any], dict[str, Any]]:
    """Small inputs of an op; what decides the lengths is int32 and in ``lengths``."""
    if name == "sdpa_decode":
        q, k, v = ((4, 16, 128), (4, 2, 700, 128), (4, 2, 700, 128))
        rest: list[Any] = [ints(700, 3, 512, 0, device=device)]
    elif name == "sdpa_decode_paged":
        q, k, v = (4, 16, 128), (180, PAGE, 2, 128), (180, PAGE, 2, 128)
        order = torch.randperm(176, generator=torch.Generator().manual_seed(seed))
        rest = [order.to(device, torch.int32).view(4, 44), ints(700, 3, 512, 0, device=device)]
    elif name == "sdpa_multi":
        q, k, v = (4, 24, 16, 128), (4, 2, 700, 128), (4, 2, 700, 128)
        rest = [ints(700, 30, 512, 24, device=device)]
    elif name == "flash_attention_paged":
        q, k, v = (300, 16, 128), (180, PAGE, 2, 128), (180, PAGE, 2, 128)
        order = torch.randperm(176, generator=torch.Generator().manual_seed(seed))
        rest = [ints(0, 1, 201, 201, 300, device=device), order.to(device, torch.int32).view(4, 44)]
        rest.append(ints(700, 300, 512, 99, device=device))
    elif name == "flash_attention":
        q, k, v = (2, 200, 8, 128), (2, 300, 2, 128), (2, 300, 2, 128)
        rest = [None, ints(300, 217, device=device)]
    else:
        q, k, v = (300, 8, 128), (500, 2, 128), (500, 2, 128)
        rest = [ints(0, 100, 300, device=device), ints(0, 220, 500, device=device)]
    tensors = [normal(*s, seed=seed * 9 + i, device=device) for i, s in enumerate((q, k, v))]
    return [*tensors, *rest], dict(causal=True) if name.startswith("flash") else {}


def other_lengths(name: str) -> dict[int, torch.Tensor]:
    """Arguments to write over, by position: other lengths, with which other keys are seen."""
    return {
        "sdpa_decode": {3: ints(1, 700, 0, 77)},
        "sdpa_decode_paged": {4: ints(1, 700, 0, 77)},
        "sdpa_multi": {3: ints(25, 700, 24, 77)},
        "flash_attention_paged": {3: ints(0, 100, 101, 300, 300), 5: ints(100, 700, 200, 0)},
        "flash_attention": {4: ints(150, 300)},
        "flash_attention_varlen": {3: ints(0, 250, 300), 4: ints(0, 300, 310)},
    }[name]


def right(what: str, name: str, got: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    op, host = OPS[name], tuple(a.cpu() if isinstance(a, torch.Tensor) else a for a in args)
    low, high = (parity.reference_of(op, host, kwargs, double=d) for d in (False, True))
    for out, g, r, r64 in zip(op.outnames, got, low, high, strict=True):
        check(f"{what}: {name} {out}", g, r, r64)


def call(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return getattr(torch.ops.attnkit, name)(*args, **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_replays_with_other_lengths(name):
    args, kwargs = made(name)
    call(name, args, kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(name, args, kwargs)
    for again in range(2):
        for at, values in other_lengths(name).items() if again else ():
            args[at].copy_(values)
        args[0].copy_(normal(*args[0].shape, seed=50 + again))
        graph.replay()
        call(name, *made(name, seed=4))  # an eager call between replays shares nothing with them
        right("replayed", name, out, args, kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_two_streams_at_once(name):
    inputs = [made(name, seed=s) for s in range(2)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs: list[Any] = []
    for stream, (args, kwargs) in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            outs.append([call(name, args, kwargs) for _ in range(30)])
    torch.cuda.synchronize()
    for got, (args, kwargs) in zip(outs, inputs, strict=True):
        right("on a stream", name, got[-1], args, kwargs)
        assert all(torch.equal(a, b) for each in got for a, b in zip(each, got[-1], strict=True)), "calls differ"


@pytest.mark.parametrize("name", NAMES)
def test_torch_compile_takes_the_whole_graph(name):
    args, kwargs = made(name)
    compiled = torch.compile(lambda *a: call(name, list(a), kwargs)[0] * 2, fullgraph=True)
    assert torch.equal(compiled(*args), call(name, args, kwargs)[0] * 2)


@two_gpus
@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_is_not_the_current_one(name):
    args, kwargs = made(name, device="cuda:1")
    assert torch.cuda.current_device() == 0
    right("on cuda:1", name, call(name, args, kwargs), args, kwargs)
    assert torch.cuda.current_device() == 0


@two_gpus
@pytest.mark.parametrize("name", NAMES)
def test_devices_in_turns(name):
    """Each has its own streams and workspace: calls that run at once on both give what they give alone."""
    inputs = [made(name, device=f"cuda:{i}") for i in range(2)]
    alone = call(name, *inputs[0])
    outs = [call(name, *each) for _ in range(20) for each in inputs]
    right("in turns", name, outs[-1], *inputs[1])
    assert all(torch.equal(a.cpu(), b.cpu()) for out in outs for a, b in zip(out, alone, strict=True))


@two_gpus
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_another_device(name):
    args, kwargs = made(name, device="cuda:1")
    call(name, args, kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream("cuda:1")):
        out = call(name, args, kwargs)
    assert torch.cuda.current_device() == 0
    args[0].copy_(normal(*args[0].shape, seed=50))
    with torch.cuda.device("cuda:1"):
        graph.replay()
    right("replayed", name, out, args, kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_permuted_strides(name):
    """The axes before the last in the opposite order in memory, and q as a slice of a fused projection."""
    args, kwargs = made(name)
    for i in (1, 2):
        axes = (*reversed(range(args[i].dim() - 1)), args[i].dim() - 1)
        args[i] = args[i].permute(axes).contiguous().permute(axes)
    fused = torch.cat((args[0], args[0] + 1), dim=-2)
    args[0] = fused.narrow(-2, 0, args[0].shape[-2])
    assert not any(a.is_contiguous() for a in args[:3])
    right("permuted", name, call(name, args, kwargs), args, kwargs)


def far(name: str, group: int) -> tuple[list[Any], slice, list[Any]]:
    """Inputs whose keys and values have more than 2^31 elements each, and what to check: rows of the outputs, and
    inputs that alone give these rows."""
    heads, dim, length = 8, 128, 8192
    many = (1 << 31) // (heads * dim) + PAGE  # keys
    fill = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    batch = many // length + 1
    if name in ("sdpa_decode", "sdpa_multi"):
        queries = (5,) if name == "sdpa_multi" else ()
        q, k, v = normal(batch, *queries, heads * group, dim), *(fill(batch, heads, length, dim) for _ in "kv")
        lengths = torch.full((batch,), 700, dtype=torch.int32, device="cuda")
        return [q, k, v, lengths], slice(-2, None), [q[-2:], k[-2:, :, :700], v[-2:, :, :700], lengths[-2:]]
    if name == "sdpa_decode_paged":
        pages = many // PAGE
        q, k, v = normal(2, heads * group, dim), *(fill(pages, PAGE, heads, dim) for _ in "kv")
        table = torch.stack([torch.arange(40), torch.arange(pages - 40, pages)]).to("cuda", torch.int32)
        last = table[1:] - (pages - 40)
        return [q, k, v, table, ints(640, 630)], slice(1, 2), [q[1:], k[-40:], v[-40:], last, ints(630)]
    if name == "flash_attention_paged":
        pages = many // PAGE
        q, k, v = normal(50, heads * group, dim), *(fill(pages, PAGE, heads, dim) for _ in "kv")
        table = torch.stack([torch.arange(40), torch.arange(pages - 40, pages)]).to("cuda", torch.int32)
        alone = [q[20:], k[-40:], v[-40:], ints(0, 30), table[1:] - (pages - 40), ints(630)]
        return [q, k, v, ints(0, 20, 50), table, ints(640, 630)], slice(20, None), alone
    if name == "flash_attention":
        q, k, v = normal(batch, 4, heads, dim), *(fill(batch, length, heads, dim) for _ in "kv")
        return [q, k, v], slice(-1, None), [q[-1:], k[-1:], v[-1:]]
    q, k, v = normal(80, heads, dim), *(fill(many, heads, dim) for _ in "kv")
    return (
        [q, k, v, ints(0, 16, 80), ints(0, many - 300, many)],
        slice(16, None),
        [q[16:], k[-300:], v[-300:], ints(0, 64), ints(0, 300)],
    )


@pytest.mark.parametrize(("name", "group"), [*((n, 1) for n in NAMES), *((n, 16) for n in DECODE)])
def test_more_than_2_to_the_31_elements(name, group):
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    args, rows, alone = far(name, group)
    assert args[1].numel() > 1 << 31
    got = call(name, args, {})
    right("far", name, [g[rows] if g.numel() else g for g in got], alone, {})


@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
@pytest.mark.parametrize("group", [1, 8, 9, 64, 128])
def test_long_caches_are_cut_and_merged(name, dim, group):
    """One sequence has almost all keys, so many blocks have a part of it, and one block has all other sequences."""
    lengths = ints(5, 4800, 1, 0, 33)
    shape = (5, 1, 4800, dim) if name == "sdpa_decode" else (5 * 4800 // PAGE, PAGE, 1, dim)
    table = () if name == "sdpa_decode" else (torch.randperm(5 * 300, device="cuda").to(torch.int32).view(5, 300),)
    q, k, v = normal(5, group, dim), normal(*shape, seed=1), normal(*shape, seed=2)
    args = [q, k, v, *table, lengths, normal(group, seed=3).float()]
    right("cut", name, call(name, args, {}), args, {})


@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("group", [16, 64, 128])
def test_one_tensor_may_be_both_caches(name, group):
    """Calls with one tensor and with two take the same plan, in turn."""
    shape = (3, 1, 900, 512) if name == "sdpa_decode" else (171, PAGE, 1, 512)
    table = () if name == "sdpa_decode" else (torch.randperm(171, device="cuda").to(torch.int32).view(3, 57),)
    q, k, v = normal(3, group, 512), normal(*shape, seed=1), normal(*shape, seed=2)
    for value in (k, v, k, v):
        args = [q, k, value, *table, ints(900, 31, 650)]
        right("shared" if value is k else "two", name, call(name, args, {}), args, {})


@pytest.mark.parametrize("page", [0, 16, 48, 64])
def test_latent_vectors_with_every_feature(page):
    """Two KV heads that are one in memory, more query heads than a block has, cuts inside tiles and pages."""
    kwargs = dict(window=1500, sink_tokens=70, softcap=20.0)
    rest = [ints(3000, 1, 0, 1777, 555), normal(200, seed=3).float(), ints(0, 0, 0, 700, 554)]
    name, k, table = "sdpa_decode", normal(5, 1, 3000, 512, seed=1).expand(5, 2, 3000, 512), []
    if page:
        many = -(-3000 // page)
        name, k = "sdpa_decode_paged", normal(5 * many, page, 1, 512, seed=1).expand(5 * many, page, 2, 512)
        table = [torch.randperm(5 * many, device="cuda").to(torch.int32).view(5, many)]
    args = [normal(5, 200, 512), k, k, *table, *rest]
    right("latent", name, call(name, args, kwargs), args, kwargs)


@pytest.mark.parametrize("name", DECODE)
def test_what_lies_behind_the_lengths_is_not_looked_at(name):
    args, kwargs = made(name)
    for group in (16, 64):
        args[0] = normal(4, group, 128, seed=group)
        want = call(name, args, kwargs)
        dirty = list(args)
        if name == "sdpa_decode":
            for i in (1, 2):
                dirty[i] = args[i].clone()
                for b, n in enumerate(args[3].tolist()):
                    dirty[i][b, :, n:] = float("nan")
        else:
            used = torch.zeros(180, PAGE, dtype=torch.bool, device="cuda")
            for b, n in enumerate(args[4].tolist()):
                for j in range(n):
                    used[args[3][b, j // PAGE], j % PAGE] = True
            for i in (1, 2):
                dirty[i] = torch.where(used[:, :, None, None], args[i], float("nan"))
            dirty[3] = args[3].clone()
            for b, n in enumerate(args[4].tolist()):
                dirty[3][b, -(-n // PAGE) :] = 2**31 - 1
        assert all(torch.equal(a, b) for a, b in zip(call(name, dirty, kwargs), want, strict=True))


@pytest.mark.parametrize("dim", [128, 512])
@pytest.mark.parametrize("one", [True, False])
def test_caches_without_rows(dim, one):
    """No keys, no pages, no table; and lengths that say otherwise, of which nothing is looked at."""
    q, lengths, wild = normal(2, 16, dim), ints(0, 0), ints(32, 2**31 - 1)
    k, pages, some = normal(2, 1, 0, dim), normal(0, PAGE, 1, dim), normal(3, PAGE, 1, dim)
    table, none = ints(0, 1, 2, 3).view(2, 2), ints(0, 1).view(2, 1)[:, :0]
    other = (lambda t: t) if one else torch.clone
    decode, paged = torch.ops.attnkit.sdpa_decode, torch.ops.attnkit.sdpa_decode_paged
    for got in (
        *(decode(q, k, other(k), n) for n in (lengths, wild)),
        *(paged(q, pages, other(pages), t, n) for t in (table, none) for n in (lengths, wild)),
        *(paged(q, some, other(some), none, n) for n in (lengths, wild)),
    ):
        assert (got[0] == 0).all() and (got[1] == -torch.inf).all()
