"""What is watched while the load runs: every action, the arbitrator's heartbeat, CPU time and memory of processes."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import numpy as np

from dynamix.collector.procfs.proc import Proc
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, Live
from dynamix.schemas.streams import ACTIONS

INTERVAL_S = 1.0
MIB = 1 << 20


class Watch:
    """Notes when each window's action was stored, and that every job's actions follow on each other.

    Attributes:
        decided: when the action of a job's window was stored, in nanoseconds since the Unix epoch.
        counters: the arbitrator's, from its newest heartbeat.
        action_bytes: of the newest action.
    """

    def __init__(self, bus: Bus, num_expected: int) -> None:
        self.decided: dict[tuple[str, int], int] = {}
        self.counters: dict[str, int] = {}
        self.action_bytes = 0
        self.num_out_of_chain = 0
        """Actions that are not the successor of the one before them; 0 when each window was decided once."""
        self.complete = asyncio.Event()
        self.listening = asyncio.Event()
        self._bus = bus
        self._num_expected = num_expected
        self._hashes: dict[str, bytes] = {}

    async def read_actions(self) -> None:
        """Read actions for ever."""
        wanted = [subjects.of("action", subjects.ANY)]
        async with self._bus.consume(ACTIONS.name, wanted, start="new") as consumer:
            self.listening.set()
            async for batch in consumer:
                for message in batch:
                    self.action_bytes = len(message.payload)
                    self._record_action(decode(Action, message.subject, message.payload), message.timestamp_ns)

    async def read_heartbeats(self) -> None:
        """Keep the arbitrator's newest counters."""
        async with self._bus.subscribe(subjects.of("live", "arbitrator", subjects.ANY)) as beats:
            async for message in beats:
                with contextlib.suppress(MalformedMessageError):  # any client may publish anything here
                    self.counters = decode(Live, message.subject, message.payload).counters

    def _record_action(self, action: Action, stored_ns: int) -> None:
        follows = action.previous_hash == self._hashes.get(action.job, b"")
        if not follows or (action.job, action.window) in self.decided:
            self.num_out_of_chain += 1
        self._hashes[action.job] = action.hash
        self.decided[action.job, action.window] = stored_ns
        if len(self.decided) >= self._num_expected:
            self.complete.set()


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
    """Samples processes by name, from /proc."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self.samples: dict[str, list[ProcessSample]] = {name: [] for name in pids}

    async def run(self) -> None:
        """Sample once a second until cancelled."""
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
