"""Models of the transformers library on the ops of this package.

Importing this module registers "attnkit" as an attention implementation (``attn_implementation="attnkit"``) with its
mask function, and as an experts implementation, and lets ``from_pretrained`` keep experts that were published as MXFP4
(GPT-OSS) or by NVIDIA's Model Optimizer as NVFP4 in their bytes. Nothing else of transformers changes what it computes.
``attnkit_model`` goes further and replaces modules of one loaded model, which ``model.attnkit_restore()`` takes back,
and ``shard_model`` shares it among processes.

Attention: any cache of transformers, left or right padding, packed sequences, sliding windows, sinks, softcap, beams,
``torch.compile`` over a static cache. DeepSeek-V4 needs ``attnkit_model``. What the ops cannot express raises
``torch_attnkit.UnsupportedError`` on every device, and says so: holes in the attention_mask, masks of four axes,
dropout, attention weights, and models that do arithmetic of their own with the mask instead of handing it to their
attention implementation (BLOOM, GPT-J, Falcon, MPT, RoFormer, DeepSeek-V3.2 and others).
"""

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from . import attention, continuous, experts, masks, modelopt, mxfp4, own_classes, swaps
from .experts import round_experts_to_fp4
from .parallel import shard_model
from .swaps import attnkit_model

__all__ = ["attnkit_model", "register", "round_experts_to_fp4", "shard_model"]


def register() -> None:
    """Make "attnkit" known to transformers. Runs at import; calling it again changes nothing."""
    AttentionInterface.register("attnkit", attention.attention)
    AttentionMaskInterface.register("attnkit", masks.mask)
    ALL_EXPERTS_FUNCTIONS.register("attnkit", experts.experts)
    PreTrainedModel.attnkit_restore = swaps.attnkit_restore
    continuous.register()
    own_classes.register()
    mxfp4.register()
    modelopt.register()


register()
