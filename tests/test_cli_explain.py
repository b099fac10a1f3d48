"""``python -m torch_attnkit explain`` with words that a user could mistype: it names the wrong one and exits with 2.

A call that the op or its rows refuse exits with 1, and nothing ends in a traceback.
"""

from __future__ import annotations

import re

import pytest
import torch
import typer
from typer.testing import CliRunner

import torch_attnkit
from torch_attnkit import cli
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.meta_call import meta_call

THREE = "\N{ARABIC-INDIC DIGIT THREE}"
NO_SIZE = ("x", "-1", "", "1.5", "1e3", "0x10", "nan", "none", "1_0", THREE, "9" * 19, "9" * 5000)
NO_DTYPE = ("fp8", "", "float8_e4m3fn", "BF16", "8", "none")
HOSTILE = {  # words that are no value of a scalar of this type
    "int": ("abc", "", "1.0", "1e3", "none", "true", "[1]", "9" * 19, "-" + "9" * 19, "9" * 5000),
    "float": ("abc", "", "none", "true", "[1]", "1,5", "1_0", "0x1p3"),
    "bool": ("abc", "", "none", "2", "yes", "-1"),
    "str": ("abc", "", "none", "NVFP4", "0"),
    "dtype": NO_DTYPE[:-1],
}
COMMAND = typer.Typer()  # alone: the runner builds every command of an app for each call
COMMAND.command()(cli.explain)
DECODE = tuple("sdpa_decode B=1 Hq=32 Hkv=8 S=1024 D=128 Dv=128".split())


def explain(*argv: str):
    return CliRunner().invoke(COMMAND, argv)


def scalars(op) -> dict[str, str]:
    """The types of an op's scalars, as HOSTILE has them, ``none`` among the words where it is a value."""
    found = {a.name: str(a.type) for a in op.parsed.arguments if a.name not in op.tensors}
    kinds = {n: re.sub(r"Optional\[(\w+)\]", r"\1", kind) for n, kind in found.items()}
    return kinds | {n: "dtype" for n in kinds if n == "dtype"}


def right(op) -> dict[str, str]:
    """Words of a call: every axis that the op's tensors usually have, and what must be given."""
    axes = {a.name: "32" for n in op.tensors for a in op.spec(n).axes if a.name}
    return axes | {n: op.choices.get(n, ("2",))[0] for n in scalars(op) if n not in op.defaults}


def spoken(argv: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in argv.items()]


def mistakes(op):
    """(argument, value) of every axis, scalar and tensor with every hostile word of its kind."""
    optional = {n for n in op.argnames if op.defaults.get(n, ...) is None}
    axes = {a.name for n in op.tensors for a in op.spec(n).axes if a.name}
    yield from ((axis, value) for axis in sorted(axes) for value in NO_SIZE)
    for name, kind in scalars(op).items():
        yield from ((name, v) for v in HOSTILE[kind] if not (v == "none" and name in optional | set(op.choices)))
    yield from ((name, value) for name in op.tensors for value in NO_DTYPE)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_wrong_value_of_every_argument_is_named(op):
    argv = right(op)
    assert not {"dtype", *op.argnames} & {a.name for n in op.tensors for a in op.spec(n).axes}, "a word for two things"
    for n, (name, value) in enumerate(mistakes(op)):
        spoiled = spoken(argv | {name: value})
        with pytest.raises(ValueError, match=re.escape(f"{op.name}: {name} is ")) as caught:
            meta_call(op, spoiled)
        assert "accepted: " in str(caught.value)
        if n % 16 == 0:  # the command adds a frame and the exit code, whatever the word
            result = explain(op.name, *spoiled)
            assert result.exit_code == 2 and name in result.output and isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_wrong_combination_is_refused_and_nothing_ends_in_a_traceback(op):
    """One axis, scalar or dtype of a call is another than in the rest, each in turn, for each target."""
    argv, kinds = right(op), scalars(op)
    others = {"int": "-7", "float": "nan", "bool": "true", "dtype": "i32"}
    changes = [{n: op.choices[n][-1] if n in op.choices else others[kinds[n]]} for n in kinds]
    changes += [{axis: ("0", "64")[i % 2]} for i, axis in enumerate(w for w in argv if w not in kinds)]
    changes += [{n: tuple(DTYPES)[i % len(DTYPES)]} for i, n in enumerate(op.tensors)]
    for n, change in enumerate(changes):
        result = explain(op.name, *spoken(argv | change), "--target", ("cpu", "metal", "sm90", "sm100")[n % 4])
        assert isinstance(result.exception, SystemExit | None), (change, result.exception)
        assert "not supported between" not in result.output and "NoneType" not in result.output, change
        # A layout that wants axes of other names is a call in which they are missing.
        assert {0: "\nruns ", 1: "\nrefused: ", 2: " needs the size of "}[result.exit_code] in result.output, change


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (DECODE[:-1], "v_cache needs the size of Dv, for example Dv=8"),
        ((*DECODE, "window"), "'window' is neither NAME=VALUE nor an optional tensor (sink, kv_start, q_scale"),
        ((*DECODE, "=8"), "'=8' is neither"),
        ((*DECODE, "Q=8"), "'Q' is no axis (B, D, Dv, Hkv, Hq, S) and no argument (q, k_cache"),
        ((*DECODE, "B=2"), "B is given twice"),
        ((*DECODE, "sink", "sink=f32"), "sink is given twice"),
        ((*DECODE, "dtype=half"), "dtype is 'half', accepted: a dtype, one of f64, f32"),
        (("route_softmax", "R=4", "E=8"), "topk is missing, accepted: topk=an integer of 64 bits"),
        (("mxfp4_dequantize", "K=33"), "K is 33, accepted: a multiple of 2, for codes is (..., K/2)"),
        (("nvfp4_quantize", "K=16", "scale_layout=round"), "scale_layout is 'round', accepted: one of linear, 128x4"),
    ],
)
def test_a_message_says_what_was_found_and_what_is_accepted(argv, expected):
    result = explain(*argv)
    assert result.exit_code == 2 and expected in " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split()), result.output


