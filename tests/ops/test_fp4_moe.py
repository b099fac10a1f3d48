"""fp4_moe: against the formula one token at a time, and what must not matter: order, names of experts, neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

op = torch.ops.attnkit.fp4_moe
nvfp4_q, nvfp4_dq = torch.ops.attnkit.nvfp4_quantize, torch.ops.attnkit.nvfp4_dequantize
mxfp4_q, mxfp4_dq = torch.ops.attnkit.mxfp4_quantize, torch.ops.attnkit.mxfp4_dequantize


def _coded(w, format, layout, scale=None):
    """Experts' matrices (E, M, K) to codes, scales in the layout, and the float64 numbers they stand for."""
    codes, scales, values = [], [], []
    for e, matrix in enumerate(w):
        g = () if scale is None else (scale[e],)
        c, s = nvfp4_q(matrix, *g) if format == "nvfp4" else mxfp4_q(matrix)
        values.append(
            nvfp4_dq(c, s, *g, dtype=torch.float64) if format == "nvfp4" else mxfp4_dq(c, s, dtype=torch.float64)
        )
        quantize = nvfp4_q if format == "nvfp4" else mxfp4_q
        scales.append(s if layout == "linear" else quantize(matrix, *g, scale_layout=layout)[1])
        codes.append(c)
    return torch.stack(codes), torch.stack(scales), torch.stack(values)


def _inputs(
    tokens=5, n=64, m=32, experts=4, k=2, *, format="nvfp4", layout="linear", dtype=torch.float64, scaled=False, seed=0
):
    gen = torch.Generator().manual_seed(seed)
    g13, g2 = ((200 + 900 * torch.rand(experts, generator=gen)) if scaled else None for _ in range(2))
    w13, s13, n13 = _coded(torch.randn(experts, 2 * m, n, generator=gen) / math.sqrt(n), format, layout, g13)
    w2, s2, n2 = _coded(torch.randn(experts, n, m, generator=gen) / math.sqrt(m), format, layout, g2)
    x = torch.randn(tokens, n, generator=gen).to(dtype)
    weights = torch.rand(tokens, k, generator=gen)
    indices = torch.randint(-1, experts, (tokens, k), generator=gen, dtype=torch.int32)
    return dict(
        x=x, weights=weights, indices=indices, w13=w13, w13_scale=s13, w2=w2, w2_scale=s2, w13_global=g13, w2_global=g2
    ), (n13, n2)  # fmt: skip


def _formula(a, values, *, swiglu="silu", alpha=1.702, limit=math.inf, interleaved=False, see=lambda v, g: v, **_):
    """The contract token by token in float64; ``see`` is what the products see of x and h."""
    n13, n2 = values
    x, out = see(a["x"], a.get("x_global")).double(), torch.zeros(a["x"].shape, dtype=torch.float64)
    for t in range(len(x)):
        for weight, e in zip(a["weights"][t].tolist(), a["indices"][t].tolist(), strict=True):
            if e < 0:
                continue
            both = n13[e] @ x[t] + (a["bias13"][e].double() if a.get("bias13") is not None else 0)
            m = len(both) // 2
            gate, up = (both[0::2], both[1::2]) if interleaved else (both[:m], both[m:])
            gate, up = gate.minimum(torch.tensor(limit)), up.clamp(-limit, limit)
            h = gate / (1 + (-gate).exp()) * up
            if swiglu == "gptoss":
                h = gate / (1 + (-alpha * gate).exp()) * (up + 1)
            y = n2[e] @ see(h, a.get("h_global")).double() + (
                a["bias2"][e].double() if a.get("bias2") is not None else 0
            )
            out[t] += weight * y
    return out


