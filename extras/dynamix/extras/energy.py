"""Energy counters: a rank's GPU by NVML, or its machine's processors by RAPL's files in /sys/class/powercap.

A rank on a GPU counts that GPU (as Zeus does), one on the CPU all packages of its machine with their memory, also for
what other programs do there. We read RAPL's files ourselves: the RAPL of zeus-ml 0.11 starts a process per counter.
"""

import importlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dynamix.trainer.measurement.energy import EnergyError
from dynamix.trainer.measurement.sockets import boot_id

MOST_WATTS = 600.0
"""More than any package draws, or its memory: between two readings so far apart that this power could fill a counter,
it may have wrapped more than once. Common counters hold 262 kJ: seven minutes."""

_UJ_PER_J = 1e6
_MJ_PER_J = 1e3


class GpuCounter:
    """The energy counter of one GPU (NVIDIA, Volta or later)."""

    def __init__(self, uuid: str, nvml: Any) -> None:
        """`nvml` is the module `pynvml`.

        Raises:
            EnergyError: when the GPU has no such counter, or NVML does not find it.
        """
        self.source = f"GPU {uuid}"
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            raise EnergyError(f"NVML does not find {self.source}: {error}") from error
        self._before_mj = self._read_mj()

    def take_j(self) -> float:
        """Joules since the last call."""
        before, self._before_mj = self._before_mj, self._read_mj()
        if self._before_mj < before:
            raise EnergyError(f"the energy counter of {self.source} was set back: its driver was loaded again")
        return (self._before_mj - before) / _MJ_PER_J

    def _read_mj(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError as error:
            raise EnergyError(
                f"NVML does not read the energy of {self.source}: {error}; it needs a whole GPU, Volta or later"
            ) from error


class _ZoneReading(NamedTuple):
    uj: int
    time_s: float


class _Zone:
    """A counter of RAPL, in microjoules, that wraps around to 0."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._file = folder / "energy_uj"
        self._clock = clock
        self._range_uj = _whole_number(folder / "max_energy_range_uj")
        self._before = self._read()

    def take_j(self) -> float:
        """Joules since the last call."""
        before, self._before = self._before, self._read()
        most_s, waited_s = self._range_uj / _UJ_PER_J / MOST_WATTS, self._before.time_s - before.time_s
        if waited_s > most_s:
            raise EnergyError(
                f"{self._file} was not read for {waited_s:.0f} s and may have wrapped twice: make windows shorter than "
                f"{most_s:.0f} s, by window_steps, and evaluations between them as well"
            )
        spent_uj = self._before.uj - before.uj
        return (spent_uj if spent_uj >= 0 else spent_uj + self._range_uj) / _UJ_PER_J

    def _read(self) -> _ZoneReading:
        return _ZoneReading(_whole_number(self._file), self._clock())


class PackageCounter:
    """All processor packages of this machine, with their memory.

    `psys`, where there is one, counts the packages once more and is left out, as is RAPL over MMIO (`intel-rapl-mmio`).
    """

    def __init__(self, powercap: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`powercap` is the folder of the packages.

        Raises:
            EnergyError: when there are none, or they cannot be read.
        """
        self.source = f"processors of machine {boot_id()}"
        self._zones = [_Zone(folder, clock) for folder in _zones(powercap)]
        if not self._zones:
            raise EnergyError(
                f"{powercap} has no RAPL package: virtual machines hide them, and so do containers, where you mount "
                "the host's /sys/devices/virtual/powercap/intel-rapl read-only and name it in DYNAMIX_TRAINER_POWERCAP"
            )

    def take_j(self) -> float:
        """Joules since the last call."""
        taken = [_taken(zone) for zone in self._zones]  # all of them: the next window begins here for each
        for each in taken:
            if isinstance(each, EnergyError):
                raise each
        return math.fsum(each for each in taken if not isinstance(each, EnergyError))


def _taken(zone: _Zone) -> float | EnergyError:
    try:
        return zone.take_j()
    except EnergyError as error:
        return error


def _zones(powercap: Path) -> Iterator[Path]:
    for package in sorted(powercap.glob("intel-rapl:*")):
        if package.name.count(":") == 1 and _text(package / "name").startswith("package"):
            yield package
            yield from (each for each in sorted(package.glob("intel-rapl:*:*")) if _text(each / "name") == "dram")


def _whole_number(file: Path) -> int:
    text = _text(file)
    if not text.isdecimal():
        raise EnergyError(f"{file} holds {text[:40]!r}, which is not a number")
    return int(text)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except PermissionError as error:
        raise EnergyError(
            f"{file} may be read by root only: as root give it to a group of this user (chgrp, chmod g+r; a boot "
            "resets that, a rule of systemd-tmpfiles keeps it)"
        ) from error
    except OSError as error:
        raise EnergyError(f"{file} cannot be read: {error.strerror}") from error


def packages(_device: torch.device, powercap: Path) -> PackageCounter:
    """The counter of a rank that computes on the CPU.

    Raises:
        EnergyError: when there is none that can be read.
    """
    return PackageCounter(powercap)


def gpu(device: torch.device, _powercap: Path) -> GpuCounter:
    """The counter of a rank that computes on a GPU. Raises as `packages`."""
    if torch.version.hip:
        raise EnergyError("there is no energy counter for AMD GPUs here: only NVIDIA GPUs and CPUs have one")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise EnergyError("the GPU's counter is read by nvidia-ml-py: pip install 'dynamix-batch[energy]'") from error
    return GpuCounter(f"GPU-{torch.cuda.get_device_properties(device).uuid}", nvml)
