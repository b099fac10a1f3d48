"""A block in which this process has a simulated GPU: unmodified CuTeDSL code compiles for it and runs on CPU tensors.

Everything that such code asks of a GPU is answered here, and nowhere else: torch.cuda's queries, CuTeDSL's, the
runtime library that compiled code links against, and the form in which tensors reach it. All of it is put in place
when the block begins and taken away when it ends. The block belongs to the process, not to a thread.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from . import launch, memory, store
from .runtime import own_name, renamed, require_compiler, runtime
from .settings import settings
from .targets import GPUS, Gpu

_active: list[str] = []
_asked_of: str | None = None  # the device whose answers packages may have cached


@contextmanager
def device(arch: str = "sm100", **options: Any) -> Iterator[Gpu]:
    """Simulate a GPU of ``arch`` (sm80, sm89, sm90, sm100 or sm120) inside this block.

    ``options`` are fields of ``Settings``.
    What CuTeDSL compiles inside runs in the simulator, here and later, in another block of the same arch. Raises
    ValueError for another arch or a block of another arch around this one, UnsupportedError without the compiler.
    """
    if arch not in GPUS:
        raise ValueError(f"device: got {arch!r}, accepted: {', '.join(GPUS)}")
    if _active and _active[-1] != arch:
        raise ValueError(f"device({arch!r}): this process has a simulated {_active[-1]} already")
    require_compiler()
    with ExitStack() as stack:
        stack.enter_context(settings(**options))
        if not _active:
            _forget_answers(arch)
            if torch.cuda.is_available():
                stack.callback(_forget_answers, None)
            work = stack.enter_context(tempfile.TemporaryDirectory(prefix="attnkit-ptx-"))
            for owner, name, value in [*_torch(GPUS[arch]), *_compiler(GPUS[arch], work), *_calls()]:
                stack.enter_context(mock.patch.object(owner, name, value))
        _active.append(arch)
        try:
            yield GPUS[arch]
        finally:
            _active.pop()


Patches = Iterator[tuple[Any, str, Any]]


def _torch(gpu: Gpu) -> Patches:
    """torch's answers about a GPU. Tensors stay where they are: ``device`` is still cpu, ``is_cuda`` is true."""
    properties = SimpleNamespace(
        name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1], multi_processor_count=gpu.processors,
        total_memory=gpu.memory, L2_cache_size=gpu.l2, warp_size=32, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=gpu.limits.threads_of_processor,
        shared_memory_per_block_optin=gpu.limits.shared,
        shared_memory_per_multiprocessor=gpu.limits.shared_of_processor,
    )  # fmt: skip
    stream = SimpleNamespace(
        cuda_stream=0, device=torch.device("cpu"), synchronize=lambda: None, query=lambda: True,
        wait_stream=lambda other: None, wait_event=lambda event: None,
    )  # fmt: skip
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "Stream": lambda device=None, priority=0: stream,  # a launch has ended when it returns: one is like another
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: gpu.name,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: properties,
        "is_current_stream_capturing": lambda: False,
    }
    yield from ((torch.cuda, name, answer) for name, answer in answers.items())
    yield torch.Tensor, "is_cuda", property(lambda tensor: True)


