"""Every kernel that the table's rows ask for compiles for its GPU, spills nothing and fits on a multiprocessor."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.prefill.test_dynamic import problem as attention
from torch_attnkit import parity, paths, warmup
from torch_attnkit.core import dispatch
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.support import support
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, inspect
from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels.indexer.sm90 import launch as indexer
from torch_attnkit.kernels.norm import launch as norms
from torch_attnkit.kernels.prefill.launch import trace_dense
from torch_attnkit.kernels.prefill.sm90 import launch as prefill
from torch_attnkit.kernels.prefill.sm90 import plan
from torch_attnkit.kernels.prefill.sm90.tiles import BITS16, TILES, heads
from torch_attnkit.kernels.prefill.sm100 import split_plan
from torch_attnkit.kernels.scores import Scores

pytestmark = pytest.mark.filterwarnings("default")  # the compiler's own imports warn
MAX_REGISTERS = 255
REGISTER_FILE = 64 << 10  # registers of a multiprocessor
# Bytes that one block may have, of the least GPU that runs what is compiled for an arch. A cubin knows static
# allocations only; the simulator, in which every case of parity runs, refuses launches with more than this altogether,
# but for sm80, where an A100 is simulated.
MAX_SHARED = {arch: (227 if arch in ("sm90", "sm100") else 99) << 10 for arch in compile.GPU_ARCH}
# What is compiled for the family of a B200 and a B300 must be fine when assembled for the latter, too; for the former
# it is the same machine code, see ``test_a_b200_runs_what_is_compiled_for_the_family``.
SIBLINGS = {"sm100": ("sm_103a",)}
# What a kernel's products and copies must be in machine code, by name and arch: wgmma is HGMMA there, mma HMMA and
# tcgen05.mma UTCHMMA, of 8 bits QGMMA and UTCQMMA, a TMA load UTMALDG, cp.async LDGSTS, and loads and stores of tensor
# memory LDTM and STTM. Slower ways to do the same would compile as well.
PREFILL = {"sm90": ("HGMMA", "UTMALDG"), "sm100": ("UTCHMMA", "UTMALDG", "LDTM", "STTM")}
INSTRUCTIONS = {
    **{(f"prefill_{kind}", "sm100"): PREFILL["sm100"] for kind in ("dense", "packed", "cached", "paged")},
    **{(f"prefill{kind}", "sm90"): PREFILL["sm90"] for kind in ("", "_hdim512", "_fp8", "_cached")},
    ("prefill_paged", "sm90"): ("HGMMA",),  # and TMA's loads, or cp.async's of small pages
    **{("decode_mma", arch): ("HMMA", "LDGSTS") for arch in compile.GPU_ARCH},
    ("decode_wgmma", "sm90"): ("HGMMA", "LDGSTS"),
    ("decode_mla", "sm90"): ("HGMMA", "UTMALDG"),
    ("decode_tcgen05", "sm100"): PREFILL["sm100"],
    ("grouped_gemm", "sm100"): ("UTMALDG", "LDTM"),
    ("grouped_gemm_wgmma", "sm90"): ("HGMMA", "UTMALDG"),
    ("batched_gemm_wgmma", "sm90"): ("HGMMA", "UTMALDG", "UTMASTG", "gsb0, 0x1"),
    ("batched_gemm_fp4_wgmma", "sm90"): ("HGMMA", "UTMALDG"),
    ("batched_gemm_fp4_mma", "sm90"): ("HMMA", "UTMALDG"),
    ("batched_gemm_fp4_e4m3", "sm90"): ("QGMMA", "UTMALDG"),
    # The wait for all but one group of products: where ptxas makes each wait for the last, it is for all.
    ("sparse", "sm90"): ("HGMMA", "LDGSTS", "gsb0, 0x1"),
    ("sparse", "sm100"): ("UTCHMMA", "LDGSTS", "LDTM", "STTM"),
    **{("sparse_mma", arch): ("HMMA", "LDGSTS", "LDSM") for arch in ("sm80", "sm89", "sm120")},
    ("indexer", "sm90"): ("HGMMA", "UTMALDG"),
    ("indexer_stream", "sm90"): ("HGMMA", "UTMALDG"),
    ("indexer_select", "sm90"): ("HGMMA", "UTMALDG"),
    # FP4 with block scales is UTCOMMA, a copy of scales to tensor memory UTCCP.
    ("batched_gemm_fp4", "sm100"): ("UTCOMMA", "UTCCP", "UTMALDG", "LDTM"),
    ("indexer", "sm100"): ("UTCHMMA", "UTMALDG", "LDTM"),
    **{("indexer_mma", arch): ("[HQ]MMA", "LDGSTS") for arch in ("sm80", "sm89", "sm120")},
}
OF_CODES = {"HGMMA": "QGMMA", "UTCHMMA": "UTCQMMA"}
OF_FP4 = {"UTCHMMA": "UTCOMMA"}  # of kernels whose numbers are MXFP4 and are multiplied so
# Kernels that decode the next operand while products run: those then wait for all groups but one. Where ptxas makes
# each product wait for the last (its warnings C7510 to C7513), the waits are for all.
OVERLAPPED = ("grouped_gemm_wgmma", "batched_gemm_fp4_wgmma")
# Kernels whose consumers load all of a stage to registers: it must have come before others may overwrite it. Of
# batched_gemm_fp4_mma the tokens, which are loaded last, are never overwritten.
LOADED = ("grouped_gemm",)
# Kernels that spill all the same, by what they are compiled for, and how many instructions of local memory they may
# have, none of which among their products. docs/lab/roadmap.md has what was tried.
SPILLED: list[tuple[str, str, dict[str, Any], int]] = [
    ("decode_mma", "sm90", {"fp8_kv": True, "dim": 256, "stages": 2}, 33),
    ("decode_mma", "sm80", {"fp8_kv": True, "dim": 256}, 65),  # E4M3 without conversions
    ("prefill", "sm120", {"dtype": "f8e4m3", "dim": 256}, 14),
    ("norm_backward", "sm90", {"config": (8, 512, 2, 512)}, 4),
    ("norm_backward", "sm89", {"config": (4, 256, 1, 256)}, 2),
    ("norm_backward", "sm120", {"config": (8, 512, 2, 512)}, 2),
    ("norm_backward", "sm100", {"config": (8, 512, 2, 512)}, 2),
    ("sparse", "sm90", {"format": "fp8", "sides": 2, "split_kv": True}, 8),
]


def families(arch: str) -> set[str]:
    """The families that rows for ``arch`` have launchers of, or name in files of their ops."""
    found = set()
    for op, _, row, _ in support(arch):
        text = Path(op.module(row.on).__file__).read_text() if row.launcher is None else row.launcher.module
        found |= set(re.findall(r"torch_attnkit\.kernels\.(\w+)\.", text))
    return {family for family in found if (paths.package() / "kernels" / family / "problem.py").exists()}


# Few kernels, which calls of one op ask for; those of the others are minutes of compiling.
QUICK = {("merge", "sm90"): "merge_partials"}
FAMILIES = [
    pytest.param(family, arch, marks=[] if (family, arch) in QUICK else [pytest.mark.proof])
    for arch in compile.GPU_ARCH
    for family in sorted(families(arch))
]
missing = [
    name
    for name, supported in (
        ("nvidia-cutlass-dsl", importlib.util.find_spec("nvidia_cutlass_dsl")),
        ("cuobjdump (of a CUDA toolkit or of triton)", inspect.cuobjdump()),
        ("nvdisasm (of a CUDA toolkit or of triton)", inspect.nvdisasm()),
        ("ptxas (of triton or of a CUDA toolkit)", inspect.ptxas()),
    )
    if not supported
]


@functools.cache
def requests(arch: str, op: str | None) -> list[compile.Request]:
    """First those that parity simulates, since they are compiled in any case."""
    return list(dict.fromkeys((*warmup.requests(arch, op, covering=True), *warmup.requests(arch, op))))


def multiplies_codes(request: compile.Request) -> bool:
    """Whether products are of E4M3 numbers."""
    return any("f8e4m3" in (value if isinstance(value, tuple) else (value,)) for _, value in request.signature)


def covering(family: str, arch: str, op: str | None) -> list[compile.Request]:
    """Few requests that together hold every value of every signature entry, those of 8 bits by themselves."""
    chosen, seen = [], set()
    for request in requests(arch, op):
        codes = multiplies_codes(request)
        values = {(codes, k, repr(v)) for k, v in (*request.signature, ("trace", request.trace))}
        if request.family == family and not values <= seen:
            seen |= values
            chosen.append(request)
    return chosen


@pytest.mark.seconds(600)
@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
@pytest.mark.parametrize(("family", "arch"), FAMILIES)
def test_a_family_compiles_and_fits(family, arch, pytestconfig):
    """From the compile cache, so that what a parity case has run in the simulator is not compiled again."""
    proof = pytestconfig.getoption("--proof")
    found = covering(family, arch, None if proof else QUICK[family, arch])[: None if proof else 4]
    assert found
    are_fine(found, arch)


def are_fine(requests: list[compile.Request], arch: str) -> None:
    kernels = [compile.get(request) for request in requests]
    for kernel, sass in zip(kernels, inspect.sass([kernel.library for kernel in kernels], arch), strict=True):
        is_fine(kernel, sass)
        if kernel.request.name in LOADED and arch == "sm90":
            code = b"".join(map(inspect.code, inspect.cubins(kernel.library)))
            assert not inspect.overtaken(sass, code), kernel.request


def is_fine(kernel: compile.Compiled, sass: str) -> None:
    request, ptx = kernel.request, kernel.ptx.read_text()
    assert sass
    spills = [found.start() for found in re.finditer(r"\b(STL|LDL)\b", sass)]
    most = may_spill(request)
    assert len(spills) <= most, f"{request}: spills registers by {len(spills)} instructions, {most} are known"
    products = [found.start() for found in re.finditer(r"\b[HQ]G?MMA\b", sass)]
    assert not any(products[0] < at < products[-1] for at in spills if products), f"{request}: spills among products"
    codes = multiplies_codes(request)
    # Of what is multiplied; "fp4" is what results become.
    four = any("mxfp4" in value for key, value in request.signature if isinstance(value, tuple) and key != "fp4")
    words = INSTRUCTIONS.get((request.name, request.arch), ())
    if dict(request.signature).get("once"):  # all keys at once: one product for the scores, one for the output
        words = tuple(word for word in words if not word.startswith("gsb0"))
    for word in words:
        word = OF_CODES.get(word, word) if codes else OF_FP4.get(word, word) if four else word
        assert re.search(rf"\b{word}\b", sass), f"{request}: no {word} inside"
    if request.name in OVERLAPPED:
        pipelined, unpipelined = (len(re.findall(rf"gsb0, 0x{pending}\b", sass)) for pending in (1, 0))
        waits = f"{unpipelined} waits for all groups of products, {pipelined} for all but one"
        assert pipelined > 3 * unpipelined, f"{request}: {waits}"
    shared = MAX_SHARED[request.arch]
    fits(inspect.resources(kernel.library), ptx, f"{request}", shared, stack=most > 0)
    for gpu in SIBLINGS.get(request.arch, ()):
        fits(inspect.taken([assembled(ptx, gpu)]), ptx, f"{request}, assembled for {gpu}", shared, stack=most > 0)


def assembled(ptx: str, gpu: str) -> bytes:
    """Skips where the assembler is of an older toolkit than CuTeDSL: that of torch 2.11's triton reads PTX 8.8."""
    try:
        return inspect.assemble(ptx, gpu)
    except ValueError as error:
        if "Unsupported .version" in str(error):
            pytest.skip(str(error))
        raise


