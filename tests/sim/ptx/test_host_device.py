"""The block with a simulated GPU: what it answers, that it leaves nothing behind, and its pytest fixture."""

from __future__ import annotations

import dataclasses
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from torch_attnkit.sim import ptx
from torch_attnkit.sim.ptx import gpu as patches
from torch_attnkit.sim.ptx.settings import current

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore")]


def patched(tmp_path):
    """(owner, attribute) of everything that a block replaces."""
    sm90 = ptx.GPUS["sm90"]
    found = [*patches._torch(sm90), *patches._compiler(sm90, str(tmp_path)), *patches._calls()]
    return [(owner, name) for owner, name, _ in found]


@pytest.mark.parametrize("how", ["ends", "raises"])
def test_a_block_leaves_nothing_behind(tmp_path, how):
    attributes = patched(tmp_path)
    own = [(name in vars(owner) if hasattr(owner, "__dict__") else True) for owner, name in attributes]
    before = [getattr(owner, name) for owner, name in attributes]
    try:
        with ptx.device("sm90", check=True):
            assert torch.cuda.is_available() and torch.zeros(1).is_cuda
            assert current().check
            if how == "raises":
                raise KeyError("inside")
    except KeyError:
        pass
    assert len(attributes) > 25
    after = [getattr(owner, name) for owner, name in attributes]
    for (owner, name), a, b in zip(attributes, before, after, strict=True):
        assert a is b or a == b, f"{owner}.{name}"
    assert own == [(name in vars(owner) if hasattr(owner, "__dict__") else True) for owner, name in attributes]
    assert not torch.zeros(1).is_cuda


def test_the_gpu_answers_for_its_arch():
    for arch, capability, processors in (("sm89", (8, 9), 128), ("sm90", (9, 0), 132), ("sm100", (10, 0), 148)):
        with ptx.device(arch) as gpu:
            info = cutlass.utils.HardwareInfo()
            assert torch.cuda.get_device_capability() == capability == gpu.capability
            assert torch.cuda.get_device_properties(0).multi_processor_count == processors
            assert info.get_device_multiprocessor_count() == processors
            assert info.get_max_active_clusters(2) == processors // 2
            assert torch.zeros(1).is_cuda and torch.zeros(1).device.type == "cpu"


def test_addresses_of_tensors_that_were_made_visible():
    """Pointers say nothing of their tensors; a kernel that wants two blocks a multiprocessor; a stream of its own."""
    import cutlass.cute as cute

    @cute.kernel
    def kernel(x, y):
        i = cute.arch.thread_idx()[0]
        cute.make_tensor(y, cute.make_layout(64))[i] = cute.make_tensor(x, cute.make_layout(64))[i] + 1.0

    @cute.jit
    def host(x, y):
        kernel(x, y).launch(grid=[1, 1, 1], block=[64, 1, 1], min_blocks_per_mp=2)

    x, y = torch.arange(64.0), torch.zeros(64)
    with ptx.device("sm100"):
        pointers = [cute.runtime.make_ptr(cutlass.Float32, t.data_ptr(), cute.AddressSpace.gmem) for t in (x, y)]
        function = cute.compile(host, *pointers)
        with pytest.raises(Exception, match="reads 4 bytes at global address"):
            function(*pointers)
        assert not y.any()
        with ptx.visible(x, y), torch.cuda.stream(torch.cuda.Stream()):
            function(*pointers)
    assert torch.equal(y, x + 1)


def test_the_driver_answers_what_it_knows():
    from cutlass.base_dsl.runtime import cuda

    names = cuda.cuda.CUdevice_attribute
    with ptx.device("sm90"):
        assert cuda.get_device_attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) == 9
        assert cuda.get_device_attribute(names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR) == 228 << 10
        with pytest.raises(NotImplementedError, match="does not know CU_DEVICE_ATTRIBUTE_CLOCK_RATE"):
            cuda.get_device_attribute(names.CU_DEVICE_ATTRIBUTE_CLOCK_RATE)


