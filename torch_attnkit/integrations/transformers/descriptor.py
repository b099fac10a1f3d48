"""What a mask of this integration is: an object that only the attention functions of this integration can read.

transformers hands the mask to whatever the model calls its attention. A model that goes through AttentionInterface
passes it on unread; one that does its own arithmetic adds it to its scores, takes slices or looks at its dtype. To
such a model the integers of a descriptor would be a wrong mask, and None would be no mask at all. So a descriptor is
never None and no tensor, and every use that a tensor would allow raises UnsupportedError, with the model's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from torch_attnkit.core import UnsupportedError

# The one implementation that every model has: many know no "sdpa".
ADVICE = "for such a call choose attn_implementation='eager'"
# Models whose own attention class attnkit_model replaces.
_REPLACED = ("deepseek_v4",)


class Layout(NamedTuple):
    """What the host knows about a mask: the attention function checks its call against it and leaves out arguments."""

    causal: bool
    window: int  # of the ops: a causal query at p sees p - window < j, a bidirectional one |p - j| < window; -1 is off
    queries: int  # how many queries and keys the mask was made for
    keys: int
    q_end: int | None  # the position behind the newest query, if the host knows it and it decides which op runs


class Descriptor:
    """One mask as ranges of keys, or as packed sequences; its tensors are int32 and on the device of the inputs.

    ``start`` (B,) and ``length`` (B,) are kv_start and kv_len of the ops, None where they would hide nothing that
    the layout does not. ``cu_seqlens`` (n + 1,) are the borders of packed sequences, all rows behind one another.
    """

    def __init__(
        self,
        layout: Layout,
        start: torch.Tensor | None = None,
        length: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        model: str | None = None,
    ) -> None:
        self.layout, self.start, self.length, self.cu_seqlens, self.model = layout, start, length, cu_seqlens, model

    @property
    def ndim(self) -> int:
        """Four, as the mask functions of transformers count, which hand on what is no mask of two axes."""
        return 4

    def contiguous(self) -> Descriptor:
        """What generate() asks of a mask that it makes before a forward."""
        return self

    def to(self, device: Any = None, *others: Any, non_blocking: bool = False, **more: Any) -> Descriptor:
        """The same mask on another device, where a model is spread over several. It has no dtype to change."""
        if others or more or not isinstance(device, (str, torch.device, int)):
            self._refuse("to")
        tensors = {"start": self.start, "length": self.length, "cu_seqlens": self.cu_seqlens}
        moved = {k: None if t is None else t.to(device, non_blocking=non_blocking) for k, t in tensors.items()}
        return Descriptor(self.layout, **moved, model=self.model)

    def beside(self, tensor: torch.Tensor) -> Descriptor:
        """The same mask on the device of ``tensor``: generate() moves tensors to the model, not masks it has made."""
        own = next((t for t in (self.length, self.start, self.cu_seqlens) if t is not None), tensor)
        return self if own.device == tensor.device else self.to(tensor.device)

    def __repr__(self) -> str:
        return f"Descriptor({self.layout}, start={self.start}, length={self.length}, cu_seqlens={self.cu_seqlens})"

    def __getattr__(self, name: str) -> NoReturn:
        """Called for what this class has not. Other names than a tensor's are looked up by tools, not by models."""
        if not name.startswith("_") and hasattr(torch.Tensor, name):
            self._refuse(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """torch calls this instead of ``function``, wherever in the arguments a descriptor stands."""
        given = [*args, *(kwargs or {}).values()]
        given += [part for a in given if isinstance(a, (list, tuple)) for part in a]
        found = next((a for a in given if isinstance(a, cls)), None)
        cls._refuse(found, getattr(function, "__name__", str(function)))

    def _refuse(self: Descriptor | None, what: str) -> NoReturn:
        model = (None if self is None else self.model) or "the model"
        if model in _REPLACED:
            way = "call attnkit_model(model) first, or choose attn_implementation='eager'"
        else:
            way = "choose attn_implementation='eager'"
        raise UnsupportedError(
            f"attnkit mask: {model} takes the mask for a tensor ({what}), to do arithmetic of its own with it;"
            " accepted: models whose attention goes through transformers' AttentionInterface with the mask untouched;"
            f" {way}"
        )


def _refusing(operator: str) -> Callable[..., NoReturn]:
    def refuse(self: Descriptor, *args: Any) -> NoReturn:
        self._refuse(operator)

    refuse.__name__ = operator
    return refuse


# Python looks operators up in the class, past __getattr__.
_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OTHERS = "eq ne lt le gt ge neg pos abs invert bool int float complex index len iter contains getitem setitem array"
for _name in (*_OTHERS.split(), *(f"{prefix}{name}" for name in _BINARY.split() for prefix in ("", "r", "i"))):
    setattr(Descriptor, f"__{_name}__", _refusing(f"__{_name}__"))
