"""From counters of sockets to the traffic of ranks in one window. Pure: whoever reads the sockets is handed in."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from dynamix.collector.intervals import FORGET_AFTER_S, Intervals, WindowId
from dynamix.schemas.messages import NetworkMetrics, RankRow, Report

from .program import Counters

NOTHING = Counters(0, 0, 0, 0, 0)

BySocket = Mapping[int, Counters]


class Sockets(Protocol):
    """What is asked of a probe: see `probe.SocketProbe`."""

    def claim(self, cookie: int) -> None:
        """Keep a socket after it has closed."""

    def release(self, cookie: int) -> None:
        """Keep it no longer."""

    def read(self, cookie: int, uid: int) -> Counters | None:
        """Its counters, if they are known."""


class KernelWindow(NamedTuple):
    """What the kernel counted for the ranks of a node between two readings."""

    by_rank: Mapping[int, NetworkMetrics]
    interval_s: float


class _Claims(NamedTuple):
    generation: int
    cookies: frozenset[int]
    at_s: float


class SocketTraffic:
    """Reads the sockets that a report's ranks name, and remembers the previous reading.

    A window is told for all of the node's ranks or for none, so that their numbers mean the same.
    """

    def __init__(self, sockets: Sockets, clock: Callable[[], float] = time.monotonic) -> None:
        self._sockets = sockets
        self._clock = clock
        self._intervals: Intervals[Mapping[int, BySocket]] = Intervals(clock)
        self._claims: dict[str, _Claims] = {}
        self._highest: dict[int, Counters] = {}
        """Of each claimed socket: what was received out of order is counted a moment early, and then put right."""

    def window(self, report: Report) -> KernelWindow | str:
        """The window's traffic, or why it is not known."""
        held = self._claims.get(report.job)
        if held is not None and held.generation > report.generation:
            return "the job has started again since"
        self._claim(report)
        readings: dict[int, BySocket] = {}
        for row in report.rows:
            found = self._read(row)
            if isinstance(found, str):
                return found
            readings[row.rank] = found
        window = WindowId(report.job, report.generation, report.window)
        last = self._intervals.exchange((report.job, report.node), readings, window)
        if last is None:
            return "the window before was not read"
        before, interval_s = last
        return KernelWindow(
            {rank: traffic(sockets, before.get(rank, {})) for rank, sockets in readings.items()}, interval_s
        )

    def _read(self, row: RankRow) -> BySocket | str:
        if not row.cookies:
            return f"rank {row.rank} names no socket"
        known: dict[int, Counters] = {}
        for cookie in row.cookies:
            counters = self._sockets.read(cookie, row.uid)
            if counters is not None:
                highest = map(max, counters, self._highest.get(cookie, NOTHING))
                known[cookie] = self._highest[cookie] = Counters(*highest)
        if unknown := len(set(row.cookies)) - len(known):
            return f"{unknown} of {len(row.cookies)} sockets of rank {row.rank} are older than the probe"
        return known

    def _claim(self, report: Report) -> None:
        """Claim what is new; release what an earlier generation, or a job that has not been heard of, had."""
        now_s = self._clock()
        for job, claims in list(self._claims.items()):
            if now_s - claims.at_s > FORGET_AFTER_S or (job == report.job and claims.generation < report.generation):
                self._release(self._claims.pop(job).cookies)
        named = frozenset(cookie for row in report.rows for cookie in row.cookies)
        held = self._claims.get(report.job)
        already = frozenset() if held is None else held.cookies
        for cookie in named - already:
            self._sockets.claim(cookie)
        self._release(already - named)
        self._claims[report.job] = _Claims(report.generation, named, now_s)

    def _release(self, cookies: frozenset[int]) -> None:
        for cookie in cookies:
            self._sockets.release(cookie)
            self._highest.pop(cookie, None)


def traffic(now: BySocket, before: BySocket) -> NetworkMetrics:
    """Traffic of one rank between two readings of its sockets; one that is new counts from its beginning."""
    parts = [_difference(counters, before.get(cookie, NOTHING)) for cookie, counters in now.items()]
    total = Counters(*(sum(column) for column in zip(*parts, strict=True)))
    return NetworkMetrics(
        tx_bytes=total.acked_bytes,
        rx_bytes=total.received_bytes,
        retransmits=total.retransmits,
        srtt_us=total.srtt_sum_us / total.num_rtts if total.num_rtts else None,
    )


def _difference(now: Counters, before: Counters) -> Counters:
    return Counters(*(last - first for last, first in zip(now, before, strict=True)))
