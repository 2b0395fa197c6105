"""What the kernel saw since the last window: differences of cumulative counters over the collector's own interval.

The only memory of the collector, and losing it costs one window's rates: they are unknown until there are two readings.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from dynamix.schemas.messages import NodeMetrics, RankRow, SystemMetrics

from .proc import NamespaceTraffic, Proc

FORGET_AFTER_S = 600.0
"""A counter not read for so long belongs to a job that is gone."""


class _Reading(NamedTuple):
    at_s: float
    value: int | NamespaceTraffic


class Readings:
    """Reads /proc and remembers the previous reading of each counter."""

    def __init__(self, proc: Proc, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._last: dict[tuple[str, int, int], _Reading] = {}

    def process(self, row: RankRow) -> SystemMetrics:
        """CPU time ratio and memory of a believed process; unknown where it ended or is closed to us."""
        try:
            ticks = self._proc.family_cpu_ticks(row.pid)
            resident = self._proc.resident_bytes(row.pid)
            total, _ = self._proc.memory()
        except OSError:
            return SystemMetrics()
        ratio = None
        if (last := self._exchange(("cpu", row.pid, row.pid_start_ticks), ticks)) is not None:
            before, interval_s = last
            assert isinstance(before, int)
            ratio = max(0, ticks - before) / self._proc.ticks_per_s / interval_s
        used, of = resident, total
        if row.device_memory_bytes is not None and row.device_memory_total_bytes:
            used, of = row.device_memory_bytes, row.device_memory_total_bytes
        return SystemMetrics(cpu_time_ratio=ratio, memory_bytes=resident, memory_ratio=used / of)

    def node(self, row: RankRow | None) -> NodeMetrics:
        """The machine, and the network namespace of the process in `row` (a node's ranks share one)."""
        total, available = self._proc.memory()
        load, used = self._proc.load_per_cpu(), 1 - available / total
        try:
            traffic = None if row is None else self._proc.traffic(row.pid)
        except OSError:
            traffic = None
        if row is None or traffic is None:
            return NodeMetrics(load_per_cpu=load, memory_used_ratio=used)
        last = self._exchange(("net", row.pid, row.pid_start_ticks), traffic)
        if last is None:
            return NodeMetrics(load_per_cpu=load, memory_used_ratio=used)
        before, interval_s = last
        assert isinstance(before, NamespaceTraffic)
        return NodeMetrics(
            load_per_cpu=load,
            memory_used_ratio=used,
            tx_bytes=max(0, traffic.tx_bytes - before.tx_bytes),
            rx_bytes=max(0, traffic.rx_bytes - before.rx_bytes),
            retransmits=max(0, traffic.retransmits - before.retransmits),
            interval_s=interval_s,
        )

    def _exchange(
        self, key: tuple[str, int, int], value: int | NamespaceTraffic
    ) -> tuple[int | NamespaceTraffic, float] | None:
        """Remember a reading; the previous one and the seconds since, if there is one."""
        now_s = self._clock()
        last = self._last.get(key)
        self._last[key] = _Reading(now_s, value)
        self._forget(now_s)
        if last is None or now_s <= last.at_s:
            return None
        return last.value, now_s - last.at_s

    def _forget(self, now_s: float) -> None:
        for key in [key for key, reading in self._last.items() if now_s - reading.at_s > FORGET_AFTER_S]:
            del self._last[key]
