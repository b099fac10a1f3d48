"""The table is well-formed, every op has its oracle and cases, and SUPPORT.md says what the table says."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Op
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.report import support_markdown

ROOT = Path(__file__).parent.parent
DESIGNED = """
    sdpa_decode sdpa_decode_paged sdpa_multi flash_attention flash_attention_varlen merge_partials sparse_fmha_with_swa
    gated_rmsnorm route_sqrt_softplus route_hash route_softmax nvfp4_quantize nvfp4_dequantize mxfp4_quantize
    mxfp4_dequantize fp4_moe inverse_rope_fp4 grouped_output_projection kv_cache_write kv_cache_gather indexer_scores
    indexer_topk indexer_select sparse_fmha_inverse_rope_fp4 gated_rmsnorm_backward flash_attention_paged
    rope_kv_cache_write paged_kv_cache_write rope_kv_cache_append linear_decode
    causal_conv1d gated_delta_rule gated_delta_step kimi_delta_step
""".split()


def test_every_designed_op_is_in_the_table():
    assert sorted(OPS) == sorted(DESIGNED)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_op_is_well_formed(op: Op):
    assert set(op.dims) == {*op.tensors, *op.outnames}, "dims names exactly the schema's tensors"
    assert op.argnames[: len(op.tensors)] == op.tensors, "tensors come first"
    assert set(op.unless) <= set(op.outnames)
    strings = {a.name for a in op.parsed.arguments if str(a.type) == "str"}
    assert set(op.choices) == strings, "every str argument lists its choices"
    for name in op.dims:
        op.spec(name)
    bound = {a.name for n in op.tensors for a in op.spec(n).axes} | set(op.derive)
    for name in op.outnames:
        missing = {a.name for a in op.spec(name).axes if a.name} - bound
        assert not missing, f"{name} needs {missing}, which no input binds and nothing derives"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_reference_takes_the_schema(op: Op):
    parameters = inspect.signature(op.module("reference").reference).parameters
    assert tuple(parameters) == op.argnames
    for name, parameter in parameters.items():
        # A required keyword-only argument may follow optional ones; as a plain parameter it then needs a default.
        default = op.defaults.get(name, parameter.default)
        assert parameter.default == default, f"{name}: reference says {parameter.default}, schema {default}"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_rows_name_files_dtypes_axes_and_features_that_exist(op: Op):
    bound = {a.name for n in op.tensors for a in op.spec(n).axes} | set(op.derive)
    for row in op.kernels:
        if row.launcher is None:
            assert hasattr(op.module(row.on), "build"), f"{row.on}.py has no build()"
        else:
            assert callable(row.launcher.of(op.name)) and {"problem", "operands"} <= vars(op.module("problem")).keys()
        assert set(row.dtypes.split()) <= set(DTYPES)
        assert set(row.dims) <= bound
        assert set(row.features.split()) <= set(op.features)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_cases_are_complete(op: Op):
    cases = op.module("cases")
    assert cases.PARITY and cases.DEGENERATE and cases.BENCH and not cases.PARITY.keys() & cases.DEGENERATE.keys()
    for dims in cases.BENCH.values():
        assert cases.bytes(dims, DTYPES["bf16"]) > 0
        assert cases.flops(dims) >= 0


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_contract_is_documented(op: Op):
    doc = inspect.getmodule(op.where and next(iter(op.where.values())) or op.module("op")).__doc__ or ""
    doc = op.module("op").__doc__ or doc
    assert doc.startswith(f"{op.name}: ") and "Source" in doc


def test_support_md_is_fresh():
    assert (ROOT / "SUPPORT.md").read_text() == support_markdown(), "run: make support"
