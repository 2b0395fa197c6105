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
    return Sample(time.monotonic(), cpu_ticks / os.sysconf("SC_CLK_TCK"), resident_pages * os.sysconf("SC_PAGE_SIZE"))


def cpu_seconds(samples: list[Sample], begin_s: float, end_s: float) -> float:
    """CPU time spent between two moments, interpolated between samples; no further than these reach."""
    return _cpu_at(samples, end_s) - _cpu_at(samples, begin_s)


def rss_growth_bytes(samples: list[Sample], begin_s: float, end_s: float) -> float:
    """Median memory of the last tenth of a span, less that of its first tenth: one peak does not make a growth."""
    tenth_s = (end_s - begin_s) / 10
    first = [sample.rss_bytes for sample in samples if begin_s <= sample.at_s <= begin_s + tenth_s]
    last = [sample.rss_bytes for sample in samples if end_s - tenth_s <= sample.at_s <= end_s]
    return median(last) - median(first) if first and last else 0.0


def _cpu_at(samples: list[Sample], at_s: float) -> float:
    if at_s <= samples[0].at_s:
        return samples[0].cpu_s
    for before, after in pairwise(samples):
        if at_s <= after.at_s:
            share = (at_s - before.at_s) / (after.at_s - before.at_s)
            return before.cpu_s + share * (after.cpu_s - before.cpu_s)
    return samples[-1].cpu_s