def may_spill(request: compile.Request) -> int:
    """Instructions of local memory that a kernel is known to have at most."""
    signature = dict(request.signature)
    known = (
        most
        for name, arch, like, most in SPILLED
        if (name, arch) == (request.name, request.arch) and like.items() <= signature.items()
    )
    return max(known, default=0)


def fits(found: list[inspect.Resources], ptx: str, where: str, shared: int, *, stack: bool = False) -> None:
    """No local memory but the ``stack`` of a kernel that spills, and as many registers as the blocks that the kernel
    wants on a multiprocessor have there; of static shared memory no more than ``shared``."""
    assert found, f"{where}: no kernel inside"
    for kernel in found:
        assert kernel.local == 0 and (stack or kernel.stack == 0), f"{where}: {kernel}"
        assert 0 < kernel.registers <= MAX_REGISTERS, f"{where}: {kernel}"
        assert inspect.promised(ptx, kernel.name).registers(kernel.registers) <= REGISTER_FILE, f"{where}: {kernel}"
        assert kernel.shared <= shared, f"{where}: {kernel}"


@pytest.mark.proof
@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
def test_a_family_is_what_its_gpus_get(tmp_path):
    """One PTX is for both GPUs, and its target alone sets it apart from what CuTeDSL makes for either."""
    import cutlass.cute as cute

    request = next(
        r for r in covering("prefill", "sm100") if r.trace == "trace_dense" and dict(r.signature)["dim"] == 128
    )
    text = compile.get(request).ptx.read_text()
    assert text.count(".target sm_100f") == 1
    for gpu in ("sm_100a", "sm_103a"):
        host, arguments = trace_dense(request.arch, **dict(request.signature))
        folder = tmp_path / gpu
        folder.mkdir()
        cute.compile(host, *arguments, options=f"--enable-tvm-ffi --gpu-arch {gpu} --keep-ptx --dump-dir {folder}")
        (own,) = (path.read_text() for path in folder.glob("*.ptx"))
        assert own == text.replace(".target sm_100f", f".target {gpu}")


