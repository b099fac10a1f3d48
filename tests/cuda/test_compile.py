"""The kernel cache: what a request's name depends on, that nothing is compiled twice, and what errors say."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_attnkit.core.errors import UnsupportedError
from torch_attnkit.cuda import compile, inspect, passes
from torch_attnkit.kernels.norm import launch as norm

ROOT = Path(__file__).resolve().parents[2]
REQUEST = compile.Request.of(
    "sm90", norm.trace, dtypes=("f32", "bf16", "bf16"), rank=2, groups=1, config=(8, 16, 1, 512, 1, False), even=True
)
pytestmark = pytest.mark.filterwarnings("default")  # the compiler's own imports warn
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_cutlass_dsl") is None, reason="needs the package nvidia-cutlass-dsl"
)
without_compiler = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_cutlass_dsl") is not None, reason="nvidia-cutlass-dsl is installed here"
)


def run(code: str, cache: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "ATTNKIT_CACHE_DIR": str(cache)}
    prelude = "from torch_attnkit.cuda import compile\nfrom torch_attnkit.cuda.compile import Request\n"
    return subprocess.Popen(
        [sys.executable, "-c", f"{prelude}request = {REQUEST!r}\n{code}"],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out.split()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def a_version(monkeypatch):
    """As if the compiler were installed, whether it is or not."""
    monkeypatch.setattr(compile, "version", lambda package: "4.8.1")


def test_the_name_depends_on_everything_that_matters_and_on_no_compiler(a_version, monkeypatch):
    changes = [
        {"arch": "sm100"},
        {"trace": "other"},
        {"module": "torch_attnkit.kernels.merge.launch"},
        {"signature": REQUEST.signature[:-1] + (("even", False),)},
    ]
    names = {REQUEST.file, *(dataclasses.replace(REQUEST, **change).file for change in changes)}
    assert len(names) == 1 + len(changes)
    assert dataclasses.replace(REQUEST).file == REQUEST.file
    monkeypatch.setattr(compile, "version", lambda package: "4.9.0")
    assert dataclasses.replace(REQUEST).file == REQUEST.file


def test_the_name_depends_on_the_sources_of_the_kernel(a_version, monkeypatch):
    before = REQUEST.file
    monkeypatch.setattr(compile.digest, "of_definitions", lambda *names, arch: f"other sources of {names} for {arch}")
    assert dataclasses.replace(REQUEST).file != before
    monkeypatch.undo()
    with pytest.raises(ValueError, match="there is no module torch_attnkit.ops.gated_rmsnorm.sm80_kernel"):
        compile.digest.of_modules("torch_attnkit.ops.gated_rmsnorm.sm80_kernel")


@pytest.mark.parametrize("part", ["", "cuda"])
def test_a_folder_that_others_can_write_to_is_refused(cache, a_version, part):
    (cache / "cuda").mkdir()
    (cache / "cuda" / f"{REQUEST.file}.so").touch()
    (cache / part).chmod(0o777)
    with pytest.raises(PermissionError, match=f"{cache / part}: others can write to it .*drwxrwxrwx.*chmod go-w"):
        compile.get(REQUEST)
    (cache / "cuda" / f"{REQUEST.file}.json").touch()
    with pytest.raises(PermissionError, match="others can write to it"):
        compile.use_bundle(cache)


def test_a_compiled_kernel_is_found_without_compiling(cache, a_version, monkeypatch):
    monkeypatch.setattr(compile, "_build", lambda *args: pytest.fail("compiled again"))
    (cache / "cuda").mkdir()
    library = cache / "cuda" / f"{REQUEST.file}.so"
    library.touch()
    assert compile.get(REQUEST).library == library
    assert compile.get(REQUEST).ptx.name == f"{REQUEST.file}.ptx"


def test_a_bundle_is_searched_before_the_cache(cache, a_version, monkeypatch, tmp_path_factory):
    bundle = tmp_path_factory.mktemp("bundle")
    monkeypatch.setattr(compile, "_bundles", [])
    with pytest.raises(ValueError, match=f"use_bundle: {bundle} holds no compiled kernels"):
        compile.use_bundle(bundle)
    for folder in (bundle / "cuda", cache / "cuda"):
        folder.mkdir()
        (folder / f"{REQUEST.file}.so").touch()
        (folder / f"{REQUEST.file}.json").touch()
    compile.use_bundle(bundle)
    assert compile.get(REQUEST).library.parent == bundle / "cuda"


def test_an_error_names_kernel_and_signature(cache, a_version, monkeypatch):
    def fails(*args):
        raise TypeError("no such layout")

    monkeypatch.setattr(compile, "_build", fails)
    with pytest.raises(RuntimeError) as error:
        compile.get(REQUEST)
    text = str(error.value)
    assert text.startswith("norm for sm90: dtypes=('f32', 'bf16', 'bf16'), rank=2,")
    assert text.endswith("does not compile: TypeError: no such layout")
    assert not list((cache / "cuda").glob("*.so"))


def test_recording_collects_requests_and_compiles_nothing(monkeypatch):
    from torch_attnkit import warmup

    monkeypatch.setattr(compile, "get", lambda request: pytest.fail("compiled"))
    found = warmup.requests("sm90", "no_such_op")
    assert found == []
    with compile.recording() as asked:
        pass
    assert asked == []


@pytest.mark.proof
def test_bench_cases_whose_inputs_depend_on_lengths_are_warm():
    """Fake tensors do not have these. Parity's cases over pages are too small for these schedulers."""
    from torch_attnkit import warmup

    asked = warmup.requests("sm90", "flash_attention_varlen")
    assert "dynamic" in {dict(request.signature).get("scheduler") for request in asked}
    asked = warmup.requests("sm90", "flash_attention_paged")
    assert {"dynamic", "stream_k"} <= {dict(request.signature).get("scheduler") for request in asked}


