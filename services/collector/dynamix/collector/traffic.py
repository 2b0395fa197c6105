"""Computes the traffic of ranks in one window from counters of sockets."""

import time
from collections.abc import Callable, Mapping

from dynamix.schemas.messages import NetworkMetrics, RankRow, Report

from .ebpf.probe import Counters, SocketProbe
from .procfs import Intervals, WindowId
from .window import Traffic

MAX_JOBS = 1024
"""Jobs of one node whose readings are remembered: reports could name any number."""

BySocket = Mapping[int, Counters]


class SocketTraffic:
    """Reads the sockets that a report's ranks name, and remembers the previous reading.

    A window is known for all of the node's ranks or for none, so that their numbers are comparable.
    """

    def __init__(self, probe: SocketProbe, clock: Callable[[], float] = time.monotonic) -> None:
        self._probe = probe
        self._intervals: Intervals[Mapping[int, BySocket]] = Intervals(clock, MAX_JOBS)

    def window(self, report: Report) -> Traffic | str:
        """The window's traffic, or why it is not known."""
        newest = self._intervals.newest(report.job)
        held = newest.value if newest is not None and newest.window.generation == report.generation else {}
        readings: dict[int, BySocket] = {}
        for row in report.rows:
            found = self._read(row, held.get(row.rank, {}))
            if isinstance(found, str):
                return found
            readings[row.rank] = found
        window = WindowId(report.job, report.generation, report.window)
        last = self._intervals.exchange(report.job, readings, window)
        if last is None:
            return "the window before was not read" if report.window else "nothing was read before a job's first window"
        before, interval_s = last
        by_rank = {}
        for rank, sockets in readings.items():
            if (
                sockets.keys() != before.get(rank, {}).keys()
            ):  # what they carried before they were named is of no window
                return f"rank {rank} names other sockets than in the window before"
            parts = [[now - was for now, was in zip(sockets[one], before[rank][one], strict=True)] for one in sockets]
            if any(number < 0 for part in parts for number in part):
                return f"a socket of rank {rank} has smaller counters than before"
            total = Counters(*(sum(column) for column in zip(*parts, strict=True)))
            by_rank[rank] = NetworkMetrics(
                tx_bytes=total.acked_bytes,
                rx_bytes=total.received_bytes,
                retransmits=total.retransmits,
                srtt_us=total.srtt_sum_us / total.num_rtts if total.num_rtts else None,
            )
        return Traffic("ebpf", by_rank, interval_s)

    def _read(self, row: RankRow, held: BySocket) -> BySocket | str:
        """Counters of a rank's sockets; of those that closed, the last ones that were read (`held`)."""
        if not row.cookies:
            return f"rank {row.rank} names no socket"
        cookies = set(row.cookies)
        found = {cookie: self._probe.read(cookie, row.uid) or held.get(cookie) for cookie in cookies}
        known = {cookie: counters for cookie, counters in found.items() if counters is not None}
        if unknown := len(cookies) - len(known):
            left_out = self._probe.num_left_out()
            full = f" ({left_out} found its table full)" if left_out else ""
            return (
                f"the probe does not know {unknown} of {len(cookies)} sockets of rank {row.rank}: older than itself, "
                f"or opened elsewhere{full}"
            )
        return known
