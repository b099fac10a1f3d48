"""What a call runs on: a device's architecture, or the same architecture simulated on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from . import config, invariance, native, runtimes
from .errors import UnsupportedError

# What a row of the table says it runs on, a device or one of its architectures, and which these are.
NVIDIA = ("sm80", "sm89", "sm90", "sm100", "sm120")
WHERE = {
    "cpu": ("cpu",),
    "mps": ("metal",),
    "cuda": NVIDIA,
    **{arch: (arch,) for arch in NVIDIA},
}
SIMULATED = ("metal", *NVIDIA)
# Compute capability to arch. 10.x are B200 and B300; 12.x, GeForce RTX 50, RTX PRO and DGX Spark, has no tensor memory.
_CAPABILITY = {
    (8, 0): "sm80", (8, 6): "sm80", (8, 9): "sm89", (9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm100",
    (12, 0): "sm120", (12, 1): "sm120",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """An architecture, on hardware or simulated; ``built_for`` that of the GPU, where kernels of another run on it."""

    arch: str
    simulated: bool = False
    built_for: str = ""

    def __str__(self) -> str:
        where = f"{self.arch} built for {self.built_for}" if self.built_for else self.arch
        return f"{where} (simulated)" if self.simulated else where


_ON_GPU = config.arch_on_gpu(SIMULATED)  # by the environment
_active: ContextVar[str | None] = ContextVar("attnkit_simulated_arch", default=config.simulated_arch(SIMULATED))
simulated_arch = _active.get
if simulated_arch() is not None:  # by the environment
    native.setting_matters()


@contextlib.contextmanager
def simulate(arch: str) -> Iterator[Target]:
    """Run the kernels of ``arch`` on CPU tensors, through its simulator, inside this block.

    The choice belongs to the current thread and asyncio task; other threads are not affected, and blocks nest.
    Raises ValueError for an arch that is not one of metal, sm80, sm89, sm90, sm100, sm120, UnsupportedError if its
    simulator is missing.
    """
    if arch not in SIMULATED:
        raise ValueError(f"simulate: got {arch!r}, accepted: {', '.join(SIMULATED)}")
    runtimes.require_simulator(arch)
    native.setting_matters()
    token = _active.set(arch)
    try:
        yield Target(arch, simulated=True)
    finally:
        _active.reset(token)


def setting() -> str | None:
    """What decides on a plan beside a call's arguments: the simulated arch, and whether it may look at the batch."""
    arch = _active.get()
    return f"{arch or ''} batch_invariant" if invariance.is_on() else arch


def target_of(device: torch.device) -> Target:
    """The target of tensors on ``device``; a CPU tensor inside ``simulate(arch)`` belongs to that arch."""
    if device.type == "cpu":
        arch = _active.get()
        if arch is None:
            return Target("cpu")
        runtimes.require_simulator(arch)  # simulate() has checked already, ATTNKIT_TARGET has not
        return Target(arch, simulated=True)
    if device.type == "mps":
        return Target("metal")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) in _CAPABILITY:
            own = _CAPABILITY[major, minor]
            return Target(own) if _ON_GPU in (None, own) else Target(_ON_GPU, built_for=own)
        have = ", ".join(f"{m}.{n} ({a})" for (m, n), a in _CAPABILITY.items())
        name = torch.cuda.get_device_name(device)
        raise UnsupportedError(f"{name} has compute capability {major}.{minor}; there are kernels for {have}")
    raise UnsupportedError(f"device {device.type!r}: accepted are cpu, mps and cuda")
