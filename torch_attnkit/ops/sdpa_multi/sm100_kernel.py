"""Device side of sdpa_multi on Blackwell: flash_attention's, with queries that end where a sequence's keys do."""

from typing import Any

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.prefill_types import Outputs
from torch_attnkit.ops.flash_attention import sm100_kernel
from torch_attnkit.ops.merge_partials import cuda_kernel


def trace(arch: str, *, split: bool = False, **signature: Any) -> tuple[Any, list[Any]]:
    """What to compile. K and V come as (B, S, Hkv, D), whatever their strides.

    With ``split`` the outputs are those of shares of the keys, (shares * B, T, Hq, Dv) and (shares * B, T, Hq) in f32.
    """
    host, (ins, outs, *rest) = sm100_kernel.trace(arch, kv_len=True, at_end=True, split=split, **signature)
    if split:
        places, tokens, heads = (fake.dim32() for _ in range(3))
        outs = Outputs(
            fake.tensor("f32", (places, tokens, heads, signature["dim_v"]), (*(fake.dim(4) for _ in range(3)), 1)),
            fake.tensor("f32", (places, tokens, heads), align=4),
            None,
        )
    return host, [ins, outs, *rest]


def trace_merge(arch: str, **signature: Any) -> tuple[Any, list[Any]]:
    """What weighs the shares of the keys: merge_partials' kernel, by which the sinks come in, too."""
    return cuda_kernel.trace(arch, **signature)
