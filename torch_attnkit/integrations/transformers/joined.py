"""q, k and v of an attention as one product: three weights that lie behind one another are one matrix.

attnkit_model moves the weights of ``q_proj``, ``k_proj`` and ``v_proj``, and their biases, into one tensor of
(q + k + v rows, K), of which the parameters of the three modules become views. Names, shapes and numbers stay, and so
does everything that looks at modules and parameters. The attention is given a subclass of its class, whose forward is
that of the class on a stand-in: asked for ``q_proj`` it multiplies with all three, asked for the others it returns
their columns of that result.

It is done while nothing stands in for the three modules (``plain``), their parameters are still views of that tensor,
no gradient of them is asked for, and the tensor that is projected is the same. Otherwise the model's own three products
run, with the same result. What gives parameters other memory ends it, and where that is a move or a cast of the model
(``to``), a copy or a pickle, they are joined again. In a compiled graph a guard asks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.comptime import comptime
from torch._dynamo.guards import install_guard

from .plain import is_plain, is_plain_tensor
from .products import linear
from .step import STEPS, Attended

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# An argument of a forward that projects keys and values of something else.
_CROSS = {"key_value_states", "encoder_hidden_states", "cross_attention_states"}
_CLASSES: dict[type, Any] = {}
_HELD = ("attnkit_weight", "attnkit_bias")


class Joined:
    """The base of attention classes whose three products are one; ``attnkit_original`` is the class that was replaced.

    ``attnkit_step`` is a forward for one token a sequence that says None where it cannot be (``step``).

    ``attnkit_weight`` (q + k + v, K) and ``attnkit_bias`` (q + k + v) share memory with the modules' parameters, and
    are no parameters themselves. Without the former nothing is joined.
    """

    attnkit_original: type[nn.Module]
    attnkit_step: Callable[..., Attended | None] | None = None
    attnkit_weight: torch.Tensor | None = None
    attnkit_bias: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.attnkit_weight is not None and _runs(self):
            step = self.attnkit_step
            if step is not None and (attended := step(self, *args, **kwargs)) is not None:
                return attended
            return self.attnkit_original.forward(StandIn(self), *args, **kwargs)
        return self.attnkit_original.forward(self, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Casts and moves, which give every parameter memory of its own."""
        held = drop(self)
        super()._apply(fn, recurse)  # type: ignore[misc]
        if held:
            join(self)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name not in _HELD}
        return _without_state, (self.attnkit_original,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        join(self)


class StandIn:
    """What the forward of an attention is given for ``self``: the module, with other projections."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.given: torch.Tensor | None = None
        self.parts: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        """Called for what this class has not."""
        if name in PROJECTIONS:
            return _Projection(self, name)
        found = getattr(self.module, name)
        if name == "o_proj" and is_plain(found, nn.Linear):
            return partial(linear, weight=found.weight, bias=found.bias)
        return found


def stood_for(module: Any) -> nn.Module:
    """``module``, or what it stands in for."""
    found: nn.Module = module.module if isinstance(module, StandIn) else module
    return found


class _Projection:
    """One of the three modules, called with ``x`` (..., K): (..., rows)."""

    def __init__(self, stand_in: StandIn, name: str) -> None:
        self.stand_in, self.name = stand_in, name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        stand_in = self.stand_in
        module = stand_in.module
        if stand_in.given is None:
            rows = [getattr(module, name).weight.shape[0] for name in PROJECTIONS]
            joined = linear(x, module.attnkit_weight, module.attnkit_bias)  # (..., q + k + v)
            stand_in.given, stand_in.parts = x, dict(zip(PROJECTIONS, joined.split(rows, -1), strict=True))
        if x is not stand_in.given:
            result: torch.Tensor = getattr(module, self.name)(x)
            return result
        return stand_in.parts[self.name]


def class_of(module: nn.Module) -> type:
    """The class of ``module`` as the model has it."""
    return module.attnkit_original if isinstance(module, Joined) else type(module)


def joinable(module: nn.Module) -> bool:
    """Whether ``module`` is an attention of transformers that projects one tensor to q, k and v by plain modules."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.") or not hasattr(module, "config"):
        return False
    parts = [module._modules.get(name) for name in PROJECTIONS]
    shared = getattr(module, "is_kv_shared_layer", False)  # keys and values of another layer
    return all(type(part) is nn.Linear for part in parts) and not shared and _projects(kind)


def _projects(kind: type) -> bool:
    """Whether the forward of ``kind`` itself calls the three projections and can be given a stand-in."""
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    code = getattr(forward, "__code__", None)
    if code is None or _CROSS & set(inspect.signature(forward).parameters):
        return False
    # __class__ is what super() looks for, which takes nothing for self but an instance.
    return set(PROJECTIONS) <= set(code.co_names) and "__class__" not in code.co_freevars


