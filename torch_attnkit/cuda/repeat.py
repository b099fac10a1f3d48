"""Records what a call launched, so that C++ can repeat it (``csrc/dispatch``): the source of every argument.

The second call of a signature is recorded. A dispatch mode follows views and allocations meanwhile; any other operation
(a copy of a tensor that is not aligned, say) leaves such calls to Python. So the families' launch functions know
nothing of this. A tensor in a launch is an argument of the op, an output, scratch of the call, the stream's workspace,
or a constant of the plan.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_attnkit.core import native

from . import workspace

_CUDA = 2  # kDLCUDA in DLDeviceType: what compiled functions take
_EMPTY = {"empty.memory_format", "empty_strided.default", "new_empty.default", "empty_like.default"}
_thread = threading.local()
Launch = tuple[Callable[..., None], tuple[Any, ...]]


class Unrepeatable(Exception):
    """Why the calls of a signature stay in Python."""


@dataclass
class Recipe:
    """What C++ makes a plan of (csrc/dispatch/plan.h)."""

    device: torch.device
    outputs: list[torch.Tensor]
    scratch: list[torch.Tensor] = field(default_factory=list)
    launches: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    needs_room: bool = False
    around: Callable[..., None] | None = None
    ffi_device: int = _CUDA


class _Watch(TorchDispatchMode):
    """Follows tensors through views, and counts as made what was allocated. ``why`` is the first other operation."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.origin: dict[int, tuple[torch.Tensor, int]] = {}  # id of a view -> what it is a view of, bytes behind
        self.made: dict[int, torch.Tensor] = {}  # by storage
        self.kept: list[torch.Tensor] = []  # so that no id comes again
        self.why = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in _EMPTY:
            self.made[_storage(out)] = out
        elif (
            isinstance(out, torch.Tensor)
            and source is not None
            and not func._schema.is_mutable
            and _storage(out) == _storage(source)
        ):
            root, offset = self.origin.get(id(source), (source, 0))
            self.origin[id(out)] = root, offset + _distance(source, out)
            self.kept.append(source)
        else:
            self.why = self.why or f"it runs {func}"
        if isinstance(out, torch.Tensor):
            self.kept.append(out)
        return out


def _storage(t: torch.Tensor) -> int:
    """What names the storage of a tensor."""
    found: int = t.untyped_storage()._cdata
    return found


def _distance(a: torch.Tensor, b: torch.Tensor) -> int:
    """Bytes from the beginning of one tensor to that of another of the same storage."""
    return b.storage_offset() * b.itemsize - a.storage_offset() * a.itemsize


def watched(launch: Callable[..., None]) -> Callable[..., None]:
    """A launch function whose calls this thread records, while it records."""
    if native.extension is None:
        return launch

    def run(*args: Any) -> None:
        watch = getattr(_thread, "watch", None)
        if watch is None:
            return launch(*args)
        watch.launches.append((launch, args))
        with torch._C._DisableTorchDispatch():
            launch(*args)

    return run


@contextmanager
def _watching() -> Iterator[_Watch]:
    """Below Autograd, where a view that a mode sees is the one that the caller gets."""
    views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(views), _Watch() as watch:
        _thread.watch = watch
        try:
            yield watch
        finally:
            _thread.watch = None


def record(launch: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Recipe | bool, str]:
    """Run a planned call: its result, what repeats it or False, and why it is False."""
    with _watching() as watch:
        result = launch(*args)
    outputs = list(result) if isinstance(result, tuple) else [] if result is None else [result]
    try:
        return result, _recipe(watch, args, outputs), ""
    except Unrepeatable as why:
        return result, False, str(why)


