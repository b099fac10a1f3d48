"""Whether a module may be read past its forward, or has to be called.

Some of what is replaced multiplies with the weight of a module that it does not call, or calls the parts of a module
and not the module. That is right as long as nothing stands in for the module: a hook, a forward of the instance's own
(accelerate sets one, and keeps what it offloads on the meta device between calls), another class (an adapter, a
parametrisation), a weight that is a tensor subclass (quantised, sharded). Otherwise the module is called, as the model
itself does. Such things come and go while a model is used, so the question is asked at every call.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as _modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSORS = (torch.Tensor, nn.Parameter, FakeTensor)


def is_plain(module: nn.Module, *classes: type) -> bool:
    """Whether calling ``module`` is nothing but the forward of its class, which is one of ``classes``, on tensors that
    are there: then its parts may be used without calling it."""
    own = module.__dict__
    hooked = any(own[name] for name in _HOOKS) or _modules._has_any_global_hook()
    return type(module) in classes and "forward" not in own and not hooked and holds_plain(module)


def holds_plain(module: nn.Module) -> bool:
    """Whether parameters and buffers of ``module`` itself are no subclasses of tensors and none is on meta: then the
    ops may be given them."""
    held = (*module._parameters.values(), *module._buffers.values())
    return all(tensor is None or is_plain_tensor(tensor) for tensor in held)


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    if torch.compiler.is_compiling():  # a trace does not always know the type of an integer tensor
        subclass: bool = is_traceable_wrapper_subclass(tensor)
        return not subclass and not tensor.is_meta
    return type(tensor) in _TENSORS and not tensor.is_meta
