"""Observation of a report's processes and sockets, beside the ranks' own measurements."""

from collections.abc import Collection

import msgspec

from dynamix.runtime.service import Context
from dynamix.schemas.messages import NodeMetrics, RankRow, Report

from .ebpf.probe import SocketProbe
from .procfs import Proc, Readings, WindowId
from .traffic import SocketTraffic
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
    agents: str = ""
    """File that learned agents decide by (`dynamix learn --policy stigmergy`); empty: the shipped one."""


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
        believed = [row for row in report.rows if self._believes(row, report)] if fresh else []
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

    def _believes(self, row: RankRow, report: Report) -> bool:
        reason = reason_to_refuse(row, self._proc, self._context.settings.uids)
        if reason is None:
            return True
        self._context.count("refused_pids")
        if reason not in self._said and len(self._said) < MOST_SAID:
            self._said.add(reason)
            self._context.log.warning(
                "a reported process is not read",
                job=report.job,
                generation=report.generation,
                window=report.window,
                rank=row.rank,
                reason=reason,
            )
        return False


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
