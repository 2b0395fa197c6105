"""From counters of sockets to the traffic of ranks in one window. Pure: whoever reads the sockets is handed in."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from dynamix.collector.intervals import FORGET_AFTER_S, Intervals, WindowId
from dynamix.schemas.messages import NetworkMetrics, RankRow, Report

from .program import Counters

BySocket = Mapping[int, Counters]


class Sockets(Protocol):
    """What is asked of a probe: see `probe.SocketProbe`."""

    def read(self, cookie: int, uid: int) -> Counters | None:
        """Counters of a socket, if they are known."""


class KernelWindow(NamedTuple):
    """What the kernel counted for the ranks of a node between two readings."""

    by_rank: Mapping[int, NetworkMetrics]
    interval_s: float


class _Newest(NamedTuple):
    """The last reading of each socket of a job: of those that closed, the last for ever."""

    generation: int
    by_socket: dict[int, Counters]
    at_s: float


class SocketTraffic:
    """Reads the sockets that a report's ranks name, and remembers the previous reading.

    A window is told for all of the node's ranks or for none, so that their numbers mean the same.
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
            return "the window before was not read"
        before, interval_s = last
        joined = [rank for rank, sockets in readings.items() if sockets.keys() != before.get(rank, {}).keys()]
        if joined:  # what they carried before they were named is of no window
            return f"rank {joined[0]} names other sockets than in the window before"
        return KernelWindow({rank: traffic(sockets, before[rank]) for rank, sockets in readings.items()}, interval_s)

    def _read(self, row: RankRow, newest: dict[int, Counters]) -> BySocket | str:
        if not row.cookies:
            return f"rank {row.rank} names no socket"
        for cookie in row.cookies:
            counters = self._sockets.read(cookie, row.uid)
            if counters is not None:
                newest[cookie] = counters
        known = {cookie: newest[cookie] for cookie in row.cookies if cookie in newest}
        if unknown := len(row.cookies) - len(known):
            return f"{unknown} of {len(row.cookies)} sockets of rank {row.rank} are older than the probe"
        return known

    def _remembered(self, report: Report) -> dict[int, Counters] | None:
        """The newest readings of a job's generation; `None` for one that is over."""
        now_s = self._clock()
        for job, newest in list(self._newest.items()):
            if now_s - newest.at_s > FORGET_AFTER_S:
                del self._newest[job]
        held = self._newest.get(report.job)
        if held is not None and held.generation > report.generation:
            return None
        same = held is not None and held.generation == report.generation
        by_socket = held.by_socket if held is not None and same else {}
        self._newest[report.job] = _Newest(report.generation, by_socket, now_s)
        return by_socket


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