def _recipe(watch: _Watch, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Recipe:
    if watch.why:
        raise Unrepeatable(watch.why)
    if {_storage(o) for o in outputs} & {_storage(a) for a in args if isinstance(a, torch.Tensor)}:
        raise Unrepeatable("it returns an argument")
    _use()
    sources = _Sources(watch, args, outputs)
    launches, around = [], None
    for launch, arguments in watch.launches:
        handle, around = callee(launch)
        launches.append((handle, tuple(sources.of(a) for a in arguments)))
    return Recipe(sources.device, outputs, sources.scratch, launches, sources.needs_room, around)


class _Sources:
    """Finds the source of each argument of a launch."""

    def __init__(self, watch: _Watch, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
        assert native.extension is not None
        self.source, self.watch = native.extension.Source, watch
        self.inputs = [(i, a) for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        self.device = self.inputs[0][1].device
        self.owned = {_storage(o): (self.source.OUTPUT, i, o) for i, o in enumerate(outputs)}
        self.scratch: list[torch.Tensor] = []
        self.needs_room = False
        self.room = room(self.device)

    def of(self, value: Any) -> Any:
        """``value`` with a Place for every tensor in it."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, tuple | list):
            return tuple(self.of(v) for v in value)
        if not isinstance(value, torch.Tensor):
            raise Unrepeatable(f"a launch takes a {type(value).__name__}")
        assert native.extension is not None
        source, index, offset = self._source(value)
        return native.extension.Place(source, index, offset, value)

    def _source(self, t: torch.Tensor) -> tuple[Any, int, int]:
        storage = _storage(t)
        for source, held in zip((self.source.PARTS, self.source.COUNTERS), self.room or (), strict=False):
            if storage == _storage(held):  # first: the workspace may have grown during this call
                self.needs_room = True
                return source, 0, _distance(held, t)
        if storage in self.watch.made and storage not in self.owned:
            self.owned[storage] = self.source.SCRATCH, len(self.scratch), self.watch.made[storage]
            self.scratch.append(self.watch.made[storage])
        if storage in self.owned:
            source, index, root = self.owned[storage]
            return source, index, _distance(root, t)
        if sharing := [(i, a) for i, a in self.inputs if _storage(a) == storage]:
            return self._input(t, sharing)
        return self.source.CONSTANT, 0, 0

    def _input(self, t: torch.Tensor, sharing: list[tuple[int, torch.Tensor]]) -> tuple[Any, int, int]:
        """Of inputs that share a storage, such as keys and values of one buffer, the one that ``t`` is a view of."""
        root, offset = self.watch.origin.get(id(t), (t, 0))
        for i, a in sharing:
            if a is root:
                return self.source.INPUT, i, offset
        if len(sharing) > 1:
            raise Unrepeatable("a launch takes a view of one of several tensors that share a storage")
        return self.source.INPUT, sharing[0][0], _distance(sharing[0][1], t)


def _called(launch: Any) -> tuple[int, Callable[..., None] | None]:
    """The TVM-FFI function behind a launch function, by its address, and what a simulator wants around a launch.

    ``driver.load`` keeps every function for good.
    """
    import tvm_ffi

    if not isinstance(launch, tvm_ffi.Function):
        raise Unrepeatable(f"a launch is a {type(launch).__name__}")
    return launch.__chandle__(), None


callee = _called  # tests replace it, to repeat what runs in a simulator


def room(device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The workspace of the device's current stream, if there is one; C++ is given it, too."""
    held = workspace._devices.get(device)
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    found = held.streams.get(stream) if held is not None else None
    if found is not None and native.extension is not None:
        native.extension.offer_room(-1 if device.index is None else device.index, stream, *found)
    return found


@functools.cache
def _use() -> None:
    """Give C++ the functions of libraries that are loaded where kernels run."""
    import tvm_ffi

    def address(library: ctypes.CDLL | None, name: str) -> int:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 if library else 0

    ffi = ctypes.CDLL(str(tvm_ffi.libinfo.find_libtvm_ffi()))
    cuda = driver = None
    if torch.version.cuda and torch._C._cuda_getDeviceCount():
        cuda = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        driver = ctypes.CDLL("libcuda.so.1")
    assert native.extension is not None
    native.extension.use(
        address(ffi, "TVMFFIEnvSetStream"),
        address(ffi, "TVMFFIErrorMoveFromRaised"),
        address(ffi, "TVMFFIObjectDecRef"),
        address(cuda, "aoti_torch_get_current_cuda_stream"),
        address(driver, "cuStreamIsCapturing"),
    )
