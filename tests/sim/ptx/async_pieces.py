"""PTX that the tests of asynchronous operations have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

# %r0: thread, %p0: thread 0. mb: eight mbarriers. data: 32 KB at the swizzle's widest alignment.
HEAD = """
.shared .align 1024 .b8 data[32768];
.shared .align 16 .b64 mb[8];
mov.u32 %r0, %tid.x;
setp.eq.u32 %p0, %r0, 0;
"""

INIT = """
@%p0 mbarrier.init.shared::cta.b64 [mb], 1;
@%p0 fence.mbarrier_init.release.cluster;
bar.sync 0;
"""

CLUSTER = """
barrier.cluster.arrive;
barrier.cluster.wait;
"""


def expect(nbytes: int) -> str:
    return f"@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [mb], {nbytes};\n"


def wait(label: str, parity: int = 0) -> str:
    return f"""
        {label}: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p6, [mb], {parity};
        @!%p6 bra {label};
        """


def move(label: str, nbytes: int, glob: str, *, out: bool, offset: int = 0) -> str:
    """All threads copy ``nbytes`` between data + offset and global memory at ``glob``."""
    body = (
        "ld.shared.u32 %r23, [%r22]; st.global.u32 [%d14], %r23;"
        if out
        else "ld.global.u32 %r23, [%d14]; st.shared.u32 [%r22], %r23;"
    )
    return f"""
        mov.u32 %r20, %r0;
        {label}: setp.ge.u32 %p7, %r20, {nbytes // 4};
        @%p7 bra {label}_END;
        shl.b32 %r21, %r20, 2;
        mov.u32 %r22, data;
        add.u32 %r22, %r22, %r21;
        add.u32 %r22, %r22, {offset};
        mad.wide.u32 %d14, %r20, 4, {glob};
        {body}
        mov.u32 %r24, %ntid.x;
        add.u32 %r20, %r20, %r24;
        bra {label};
        {label}_END:
        bar.sync 0;
        """


def aligned(shape: int | tuple[int, ...], dtype: Any = np.uint8, fill: Any = 0, align: int = 128) -> np.ndarray:
    """An array whose first byte is at a multiple of ``align``, with memory of nobody's around it."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.zeros(size + 2 * align, np.uint8)
    start = -buffer.ctypes.data % align
    out: np.ndarray = buffer[start : start + size].view(dtype).reshape(shape)
    out[...] = fill
    return out
