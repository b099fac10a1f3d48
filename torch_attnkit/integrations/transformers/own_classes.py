"""Models that look an attention class up by the name of the implementation, in a dictionary of their own.

They go past AttentionInterface, and of "attnkit" they know nothing but that the key is missing. An entry that refuses
says why. Some are encoders of images that stand beside a language model: that one alone can be set to "attnkit", and a
model that was built with another implementation keeps its encoder's class when it is set later.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, NoReturn

from torch_attnkit.core import UnsupportedError

_ALONE = "choose attn_implementation='eager'"
_BESIDE = "choose attn_implementation={'text_config': 'attnkit'} for the language model beside it, or 'eager'"
# module under transformers.models: its dictionary, and what a user can do
_DICTIONARIES = {
    "bark.modeling_bark": ("BARK_ATTENTION_CLASSES", _ALONE),
    "data2vec.modeling_data2vec_vision": ("DATA2VEC_VISION_SELF_ATTENTION_CLASSES", _ALONE),
    "deepseek_ocr2.modeling_deepseek_ocr2": ("DEEPSEEK_OCR2_SAM_VISION_ATTENTION_CLASSES", _BESIDE),
    "falcon.modeling_falcon": ("FALCON_ATTENTION_CLASSES", _ALONE),
    "git.modeling_git": ("GIT_SELF_ATTENTION_CLASSES", _ALONE),
    "gpt_neo.modeling_gpt_neo": ("GPT_NEO_ATTENTION_CLASSES", _ALONE),
    "gptj.modeling_gptj": ("GPTJ_ATTENTION_CLASSES", _ALONE),
    "sam.modeling_sam": ("SAM_VISION_ATTENTION_CLASSES", _BESIDE),
    "sam_hq.modeling_sam_hq": ("SAM_HQ_VISION_ATTENTION_CLASSES", _ALONE),
    "superglue.modeling_superglue": ("SUPERGLUE_SELF_ATTENTION_CLASSES", _ALONE),
    "unlimited_ocr.modeling_unlimited_ocr": ("UNLIMITED_OCR_SAM_VISION_ATTENTION_CLASSES", _BESIDE),
}


def register() -> None:
    """Give every dictionary an entry "attnkit" that refuses; a version of transformers may have lost some."""
    for module, (name, way) in _DICTIONARIES.items():
        found = getattr(importlib.import_module(f"transformers.models.{module}"), name, {})
        found.setdefault("attnkit", partial(_refuse, module.partition(".")[0], way))


def _refuse(model: str, way: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        f"attnkit attention: {model} chooses from attention classes of its own, past transformers' AttentionInterface;"
        f" accepted: models whose attention goes through it; {way}"
    )