def test_the_questions_that_cutlass_asks_first():
    """``initialize_cuda_context`` and ``HardwareInfo``, and the functions of the driver below them."""
    from cuda.bindings import driver
    from cutlass.base_dsl.runtime import cuda

    ask = cuda.checkCudaErrors
    for arch, gpu in ptx.GPUS.items():
        with ptx.device(arch):
            assert driver.cuInit(0) == (driver.CUresult.CUDA_SUCCESS,)
            assert ask(driver.cuDeviceGetCount()) == 1 and int(ask(driver.cuDeviceGet(0))) == 0
            assert driver.cuDeviceGet(1)[0] == driver.CUresult.CUDA_ERROR_INVALID_DEVICE
            assert ask(driver.cuDriverGetVersion()) == cuda.get_driver_version() >= 12000
            assert ask(driver.cuDeviceGetName(100, 0)) == gpu.name.encode()
            assert cuda.get_compute_capability_major_minor() == gpu.capability
            assert cuda.get_device_info().device_count == 1
            assert cuda.initialize_cuda_context() is not None
            shared = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
            assert ask(driver.cuDeviceGetAttribute(shared, 0)) == gpu.limits.shared
            assert torch.cuda.get_device_properties(0).shared_memory_per_block_optin == gpu.limits.shared


def test_wrong_words_are_refused():
    with pytest.raises(ValueError, match="device: got 'sm70', accepted: sm80, sm89, sm90"), ptx.device("sm70"):
        pass
    with pytest.raises(ValueError, match="there is no speed, accepted: check, seed"), ptx.device("sm90", speed=9):
        pass
    with (
        ptx.device("sm90"),
        pytest.raises(ValueError, match="has a simulated sm90 already"),
        ptx.device("sm100"),
    ):
        pass
    with pytest.raises(TypeError, match="run: got function without PTX for sm_80 or sm_89 or sm_90a or"):
        ptx.run(lambda: None)


def test_answers_that_packages_cached_are_forgotten_when_the_arch_changes():
    interface = pytest.importorskip("flash_attn.cute.interface", reason="needs flash-attn-4")
    for arch, number in (("sm90", 90), ("sm100", 100), ("sm90", 90)):
        with ptx.device(arch):
            assert interface._get_device_arch() == number


def test_object_files_of_a_package_run_in_the_next_process(tmp_path, monkeypatch):
    """quack keeps object files; the PTX that belongs to them is in the simulator's own cache."""
    cache = pytest.importorskip("quack.cache", reason="needs quack-kernels")
    from quack.softmax import Softmax, softmax_fwd

    monkeypatch.setattr(cache, "CACHE_DIR", str(tmp_path / "quack"))
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path / "attnkit"))
    x = torch.randn(4, 128)
    with ptx.device("sm90"):
        Softmax.compile.cache_clear()
        softmax_fwd(x)
        (written,) = (tmp_path / "quack").rglob("*.o")
        Softmax.compile.cache_clear()  # as a new process would begin
        monkeypatch.setattr(cutlass.cute, "compile", lambda *args, **kwargs: pytest.fail("compiled again"))
        torch.testing.assert_close(softmax_fwd(x), x.softmax(-1))
    assert written.exists()


def test_the_fixture_runs_a_users_own_kernel(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        textwrap.dedent(
            """
            import pytest, torch
            import cutlass.cute as cute
            from cutlass.cute.runtime import from_dlpack

            @cute.kernel
            def kernel(out: cute.Tensor):
                out[cute.arch.thread_idx()[0]] = cute.arch.thread_idx()[0] * 2

            @cute.jit
            def host(out: cute.Tensor):
                kernel(out).launch(grid=(1, 1, 1), block=(64, 1, 1))

            @pytest.mark.ptx(arch="sm90", seed=2, waive=("exited",))
            def test_mine(ptx_simulator):
                out = torch.zeros(64, dtype=torch.int32)
                host(from_dlpack(out))
                assert out.tolist() == list(range(0, 128, 2))
                assert ptx_simulator[0].target == "sm_90a"
                assert ptx_simulator[0].notes == ("note: waived: exited (seen 0 times)",)
            """
        )
    )
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "torch_attnkit.sim.ptx.pytest_plugin"]
    done = subprocess.run([*command, tmp_path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_documented_example_runs(tmp_path):
    page = (Path(__file__).resolve().parents[3] / "docs/ptx_simulator.md").read_text()
    file = tmp_path / "example.py"  # CuTeDSL reads the source of what it compiles
    file.write_text(page.split("```python\n")[1].split("```")[0])
    result = runpy.run_path(str(file))
    assert torch.equal(result["out"], result["x"] * 2)


def test_the_documented_settings_are_all_there_are():
    page = (Path(__file__).resolve().parents[3] / "docs/ptx_simulator.md").read_text()
    table = page.split("| option of")[1].split("## ")[0]
    documented = dict(line.split("`")[1].split("=") for line in table.splitlines()[2:] if line.startswith("| `"))
    assert documented == {f.name: repr(f.default) for f in dataclasses.fields(ptx.Settings)}
