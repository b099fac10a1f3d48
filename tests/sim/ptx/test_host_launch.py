"""From CPU tensors to a launch and back: addresses, names, shapes, errors, and what compiled code is linked against."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.errors import UnsupportedError
from torch_attnkit.sim import ptx
from torch_attnkit.sim.ptx import launch, memory, runtime

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
import cutlass.cute as cute  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor  # noqa: E402

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore")]
FFI = "--enable-tvm-ffi"
THREADS = 32


def adder(amount: int, *, beyond: int = 0, cluster: int = 1, shared: int = 0):
    """A host function of (out, x), each (32 * cluster): out[i + beyond] = x[i] + amount."""

    @cute.kernel
    def kernel(out: cute.Tensor, x: cute.Tensor):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        at = cute.make_tensor(out.iterator + beyond, out.layout)
        at[i] = x[i] + amount

    @cute.jit
    def host(out: cute.Tensor, x: cute.Tensor):
        launch = kernel(out, x)
        launch.launch(grid=(cluster, 1, 1), block=(THREADS, 1, 1), cluster=(cluster, 1, 1), smem=shared)

    return host


def tensors(n: int = THREADS):
    return torch.zeros(n), torch.randn(n)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("options", ["", FFI], ids=["cute", "ffi"])
def test_a_function_compiled_either_way_runs(arch, options):
    out, x = tensors()
    function = ptx.compile(adder(1), out, x, arch=arch, options=options)
    ptx.run(function, out, x)
    assert torch.equal(out, x + 1)


def _racing():
    """Two warps store different values to one place."""

    @cute.kernel
    def kernel(out: cute.Tensor, x: cute.Tensor):
        if cute.arch.lane_idx() == 0:
            out[0] = x[cute.arch.warp_idx()]

    @cute.jit
    def host(out: cute.Tensor, x: cute.Tensor):
        kernel(out, x).launch(grid=(1, 1, 1), block=(2 * THREADS, 1, 1))

    return host


def test_a_kind_of_finding_is_waived_for_one_run():
    out, x = tensors()
    function = ptx.compile(_racing(), out, x)
    with pytest.raises(ptx.CheckError, match="write after write"):
        ptx.run(function, out, x, check=True)
    with ptx.counting() as launches:
        ptx.run(function, out, x, check=True, waive=("write_after_write",))
    first, second = launches[0].notes
    assert first == "note: waived: write_after_write (seen 1 time)"
    assert second.startswith("note: waived: data race (write after write)")
    with pytest.raises(ptx.CheckError, match="write after write"):
        ptx.run(function, out, x, check=True, waive=("exited",))


def test_a_waiver_of_nothing_that_is_known_is_refused():
    out, x = tensors()
    function = ptx.compile(adder(1), out, x)
    with pytest.raises(ValueError, match="waive has 'races', accepted: read_after_write, "):
        ptx.run(function, out, x, waive=("races",))
    with (
        pytest.raises(TypeError, match="waive is 'exited', accepted: a sequence of names"),
        ptx.device("sm90", waive="exited"),
    ):
        pass


def test_kernels_of_one_name_are_told_apart_by_their_code():
    out, x = tensors()
    functions = [ptx.compile(adder(n), out, x, options=FFI) for n in (1, 2)]
    with ptx.counting() as launches:
        for n, function in enumerate(functions, 1):
            ptx.run(function, out, x)
            assert torch.equal(out, x + n)
    assert launches[0].kernel == launches[1].kernel


def test_the_launch_has_the_shape_that_host_code_gave():
    out, x = tensors(4 * THREADS)
    function = ptx.compile(adder(3, cluster=4, shared=2048), out, x, options=FFI, arch="sm90")
    with ptx.counting() as launches:
        ptx.run(function, out, x)
    assert torch.equal(out, x + 3)
    (launch,) = launches
    assert (launch.target, launch.grid, launch.block, launch.cluster) == ("sm_90a", (4, 1, 1), (32, 1, 1), (4, 1, 1))
    assert launch.dynamic_shared >= 2048 and launch.counters["instructions"] > 0


@pytest.mark.parametrize("options", ["", FFI], ids=["cute", "ffi"])
def test_an_address_of_no_tensor_is_an_error(options):
    """Only the storages of the call's tensors may be touched; nothing else of the process is."""
    out, x = tensors()
    function = ptx.compile(adder(1, beyond=1 << 20), out, x, options=options)
    with pytest.raises(ptx.PtxError, match=r"st\.global"):
        ptx.run(function, out, x)
    ptx.run(ptx.compile(adder(1), out, x, options=options), out, x)
    assert torch.equal(out, x + 1)


