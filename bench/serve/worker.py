"""What vLLM's workers get from ``bench.serve``: each of them imports this module for ``Extension``.

With it comes the loader ``drawn_by_name``, whose weights are those of ``models``, and this package's plugin where a
case is ours: a tree on the path alone has no metadata that vLLM would find it by.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from . import load

_OF_CACHE = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")  # parameters that checkpoints need not have


def plug_in(run: load.Run) -> None:
    """Register the plugin with vLLM, if the case is ours. Raises RuntimeError where it is for another vLLM."""
    if not load.CASES[run.case].ours:
        return
    from torch_attnkit.integrations import vllm as plugin

    if (word := plugin.unfit()) is not None:
        raise RuntimeError(f"{run.case}: the plugin is not for this vLLM: {word}")
    plugin.register()


@register_model_loader("drawn_by_name")
class Generated(BaseModelLoader):
    """``model_loader_extra_config`` holds the run as text."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.run = load.Run.of(load_config.model_loader_extra_config["run"])
        plug_in(self.run)

    def download_model(self, model_config: Any) -> None:
        """Nothing is to be fetched."""

    @torch.no_grad()
    def load_weights(self, model: Any, model_config: Any) -> None:
        parameters = dict(model.named_parameters())
        device = next(iter(parameters.values())).device
        loaded = model.load_weights(self.run.served.checkpoint(device, packed=self.run.packed))
        if missing := [name for name in parameters if name not in loaded and not name.endswith(_OF_CACHE)]:
            raise RuntimeError(f"vLLM's {type(model).__name__} took no weights for {', '.join(missing[:5])}")


class Extension:
    """Methods of a worker."""

    def chosen(self) -> dict[str, list[str]]:
        """What its layers run on: attention backends, and methods of experts."""
        attention, experts = set(), set()
        for module in self.get_model().modules():  # type: ignore[attr-defined]
            if hasattr(module, "attn_backend"):
                attention.add(module.attn_backend.get_name())
            method = getattr(module, "quant_method", None)
            if "MoE" in type(method).__name__ or "Expert" in type(method).__name__:
                named = (getattr(method, f"{form}_backend", None) for form in ("mxfp4", "nvfp4"))
                theirs = type(method).__module__.startswith("vllm.")  # ours run none of vLLM's kernels
                kernel = next((found.name for found in named if found is not None and theirs), "")
                experts.add(f"{type(method).__name__} {kernel}".strip())
        return {"attention": sorted(attention), "experts": sorted(experts)}
