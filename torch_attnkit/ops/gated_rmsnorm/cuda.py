"""gated_rmsnorm on Hopper and Blackwell: how a row is spread over threads, and the launch.

Device memory bounds it: y, z and out go once through the chip, w comes from the cache. A row of N elements is cut into
vectors of ``width`` elements, 16 bytes where N, the strides and the pointers allow it; a thread holds ``vectors`` of
them, so ``lanes = N / (width * vectors)`` threads, rounded up to a power of two, share a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

from torch_attnkit.core.op import Call
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

# Threads of a row by its vectors, rounded up to a power of two. H200, bf16, the best of up to nine spreads each:
# 262144 x 128 (16 vectors), 65536 x 2048 (256), 16384 x 4096 (512), 32768 x 8192 (1024).
_LANES = {64: 32, 128: 64, 256: 128, 512: 512, 1024: 256}
_SMALL = 32 << 20  # bytes of a call below which latency counts, not bandwidth


@dataclass(frozen=True)
class Config:
    """``vectors`` 0 means that the row does not fit into registers and is read twice."""

    width: int
    lanes: int
    vectors: int
    threads: int
    cluster: int
    once: bool  # tell the cache that the data will not be used again

    @property
    def rows(self) -> int:
        """Rows that a block works on side by side."""
        return self.threads // self.lanes


def configure(n: int, rows: int, width: int, nbytes: int, sms: int) -> Config:
    """The spread of one row, for the number of rows, the bytes of the call and the number of multiprocessors."""
    cells, once = -(-n // width), nbytes < _SMALL  # vectors of a row
    if cells <= 1024:
        most = 1 << (cells - 1).bit_length()
        widest = _LANES.get(most, most)
        # Half as many threads where fewer of them would have nothing to do.
        lanes = min((widest, max(1, widest // 2)), key=lambda x: x * -(-cells // x))
        # Small blocks spread few rows over more multiprocessors: 32 rows of 128, 1.4 us against 1.8.
        least = 128 if once else 512 if lanes <= 32 else 256
        threads = max(least, lanes)
        return Config(width, lanes, -(-cells // lanes), threads, 1, once)
    # H200, bf16: 32 rows of 16384 in clusters of 8 blocks of 256, 3.3 us against 3.4 of 4; 4096 rows, 107 of 4 against
    # 120 of 8; 1024 rows of 65536, 120 of 8 blocks of 256 against 127 of 8 and 156 of 4 blocks of 512.
    cluster = 8 if 4 * rows <= sms or cells > 4096 else 4
    lanes = 256 if cells <= 1024 * cluster else 512
    vectors = -(-cells // (lanes * cluster))
    if vectors > 4:
        return Config(width, 1024, 0, 1024, 1, once)
    return Config(width, lanes, vectors, lanes, cluster, once)


def merge_axes(sizes: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[list[int], list[list[int]]]:
    """The fewest axes that step through the same addresses in the same order, in every one of the tensors."""
    merged: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for size, *step in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if merged and all(s[-1] == t * size for s, t in zip(steps, step, strict=True)):
            merged[-1] *= size
            for s, t in zip(steps, step, strict=True):
                s[-1] = t
        else:
            merged.append(size)
            for s, t in zip(steps, step, strict=True):
                s.append(t)
    return (merged, steps) if merged else ([1], [[0] for _ in strides])


def build(call: Call, target: Target) -> Callable[..., None]:
    y, z, w, n = call.arg.y, call.arg.z, call.arg.w, call.dim["N"]
    sizes, (y_steps, z_steps) = merge_axes(call.batch, y.stride()[:-1], z.stride()[:-1])
    rows = 1
    for size in sizes:
        rows *= size
    if rows == 0:
        return lambda *args: None
    dtypes = (short(y.dtype), short(z.dtype), short(w.dtype))
    bytes_in_vector = 16 // z.element_size()
    steps = (n, *y_steps, *z_steps)
    widest = next(v for v in (8, 4, 2, 1) if v <= bytes_in_vector and all(s % v == 0 for s in steps))
    nbytes = rows * n * (y.element_size() + 2 * z.element_size())
    sms = driver.sm_count(call.device)

    def compiled(width: int) -> Callable[..., None]:
        config = configure(n, rows, width, nbytes, sms)
        even = n == config.width * config.lanes * config.vectors * config.cluster
        return compile.launcher(
            call, target, "cuda", dtypes=dtypes, rank=y.dim(), groups=len(sizes), config=astuple(config), even=even
        )

    wide, inner = compiled(widest), tuple(sizes)
    y_odd, z_odd, w_odd = (widest * t.element_size() - 1 for t in (y, z, w))  # the bits of no vector's address
    narrow: list[Callable[..., None]] = []

    def launch(y: Any, z: Any, w: Any, eps: float, out: Any) -> None:
        aligned = not (y.data_ptr() & y_odd | z.data_ptr() & z_odd | w.data_ptr() & w_odd)
        if not aligned and not narrow:
            narrow.append(compiled(1))
        run = wide if aligned else narrow[0]
        run(y, z, w, out, n, inner, tuple(y_steps), tuple(z_steps), eps, 1.0 / n)

    return launch