def _compiler(gpu: Gpu, work: str) -> Patches:
    """CuTeDSL's settings, its questions to the driver, and what it links compiled code against."""
    import cutlass.cute.runtime
    import cutlass.runtime
    from cutlass._mlir._mlir_libs._cutlass_ir import _execution_engine
    from cutlass.base_dsl import compiler, dsl, env_manager
    from cutlass.base_dsl.export.external_binary_module import ExternalBinaryModule
    from cutlass.base_dsl.runtime import cuda as driver
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction
    from cutlass.utils.hardware_info import HardwareInfo

    library = runtime().__file__
    wanted = {
        "_arch": gpu.target, "shared_libs": library, "keep_ptx": True, "keep_cubin": True, "dump_dir": work,
        "disable_file_caching": True, "lineinfo": True,
    }  # fmt: skip
    cutlass.cutlass_dsl.CuTeDSL._get_dsl()
    for instance in dsl.DSLSingletonMeta._instances.values():
        yield from ((instance.envar, name, value) for name, value in wanted.items())
    for module in (env_manager, cutlass.runtime):
        yield module, "get_prefix_dsl_libs", lambda prefix: library

    yield dsl.BaseDSL, "_build_jit_function", _registering(dsl.BaseDSL._build_jit_function)
    yield compiler.Compiler, "jit", _linking(compiler.Compiler.jit)
    engine = _execution_engine.BinaryExecutionEngine
    own_engine = lambda code, libraries, link: engine(renamed(code), libraries, link)
    yield _execution_engine, "BinaryExecutionEngine", own_engine
    yield ExternalBinaryModule.load_provider, "execution_engine_constructor", own_engine

    yield CudaDialectJitCompiledFunction, "num_devices", 1
    load = CudaDialectJitCompiledFunction._load_cuda_library
    # The handles are the simulator's: the real runtime, which would unload them, must not see them.
    yield CudaDialectJitCompiledFunction, "_load_cuda_library", lambda function: [] if load(function) else []
    yield driver, "get_device_attribute", _attribute(gpu)
    yield driver, "get_driver_version", lambda: driver.cuda.CUDA_VERSION  # its own would keep the answer
    yield from _driver(gpu, driver.cuda)
    yield HardwareInfo, "__init__", lambda info, device_id=0: None
    yield HardwareInfo, "get_device_multiprocessor_count", lambda info: gpu.processors
    yield HardwareInfo, "get_l2_cache_size_in_bytes", lambda info: gpu.l2
    yield HardwareInfo, "get_max_active_clusters", lambda info, size, stream=None: max(1, gpu.processors // size)
    # Packages keep compiled functions on disk by the compiler's version: those for a simulated GPU go to a place apart.
    yield cutlass, "__version__", f"{cutlass.__version__}+simulated.{gpu.target.replace('_', '')}"
    yield cutlass.cute.runtime, "load_module", _loading(cutlass.cute.runtime.load_module)


def _driver(gpu: Gpu, driver: Any) -> Patches:
    """The driver's functions that CuTeDSL and its examples ask before they compile: one device, initialised."""
    success, attribute = driver.CUresult.CUDA_SUCCESS, _attribute(gpu)
    context = driver.CUcontext(1)  # a handle that nobody follows

    def device(ordinal: int) -> tuple[Any, ...]:
        return (success, driver.CUdevice(0)) if ordinal == 0 else (driver.CUresult.CUDA_ERROR_INVALID_DEVICE, None)

    answers: dict[str, Callable[..., tuple[Any, ...]]] = {
        "cuInit": lambda flags: (success,),
        "cuDriverGetVersion": lambda: (success, driver.CUDA_VERSION),
        "cuDeviceGetCount": lambda: (success, 1),
        "cuDeviceGet": device,
        "cuDeviceGetAttribute": lambda asked, dev: (success, attribute(asked)),
        "cuDeviceGetName": lambda length, dev: (success, gpu.name.encode()[: length - 1]),
        "cuDeviceTotalMem": lambda dev: (success, gpu.memory),
        "cuCtxGetCurrent": lambda: (success, context),
        "cuCtxGetDevice": lambda: (success, driver.CUdevice(0)),
        "cuCtxSynchronize": lambda: (success,),
        "cuStreamSynchronize": lambda stream: (success,),
    }
    yield from ((driver, name, answer) for name, answer in answers.items())


def _attribute(gpu: Gpu) -> Callable[..., int]:
    """The driver's answers about a device, by the names that the driver gives its questions."""
    known: dict[str, int] = {
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": gpu.limits.shared_of_processor,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": gpu.limits.shared,
        "MULTIPROCESSOR_COUNT": gpu.processors,
        "COMPUTE_CAPABILITY_MAJOR": gpu.capability[0],
        "COMPUTE_CAPABILITY_MINOR": gpu.capability[1],
    }

    def answered(attribute: Any, device_id: int = 0) -> int:
        name = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        if name not in known:
            raise NotImplementedError(f"the simulated GPU does not know {attribute.name}; accepted: {', '.join(known)}")
        return known[name]

    return answered


def _registering(build: Callable[..., Any]) -> Callable[..., Any]:
    """The step that makes a compiled function, and tells ``launch`` which PTX belongs to its device code."""

    def built(*args: Any, **kwargs: Any) -> Any:
        function = build(*args, **kwargs)
        artifacts = function.artifacts
        if isinstance(artifacts.PTX, str) and isinstance(artifacts.CUBIN, bytes):  # else: host code alone
            launch.register(artifacts.CUBIN, artifacts.PTX)
            store.save(artifacts.CUBIN, artifacts.PTX)
        return function

    return built


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """``cute.runtime.load_module`` for object files, whose functions then take CPU tensors."""

    def loaded(file_path: str, *, enable_tvm_ffi: bool = False) -> Any:
        code = Path(file_path).read_bytes()
        ptx = store.find(code)
        if ptx is None or not file_path.endswith(".o") or not enable_tvm_ffi:
            raise RuntimeError(
                f"{file_path}: accepted are object files of TVM-FFI functions that were compiled in the simulator"
            )
        launch.register(code, ptx)
        return _Module(load(file_path, enable_tvm_ffi=True))

    return loaded


class _Module:
    """A loaded object file; its functions by name."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name)
        return lambda *args, **kwargs: call_with_tensors(function, args, kwargs)

    __getitem__ = __getattr__


def _linking(jit: Callable[..., Any]) -> Callable[..., Any]:
    """CuTeDSL's own linking step, on a module that calls the simulator's runtime meanwhile."""

    def linked(compiler: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = [(symbol, own_name(symbol)) for symbol in runtime().symbols]
        _rename(module, pairs)
        try:
            return jit(compiler, module, *args, **kwargs)
        finally:
            _rename(module, [(own, symbol) for symbol, own in pairs])

    return linked


def _rename(module: Any, pairs: list[tuple[str, str]]) -> None:
    from cutlass._mlir import ir

    with module.context:
        table = ir.SymbolTable(module.operation)
        for old, new in pairs:
            if old in table:
                ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
                ir.SymbolTable.set_symbol_name(table[old], new)


def _calls() -> Patches:
    """How tensors reach compiled functions, and how failures come back."""
    from cutlass.base_dsl.jit_executor import JitExecutor
    from cutlass.cute import runtime as cute_runtime
    from cutlass.cutlass_dsl import tvm_ffi_provider as provider

    for owner in (provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs):
        yield owner, "__call__", _converting(owner.__call__)
    run = JitExecutor.run_compiled_program

    def raising(*args: Any) -> Any:
        with launch.raising():
            return run(*args)

    yield JitExecutor, "run_compiled_program", raising
    begin = cute_runtime._Tensor.__init__

    def described(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            begin(self, memory.capsule(tensor), *args, **kwargs)
            memory.hold(self, tensor)
        else:
            begin(self, tensor, *args, **kwargs)

    yield cute_runtime._Tensor, "__init__", described


def _converting(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda function, *args, **kwargs: call_with_tensors(lambda *a, **k: call(function, *a, **k), args, kwargs)


def call_with_tensors(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a TVM-FFI function on CPU tensors, which it and its kernels take for tensors of a GPU.

    Some functions ask for addresses that torch's CPU allocator does not promise; those work on aligned copies.
    """
    with memory.visible(*memory.tensors_in([args, kwargs])), launch.raising():
        try:
            return function(*_presented(args), **_presented(kwargs))
        except ValueError as error:
            if not str(error).startswith("Misaligned Tensor data"):
                raise
    aligned = memory.Aligned()
    args, kwargs = _mapped((args, kwargs), aligned)
    with memory.visible(*memory.tensors_in([args, kwargs])), launch.raising():
        result = function(*_presented(args), **_presented(kwargs))
    aligned.write_back()
    return result


def _presented(value: Any) -> Any:
    import tvm_ffi

    return _mapped(value, lambda tensor: tvm_ffi.from_dlpack(memory.capsule(tensor)))


def cute_tensors(args: tuple[Any, ...], *, tvm_ffi: bool) -> tuple[Any, ...]:
    """Arguments with CuTe tensors in the place of torch's; inside ``device``."""
    from cutlass.cute.runtime import from_dlpack

    made: tuple[Any, ...] = _mapped(args, lambda tensor: from_dlpack(tensor, enable_tvm_ffi=tvm_ffi))
    return made


def _mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with a function applied to every tensor inside tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(v, function) for v in value))
    if isinstance(value, tuple | list):
        return type(value)(_mapped(v, function) for v in value)
    if isinstance(value, dict):
        return {k: _mapped(v, function) for k, v in value.items()}
    return value


def _forget_answers(arch: str | None) -> None:
    """Clear the functools caches of modules that use CuTeDSL when the device is not the one that they asked.

    Packages cache a device's capability and what they compile for it, as if it could not change in a process.
    """
    global _asked_of
    if _asked_of == arch:
        return
    _asked_of = arch
    for name, module in list(sys.modules.items()):
        values = list(vars(module).values()) if module is not None else []
        if name.startswith(("cutlass", "torch_attnkit")) or not any(_of_cutlass(v) for v in values):
            continue
        for value in values:
            if getattr(value, "__module__", None) == name and callable(getattr(value, "cache_clear", None)):
                value.cache_clear()


def _of_cutlass(value: Any) -> bool:
    return type(value) is type(sys) and value.__name__.split(".")[0] == "cutlass"
