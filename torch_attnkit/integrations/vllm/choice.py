"""What CUSTOM is: vLLM looks for ``choice.Backend`` whenever it resolves that name, with its configuration at hand.

One name serves both kinds of attention. vLLM would register another name, too, but its configuration could not be sent
to a process that has not loaded plugins, nor be made before they are loaded.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``Backend``: the one for latent attention where the model has it, else the ordinary one.

    Raises:
        ImportError: vLLM lacks what the backend is written against.
    """
    if name != "Backend":
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None and config.model_config.use_mla:
        from .mla import LatentBackend

        return LatentBackend
    from .backend import AttnkitBackend

    return AttnkitBackend
