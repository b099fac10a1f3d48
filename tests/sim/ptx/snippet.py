"""Runs a few lines of PTX on arrays, for instruction tests.

    run("ld.global.u32 %a, [%in0]; ...", x, y)

The body becomes the body of a kernel with one .u64 parameter an array; ``%in0``, ``%in1``, ... hold their addresses.
There are besides: ``%tid`` (u32, the thread's index in the block), ``%p0``-``%p15``, ``%h0``-``%h31`` (b16),
``%r0``-``%r63`` (b32), ``%d0``-``%d31`` (b64), ``%q0``-``%q3`` (b128). ``smem`` is the dynamic shared memory.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from torch_attnkit.sim import _ptx

HEADER = """
.version 9.0
.target {target}
.address_size 64
{module}
.extern .shared .align 1024 .b8 smem[];
.visible .entry snippet({params})
{{
  .reg .pred %p<16>;
  .reg .b16 %h<32>;
  .reg .b32 %r<64>;
  .reg .b64 %d<32>;
  .reg .b128 %q<4>;
  .reg .b32 %tid;
  .reg .b64 %in<{arrays}>;
{loads}
  mov.u32 %tid, %tid.x;
{body}
  ret;
}}
"""


def aligned(shape: int | tuple[int, ...], dtype: Any, to: int = 1024) -> np.ndarray:
    """Zeros at an address that is a multiple of ``to`` bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + to, np.uint8)
    return raw[-raw.ctypes.data % to :][:size].view(dtype).reshape(shape)


def kernel(body: str, arrays: int, *, target: str = "sm_100a", module: str = "") -> str:
    """The PTX module around a body."""
    params = ", ".join(f".param .u64 p{i}" for i in range(arrays))
    loads = "\n".join(f"  ld.param.u64 %in{i}, [p{i}];" for i in range(arrays))
    return HEADER.format(target=target, module=module, params=params, arrays=max(arrays, 1), loads=loads, body=body)


def run(
    body: str,
    *arrays: np.ndarray,
    grid: int | tuple[int, ...] = 1,
    block: int | tuple[int, ...] = 32,
    cluster: int | tuple[int, ...] = 1,
    shared: int = 0,
    target: str = "sm_100a",
    module: str = "",
    **options: Any,
) -> Any:
    """Launches the body; arrays are changed in place. ``shared``: bytes of dynamic shared memory."""
    size = lambda v: (v,) if isinstance(v, int) else tuple(v)
    ranges = []
    for i, a in enumerate(arrays):
        assert a.flags.c_contiguous, f"array {i} is not contiguous"
        ranges.append((a.ctypes.data, a.ctypes.data + a.nbytes, bool(a.flags.writeable), f"in{i}"))
    params = b"".join(struct.pack("<Q", a.ctypes.data) for a in arrays)
    k = _ptx.Module(kernel(body, len(arrays), target=target, module=module)).kernel("snippet")
    options.setdefault("threads", 1)
    options.setdefault("limit", 10_000_000)
    return k.launch(
        grid=size(grid),
        block=size(block),
        cluster=size(cluster),
        dynamic_shared=shared,
        params=params,
        ranges=ranges,
        **options,
    )


def per_lane(instruction: str, *inputs: np.ndarray, out: Any, lanes: int = 32, **options: Any) -> np.ndarray:
    """One instruction on every element of equally long inputs; ``{d}``, ``{0}``, ``{1}``, ... stand for its registers.

    Registers are as wide as the elements (16, 32 or 64 bits; bytes travel in 16). ``out``: the dtype of the result.
    """
    n = len(inputs[0])
    bank = {1: ("h", "b8"), 2: ("h", "b16"), 4: ("r", "b32"), 8: ("d", "b64")}
    result = np.zeros(-(-n // lanes) * lanes, out)
    padded = [np.concatenate([x, np.zeros(len(result) - n, x.dtype)]) for x in inputs]
    body, names = [], []
    for i, x in enumerate([result, *padded]):
        letter, kind = bank[x.dtype.itemsize]
        names.append(f"%{letter}{8 + i}")
        body += [f"mad.wide.u32 %d{20 + i}, %r1, {x.dtype.itemsize}, %in{i};"]
        if i:
            body += [f"ld.global.{kind} {names[i]}, [%d{20 + i}];"]
    letter, kind = bank[result.dtype.itemsize]
    body += [instruction.format(*names[1:], d=names[0]) + ";", f"st.global.{kind} [%d20], {names[0]};"]
    head = [f"mov.u32 %r0, %ctaid.x;\nmad.lo.u32 %r1, %r0, {lanes}, %tid;"]
    run("\n".join(head + body), result, *padded, grid=len(result) // lanes, block=lanes, **options)
    return result[:n]