def test_an_op_that_refuses_ends_with_1_and_one_that_runs_with_0():
    assert explain(*DECODE, "--target", "sm90").exit_code == 0
    result = explain(*DECODE, "--target", "sm90", "D=128", "kv_start=f32")
    assert result.exit_code == 2  # D is there twice
    for argv in (("window=-2",), ("kv_len=f32",), ("scale=inf",), ("dtype=f64",), ("dtype=i32",)):
        result = explain(*DECODE, *argv, "--target", "sm90")
        assert result.exit_code == 1 and "\nrefused: " in result.output, result.output


def test_single_tensors_may_have_dtypes_of_their_own():
    """E4M3 caches beside bf16 queries, with scales; a cache of bytes; what the command says, the op computes."""
    caches = ("k_cache=f8e4m3", "v_cache=f8e4m3", "k_scale", "v_scale=f32")
    result = explain(*DECODE, *caches, "--target", "sm90")
    assert result.exit_code == 0 and "features: gqa, scales" in result.output
    assert "returns  out (1, 32, 128) torch.bfloat16" in result.output
    given = meta_call(OPS["sdpa_decode"], [*DECODE[1:], *caches])
    assert {n: t.dtype for n, t in given.items() if isinstance(t, torch.Tensor)} == {
        "q": torch.bfloat16, "k_cache": torch.float8_e4m3fn, "v_cache": torch.float8_e4m3fn, "kv_len": torch.int32,
        "k_scale": torch.float32, "v_scale": torch.float32,
    }  # fmt: skip
    assert torch.ops.attnkit.sdpa_decode(**given)[0].dtype == torch.bfloat16
    written = ("kv_cache_write", "R=3", "D=512", "Nc=8", "Rb=584", "cache=u8", "format=fp8")
    assert explain(*written, "--target", "sm90").exit_code == 0
    assert explain(*written[:-2], "format=fp8", "--target", "sm90").exit_code == 1


def test_dtype_is_the_argument_where_the_op_has_one():
    result = explain("merge_partials", "P=2", "R=3", "H=4", "Dv=64", "out_partial=f32", "dtype=bf16")
    assert result.exit_code == 0 and "out (3, 4, 64) torch.bfloat16" in result.output
    assert "dtype    torch.float16" in explain(*DECODE, "dtype=f16").output


def test_tensors_have_the_shapes_that_other_arguments_give_them():
    """A table makes the cache one of pages, whose axes have other names; a layout changes the axes of scales."""
    pages = "Tq=2 Hq=64 D=512 Nw=4 Pw=64 R=2 Mw=2 swa_block_table".split()
    given = meta_call(OPS["sparse_fmha_with_swa"], pages)
    assert given["swa_kv"].shape == (4, 64, 512) and given["swa_block_table"].shape == (2, 2)
    assert explain("sparse_fmha_with_swa", *pages, "--target", "sm90").exit_code == 0
    assert explain("nvfp4_dequantize", "K=64", "scale_layout=128x4", "Ms=128", "Ks=4").exit_code == 0


def test_help_names_every_kind_of_word():
    text = " ".join(CliRunner().invoke(cli.app, ("explain", "--help")).output.split())
    for argv in ("B=2", "window=128", "sink", "k_cache=f8e4m3", "dtype=f16"):
        assert argv in text


def test_explain_in_python_names_a_scalar_of_a_wrong_type_too():
    shapes = (1, 4, 64), (1, 2, 32, 64), (1, 2, 32, 64)
    tensors = [*(torch.empty(s) for s in shapes), torch.empty(1, dtype=torch.int32)]
    for change, found in ({"window": "abc"}, "'abc'"), ({"window": 1.5}, "1.5"), ({"window": None}, "None"):
        with pytest.raises(TypeError, match=f"sdpa_decode: window is {found}, accepted: int"):
            torch_attnkit.explain("sdpa_decode", *tensors, **change)
    with pytest.raises(TypeError, match="sdpa_decode: softcap is 'x', accepted: float"):
        torch_attnkit.explain("sdpa_decode", *tensors, softcap="x")
    with pytest.raises(TypeError, match="sdpa_decode: q is 3, accepted: Tensor"):
        torch_attnkit.explain("sdpa_decode", 3, *tensors[1:])
    with pytest.raises(TypeError, match="route_softmax: topk is None, accepted: int"):
        torch_attnkit.explain("route_softmax", torch.empty(2, 8))
    assert "runs " in torch_attnkit.explain("sdpa_decode", *tensors, softcap=1, scale=None)