@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
@pytest.mark.parametrize(("family", "arch"), [f for f in FAMILIES if f.values[1] == "sm100"])
def test_a_b200_runs_what_is_compiled_for_the_family(family, arch):
    """Machine code for sm_100a is that for sm_100f; of a family's kernels the first and the last are looked at."""
    chosen = covering(family, arch)
    for kernel in map(compile.get, {chosen[0], chosen[-1]}):
        (own,) = inspect.cubins(kernel.library)
        assert inspect.code(own) == inspect.code(assembled(kernel.ptx.read_text(), "sm_100a")) != b""


@pytest.mark.proof
@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
@pytest.mark.parametrize(
    "row", [r for r in OPS["sdpa_multi"].kernels if r.on == "sm100"], ids=lambda r: f"D{r.dims['D'][0]}"
)
def test_kernels_for_splits_of_the_keys_fit(row, monkeypatch):
    """With every feature and two tiles of rows; which cases are split depends on what a plan finds best."""
    op, dims = OPS["sdpa_multi"], tuple((axis, sizes[0]) for axis, sizes in row.dims.items())
    monkeypatch.setattr(split_plan, "cheapest", lambda work, sms: 4)
    args, kwargs = parity.inputs(op, "two-tiles", torch.bfloat16, tuple(row.features.split()), dims)
    with compile.recording() as asked:
        dispatch.build(op, parity.bound(op, args, kwargs), Target("sm100"))
    assert [r.trace for r in asked] == ["trace_cached", "trace"] and dict(asked[0].signature)["split"]
    are_fine(asked[:1], "sm100")


