"""Every kernel that the table's rows ask for compiles for its GPU, spills nothing and fits on a multiprocessor."""

from __future__ import annotations

import importlib.util
import re

import pytest

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.cuda import compile, inspect, warmup

pytestmark = pytest.mark.filterwarnings("default")  # the compiler's own imports warn
MAX_REGISTERS = 255
MAX_SHARED = 227 << 10  # bytes that one block may have; static allocations only
# What a kernel's products and copies must be in machine code, by op, arch and trace: wgmma is HGMMA there, mma HMMA and
# tcgen05.mma UTCHMMA, a TMA load UTMALDG, cp.async LDGSTS, and loads and stores of tensor memory LDTM and STTM. Slower
# ways to do the same would compile as well.
WIDE, NARROW = ("HGMMA", "LDGSTS"), ("HMMA", "LDGSTS")
PREFILL = {"sm90": ("HGMMA", "UTMALDG"), "sm100": ("UTCHMMA", "UTMALDG", "LDTM", "STTM")}
INSTRUCTIONS = {
    **{(op, arch, "trace"): PREFILL[arch] for op in ("flash_attention", "flash_attention_varlen") for arch in PREFILL},
    ("sdpa_multi", "sm90", "trace"): PREFILL["sm90"],
    ("sdpa_multi", "sm100", "trace"): PREFILL["sm100"],
    **{(op, arch, "trace"): NARROW for op in ("sdpa_decode", "sdpa_decode_paged") for arch in PREFILL},
    ("sdpa_decode", "sm90", "trace_wide"): WIDE,
    ("sdpa_decode_paged", "sm90", "trace_wide"): WIDE,
    ("sdpa_decode", "sm90", "trace_latent"): WIDE,
    ("sdpa_decode_paged", "sm90", "trace_latent"): WIDE,
}
ROWS = sorted({(name, row.file, arch) for name, op in OPS.items() for row in op.kernels for arch in row.archs})
ROWS = [row for row in ROWS if row[2] in compile.GPU_ARCH]
missing = [
    name
    for name, there in (
        ("nvidia-cutlass-dsl", importlib.util.find_spec("nvidia_cutlass_dsl")),
        ("cuobjdump (of a CUDA toolkit or of triton)", inspect.cuobjdump()),
    )
    if not there
]


def covering(name: str, file: str, arch: str) -> list[compile.Request]:
    """Few requests of a row that together hold every value of every signature entry."""
    chosen, seen = [], set()
    for request in warmup.requests(arch, name):
        values = {(k, repr(v)) for k, v in (*request.signature, ("trace", request.trace))}
        if request.row == file and not values <= seen:
            seen |= values
            chosen.append(request)
    return chosen


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
@pytest.mark.parametrize(("name", "file", "arch"), ROWS, ids=["-".join(row) for row in ROWS])
def test_a_row_compiles_and_fits(name, file, arch):
    """From the compile cache, so that what a parity case has run in the simulator is not compiled again."""
    requests = covering(name, file, arch)
    assert requests
    for request in requests:
        library = compile.get(request).library
        found = inspect.resources(library)
        assert found, f"{request}: no kernel inside"
        sass = inspect.sass(library)
        assert not re.search(r"\b(STL|LDL)\b", sass), f"{request}: spills registers"
        for word in INSTRUCTIONS.get((name, arch, request.trace), ()):
            assert re.search(rf"\b{word}\b", sass), f"{request}: no {word} inside"
        for kernel in found:
            where = f"{request}: {kernel}"
            assert kernel.local == 0, where
            assert 0 < kernel.registers <= MAX_REGISTERS, where
            assert kernel.shared <= MAX_SHARED, where


@pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
def test_vectors_are_16_bytes_wide_and_marked(tmp_path):
    """Loads and stores of aligned rows move 16 bytes an instruction; all but those of w leave the cache first."""
    request = compile.Request(
        "gated_rmsnorm", "cuda", "sm90", "torch_attnkit.ops.gated_rmsnorm.cuda_kernel", "trace",
        (("dtypes", ("bf16",) * 3), ("rank", 2), ("groups", 1), ("config", (8, 64, 4, 256, 1, True)), ("even", True)),
    )  # fmt: skip
    text = inspect.sass(compile.compile_into(request, tmp_path).library)
    assert text.count("LDG.E.EF.128") == 2 * 4 and text.count("STG.E.EF.128") == 4 and text.count("LDG.E.128") == 4
