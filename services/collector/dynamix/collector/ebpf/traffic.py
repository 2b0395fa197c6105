"""Computes the traffic of ranks in one window from counters of sockets. Pure: the socket reader is injected."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from dynamix.collector.procfs.intervals import FORGET_AFTER_S, Intervals, WindowId
from dynamix.schemas.messages import NetworkMetrics, RankRow, Report

from .program import Counters

MAX_JOBS = 1024
"""Jobs of one node whose readings are remembered: reports could name any number."""

BySocket = Mapping[int, Counters]


class Sockets(Protocol):
    """The part of a probe that is used here: see `probe.SocketProbe`."""

    def read(self, cookie: int, uid: int) -> Counters | None:
        """Counters of a socket, if they are known."""

    def num_left_out(self) -> int:
        """Sockets for which there was no room."""


class KernelWindow(NamedTuple):
    """The kernel's counts for the ranks of a node in a window."""

    by_rank: Mapping[int, NetworkMetrics]
    interval_s: float | None
    """Between two readings of the collector; `None` for what the ranks read themselves."""


class _Newest(NamedTuple):
    """The last reading of each socket of a job: of those that closed, the last for ever."""

    generation: int
    by_socket: dict[int, Counters]
    at_s: float


class SocketTraffic:
    """Reads the sockets that a report's ranks name, and remembers the previous reading.

    A window is known for all of the node's ranks or for none, so that their numbers are comparable.
    """

    def __init__(self, sockets: Sockets, clock: Callable[[], float] = time.monotonic) -> None:
        self._sockets = sockets
        self._clock = clock
        self._intervals: Intervals[Mapping[int, BySocket]] = Intervals(clock)
        self._newest: dict[str, _Newest] = {}

    def window(self, report: Report) -> KernelWindow | str:
        """The window's traffic, or why it is not known."""
        newest = self._remembered(report)
        if newest is None:
            return "the job has started again since"
        readings: dict[int, BySocket] = {}
        for row in report.rows:
            found = self._read(row, newest)
            if isinstance(found, str):
                return found
            readings[row.rank] = found
        window = WindowId(report.job, report.generation, report.window)
        last = self._intervals.exchange((report.job, report.node), readings, window)
        if last is None:
            return "the window before was not read" if report.window else "nothing was read before a job's first window"
        before, interval_s = last
        joined = [rank for rank, sockets in readings.items() if sockets.keys() != before.get(rank, {}).keys()]
        if joined:  # what they carried before they were named is of no window
            return f"rank {joined[0]} names other sockets than in the window before"
        return KernelWindow({rank: traffic(sockets, before[rank]) for rank, sockets in readings.items()}, interval_s)

    def _read(self, row: RankRow, newest: dict[int, Counters]) -> BySocket | str:
        if not row.cookies:
            return f"rank {row.rank} names no socket"
        cookies = set(row.cookies)
        for cookie in cookies:
            counters = self._sockets.read(cookie, row.uid)
            if counters is None:
                continue
            if any(now < last for now, last in zip(counters, newest.get(cookie, counters), strict=True)):
                del newest[cookie]
                return f"a socket of rank {row.rank} has smaller counters than before"
            newest[cookie] = counters
        known = {cookie: newest[cookie] for cookie in cookies if cookie in newest}
        if unknown := len(cookies) - len(known):
            left_out = self._sockets.num_left_out()
            full = f" ({left_out} found its table full)" if left_out else ""
            return (
                f"the probe does not know {unknown} of {len(cookies)} sockets of rank {row.rank}: older than itself, "
                f"or opened elsewhere{full}"
            )
        return known

    def _remembered(self, report: Report) -> dict[int, Counters] | None:
        """The newest readings of a job's generation; `None` for one that is over."""
        now_s = self._clock()
        for job, newest in list(self._newest.items()):
            if now_s - newest.at_s > FORGET_AFTER_S:
                del self._newest[job]
        held = self._newest.pop(report.job, None)  # and in again at the end: the oldest stays in front
        while len(self._newest) >= MAX_JOBS:
            del self._newest[next(iter(self._newest))]
        if held is None or held.generation < report.generation:
            held = _Newest(report.generation, {}, now_s)
        if held.generation > report.generation:
            self._newest[report.job] = held
            return None
        self._newest[report.job] = held._replace(at_s=now_s)
        return held.by_socket


def traffic(now: BySocket, before: BySocket) -> NetworkMetrics:
    """Traffic of one rank between two readings of the same sockets."""
    parts = [[last - first for last, first in zip(now[cookie], before[cookie], strict=True)] for cookie in now]
    total = Counters(*(sum(column) for column in zip(*parts, strict=True)))
    return NetworkMetrics(
        tx_bytes=total.acked_bytes,
        rx_bytes=total.received_bytes,
        retransmits=total.retransmits,
        srtt_us=total.srtt_sum_us / total.num_rtts if total.num_rtts else None,
    )
