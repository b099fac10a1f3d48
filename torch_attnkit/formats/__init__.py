"""The bit formats of the package, defined in plain torch.

Every function here states, bit for bit, what a kernel that reads or writes the format has to do.
Nothing reads tensor data on the host and no shape depends on data, so the functions also trace and
compile.

Floating inputs may be float64, float32, float16 or bfloat16. The arithmetic runs in float32, or in
float64 for float64 inputs; bytes are uint8.

- `e2m1`: the 4-bit element and its packing, two to a byte.
- `fp8`: E4M3 elements, UE8M0 scales, and blocks of the first under the second (MXFP8, cache rows).
- `nvfp4`, `mxfp4`: blocks of E2M1 under E4M3 (16 elements) and UE8M0 (32 elements) scales.
- `scale_layout`: block scales in the byte order of block-scaled tensor cores ("128x4").
- `kv_cache`: rows of a key-value cache with quantised NoPE channels and bfloat16 RoPE channels.
- `rope`: rotary embedding of part of a head, forward and inverse.
"""

from __future__ import annotations

from . import blocks, e2m1, fp8, kv_cache, mxfp4, nvfp4, rope, scale_layout

__all__ = ["blocks", "e2m1", "fp8", "kv_cache", "mxfp4", "nvfp4", "rope", "scale_layout"]
