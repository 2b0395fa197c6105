"""CPU time and memory of other processes, once a second, from /proc."""

import asyncio
import os
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

INTERVAL_S = 1.0
MIB = 1 << 20


class Sample(NamedTuple):
    """One process at one moment."""

    at_s: float
    """Monotonic."""
    cpu_s: float
    """Of all its threads since it began."""
    rss_bytes: int
    wait_s: float | None = None
    """That its main thread was ready and waited for a processor; `None` where the kernel does not count."""


class Meter:
    """Samples processes by name until it is cancelled."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self.samples: dict[str, list[Sample]] = {name: [] for name in pids}

    async def run(self) -> None:
        """Sample for ever."""
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL_S)

    def sample(self) -> None:
        """Sample each process once."""
        for name, pid in self._pids.items():
            self.samples[name].append(sample_of(pid))


def sample_of(pid: int) -> Sample:
    """A process now.

    Raises:
        OSError: when it has ended.
    """
    directory = Path("/proc") / str(pid)
    fields = (directory / "stat").read_text().rpartition(")")[2].split()
    cpu_ticks = int(fields[11]) + int(fields[12])
    resident_pages = int((directory / "statm").read_text().split()[1])
    return Sample(
        at_s=time.monotonic(),
        cpu_s=cpu_ticks / os.sysconf("SC_CLK_TCK"),
        rss_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
        wait_s=_wait_s(directory),
    )


def cpu_seconds(samples: list[Sample], begin_s: float, end_s: float) -> float:
    """CPU time spent between two moments, interpolated between samples; no further than these reach."""
    times = [(sample.at_s, sample.cpu_s) for sample in samples]
    return _at(times, end_s) - _at(times, begin_s)


def wait_seconds(samples: list[Sample], begin_s: float, end_s: float) -> float | None:
    """The same of waiting for a processor; `None` where the kernel does not count."""
    times = [(sample.at_s, sample.wait_s) for sample in samples if sample.wait_s is not None]
    return _at(times, end_s) - _at(times, begin_s) if times else None


def rss_growth_bytes(samples: list[Sample], begin_s: float, end_s: float) -> float:
    """Median memory of the last tenth of a span, less that of its first tenth: one peak does not make a growth."""
    tenth_s = (end_s - begin_s) / 10
    first = [sample.rss_bytes for sample in samples if begin_s <= sample.at_s <= begin_s + tenth_s]
    last = [sample.rss_bytes for sample in samples if end_s - tenth_s <= sample.at_s <= end_s]
    return median(last) - median(first) if first and last else 0.0


def _at(times: list[tuple[float, float]], at_s: float) -> float:
    """A counter at a moment, from its readings."""
    if at_s <= times[0][0]:
        return times[0][1]
    for (before_s, before), (after_s, after) in pairwise(times):
        if at_s <= after_s:
            return before + (at_s - before_s) / (after_s - before_s) * (after - before)
    return times[-1][1]


def _wait_s(directory: Path) -> float | None:
    try:
        return int((directory / "schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:  # a kernel without CONFIG_SCHED_INFO
        return None