def _close(got, want):
    assert got.dtype == torch.float64 and got.shape == want.shape
    assert bool(((got - want).abs() <= 1e-11 * (1 + want.abs().max() if want.numel() else 1)).all())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 5),
    n=st.sampled_from((32, 96)),
    m=st.sampled_from((32, 64)),
    experts=st.integers(1, 4),
    k=st.integers(0, 3),
    format=st.sampled_from(("nvfp4", "mxfp4")),
    layout=st.sampled_from(("linear", "128x4")),
    gate=st.fixed_dictionaries(
        dict(
            swiglu=st.sampled_from(("silu", "gptoss")),
            limit=st.sampled_from((None, 0.5)),
            interleaved=st.booleans(),
        )
    ),
    bias=st.sampled_from(("", "13", "2", "13 2")),
    scaled=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_equals_the_formula_for_every_combination(tokens, n, m, experts, k, format, layout, gate, bias, scaled, seed):
    scaled = scaled and format == "nvfp4"
    a, values = _inputs(tokens, n, m, experts, k, format=format, layout=layout, scaled=scaled, seed=seed)
    if "13" in bias:
        a["bias13"] = torch.randn(experts, 2 * m, dtype=torch.float64)
    if "2" in bias.split():
        a["bias2"] = torch.randn(experts, n, dtype=torch.float64)
    unbounded = dict(limit=math.inf) if gate["limit"] is None else {}
    _close(op(**a, format=format, scale_layout=layout, **gate), _formula(a, values, **gate | unbounded))


def _mxfp8(v, g):
    """E4M3 under 2^ceil(log2(amax / 448)) per 32, by torch's own cast."""
    blocks = v.float().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.ceil(torch.log2(amax.double() / 448)).float()  # no amax here is 448 times a power of two
    return ((blocks / torch.exp2(exponent)).to(torch.float8_e4m3fn).float() * torch.exp2(exponent)).flatten(-2)


SEES = {
    "nvfp4": lambda v, g: nvfp4_dq(*nvfp4_q(v.float(), g), g, dtype=torch.float64),
    "mxfp4": lambda v, g: mxfp4_dq(*mxfp4_q(v.float())),
    "mxfp8": _mxfp8,
}


@pytest.mark.parametrize("activations", SEES)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("scaled", [False, True])
def test_quantised_activations_are_the_numbers_that_their_codes_stand_for(activations, format, scaled):
    """Codes come from the float32 values of x and h, so float64 and float32 runs meet the same ones."""
    a, values = _inputs(16, format=format, dtype=torch.float32)
    if scaled and activations == "nvfp4":
        a |= dict(x_global=torch.tensor(600.0), h_global=torch.tensor(1000.0))
    want = _formula(a, values, see=SEES[activations])
    exact = op(**(a | dict(x=a["x"].double())), format=format, activations=activations)
    _close(exact, want)
    # In float32 h may fall on the other side of a rounding boundary, which no element does here.
    got = op(**a, format=format, activations=activations)
    assert bool(((got.double() - want).abs() <= 64 * torch.finfo(torch.float32).eps * want.abs().max()).all())
    plain = op(**a | dict(x_global=None, h_global=None), format=format)
    assert not torch.equal(got, plain)


def test_an_activation_of_another_number_of_bits_moves_the_result_by_that_much():
    a, values = _inputs(16, dtype=torch.float32)
    want = _formula(a, values)
    error = {
        kind: ((op(**a, activations=kind).double() - want).norm() / want.norm()).item() for kind in ("none", *SEES)
    }
    assert error["none"] < 4 * torch.finfo(torch.float32).eps  # seen 1.8
    assert 1e-3 < error["mxfp8"] < error["nvfp4"] < error["mxfp4"] < 0.5


