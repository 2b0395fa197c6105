"""Observation of a report's processes and sockets, beside the ranks' own measurements."""

import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from dynamix.runtime.service import Context
from dynamix.schemas.messages import NetworkMetrics, NodeMetrics, RankRow, Report

from .ebpf.probe import Counters, SocketProbe
from .procfs import Intervals, Proc, Readings, WindowId
from .window import Observation, Traffic, WantedProbe, read_network

MOST_SAID = 256
"""Different reasons in the log: reports can name any pid."""


class CollectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the collector, `DYNAMIX_COLLECTOR_<FIELD>` or `--field`; which node it watches is DYNAMIX_NODE."""

    probe: WantedProbe = "auto"
    """Source of network metrics; `auto` takes the best one that knows the window."""
    cgroup: str = ""
    """Directory of the control group (version 2) whose sockets eBPF counts; empty: the whole hierarchy."""
    uids: tuple[int, ...] = ()
    """Users whose processes may be read; empty: everybody's that the kernel lets this process read."""


class KernelObserver:
    """Reads /proc and the sockets of reported processes, after checking their identity."""

    def __init__(self, context: Context[CollectorSettings], probe: SocketProbe | str) -> None:
        """Look through a probe, or without one for the reason given instead."""
        self._context = context
        self._kernel = probe if isinstance(probe, str) else SocketTraffic(probe)
        self._proc = Proc()
        self._readings = Readings(self._proc)
        self._said: set[str] = set()
        """Reasons already logged: a window comes every second."""
        self._num_readings_lost = 0

    def observe(self, report: Report, *, fresh: bool) -> Observation:
        """Observe the processes of a report; not of a late one, since /proc has moved on from its window."""
        believed = []
        for row in report.rows if fresh else ():
            reason = reason_to_refuse(row, self._proc, self._context.settings.uids)
            if reason is None:
                believed.append(row)
                continue
            self._context.count("refused_pids")
            if reason not in self._said and len(self._said) < MOST_SAID:
                self._said.add(reason)
                where = {"job": report.job, "generation": report.generation, "window": report.window, "rank": row.rank}
                self._context.log.warning("a reported process is not read", **where, reason=reason)
        at = WindowId(report.job, report.generation, report.window)
        processes = {row.pid: row for row in believed}  # each once, however many rows name it
        read = {pid: self._readings.process(row, at) for pid, row in processes.items()}
        systems = {row.rank: read[row.pid] for row in believed}
        node = self._readings.node(believed[0] if believed else None, at) if fresh else NodeMetrics()
        if node.interval_s is None and report.window > 0:
            self._num_readings_lost += 1
        kernel: Traffic | str
        if isinstance(self._kernel, str):
            kernel = self._kernel
        elif not fresh:
            kernel = "the report came late"
        elif len(believed) < len(report.rows):
            kernel = "a process is not believed: see refused_pids"
        else:
            kernel = self._kernel.window(report)
        return Observation(
            systems=systems,
            node=node,
            network=read_network(report, node, self._context.settings.probe, kernel),
            num_readings_lost=self._num_readings_lost,
            refused_pids=tuple(row.pid for row in report.rows if fresh and row.rank not in systems),
        )


def reason_to_refuse(row: RankRow, proc: Proc, uids: Collection[int]) -> str | None:
    """Reason why a reported process is not read, or `None` when it matches its row.

    The pid must exist here, with the start time, pid namespace and user that the rank reported of itself; where `uids`
    is not empty, only those users' processes are read at all.
    """
    try:
        if proc.stat(row.pid).start_ticks != row.pid_start_ticks:
            return f"pid {row.pid} belongs to another process now"
        uid, pid_namespace = proc.owner(row.pid)
    except OSError:
        return f"pid {row.pid} is not running here, or hidden from this collector (hidepid)"
    if pid_namespace != row.pid_namespace:
        return f"pid {row.pid} counts in another pid namespace: run the collector in the ranks' namespace"
    if uid != row.uid:
        return f"pid {row.pid} belongs to uid {uid}, not to {row.uid}"
    if uids and uid not in uids:
        return f"uid {uid} is not among the users this collector serves: see DYNAMIX_COLLECTOR_UIDS"
    return None


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
            if sockets.keys() != before.get(rank, {}).keys():  # what they carried before is of no window
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
