"""Language models that look an attention class up by the name of the implementation, in a dictionary of their own.

They go past AttentionInterface, and of "attnkit" they know nothing but that the key is missing. An entry that refuses
says why. Encoders of images with such a dictionary raise the KeyError.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, NoReturn

from torch_attnkit.core import UnsupportedError

_DICTIONARIES = {
    "bark": "BARK_ATTENTION_CLASSES",
    "falcon": "FALCON_ATTENTION_CLASSES",
    "git": "GIT_SELF_ATTENTION_CLASSES",
    "gpt_neo": "GPT_NEO_ATTENTION_CLASSES",
    "gptj": "GPTJ_ATTENTION_CLASSES",
}


def register() -> None:
    """Give every dictionary an entry "attnkit" that refuses; a version of transformers may have lost some."""
    for model, name in _DICTIONARIES.items():
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        getattr(module, name, {}).setdefault("attnkit", partial(_refuse, model))


def _refuse(model: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        f"attnkit attention: {model} chooses from attention classes of its own, past transformers' AttentionInterface;"
        " accepted: models whose attention goes through it; choose attn_implementation='eager' or 'sdpa'"
    )