def test_one_expert_of_weight_one_is_a_dense_mlp():
    a, (n13, n2) = _inputs(7, experts=1, k=1)
    a |= dict(weights=torch.ones(7, 1), indices=torch.zeros(7, 1, dtype=torch.int64))
    gate, up = (a["x"] @ n13[0].T).chunk(2, -1)
    _close(op(**a), torch.nn.functional.silu(gate) * up @ n2[0].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_renaming_the_experts_changes_nothing(dtype):
    a, _ = _inputs(9, experts=5, k=3, dtype=dtype, scaled=True)
    order = torch.randperm(5)
    position = torch.cat((order.argsort(), torch.tensor([-1])))  # where each expert went; -1 stays
    b = a | {n: a[n][order] for n in ("w13", "w13_scale", "w2", "w2_scale", "w13_global", "w2_global")}
    b["indices"] = position[a["indices"].long()].int()
    assert torch.equal(op(**b), op(**a))


def test_the_sum_over_k_is_linear_in_the_weights_and_its_terms_may_swap():
    a, _ = _inputs(6, k=2)
    both = op(**a)
    parts = [op(**a | dict(weights=a["weights"][:, i : i + 1], indices=a["indices"][:, i : i + 1])) for i in (0, 1)]
    _close(parts[0] + parts[1], both)
    swapped = dict(weights=a["weights"].flip(1), indices=a["indices"].flip(1))
    _close(op(**a | swapped), both)
    _close(op(**a | dict(weights=a["weights"] * 2)), both * 2)
    twice = a["indices"][:, :1].expand(-1, 2).contiguous()  # one expert twice counts twice
    want = op(**a | dict(weights=a["weights"].sum(1, keepdim=True), indices=twice[:, :1]))
    assert bool(((op(**a | dict(indices=twice)) - want).abs() <= 1e-6 * want.abs().max()).all())  # float32 weights


def test_no_expert_adds_nothing_whatever_its_weight():
    a, _ = _inputs(4, k=3)
    a["indices"][:, 1] = -1
    want = op(**a)
    a["weights"][:, 1] = torch.nan
    assert torch.equal(op(**a), want)
    assert torch.equal(op(**a | dict(indices=torch.full((4, 3), -1))), torch.zeros(4, 64, dtype=torch.float64))


def test_experts_without_tokens_are_not_looked_at():
    a, _ = _inputs(6, experts=4, scaled=False)
    a["indices"] = a["indices"].clamp(-1, 1)
    want = op(**a)
    for name in ("w13_scale", "w2_scale"):
        a[name][2:] = 0x7F  # nan
    assert torch.equal(op(**a), want) and not bool(want.isnan().any())


def test_padding_of_swizzled_scales_is_not_looked_at():
    a, values = _inputs(layout="128x4")
    for name, rows, columns in (("w13_scale", 64, 4), ("w2_scale", 64, 2)):
        at = torch.zeros(128, 4, dtype=torch.bool)
        for m in range(rows):
            for k in range(columns):
                at.view(-1)[m % 32 * 16 + m // 32 * 4 + k] = True
        a[name][:, ~at] = 0x7F
    _close(op(**a, scale_layout="128x4"), _formula(a, values))


def test_the_hidden_activation_is_rounded_to_the_model_dtype():
    a, (n13, n2) = _inputs(8, experts=1, k=1, dtype=torch.bfloat16)
    a |= dict(weights=torch.ones(8, 1), indices=torch.zeros(8, 1, dtype=torch.int32))
    gate, up = (a["x"].double() @ n13[0].T).chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    rounded, unrounded = ((h.to(torch.bfloat16).double() @ n2[0].T).bfloat16(), (h @ n2[0].T).bfloat16())
    got = op(**a)
    assert (got != rounded).float().mean() < 0.01 < (got != unrounded).float().mean()


@pytest.mark.parametrize("activations", SEES)
def test_a_quantised_hidden_activation_is_not_rounded_to_the_model_dtype_first(activations):
    a, _ = _inputs(16, dtype=torch.bfloat16)
    wide = op(**a | dict(x=a["x"].float()), activations=activations)
    assert torch.equal(op(**a, activations=activations), wide.bfloat16())


def test_float8_scales_and_int64_indices_are_the_same_call():
    for format, dtype in (("nvfp4", torch.float8_e4m3fn), ("mxfp4", torch.float8_e8m0fnu)):
        a, _ = _inputs(format=format)
        b = a | {n: a[n].view(dtype) for n in ("w13_scale", "w2_scale")} | dict(indices=a["indices"].long())
        assert torch.equal(op(**b, format=format), op(**a, format=format))


@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (3, 0), (0, 0)])
def test_no_tokens_and_no_choices(tokens, k):
    a, _ = _inputs(tokens, k=k)
    assert torch.equal(op(**a), torch.zeros(tokens, 64, dtype=torch.float64))


def _refused(kind, message, change, **kwargs):
    a, _ = _inputs(dtype=torch.float32)
    with pytest.raises(kind, match=f"^fp4_moe: {message}"):
        op(**a | change(a), **kwargs)


