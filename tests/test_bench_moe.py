"""The bench of fp4_moe: its cases, the weights that lines share, and the parts of its peers that need no GPU."""

import importlib
import importlib.util
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import gate, timing
from bench.inputs import Inputs
from bench.peers import marlin_moe, moe_layer, torch_grouped_mm
from torch_attnkit import warmup
from torch_attnkit.core.dispatch import OPS

OP = OPS["fp4_moe"]
CASES = OP.module("cases")
ADAPTERS = ("marlin_moe", "humming_moe", "humming_grouped", "triton_kernels_moe", "torch_grouped_mm")
SMALL = dict(Tq=9, N=64, M=96, E=5, K=2, act=0)
CALLS = {
    "nvfp4": SMALL | dict(blk=16, limit=1),
    "mxfp4": SMALL | dict(blk=32),
    "gptoss": SMALL | dict(blk=32, limit=7, gptoss=1, bias=1),
}


def call(name: str, dtype: torch.dtype = torch.bfloat16, **changes: int):
    return CASES.bench(CALLS[name] | changes, dtype, torch.Generator().manual_seed(0))


# Activations, what experts give and sums of these are rounded to bfloat16: seen up to 1.04 eps, of the whole.
NEAR = 1.5 * torch.finfo(torch.bfloat16).eps


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.fixture
def interpreted(monkeypatch):
    """The steps between products, run by Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "bench.peers.moe_steps", raising=False)
    steps = importlib.import_module("bench.peers.moe_steps")
    yield steps
    sys.modules.pop("bench.peers.moe_steps", None)


@pytest.mark.parametrize("case", CASES.BENCH)
def test_routes_lead_to_distinct_experts_as_popular_as_the_case_says(case):
    dims = CASES.BENCH[case]
    routes = CASES._routes(dims, 0)
    assert routes.shape == (dims["Tq"], dims["K"]) and routes.dtype == torch.int32
    assert int(routes.min()) >= 0 and int(routes.max()) < dims["E"]
    assert bool((routes.sort(1).values.diff(dim=1) > 0).all())
    counts = routes.flatten().bincount(minlength=dims["E"]).sort(descending=True).values
    mean = routes.numel() / dims["E"]
    if dims.get("same"):
        assert counts[: dims["K"]].tolist() == [dims["Tq"]] * dims["K"]
    elif dims.get("zipf"):  # the most popular stands in most rows
        assert counts[0] > 0.5 * dims["Tq"] and counts[128] < mean
    else:  # five standard deviations, and one for the few
        assert max(counts[0] - mean, mean - counts[-1]) < 1 + 5 * (mean**0.5)
    other = CASES._routes(dims, 1)
    assert not torch.equal(routes, other)


def test_bytes_count_the_experts_that_are_reached():
    dims = CASES.BENCH["deepseek_v4-nvfp4-same-128"]
    expert = 3 * 4096 * 2048
    assert CASES.bytes(dims, torch.bfloat16) == 2 * 128 * 4096 * 2 + 128 * 6 * 8 + 6 * (expert // 2 + expert // 16)
    assert CASES.bytes(CASES.BENCH["gptoss-8192"], torch.bfloat16) > 128 * 3 * 2880 * 2880 * 17 // 32


def test_the_gate_reads_the_weights_once_for_all_tokens():
    dims = CASES.BENCH["deepseek_v4-nvfp4-8192"]
    E, N, M, Tq = (dims[n] for n in ("E", "N", "M", "Tq"))
    sizes = dict(x=(Tq, N), indices=(Tq, 6), w13=(E, 2 * M, N // 2), w2=(E, N, M // 2), out=(Tq, N))
    tensors = {name: torch.empty(shape, device="meta", dtype=torch.uint8) for name, shape in sizes.items()}
    assert len(list(gate.parts_of(OP, tensors))) == 1


def test_lines_of_a_model_share_its_weights(monkeypatch):
    inputs = Inputs(OP, torch.bfloat16, "cpu")
    args, kwargs = inputs.first(CALLS["nvfp4"])
    again = inputs.more(CALLS["nvfp4"], args, 2)
    other, _ = inputs.first(CALLS["nvfp4"] | dict(Tq=4))
    for theirs in (*again, other):
        assert all(a is b for a, b in zip(args[3:], theirs[3:], strict=True))
    assert len({tuple(a[2].flatten().tolist()) for a in (args, *again)}) == 3
    mxfp4, _ = inputs.first(CALLS["mxfp4"])
    assert mxfp4[3] is not args[3] and kwargs["format"] == "nvfp4"
    assert inputs.touched(CALLS["nvfp4"], args, None) == CASES.bytes(CALLS["nvfp4"], torch.bfloat16)


def test_other_ops_get_copies():
    inputs = Inputs(OPS["nvfp4_dequantize"], torch.bfloat16, "cpu")
    args, _ = inputs.first(dict(R=2, H=1, K=32))
    (copy,) = inputs.more({}, args, 1)
    assert copy[0] is not args[0] and torch.equal(copy[0], args[0])


def test_long_calls_end_the_hosts_rounds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_HOST_SECONDS", 0.0)
    issued = []
    timing.host([[lambda: issued.append(1)]])
    assert len(issued) == 2 * timing._ISSUED


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_peers_refuse_what_they_would_compute_otherwise(adapter):
    adapt = importlib.import_module(f"bench.peers.{adapter}").adapt
    args, kwargs = call("mxfp4", Tq=600)
    missing = args[2].clone()
    missing[3, 1] = -1
    assert adapt("nvfp4_quantize", args, kwargs) is None
    assert adapt("fp4_moe", args, kwargs | dict(activations="mxfp8")) is None
    assert adapt("fp4_moe", (*args[:2], missing, *args[3:]), kwargs) is None
    assert adapt("fp4_moe", *call("mxfp4", torch.float16, Tq=600)) is None
    assert adapt("fp4_moe", *call("mxfp4", Tq=0)) is None


def test_peers_refuse_formats_and_sizes():
    triton_kernels, grouped = (
        importlib.import_module(f"bench.peers.{name}").adapt for name in ("triton_kernels_moe", "humming_grouped")
    )
    assert triton_kernels("fp4_moe", *call("nvfp4")) is None
    assert grouped("fp4_moe", *call("mxfp4", Tq=511)) is None


@pytest.mark.parametrize("adapter", [a for a in ADAPTERS if a != "torch_grouped_mm"])
def test_a_peer_that_is_not_installed_says_so(adapter):
    package = {"triton_kernels_moe": "triton_kernels"}.get(adapter, "vllm")
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    pytest.importorskip("triton")
    adapt = importlib.import_module(f"bench.peers.{adapter}").adapt
    with pytest.raises(ImportError, match=package):
        adapt("fp4_moe", *call("mxfp4", Tq=600))


class Product:
    """A product of Humming in plain torch: what it reads of its routing is what the package reads."""

    def __init__(self, weights: moe_layer.Weights, format: str, tile: int) -> None:
        self.dense, self.bias, self.tile = torch_grouped_mm._dequantised(weights, format).float(), weights.bias, tile

    def tuning(self, routes: int, gemm: str) -> dict:
        return {"block_shape": (self.tile, 64, 64)}

    def run(self, gemm: str, routes: int, top_k: int = 1):
        def parts(routing):
            if gemm == "indexed":
                ids = routing["sorted_ids"][: int(routing["num_tokens_padded"])].long().view(-1, self.tile)
                yield from (
                    (int(e), block[block < routes]) for e, block in zip(routing["expert_ids"], ids, strict=False)
                )
            else:
                spans = itertools.pairwise(routing["expert_layout"].tolist())
                yield from ((e, torch.arange(*span)) for e, span in enumerate(spans))

        def call(rows, **routing):
            out = rows.new_empty(routes, self.dense.shape[1])
            for e, ids in parts(routing):
                y = rows[ids // top_k].float() @ self.dense[e].T
                out[ids] = (y if self.bias is None else y + self.bias[e]).bfloat16()
            return out

        return call


@pytest.mark.sample(3)
@pytest.mark.parametrize("adapter", ["humming_moe", "humming_grouped"])
@pytest.mark.parametrize("name", CALLS)
def test_humming_routes_its_products(name, adapter, interpreted, monkeypatch):
    from bench.peers import vllm_ops

    module = importlib.import_module(f"bench.peers.{adapter}")
    monkeypatch.setattr(vllm_ops, "moe", Library)
    monkeypatch.setattr(
        module, "products", lambda layer: (Product(layer.up, layer.format, 8), Product(layer.down, layer.format, 16))
    )
    args, kwargs = call(name, Tq=512 if adapter == "humming_grouped" else 9)
    got = module.adapt("fp4_moe", args, kwargs)()
    assert relative(got, OP.module("reference").reference(*args, **kwargs)) < NEAR


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("name", CALLS)
def test_grouped_mm_computes_the_layer(name, layout, interpreted):
    from torch_attnkit.oracle import fp4

    args, kwargs = call(name)
    args = list(args)
    if layout == "128x4":
        args[4], args[6] = (fp4.scale_layout.to_128x4(args[i]) for i in (4, 6))
        kwargs |= dict(scale_layout=layout)
    peer = importlib.import_module("bench.peers.torch_grouped_mm").adapt("fp4_moe", tuple(args), kwargs)
    want = OP.module("reference").reference(*args, **kwargs)
    assert relative(peer(), want) < NEAR
    args[1] = args[1].flip(0)
    assert relative(peer(), OP.module("reference").reference(*args, **kwargs)) > 0.1


def test_steps_without_biases_and_in_the_order_of_routes(interpreted):
    gen = torch.Generator().manual_seed(1)
    both, weights = torch.randn(6, 2 * 40, generator=gen) * 4, torch.rand(3, 2, generator=gen)
    gate, up = both.chunk(2, 1)
    h = interpreted.swiglu(both, moe_layer.Swiglu(False, 1.702, 2.0))
    torch.testing.assert_close(h, torch.nn.functional.silu(gate.clamp(max=2)) * up.clamp(-2, 2))
    h = interpreted.swiglu(both, moe_layer.Swiglu(True, 1.702, float("inf")))
    torch.testing.assert_close(h, gate * (1.702 * gate).sigmoid() * (up + 1))
    want = (both.view(3, 2, 80) * weights[..., None]).sum(1)
    torch.testing.assert_close(interpreted.combine(both, weights), want)


def test_the_epilogue_of_triton_kernels_splits_pairs(interpreted, monkeypatch):
    import triton
    from triton import language as tl

    monkeypatch.delitem(sys.modules, "bench.peers.moe_epilogue", raising=False)
    silu_of_pairs = importlib.import_module("bench.peers.moe_epilogue").silu_of_pairs

    @triton.jit
    def kernel(x, y, limit, F: tl.constexpr):
        rows, pairs, halves = tl.arange(0, 4)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, 8)[None, :]
        tl.store(y + rows * 8 + halves, F(tl.load(x + rows * 16 + pairs), limit))

    x, y = torch.randn(4, 16, generator=torch.Generator().manual_seed(2)) * 3, torch.empty(4, 8)
    kernel[(1,)](x, y, 2.0, F=silu_of_pairs)
    gate, up = x[:, 0::2].clamp(max=2), x[:, 1::2].clamp(-2, 2)
    torch.testing.assert_close(y, torch.nn.functional.silu(gate) * up)
    sys.modules.pop("bench.peers.moe_epilogue")


def test_routes_are_sorted_by_expert(interpreted):
    indices = torch.tensor([[2, 0], [2, 3], [0, 3]], dtype=torch.int32)
    order = interpreted.by_expert(indices, torch.arange(5, dtype=torch.int16))
    assert order.expert.tolist() == [0, 0, 2, 2, 3, 3]
    assert order.route.tolist() == [1, 4, 0, 2, 3, 5]
    assert order.position.tolist() == [[2, 0], [3, 4], [1, 5]]
    assert order.ends.tolist() == [2, 2, 4, 6, 6]


def test_halves_and_turns_are_each_others_inverse():
    rows = torch.arange(2 * 6 * 3).view(2, 6, 3)
    assert moe_layer.halves(rows)[0, :, 0].tolist() == [0, 6, 12, 3, 9, 15]
    assert torch.equal(moe_layer.interleave(moe_layer.halves(rows)), rows)


def codes_of(words: torch.Tensor, rows: int, depth: int) -> torch.Tensor:
    """(E, rows, depth) codes of what Marlin reads.

    Thread ``lane`` of an m16n8k16 product holds of column n = lane / 4 the rows k = 2 (lane % 4) + {0, 1, 8, 9}.
    """
    e, row, k = torch.meshgrid(*map(torch.arange, (len(words), rows, depth)), indexing="ij")
    lane = row % 8 * 4 + k % 8 // 2
    word = words.long()[e, k // 16, row // 64 * 128 + lane * 4 + row % 64 // 16]
    return word >> 4 * (4 * (k % 2) + 2 * (row // 8 % 2) + k // 8 % 2) & 15


def test_marlins_codes_stand_where_a_thread_reads_them():
    codes = torch.randint(0, 256, (2, 128, 48 // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = marlin_moe.pack_codes(codes)
    assert words.shape == (2, 3, 256) and words.dtype == torch.int32
    assert torch.equal(codes_of(words, 128, 48), torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long())


def packed_rows(pack, rows: int) -> torch.Tensor:
    """Where ``pack`` puts each row."""
    return pack(torch.arange(rows).view(1, rows, *[1] * (pack is marlin_moe.pack_scale))).flatten().argsort()


class Library:
    """vLLM 0.26's operators as far as peers call them: their types from the schemas, in plain torch."""

    SCHEMAS = (
        "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids,"
        " Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map) -> ()",
        "moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none,"
        " Tensor! b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none,"
        " Tensor? perm_or_none, Tensor! workspace, Tensor sorted_token_ids, Tensor! expert_ids,"
        " Tensor! num_tokens_past_padded, Tensor! topk_weights, int moe_block_size, int top_k, bool mul_topk_weights,"
        " int b_type_id, int size_m, int size_n, int size_k, bool is_full_k, bool use_atomic_add,"
        " bool use_fp32_reduce, bool is_zp_float, int thread_k, int thread_n, int blocks_per_sm) -> Tensor",
        "moe_sum(Tensor input, Tensor! output, Tensor? topk_ids=None, Tensor? expert_map=None) -> ()",
        "moe_permute(Tensor input, Tensor topk_ids, Tensor token_expert_indices, Tensor? expert_map, int n_expert,"
        " int n_local_expert, int topk, Tensor! permuted_input, Tensor! expert_first_token_offset,"
        " Tensor! inv_permuted_idx, Tensor! permuted_idx) -> ()",
        "moe_unpermute(Tensor permuted_hidden_states, Tensor topk_weights, Tensor inv_permuted_idx,"
        " Tensor? expert_first_token_offset, int topk, Tensor! hidden_states) -> ()",
        "topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output,"
        " bool renormalize, Tensor? bias) -> ()",
        "topk_softplus_sqrt(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices,"
        " Tensor gating_output, bool renormalize, float routed_scaling_factor, Tensor? bias, Tensor? input_ids,"
        " Tensor? tid2eid) -> ()",
    )
    KINDS = {"Tensor": torch.Tensor, "Optional[Tensor]": torch.Tensor | None, "int": int, "bool": bool, "float": float}

    def __getattr__(self, name: str):
        (schema,) = (torch._C.parse_schema(text) for text in self.SCHEMAS if text.startswith(f"{name}("))

        def checked(*values):
            for argument, value in zip(schema.arguments, values, strict=True):
                kind = self.KINDS[str(argument.type)]
                assert isinstance(value, kind) and (kind is not int or type(value) is int), argument
                assert not isinstance(value, torch.Tensor) or value.is_contiguous(), argument
            named = {a.name: v for a, v in zip(schema.arguments, values, strict=True)}
            getattr(Library, f"_{name}")(SimpleNamespace(**named))

        return checked

    @staticmethod
    def _moe_align_block_size(g):
        g.sorted_token_ids.fill_(g.topk_ids.numel())
        at = 0
        for e in range(g.num_experts):
            routes = (g.topk_ids.flatten() == e).nonzero().flatten().int()
            blocks = -(-len(routes) // g.block_size)
            g.sorted_token_ids[at * g.block_size :][: len(routes)] = routes
            g.experts_ids[at : at + blocks] = e
            at += blocks
        g.num_tokens_post_pad.fill_(at * g.block_size)

    @staticmethod
    def _moe_wna16_marlin_gemm(g):
        assert g.a.shape == (g.size_m, g.size_k) and g.c_or_none.shape == (g.size_m * g.top_k, g.size_n)
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        bits = g.b_scales.view(torch.uint8)[..., packed_rows(marlin_moe.pack_scale, g.size_n)].transpose(1, 2).int()
        scale = torch.exp2(bits.float() - 127)  # (E, rows, K/block)
        if g.global_scale is not None:  # E4M3 without its sign, raised by 2^7, and the E2M1 of bf16 by 2^-126
            scale = torch.exp2((bits >> 3).float() - 15) * (1 + (bits & 7) / 8)
            scale *= (g.global_scale * 2.0**-126)[:, None, None]
        dense = values[codes_of(g.b_q_weight, g.size_n, g.size_k)] * scale.repeat_interleave(
            g.size_k // scale.shape[2], 2
        )
        for block, e in enumerate(g.expert_ids[: int(g.num_tokens_past_padded) // g.moe_block_size].tolist()):
            routes = g.sorted_token_ids[block * g.moe_block_size :][: g.moe_block_size]
            routes = routes[routes < g.size_m * g.top_k].long()
            y = g.a[routes // g.top_k].float() @ dense[e].T
            if g.b_bias_or_none is not None:
                y = y + g.b_bias_or_none[e, packed_rows(marlin_moe.pack_bias, g.size_n)]
            g.c_or_none[routes] = (y * g.topk_weights.flatten()[routes, None] if g.mul_topk_weights else y).bfloat16()

    @staticmethod
    def _moe_sum(g):
        g.output.copy_(g.input.float().sum(1))

    @staticmethod
    def _moe_permute(g):
        expert, route = g.topk_ids.flatten().sort(stable=True)
        g.permuted_input.copy_(g.input[route // g.topk])
        g.permuted_idx.copy_(route)
        g.inv_permuted_idx.flatten()[route] = torch.arange(len(route), dtype=torch.int32)
        g.expert_first_token_offset.copy_(torch.searchsorted(expert, torch.arange(g.n_expert + 1, dtype=torch.int32)))

    @staticmethod
    def _moe_unpermute(g):
        rows = g.permuted_hidden_states[g.inv_permuted_idx.long()].float().view(-1, g.topk, g.hidden_states.shape[1])
        g.hidden_states.copy_((rows * g.topk_weights[..., None]).sum(1))

    @staticmethod
    def _topk_softmax(g):
        chosen, index = g.gating_output.float().softmax(-1).topk(g.topk_weights.shape[1])
        g.topk_weights.copy_(chosen / chosen.sum(-1, keepdim=True) if g.renormalize else chosen)
        g.topk_indices.copy_(index)

    @staticmethod
    def _topk_softplus_sqrt(g):
        scores = torch.nn.functional.softplus(g.gating_output.float()).sqrt()
        if g.tid2eid is None:
            index = (scores if g.bias is None else scores + g.bias).topk(g.topk_weights.shape[1]).indices
        else:
            assert g.input_ids.dtype == g.tid2eid.dtype
            index = g.tid2eid[g.input_ids].long()
        chosen = scores.gather(-1, index)
        chosen = chosen / chosen.sum(-1, keepdim=True) if g.renormalize else chosen
        g.topk_weights.copy_(chosen * g.routed_scaling_factor)
        g.topk_indices.copy_(index)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (n, c)
        for n in ("route_softmax", "route_sqrt_softplus", "route_hash")
        for c in OPS[n].module("cases").BENCH
        if c.endswith("-64")
    ],
)
def test_vllms_routers_compute_what_ours_do(name, case, monkeypatch):
    from bench.peers import vllm_ops, vllm_routers

    monkeypatch.setattr(vllm_ops, "moe", Library)
    op = OPS[name]
    args, kwargs = warmup.bench_inputs(op, op.module("cases").BENCH[case], torch.bfloat16, torch.Generator())
    weights, indices = vllm_routers.adapt(name, args, kwargs)()
    want, wanted = op.module("reference").reference(*args, **kwargs)
    torch.testing.assert_close(weights, want)
    # Equal logits may come in any order.
    assert torch.equal(*(args[0].gather(-1, chosen.long()) for chosen in (indices, wanted)))
    if name == "route_hash":
        assert vllm_routers.adapt(name, (args[0], args[1].long(), args[2]), kwargs) is None


@pytest.mark.parametrize("name", CALLS)
def test_marlin_computes_the_layer(name, interpreted, monkeypatch):
    from bench.peers import vllm_ops

    monkeypatch.setattr(vllm_ops, "moe", Library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
    args, kwargs = call(name)
    got = marlin_moe.adapt("fp4_moe", args, kwargs)()
    assert relative(got, OP.module("reference").reference(*args, **kwargs)) < NEAR


def test_marlins_scales_and_biases_keep_their_rows():
    """Of 64 rows a thread reads those 8 apart, with the second and third of each four exchanged."""
    scale = torch.arange(128 * 3).view(1, 128, 3)
    packed = marlin_moe.pack_scale(scale)
    assert (packed[0, 1, :8] // 3).tolist() == [0, 16, 8, 24, 32, 48, 40, 56]
    assert (packed[0, 2, 64:72] // 3).tolist() == [64, 80, 72, 88, 96, 112, 104, 120]
    assert torch.equal(packed.sort(-1).values, scale.transpose(1, 2))
    bias = marlin_moe.pack_bias(torch.arange(64)[None])
    assert bias[0, :10].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]


def test_marlins_scales_have_no_sign_and_lose_nothing():
    scale = torch.arange(1, 100, dtype=torch.uint8).view(1, 1, -1)
    packed, raised = marlin_moe.positive_scale(scale)
    decoded = scale.view(torch.float8_e4m3fn).float()
    exponent, mantissa = packed.int() >> 3, packed.int() & 7
    assert bool((exponent >= 16).all()), "the exponent's highest bit is always set"
    read = torch.exp2(exponent.float() - 15) * (1 + mantissa / 8) / 2**7
    torch.testing.assert_close(read, decoded * raised, rtol=0, atol=0)
    assert marlin_moe.positive_scale(torch.zeros_like(scale) + scale[..., -1:])[1] == raised


@pytest.mark.parametrize(
    ("routes", "experts", "rows"), [(6, 256, 8), (1843, 256, 8), (1844, 256, 16), (49152, 256, 64), (2048, 128, 32)]
)
def test_marlins_tile_follows_the_mean_expert(routes, experts, rows):
    assert marlin_moe.block_rows(routes, experts) == rows


def test_marlin_pads_gates_and_ups_by_themselves():
    args, kwargs = call("gptoss")
    layer = moe_layer.call_of("fp4_moe", args, kwargs).layer
    up, down = marlin_moe._packed(layer)
    assert (up.rows, up.depth, down.rows, down.depth) == (256, 256, 256, 128)
    assert up.scale.dtype == torch.float8_e8m0fnu and up.factor is None
    bias = torch.zeros(5, 2, 128, dtype=torch.bfloat16)
    bias[:, :, :96] = torch.stack([args[9][:, 0::2], args[9][:, 1::2]], 1)
    assert torch.equal(up.bias, marlin_moe.pack_bias(bias.flatten(1)))