def test_a_view_may_reach_its_storage_and_no_further():
    storage, x = tensors(4 * THREADS)
    function = ptx.compile(adder(1, beyond=THREADS), storage[:THREADS], x[:THREADS], options=FFI)
    ptx.run(function, storage[:THREADS], x[:THREADS])
    assert torch.equal(storage[THREADS : 2 * THREADS], x[:THREADS] + 1)
    with pytest.raises(ptx.PtxError):
        ptx.run(function, storage[-THREADS:], x[:THREADS])


def test_alignment_that_cpu_memory_lacks_is_made_up_for():
    """The kernel asks for 512 bytes. It works on copies; the storage around the view comes back as it was."""
    fakes = [make_fake_compact_tensor(cutlass.Float32, (THREADS,), assumed_align=memory.ALIGNMENT) for _ in range(2)]
    with ptx.device("sm100"):
        function = cute.compile(adder(5), *fakes, options=FFI)
    start, raw = 128, bytearray((1 << 14) + memory.ALIGNMENT)
    address = ctypes.addressof(ctypes.c_char.from_buffer(raw))
    offset = (64 - address) % memory.ALIGNMENT  # where a GPU's allocator would not put a storage
    buffer = torch.frombuffer(raw, dtype=torch.float32, count=1 << 12, offset=offset).normal_()
    before, x = buffer.clone(), buffer[1024 : 1024 + THREADS]
    ptx.run(function, buffer[start : start + THREADS], x)
    want = before.clone()
    want[start : start + THREADS] = x + 5
    assert torch.equal(buffer, want)


def test_copies_of_one_storage_are_one_copy():
    raw = bytearray(4096 * 4 + 2 * memory.ALIGNMENT)
    address = ctypes.addressof(ctypes.c_char.from_buffer(raw))
    offset = (64 - address) % memory.ALIGNMENT  # a storage that torch might have placed so, and a GPU would not
    base = torch.frombuffer(raw, dtype=torch.float32, count=4096, offset=offset)
    base.copy_(torch.arange(4096))
    base = base[16:]
    aligned = memory.Aligned()
    a, b = aligned(base[128:160]), aligned(base[144:176].view(2, 16).t())
    assert a.data_ptr() % memory.ALIGNMENT == (16 + 128) * 4 % memory.ALIGNMENT
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and b.stride() == (1, 16)
    assert torch.equal(b, base[144:176].view(2, 16).t())
    a.fill_(-1)
    assert base[128] == 144 and b[0, 0] == -1
    aligned.write_back()
    assert base[128:160].eq(-1).all() and base[160] == 176 and base[127] == 143


def test_ranges_are_sorted_apart_and_named():
    a, b = torch.zeros(64), torch.zeros(32)
    with memory.visible(b, a, a[8:]):
        found = memory.ranges()
    regions = [r for r in found if r[0] in (a.data_ptr(), b.data_ptr())]
    assert sorted(found) == found and all(p[1] <= q[0] for p, q in zip(found, found[1:], strict=False))
    assert {(r[0], r[1] - r[0]) for r in regions} == {(a.data_ptr(), 256), (b.data_ptr(), 128)}
    assert {r[3] for r in regions} == {"argument 0", "argument 1, argument 2"}
    assert memory.ranges() != found or not regions