def joined_class(original: type) -> Any:
    """The subclass of ``original`` that multiplies once."""
    if original not in _CLASSES:
        step = STEPS.get(original)
        own = {"attnkit_original": original, "attnkit_step": step and staticmethod(step)}
        _CLASSES[original] = type(f"Attnkit{original.__name__}", (Joined, original), own)
    return _CLASSES[original]


def _without_state(original: type) -> Any:
    kind = joined_class(original)
    return kind.__new__(kind)


def join(module: Any) -> None:
    """Let the parameters of the three projections be views of one tensor, if they can."""
    drop(module)
    parts = [module._modules[name] for name in PROJECTIONS]
    if not all(is_plain(part, nn.Linear) for part in parts):
        return
    weights = [part.weight for part in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    if len({(w.dtype, w.device, w.shape[1]) for w in weights}) > 1 or len(biases) not in (0, 3):
        return
    with torch.inference_mode(False), torch.no_grad():
        module.attnkit_weight = _one(weights)
        module.attnkit_bias = _one(biases) if biases else None


def _one(parameters: list[Any]) -> torch.Tensor:
    """One tensor of which ``parameters``, in order, are views along the first axis."""
    rows = [p.shape[0] for p in parameters]
    first = parameters[0].data
    size, end = (sum(rows), *first.shape[1:]), first.storage_offset() + sum(rows) * first.stride(0)
    if end * first.itemsize <= first.untyped_storage().nbytes():
        whole = first.as_strided(size, first.stride(), first.storage_offset())
        if _adjacent(whole, parameters):  # joined by another module that has the same parameters, or when saved
            return whole
    joined = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, joined.split(rows), strict=True):
        parameter.data = part
    return joined


def drop(module: Any) -> bool:
    """Forget the joined tensor, whose parts stay parameters; whether there was one."""
    return any([vars(module).pop(name, None) is not None for name in _HELD])


def separate(module: Any) -> None:
    """Give the parameters of the three projections memory of their own."""
    held = [t for name in _HELD if (t := vars(module).get(name)) is not None]
    drop(module)
    for name in PROJECTIONS:
        for parameter in module._modules[name].parameters():
            if is_plain_tensor(parameter) and any(_storage(parameter) == _storage(t) for t in held):
                parameter.data = parameter.data.clone()


# Whether the joined product may run.


def _runs(module: Any) -> bool:
    parts = [module._modules[name] for name in PROJECTIONS]
    # Behind the property: a config looks names up in Python.
    ready = module.config.__dict__["_attn_implementation_internal"] == "attnkit"
    ready = ready and all([is_plain(part, nn.Linear) for part in parts])
    if ready and torch.is_grad_enabled():
        ready = not any([p.requires_grad for part in parts for p in (part.weight, part.bias) if p is not None])
    if not torch.compiler.is_compiling():
        if not _views(module):
            drop(module)  # else it would keep memory that nothing uses
            return False
        return ready
    if not ready:
        return False
    if not _views_in_trace(module.attnkit_weight, *[part.weight for part in parts]):
        return False
    if module.attnkit_bias is not None and not _views_in_trace(module.attnkit_bias, *[part.bias for part in parts]):
        return False
    comptime(_guard_views)
    return True


def _views(module: Any) -> bool:
    """Whether the parameters of the three projections are those parts of the joined tensors that they were."""
    weight, bias = (getattr(module, name, None) for name in _HELD)
    parts = [module._modules[name] for name in PROJECTIONS]
    if weight is None or not all([type(part) is nn.Linear for part in parts]):
        return False
    if bias is not None and not _adjacent(bias, [part.bias for part in parts]):
        return False
    return _adjacent(weight, [part.weight for part in parts])


def _adjacent(whole: torch.Tensor, parts: list[torch.Tensor | None]) -> bool:
    """Whether ``parts`` are views of ``whole`` along its first axis, one behind the other, and nothing is left."""
    storage, stride, offset = _storage(whole), whole.stride(), whole.storage_offset()
    for part in parts:
        if part is None or _storage(part) != storage or part.storage_offset() != offset or part.stride() != stride:
            return False
        if part.dtype != whole.dtype or part.shape[1:] != whole.shape[1:]:
            return False
        offset += part.shape[0] * stride[0]
    return offset == whole.storage_offset() + whole.shape[0] * stride[0]


def _storage(tensor: torch.Tensor) -> int:
    """Which memory a tensor has; 0 if that cannot be said, as inside of vmap."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _views_in_trace(whole: torch.Tensor, *parts: torch.Tensor) -> bool:
    return _adjacent(whole, list(parts))


def _guard_views(context: Any) -> None:
    """Let a compiled graph hold as long as ``module`` of the frame being traced is joined.

    torch's own guards look at the shape, dtype and device of a parameter, and not at which memory it has.
    """

    def create(builder: Any, guard: Any) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(_views, ["the weights of q, k and v are one tensor"], None)

    module = context.get_local("module")._i_will_not_complain_if_bc_breaks_VariableTracker()
    install_guard(module.source.make_guard(create))