@pytest.mark.sample(17)
@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("dims", heads(BITS16), ids=lambda dims: f"D{dims[0]}")
def test_dynamic_kernels_over_pages_fit(dims, softcap):
    """Parity's cases have too few tiles for them."""
    signature = dynamic_signature(dims, TILES[BITS16, *dims].paged, "paged", softcap=softcap)
    are_fine([compile.Request.of("sm90", prefill.trace_paged, page=16, box=16, **signature)], "sm90")


def dynamic_signature(dims, tile, kv, softcap=False, window=-1, sinks=0, **facts):
    scores = Scores(dims[0], window=window, sink_tokens=sinks, softcap=30.0 if softcap else 0.0)
    sizes = dict(dim=dims[0], dim_v=dims[1], scores=scores, packed=kv == "packed")
    problem = dataclasses.replace(attention(1, 4096), **sizes, **facts)
    return plan.group_signature(problem, plan.Plan(tile, dynamic=132), kv)


@pytest.mark.sample(17)
@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
@pytest.mark.parametrize("every", [False, True], ids=["plain", "every"])
@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("dims", [d for d in heads(BITS16) if TILES[BITS16, *d].dynamic], ids=str)
@pytest.mark.proof
def test_dynamic_kernels_over_tensors_fit(dims, kind, every):
    """The same, without features and with all lengths and capped scores."""
    choice = TILES[BITS16, *dims].dynamic
    facts = dict(softcap=every) | (dict(kv_len=every, kv_start=every) if kind == "dense" else {})
    asked = []
    for kept, window, sinks in (
        (choice.full, -1, 0),
        (choice.causal, -1, 0),
        (choice.window, 128, 0),
        (choice.window, 128, 1),
        (choice.wide, 1024, 0),
        (choice.wide, 1024, 1),
    ):
        tile = every and kept and choice.capped or kept
        if tile is not None:
            signature = dynamic_signature(dims, tile, kind, window=window, sinks=sinks, **facts)
            asked.append(compile.Request.of("sm90", prefill.trace, **signature))
    are_fine(list(dict.fromkeys(asked)), "sm90")