def test_values_outside_the_contract_are_refused():
    bad = torch.zeros(5, 2, dtype=torch.int32)
    for value in (4, -2):
        bad[3, 1] = value
        _refused(ValueError, rf"indices\[3, 1\] is {value}, accepted: -1 to 3", lambda a: dict(indices=bad))
    scale = torch.ones(4)
    for value, word in ((0.0, "0"), (-2.0, "-2"), (torch.nan, "nan"), (torch.inf, "inf")):
        scale[2] = value
        for name in ("w13_global", "w2_global"):
            message = rf"{name}\[2\] is {word}, accepted: finite numbers above 0"
            _refused(ValueError, message, lambda a, name=name: {name: scale})
        _refused(
            ValueError, f"h_global is {word}, accepted", lambda a: dict(h_global=scale[2]), activations="nvfp4"
        )  # fmt: skip
    for limit in (0.0, -1.0):
        _refused(ValueError, "limit must be positive", dict, limit=limit)


def test_shapes_and_formats_outside_the_contract_are_refused():
    _refused(
        ValueError,
        r"w13 must be \(E, M2, N/2\), got shape \(4, 64, 24\): N=48, but x has N=64",
        lambda a: dict(w13=a["w13"][..., :24]),
    )
    _refused(
        ValueError,
        "w13 must have M2 = 2 \\* M rows.*M2=62",
        lambda a: dict(w13=a["w13"][:, :62], w13_scale=a["w13_scale"][:, :62]),
    )
    _refused(
        ValueError,
        r"w2 must be \(E, N, M/2\), got shape \(3, 64, 16\): E=3, but w13 has E=4",
        lambda a: dict(w2=a["w2"][:3]),
    )
    _refused(
        ValueError, "w13_scale must be \\(E, M2, N/block\\).*Ns=3", lambda a: dict(w13_scale=a["w13_scale"][..., :3])
    )
    _refused(ValueError, "w2_scale must be \\(E, N, M/block\\).*Ms=1", lambda a: dict(w2_scale=a["w2_scale"][..., :1]))
    _refused(ValueError, "w13_scale must be", dict, format="mxfp4")
    _refused(ValueError, r"w13_scale must be .*128x4.*PM2=64, PNs=4", dict, scale_layout="128x4")
    _refused(
        ValueError,
        "w13_global and w2_global are accepted with format 'nvfp4' only",
        lambda a: dict(w13_global=torch.ones(4), w13_scale=a["w13_scale"][..., :2], w2_scale=a["w2_scale"][..., :1]),
        format="mxfp4",
    )
    _refused(
        ValueError,
        "x_global and h_global are accepted with activations 'nvfp4' only",
        lambda a: dict(x_global=torch.ones(())),
    )
    _refused(ValueError, "format is 'fp4', accepted: nvfp4, mxfp4", dict, format="fp4")
    _refused(ValueError, "activations is 'fp8', accepted: none, nvfp4, mxfp4, mxfp8", dict, activations="fp8")
    _refused(
        TypeError,
        "w2_scale is f8e8m0, accepted with format 'nvfp4': u8, f8e4m3",
        lambda a: dict(w2_scale=a["w2_scale"].view(torch.float8_e8m0fnu)),
    )
    _refused(TypeError, "bias2 is bf16, accepted: f32", lambda a: dict(bias2=torch.zeros(4, 64, dtype=torch.bfloat16)))
    _refused(TypeError, "weights is bf16, accepted: f32", lambda a: dict(weights=a["weights"].bfloat16()))


def test_widths_that_do_not_fill_a_block_are_refused():
    a, _ = _inputs(n=48, m=16, dtype=torch.float32)
    assert bool(op(**a).isfinite().all())  # 48 and 16 are whole NVFP4 blocks
    with pytest.raises(ValueError, match="fp4_moe: N and M must be multiples of the block of activations.*N=48.*M=16"):
        op(**a, activations="mxfp8")
    with pytest.raises(ValueError, match="fp4_moe: N and M must be multiples of the block of format.*N=48.*M=16"):
        op(**a, format="mxfp4")
