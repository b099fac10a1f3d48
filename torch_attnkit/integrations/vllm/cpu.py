"""vLLM's CPU platform takes its own backend whatever it is asked for; here it learns to take CUSTOM."""

from __future__ import annotations

from typing import Any


def accept_custom() -> None:
    """From now on ``--attention-backend CUSTOM`` means CUSTOM on a CPU too. Other choices stay vLLM's."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    own = CpuPlatform.get_attn_backend_cls
    if getattr(own, "accepts_custom", False):
        return

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        custom = AttentionBackendEnum.CUSTOM
        if selected_backend is not custom:
            return own(selected_backend, attn_selector_config, num_heads)
        # As the CUDA platform does.
        config = attn_selector_config._asdict()
        if reasons := custom.get_class().validate_configuration(device_capability=None, **config):
            raise ValueError(f"Selected backend {custom} is not valid for this configuration. Reason: {reasons}")
        return custom.get_path()

    get_attn_backend_cls.accepts_custom = True  # type: ignore[attr-defined]
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
