"""vLLM on the ops of this package: a plugin that makes an attention backend and experts known to it.

``pip install torch_attnkit`` beside vLLM is all: the entry point ``vllm.general_plugins`` has every process of vLLM
call ``register``. ``--attention-backend CUSTOM`` then asks for attention by ``sdpa_decode_paged`` and
``flash_attention_paged``, in models with latent attention (MLA) ``flash_attention_varlen``, over views of vLLM's own
cache, and ``--quantization attnkit_mxfp4`` for the experts of GPT-OSS by ``fp4_moe``. Who asks for nothing gets what
vLLM would have taken anyway.

vLLM promises no stability of these interfaces: the plugin registers itself where all that it is written against is
there (``interfaces.py``), and else says what is missing and registers nothing. What MLA needs besides is asked for with
the first model that has it.
Source: vLLM's documentation of plugins, ``vllm/v1/attention/backend.py`` of 0.32.
"""

from __future__ import annotations

import logging

from torch_attnkit.core import set_batch_invariant

BACKEND = "torch_attnkit.integrations.vllm.choice.Backend"
logger = logging.getLogger("vllm.torch_attnkit")  # below vLLM's own, whose handlers print it


def register() -> None:
    """Make the backend known to vLLM as CUSTOM, and ``quantization.NAME``. vLLM calls it in each of its processes.

    With ``VLLM_BATCH_INVARIANT=1`` the ops of the process are ``batch_invariant``, too. Calling it again changes
    nothing. Warns and does nothing where vLLM lacks what is needed, and where another plugin has taken CUSTOM: whoever
    starts vLLM may not have asked for us.
    """
    if (word := unfit()) is not None:
        logger.warning("torch_attnkit: nothing is registered with vLLM: %s", word)
        return
    try:
        from vllm import envs
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        from . import cpu, quantization
    except ImportError as error:
        logger.warning("torch_attnkit: nothing is registered with vLLM: %s", error)
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        logger.warning("torch_attnkit: nothing is registered with vLLM: CUSTOM is already %s", custom.get_path())
        return
    if envs.VLLM_BATCH_INVARIANT:
        set_batch_invariant(True)
    register_backend(custom, BACKEND)
    quantization.register()
    if current_platform.is_cpu():
        cpu.accept_custom()


def unfit() -> str | None:
    """Why the plugin is not for the vLLM that is installed; None where it is."""
    try:
        import vllm
    except ImportError as error:
        return f"vLLM cannot be imported: {error}"
    from . import interfaces

    version = getattr(vllm, "__version__", "of no version")
    if lacking := list(interfaces.missing()):
        ran = ", ".join(interfaces.RAN)
        return f"vLLM {version} lacks what the plugin is written against (it ran in {ran}): {'; '.join(lacking)}"
    if not any(version == ran or version.startswith(f"{ran}.") for ran in interfaces.RAN):
        logger.info(
            "torch_attnkit: vLLM %s has the interfaces of %s, but no run of it is known", version, interfaces.RAN
        )
    return None