def test_both_runtimes_live_in_one_process():
    """NVIDIA's runtime first and for everybody, as cutlass itself and other packages load it."""
    code = f"""
    import ctypes, sys
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs
    nvidia = get_prefix_dsl_libs("CUTE_DSL")
    real = ctypes.CDLL(nvidia, mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, {str(__file__).rsplit("/", 1)[0]!r})
    import test_host_launch as t
    out, x = t.tensors()
    for options in ("", t.FFI):
        t.ptx.run(t.ptx.compile(t.adder(1), out, x, options=options), out, x)
        assert t.torch.equal(out, x + 1)
    mine = ctypes.cast(ctypes.CDLL(None)._cudaLaunchKernelEx, ctypes.c_void_p).value
    assert mine == ctypes.cast(real._cudaLaunchKernelEx, ctypes.c_void_p).value
    assert get_prefix_dsl_libs("CUTE_DSL") == nvidia
    print("both")
    """
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0 and "both" in done.stdout, done.stderr


def test_renaming_changes_undefined_symbols_alone(tmp_path):
    source = tmp_path / "a.c"
    source.write_text(
        "int _cudaGetDevice(int*); int x_cudaSetDevice(int);\n"
        'const char* text = "_cudaGetDevice";\n'
        "int cuda_dialect_get_error_name(void) { return 1; }\n"
        "int f(void) { int d; return _cudaGetDevice(&d) + x_cudaSetDevice(0); }\n"
    )
    object_file = tmp_path / "a.o"
    subprocess.run(["cc", "-c", source, "-o", object_file], check=True)
    code = object_file.read_bytes()
    own = runtime.renamed(code)
    assert len(own) == len(code) and b"ScudaGetDevice\0" in own
    assert b"x_cudaSetDevice\0" in own and b"cuda_dialect_get_error_name\0" in own
    assert own.count(b"_cudaGetDevice\0") == 1  # the text


def test_the_names_are_all_there():
    library = ctypes.CDLL(runtime.runtime().__file__)
    for symbol in runtime.runtime().symbols:
        assert hasattr(library, runtime.own_name(symbol)), symbol


def test_host_code_can_encode_tensor_maps():
    """cuTensorMapEncodeTiled for a bf16 matrix of 48 x 640 in boxes of 64 x 8, 128-byte swizzle."""
    launch._install()
    encode = ctypes.CDLL(runtime.runtime().__file__).ScuTensorMapEncodeTiled
    matrix = torch.zeros(640, 64, dtype=torch.bfloat16)
    wide, narrow, encoded = ctypes.c_uint64 * 2, ctypes.c_uint32 * 2, ctypes.create_string_buffer(128)
    address = ctypes.c_void_p(matrix.data_ptr())
    sizes, strides, box, steps = wide(48, 640), wide(128), narrow(64, 8), narrow(1, 1)
    assert encode(encoded, 9, 2, address, sizes, strides, box, steps, 0, 3, 0, 0) == 0
    found = runtime.machine().tensor_map_decode(encoded.raw)
    assert (found["address"], found["box"]) == (matrix.data_ptr(), [64, 8])
    assert (found["sizes"], found["strides"]) == ([48, 640], [128])
    assert encode(encoded, 99, 2, address, sizes, strides, box, steps, 0, 3, 0, 0) != 0


def test_a_kernel_of_the_table_runs_without_a_linker(monkeypatch, tmp_path):
    """The compile cache then holds objects, which CuTeDSL links itself."""
    from torch_attnkit.cuda import compile

    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile.shutil, "which", lambda name: None)
    op = OPS["merge_partials"]
    index = next(i for i, row in enumerate(op.kernels) if "sm90" in row.archs)
    from torch_attnkit.core import dispatch

    dispatch._PLANS["merge_partials"].clear()
    parity.run(parity.cases(op, index, "sm90", covering=True)[0])
    assert list((tmp_path / "cuda").glob("*.o")) and not list((tmp_path / "cuda").glob("*.so"))
    dispatch._PLANS["merge_partials"].clear()


def test_another_version_of_the_compiler_is_refused(monkeypatch):
    runtime.require_compiler.cache_clear()
    monkeypatch.setattr(runtime.importlib.metadata, "version", lambda name: "4.9.0")
    with pytest.raises(UnsupportedError, match=r"checked with nvidia-cutlass-dsl 4\.8\.1, found 4\.9\.0: pip install"):
        runtime.require_compiler()
    monkeypatch.undo()
    runtime.require_compiler()
