"""The mask function "attnkit" and its descriptor: what they say, what they refuse, and that nobody misreads them."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.transformers import masks
from torch_attnkit.integrations.transformers.attention import attention


def test_a_descriptor_moves_to_another_device():
    """As a model that is spread over several does with it."""
    mask = masks.mask(2, 3, 9, q_offset=torch.tensor(4), attention_mask=torch.tensor([[1] * 7, [0] + [1] * 6]))
    for device in ("meta", torch.device("meta")):
        moved = mask.to(device, non_blocking=True)
        assert moved.layout == mask.layout and moved.model == mask.model
        assert moved.start.device.type == moved.length.device.type == "meta"


def test_a_descriptor_follows_the_tensors_that_it_is_for():
    """generate() makes the mask of a static cache where the ids are and moves nothing but tensors to the model."""
    q, k = torch.empty(2, 4, 1, 8, device="meta"), torch.empty(2, 2, 9, 8, device="meta")
    mask = masks.mask(2, 1, 9, q_offset=torch.tensor(4), attention_mask=torch.tensor([[1] * 5, [0] + [1] * 4]))
    assert mask.start.device.type == "cpu" and mask.beside(mask.start) is mask
    out = attention(SimpleNamespace(is_causal=True), q, k, k, mask)[0]
    assert out.device.type == "meta" and out.shape == (2, 1, 4, 8)


def test_a_decode_step_depends_on_no_number_of_the_host():
    """Else every step of a window that is filling up would be compiled anew."""
    assert masks.mask(2, 1, 8, q_offset=4).layout == masks.mask(2, 1, 8, q_offset=5).layout


def test_a_mask_that_hides_nothing_has_no_tensors():
    both = transformers.masking_utils.bidirectional_mask_function
    for kwargs in (
        {},
        dict(attention_mask=torch.ones(2, 3)),
        dict(mask_function=both, attention_mask=torch.ones(2, 3)),
    ):
        mask = masks.mask(2, 3, 3, **kwargs)
        assert mask.start is None and mask.length is None and mask.cu_seqlens is None
    assert masks.mask(2, 1, 3, q_offset=2).length.tolist() == [3, 3]


def test_a_row_of_padding_alone_starts_behind_it():
    """A chunk of a left-padded prompt may hold one; from 0 on its padding would see padding."""
    both = transformers.masking_utils.bidirectional_mask_function
    hidden = torch.tensor([[1, 1, 1], [0, 0, 0], [0, 0, 1]])
    assert masks.mask(3, 3, 3, attention_mask=hidden).start.tolist() == [0, 3, 2]
    mask = masks.mask(3, 3, 3, attention_mask=hidden, mask_function=both)
    assert (mask.start.tolist(), mask.length.tolist()) == ([0, 3, 2], [3, 3, 3])


def test_a_mask_of_three_axes_is_refused():
    with pytest.raises(ValueError, match="attention_mask has 3 axes, accepted: 2"):
        masks.mask(1, 4, 4, attention_mask=torch.ones(1, 4, 4))


@pytest.mark.parametrize("joined", ["or_masks", "and_masks"])
def test_an_addition_to_the_mask_is_refused_by_name(joined):
    utils = transformers.masking_utils
    function = getattr(utils, joined)(utils.causal_mask_function, lambda b, h, q, k: k < 3)
    with pytest.raises(UnsupportedError, match=rf"the pattern {joined}\.<locals>\.\w+ is not supported"):
        masks.mask(1, 4, 4, mask_function=function)


def test_chunks_of_a_prompt_are_packed_sequences_and_a_decode_step_begins_at_its_own():
    """Two rows, the second behind three tokens of padding, which are in chunks that no valid token is in."""
    padding = torch.tensor([0, 3])
    function = transformers.masking_utils.chunked_causal_mask_function(4, padding)
    found = masks.mask(2, 10, 10, mask_function=function)
    assert found.layout.causal and found.cu_seqlens.tolist() == [0, 4, 8, 10, 13, 17, 20]
    for position, starts in ((8, [8, 7]), (10, [8, 7]), (11, [8, 11]), (12, [12, 11])):
        step = masks.mask(2, 1, position + 1, q_offset=position, mask_function=function)
        assert step.start.tolist() == starts and step.length.tolist() == [position + 1] * 2
        behind = masks.mask(2, 1, 5, q_offset=position, kv_offset=position - 4, mask_function=function)
        assert behind.start.tolist() == [start - (position - 4) for start in starts]
    assert masks.mask(2, 3, 4, q_offset=1, mask_function=function).cu_seqlens is None  # inside the first chunk
    with pytest.raises(UnsupportedError, match="3 queries behind a cache, in chunks of 4 .* accepted: a prompt"):
        masks.mask(2, 3, 5, q_offset=2, mask_function=function)


# The descriptor in the hands of others.


FOREIGN = {
    "add": lambda m, x: x + m,
    "radd": lambda m, x: m + x,
    "iadd": lambda m, x: x.__iadd__(m),
    "add_": lambda m, x: x.add_(m),
    "float": lambda m, x: 1.0 - m,
    "compare": lambda m, x: m == 0,
    "greater": lambda m, x: x > m,
    "not": lambda m, x: ~m,
    "truth": lambda m, x: bool(m),
    "slice": lambda m, x: m[:, :, :, :3],
    "newaxis": lambda m, x: m[:, None],
    "as an index": lambda m, x: x[m],
    "assigned": lambda m, x: x.__setitem__(m, 0),
    "len": lambda m, x: len(m),
    "iterated": lambda m, x: list(m),
    "where": lambda m, x: torch.where(m, x, 0),
    "cat": lambda m, x: torch.cat([x, m]),
    "fill": lambda m, x: x.masked_fill(m, 0),
    "baddbmm": lambda m, x: torch.baddbmm(m, x, x),
    "to": lambda m, x: m.to(x.dtype),
    "to by name": lambda m, x: m.to(dtype=x.dtype),
    "type_as": lambda m, x: m.type_as(x),
    "bool": lambda m, x: m.bool(),
    "shape": lambda m, x: m.shape,
    "size": lambda m, x: m.size(),
    "dim": lambda m, x: m.dim(),
    "dtype": lambda m, x: m.dtype,
    "device": lambda m, x: m.device,
    "view": lambda m, x: m.view(2, -1),
    "expand": lambda m, x: m.expand(2, 4, 3, 3),
    "unsqueeze": lambda m, x: m.unsqueeze(1),
    "sum": lambda m, x: torch.sum(m),
    "sdpa": lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=m),
    "numpy": lambda m, x: np.asarray(m),
    "tensor": lambda m, x: torch.as_tensor(m),
}


@pytest.mark.parametrize("use", FOREIGN)
def test_a_mask_that_is_taken_for_a_tensor_says_so_and_names_the_model(use):
    config = SimpleNamespace(model_type="bloom")
    for hidden in (None, torch.tensor([[1, 1, 1], [0, 1, 1]])):  # where nothing is hidden, others would give None
        mask = masks.mask(2, 3, 3, attention_mask=hidden, config=config)
        with pytest.raises(UnsupportedError, match=r"bloom takes the mask for a tensor \(.*'eager'$"):
            FOREIGN[use](mask, torch.ones(2, 3, 3))


def test_a_compiled_model_may_not_take_it_for_a_tensor_either():
    torch._dynamo.reset()
    foreign = torch.compile(lambda x: x + masks.mask(2, 3, 3, allow_is_causal_skip=True), backend="eager")
    with pytest.raises(UnsupportedError, match="takes the mask for a tensor"):
        foreign(torch.ones(2, 3, 3))


def test_a_mask_can_be_printed_copied_and_pickled():
    mask = masks.mask(2, 3, 3, attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]))
    assert "causal=True" in repr(mask)
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other.layout == mask.layout and other.start.tolist() == [0, 1]
