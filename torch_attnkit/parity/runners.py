"""Where parity can run here: the devices that torch sees, and the simulators of this installation."""

from __future__ import annotations

import contextlib
import multiprocessing
import platform
from dataclasses import dataclass

import torch

from torch_attnkit.core import Target, UnsupportedError, runtimes
from torch_attnkit.core.target import NVIDIA, SIMULATED, target_of
from torch_attnkit.sim.metal import settings as metal_settings
from torch_attnkit.sim.ptx import settings as ptx_settings

SCHEDULES = 4  # of the PTX simulator: the plain one and three hostile ones, which cases use cyclically
_CHECKED = {  # what a simulator finds besides a wrong result
    "metal": "bounds, alignment, races, uninitialised reads, divergent barriers and collectives",
    **dict.fromkeys(
        NVIDIA, "bounds, alignment, races, uninitialised reads, barrier misuse, under four schedules in turn"
    ),
}


@dataclass(frozen=True)
class Runner:
    """A device to run cases on: torch's name of it, what people call it, and its target."""

    device: str
    label: str
    target: Target

    def __str__(self) -> str:
        return str(self.target) if self.target.simulated else f"{self.target} on {self.label}"

    @property
    def evidence(self) -> str:
        """The device's name in evidence: one for all processors of a kind."""
        return f"CPU {platform.machine()}" if self.target.arch == "cpu" else self.label

    @property
    def checked(self) -> str:
        return _CHECKED[self.target.arch] if self.target.simulated else ""

    def watching(self, schedule: int = 0) -> contextlib.AbstractContextManager[object]:
        """A block in which a simulator finds all it can, under one of its schedules; on hardware an empty one."""
        if not self.target.simulated:
            return contextlib.nullcontext()
        if self.target.arch == "metal":
            return metal_settings(mode="checked", strict=True)
        # One of several processes has a core to itself; a simulator alone takes all.
        several = multiprocessing.parent_process() is not None
        return ptx_settings(check=True, seed=schedule % SCHEDULES, threads=int(several))


def devices() -> list[tuple[str, str, str]]:
    """(device, name, arch or the reason why there is none) of everything torch sees here."""
    found = [("cpu", platform.processor() or platform.machine(), "cpu")]
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + ["mps"] * torch.backends.mps.is_available()
    for name in names:
        label = torch.cuda.get_device_name(name) if name != "mps" else platform.processor()
        try:
            target = target_of(torch.device(name))
        except UnsupportedError as error:
            found.append((name, label, str(error)))
        else:
            found.append((name, f"{label} built as {target.arch}" if target.built_for else label, target.arch))
    return found


def simulators() -> dict[str, str]:
    """Every arch that can be simulated, with an empty word if it can be here, else what is missing."""
    found = {}
    for arch in SIMULATED:
        try:
            runtimes.require_simulator(arch)
        except UnsupportedError as error:
            found[arch] = str(error)
        else:
            found[arch] = ""
    return found


def here(archs: tuple[str, ...]) -> list[Runner]:
    """The runners for these archs, hardware first; of several GPUs of a kind the first."""
    runners: dict[Target, Runner] = {}
    for device, label, arch in devices():
        if arch in archs:
            target = Target(arch) if device == "cpu" else target_of(torch.device(device))
            runners.setdefault(target, Runner(device.split(":")[0], label, target))
    for arch, missing in simulators().items():
        if arch in archs and not missing:
            target = Target(arch, simulated=True)
            runners[target] = Runner("cpu", arch, target)
    return list(runners.values())
