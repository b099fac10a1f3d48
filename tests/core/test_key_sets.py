"""Which calls the short cut of the Autograd key takes: those whose key set is the backend's and its Autograd key's."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.core import dispatch

NAME = "attnkit_key_sets"


@pytest.fixture(scope="module")
def keys():
    """An op that, like ours, gets its key set at the Autograd key; calling it tells whether that is a plain one."""
    seen: list[bool] = []

    def look(key_set, x, y=None):
        seen.append(key_set.raw_repr() in dispatch._PLAIN)
        return x

    library = torch.library.Library(NAME, "DEF")
    library.define("look(Tensor x, Tensor? y=None) -> Tensor")
    for device in dispatch._DEVICES:
        library.impl("look", look, f"Autograd{device}", with_keyset=True)

    def plain(*args) -> bool:
        getattr(torch.ops, NAME).look(*args)
        return seen.pop()

    yield plain
    library._destroy()


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_plain_tensors_take_the_short_cut_in_every_mode(keys, device):
    if device != "cpu" and not getattr(torch, device).is_available():
        pytest.skip(f"no {device} device")
    x = torch.ones(2, device=device)
    for tensor in (x, torch.nn.Parameter(x), x.t(), x.clone().requires_grad_()):
        assert keys(tensor) and keys(tensor, tensor)
    with torch.no_grad():
        assert keys(x)
    with torch.autocast(device, torch.bfloat16 if device == "cpu" else torch.float16):
        assert keys(x)
    with torch.inference_mode():
        inside = torch.ones(2, device=device)
    assert keys(x, inside)


def test_other_tensors_do_not(keys):
    x = torch.ones(2)
    negated, zero = torch._neg_view(x), torch._efficientzerotensor(2)
    complex_view = torch.ones(2, dtype=torch.complex64).conj()
    for tensor in (negated, zero, complex_view, x.to_sparse()):
        assert not keys(tensor)
        assert not keys(x, tensor)