@pytest.mark.proof
@pytest.mark.seconds(600)
@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
@pytest.mark.parametrize("tokens", [67, 128])
@pytest.mark.parametrize("format", kv_cache.FORMATS[1:])
def test_encoded_rows_that_two_head_blocks_share_fit(format, tokens):
    """With keys in pages and without; of 67 tokens CTAs share the keys as well. What is stored for the other CTA is
    STAS in machine code."""
    op, fmt = OPS["sparse_fmha_with_swa"], kv_cache.FORMATS.index(format)
    sizes = dict(Tq=tokens, Hq=128, R=1, S=256, C=1024, K=1024, D=512, window=128, fmt=fmt, Ps=64)
    for features in ("compressed topk", "compressed topk swa_paged compressed_paged"):
        args, kwargs = op.module("cases").make(sizes, torch.bfloat16, tuple(features.split()), torch.Generator())
        with compile.recording() as asked:
            dispatch.build(op, parity.bound(op, args, kwargs), Target("sm90"))
        (request,) = asked
        signature = dict(request.signature)
        assert signature["sides"] == 2 and signature["merge"] == (tokens == 67)
        are_fine(asked, "sm90")
        (sass,) = inspect.sass([compile.get(request).library], "sm90")
        assert re.search(r"\bSTAS\b", sass)


@pytest.mark.proof
@pytest.mark.seconds(600)
@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
@pytest.mark.parametrize(("tokens", "hidden"), [(64, 512), (256, 512), (512, 256)])
@pytest.mark.parametrize(("block", "act"), [(16, 1), (32, 2), (32, 3)])
def test_experts_of_many_tokens_fit(block, act, tokens, hidden):
    """Of clusters: neighbours that share tokens, or weights, and pairs of CTAs; cases of parity have too few tokens."""
    op, dims = OPS["fp4_moe"], dict(Tq=tokens, N=hidden, M=256, E=1, K=1, blk=block, act=act)
    args, kwargs = op.module("cases").make(dims, torch.bfloat16, ("bias",), torch.Generator().manual_seed(0))
    with compile.recording() as asked:
        dispatch.build(op, parity.bound(op, args, kwargs), Target("sm100"))
    (request,) = asked
    signature = dict(request.signature)
    columns = {64: (128,) * 3, 256: (256,) * 3, 512: (256, 256, 512)}[tokens]
    assert (signature["row_warps"], signature["columns"]) == ((32, 32 if hidden == 512 else 16), columns)
    are_fine(asked, "sm100")


def norm(arch: str) -> compile.Request:
    """A kernel of gated_rmsnorm with wide vectors."""
    config = (8, 64, 4, 256, 1, True)
    return compile.Request.of(arch, norms.trace, dtypes=("bf16",) * 3, rank=2, groups=1, config=config, even=True)


@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
def test_vectors_are_16_bytes_wide_and_marked(tmp_path):
    """Loads and stores of aligned rows move 16 bytes an instruction; all but those of w leave the cache first."""
    (text,) = inspect.sass([compile.compile_into(norm("sm90"), tmp_path).library], "sm90")
    assert text.count("LDG.E.EF.128") == 2 * 4 and text.count("STG.E.EF.128") == 4 and text.count("LDG.E.128") == 4


@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
@pytest.mark.parametrize(("dtype", "consumers"), [("f8e4m3", 3), ("bf16", 2)])
def test_an_indexers_products_do_not_wait_for_each_other(dtype, consumers, tmp_path):
    """64 heads: while one of two products is summed up, the other is under way."""
    config = (dtype, dtype, "bf16", 64, 128, 8, False, False, False, dtype == "f8e4m3", 16, consumers, 2, 1)
    request = compile.Request.of("sm90", indexer.trace, config=config)
    (text,) = inspect.sass([compile.compile_into(request, tmp_path).library], "sm90")
    assert [len(re.findall(rf"gsb0, 0x{pending}\b", text)) for pending in (1, 0)] == [1, 1]


@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
def test_spills_and_greed_are_noticed(tmp_path):
    """The same PTX fails with few registers, and where it promises more blocks than there is room for."""
    ptx = compile.compile_into(norm("sm100"), tmp_path).ptx.read_text()
    poor = re.sub(r"(?m)^(\.reqntid .*)", r"\1\n.maxnreg 24", ptx)
    with pytest.raises(AssertionError, match=r"poor: .* stack=[1-9]"):
        fits(inspect.taken([assembled(poor, "sm_103a")]), poor, "poor", MAX_SHARED["sm100"])
    crowded = re.sub(r"(?m)^(\.reqntid .*)", r"\1\n.minnctapersm 32", ptx)
    with pytest.raises(AssertionError, match="crowded: "):
        fits(inspect.taken([assembled(ptx, "sm_103a")]), crowded, "crowded", MAX_SHARED["sm100"])