@without_compiler
def test_without_the_compiler_the_error_names_package_and_command(cache):
    with pytest.raises(UnsupportedError, match=r"nvidia-cutlass-dsl, which is not installed: pip install 'torch_attn"):
        compile.get(REQUEST)


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr(compile, "_EXTRAS", {"no-such-calls": "cuda", "no-such-compiler": "compile"})
    monkeypatch.setattr(compile, "COMPILER", "no-such-compiler")
    for package, words in (
        ("no-such-calls", "CUDA kernels need the package no-such-calls, which is not installed: "
         "pip install 'torch_attnkit[cuda]'"),
        ("no-such-compiler", "compiling CUDA kernels needs the package no-such-compiler, which is not installed: "
         "pip install 'torch_attnkit[compile]'"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError) as error:
            compile.version(package)
        assert str(error.value) == words


@needs_compiler
def test_two_processes_compile_once(tmp_path):
    """Both ask at the same time; a count of the builds is written by whoever builds."""
    code = (
        "import os\nbuild = compile._build\n"
        "def counted(request, folder, simulated):\n"
        "    (folder / f'built-{os.getpid()}').touch()\n"
        "    return build(request, folder, simulated)\n"
        "compile._build = counted\n"
        "print(compile.get(request).library, compile.get(request).library.stat().st_size > 0)\n"
    )
    both = [run(code, tmp_path) for _ in range(2)]
    (first, ok), (second, also) = (finish(p) for p in both)
    assert first == second and ok == also == "True"
    assert len(list((tmp_path / "cuda").glob("built-*"))) == 1
    leftovers = {p.suffix for p in (tmp_path / "cuda").iterdir()} - {".so", ".ptx", ".json", ".lock", ""}
    assert not leftovers


@needs_compiler
@pytest.mark.parametrize("first", [True, False])
def test_a_simulator_needs_no_machine_code_and_a_gpu_does(cache, first, monkeypatch):
    """What one made the other finds where that is enough, and the PTX is the same."""
    one = compile.get(REQUEST, simulated=first)
    text = one.ptx.read_text()
    built, build = [], compile._build
    monkeypatch.setattr(compile, "_build", lambda *args: built.append(args) or build(*args))
    other = compile.get(REQUEST, simulated=not first)
    assert len(built) == first and (other.library != one.library) == first
    of = {first: one, not first: other}
    assert len(list(inspect.cubins(of[False].library))) == 1
    assert other.ptx == one.ptx and other.ptx.read_text() == text
    if first:
        assert not list(inspect.cubins(one.library))
        assert compile.get(REQUEST, simulated=True) is one


@needs_compiler
@pytest.mark.proof
@pytest.mark.parametrize("arch", compile.GPU_ARCH)
def test_ptx_is_the_same_without_the_assembler(arch, cache):
    from torch_attnkit import warmup

    asked = (
        warmup.requests(arch, "sdpa_decode", covering=True)[::9] + warmup.requests(arch, "fp4_moe", covering=True)[::9]
    )
    for request in asked:
        one = compile.get(request, simulated=True)
        text, fingerprint = one.ptx.read_text(), one.fingerprint
        other = compile.get(request)
        assert other.ptx.read_text() == text and other.fingerprint == fingerprint, request


def test_passes_of_another_form_have_no_stages():
    given = "builtin.module(cute-to-nvvm{cubin-format=bin opt-level=3 dump-ptx-path='/a b/x' cubin-chip=sm_90a})"
    assert passes.stages(given) == (
        "builtin.module(cute-to-nvvm{cubin-format=bin opt-level=3 llvm-only=true dump-ptx-path='/a b/x' "
        "cubin-chip=sm_90a})",
        "builtin.module(cuda-to-binary{opt-level=3 dump-ptx-path='/a b/x'})",
    )
    for missing in ("opt-level=3", "dump-ptx-path='/a b/x'", "cute-to-nvvm{"):
        assert passes.stages(given.replace(missing, "")) is None


@needs_compiler
def test_with_passes_of_another_form_a_gpus_kernel_is_whole_and_a_simulators_refused(cache, monkeypatch):
    monkeypatch.setattr(passes, "stages", lambda pipeline: None)
    assert len(list(inspect.cubins(compile.get(REQUEST).library))) == 1
    with pytest.raises(RuntimeError, match="passes of an unknown form: builtin"):
        compile._build(REQUEST, cache / "cuda", True)


@needs_compiler
def test_loading_imports_no_compiler(tmp_path):
    finish(run("compile.get(request)", tmp_path))
    loaded = finish(
        run(
            "import sys\nfrom torch_attnkit.cuda import driver\n"
            "compile._build = None\n"
            "class Blocked:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name.split('.')[0] in ('cutlass', 'nvidia_cutlass_dsl'):\n"
            "            raise ImportError(name)\n"
            "sys.meta_path.insert(0, Blocked())\n"
            "print(type(driver.load(compile.get(request), 'sm90')).__name__)\n"
            "print(any(m == 'cutlass' or m.startswith('cutlass.') for m in sys.modules))\n",
            tmp_path,
        )
    )
    assert loaded == ["Function", "False"]


@needs_compiler
def test_a_kernel_that_does_not_trace_says_which(cache):
    wrong = dataclasses.replace(REQUEST, signature=REQUEST.signature[:-1])
    with pytest.raises(RuntimeError, match=r"^norm for sm90: .*does not compile: TypeError: trace\(\)"):
        compile.get(wrong)


@pytest.mark.parametrize(("index", "entered"), [(0, []), (1, [1])])
def test_a_launch_makes_its_device_current(index, entered, monkeypatch):
    """On a GPU that is not the current one, for as long as the launch takes; what two GPUs do has to be seen there."""
    inside, seen = [], []

    @contextlib.contextmanager
    def device(which):
        inside.append(which.index)
        yield
        inside.clear()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    compile.on_device(torch.device("cuda", index), lambda *args: seen.append((args, list(inside))))(1, 2)
    assert seen == [((1, 2), entered)] and not inside
