"""CPU time and memory of other processes, once a second, from /proc."""

import asyncio
import time
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import numpy as np

from dynamix.collector.procfs.proc import Proc

INTERVAL_S = 1.0
MIB = 1 << 20


class ProcessSample(NamedTuple):
    """One process at one moment."""

    at_s: float
    """Monotonic."""
    cpu_s: float
    """CPU time of all its threads since it began."""
    rss_bytes: int
    wait_s: float | None = None
    """Time that its main thread was ready and waited for a processor; `None` where the kernel does not count."""


class Meter:
    """Samples processes by name until it is cancelled."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self.samples: dict[str, list[ProcessSample]] = {name: [] for name in pids}

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL_S)

    def sample(self) -> None:
        """Sample each process once."""
        for name, pid in self._pids.items():
            self.samples[name].append(sample_of(pid))


def sample_of(pid: int) -> ProcessSample:
    """A process now.

    Raises:
        OSError: when it has ended.
    """
    proc = Proc()
    family = proc.family(pid)
    main = (family.threads or {}).get(pid)
    wait_s = None if main is None else main.wait_ns / 1e9
    return ProcessSample(time.monotonic(), family.cpu_ticks / proc.ticks_per_s, proc.resident_bytes(pid), wait_s)


def cpu_seconds(samples: list[ProcessSample], begin_s: float, end_s: float) -> float:
    """CPU time spent between two moments, interpolated between samples; no further than these reach."""
    return _grown([(sample.at_s, sample.cpu_s) for sample in samples], begin_s, end_s)


def wait_seconds(samples: list[ProcessSample], begin_s: float, end_s: float) -> float | None:
    """Time waited for a processor between two moments; `None` where the kernel does not count."""
    times = [(sample.at_s, sample.wait_s) for sample in samples if sample.wait_s is not None]
    return _grown(times, begin_s, end_s) if times else None


def rss_growth_bytes(samples: list[ProcessSample], begin_s: float, end_s: float) -> float:
    """Median memory of the last tenth of a span, less that of its first tenth: one peak does not make a growth."""
    tenth_s = (end_s - begin_s) / 10
    first = [sample.rss_bytes for sample in samples if begin_s <= sample.at_s <= begin_s + tenth_s]
    last = [sample.rss_bytes for sample in samples if end_s - tenth_s <= sample.at_s <= end_s]
    return median(last) - median(first) if first and last else 0.0


def _grown(times: list[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """How much a counter grew between two moments, from its readings."""
    before, after = np.interp([begin_s, end_s], *np.transpose(times))
    return float(after - before)
