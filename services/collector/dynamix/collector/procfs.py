"""/proc: processes, network namespaces and the machine, and what they used since the window before.

`Proc` reads files, `Intervals` keeps the previous reading of each cumulative counter, `Readings` turns two readings
into the metrics of a window. In come pids that were checked; out go metrics, `None` where not known. To add a counter:
read it in `Proc`, take its difference in `Readings`, add its field to `schemas.messages.measured`.
"""

import os
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from dynamix.schemas.messages import NodeMetrics, RankRow, SystemMetrics

READ_BYTES = 1 << 16
SCHEDSTAT_VERSIONS = ("15", "16", "17")
"""Layouts of /proc/schedstat in which field 8 of a processor's line is what its threads waited (Linux 2.6.26 and later;
Documentation/scheduler/sched-stats.rst). The numbers of another layout would be guesses."""


class ProcessStat(NamedTuple):
    """Fields of /proc/<pid>/stat; CPU time in clock ticks, including that of children that were waited for."""

    cpu_ticks: int
    start_ticks: int


class ThreadCounters(NamedTuple):
    """Fields of /proc/<pid>/task/<tid>/schedstat, since the thread began."""

    wait_ns: int
    """Ready to run, waiting for a processor; time in which a CPU quota kept it from one is in it (tried on 6.18).

    Linux since 6.12 now and then adds a whole sleep, when it moves a thread that just fell asleep to another processor:
    on 6.18, 4 seconds of 20 held one among 12 processes that slept 0.5 s at a time beside 3 busy ones.
    """
    num_switches: int
    """Times that it got a processor: the same number as the context switches in its status, which is dearer to read."""


class FamilyCounters(NamedTuple):
    """A process and its living descendants."""

    cpu_ticks: int
    """In clock ticks: they hold the time of ended threads and of children that were waited for, while the nanoseconds
    of schedstat go with their thread. User and system time of each process are rounded down to a tick."""
    threads: Mapping[int, ThreadCounters] | None
    """By thread id, since what a thread counted goes with it; `None` where the kernel does not count."""


class HostCounters(NamedTuple):
    """The machine since it was started, all processors together."""

    num_processors: int
    busy_ticks: int
    """Neither idle nor waiting for a disk; time that a hypervisor gave to others is busy."""
    idle_ticks: int
    num_switches: int
    wait_ns: int | None
    """Threads ready to run and waiting; `None` where the kernel does not count (CONFIG_SCHEDSTATS)."""


class NamespaceTraffic(NamedTuple):
    """Counters of one network namespace since it was made, loopback left out of the bytes."""

    tx_bytes: int
    rx_bytes: int
    retransmits: int


def field_of(text: str, key: str, default: str | None = None) -> str:
    """The value of a `Key: value` line of /proc/<pid>/status or /proc/meminfo.

    Of sixty lines two are wanted: to parse all of them takes as long as the kernel takes to write them.

    Raises:
        KeyError: without such a line and a default.
    """
    _, found, rest = ("\n" + text).partition(f"\n{key}:")
    if found:
        return rest.partition("\n")[0].strip()
    if default is None:
        raise KeyError(key)
    return default


def parse_host_schedstat(text: str) -> int | None:
    """Nanoseconds that threads waited on all processors, from /proc/schedstat; `None` for an unknown layout."""
    lines = [line.split() for line in text.splitlines()]
    if not lines or lines[0][0] != "version" or lines[0][1] not in SCHEDSTAT_VERSIONS:
        return None
    return sum(int(fields[8]) for fields in lines if fields and fields[0].startswith("cpu"))


def parse_net_dev(text: str) -> tuple[int, int]:
    """Bytes sent and received by all interfaces but loopback, from /proc/<pid>/net/dev."""
    tx_bytes = rx_bytes = 0
    for line in text.splitlines()[2:]:
        interface, counters = line.split(":", 1)
        if interface.strip() != "lo":
            fields = counters.split()
            rx_bytes += int(fields[0])
            tx_bytes += int(fields[8])
    return tx_bytes, rx_bytes


def parse_snmp_retransmits(text: str) -> int:
    """RetransSegs of /proc/<pid>/net/snmp: retransmitted segments of the whole namespace."""
    names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


class Proc:
    """Reads below `root` (a captured tree in tests). A process that is gone or closed to us raises OSError."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._own_pid_namespace: int | None = None
        """Found once: a process stays in its own."""
        self.ticks_per_s = os.sysconf("SC_CLK_TCK")

    def stat(self, pid: int) -> ProcessStat:
        """CPU time and start time of one process."""
        text = self._text(f"{pid}/stat")
        fields = text[text.rindex(")") + 2 :].split()  # behind the command's name, which may hold spaces and brackets
        utime, stime, cutime, cstime = (int(field) for field in fields[11:15])
        return ProcessStat(cpu_ticks=utime + stime + cutime + cstime, start_ticks=int(fields[19]))

    def owner(self, pid: int) -> tuple[int, int | None]:
        """Real user id of a process, and the inode of its pid namespace if that is our own, else `None`.

        Another user's /proc/<pid>/ns/pid takes CAP_SYS_PTRACE; its status takes nothing, and names one pid per
        namespace from here down: a single one says that it lives in the namespace of this /proc, which is ours.
        """
        status = self._text(f"{pid}/status")
        if self._own_pid_namespace is None:
            self._own_pid_namespace = (self._root / "self/ns/pid").stat().st_ino
        is_nested = len(field_of(status, "NSpid").split()) > 1
        return int(field_of(status, "Uid").split()[0]), None if is_nested else self._own_pid_namespace

    def resident_bytes(self, pid: int) -> int:
        """Resident memory of a process."""
        return _kib(field_of(self._text(f"{pid}/status"), "VmRSS", "0 kB"))

    def family(self, pid: int) -> FamilyCounters:
        """CPU time and threads of a process and its living descendants; a dead child's time is in its parent's.

        Two small files a thread: some 18 us.
        """
        cpu_ticks, waiting = 0, [pid]
        threads: dict[int, ThreadCounters] = {}
        while waiting:
            current = waiting.pop()
            try:
                cpu_ticks += self.stat(current).cpu_ticks
                tasks = os.open(f"{self._root}/{current}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:  # below it, so that the kernel looks up the process once and not twice a thread
                    for tid in os.listdir(tasks):  # noqa: PTH208 - of a descriptor
                        counted = [int(field) for field in self._text_or_empty(f"{tid}/schedstat", tasks).split()]
                        if counted and counted[2]:  # zeros where it has not run yet, or where the kernel does not count
                            threads[int(tid)] = ThreadCounters(wait_ns=counted[1], num_switches=counted[2])
                        waiting += map(int, self._text_or_empty(f"{tid}/children", tasks).split())
                finally:
                    os.close(tasks)
            except (FileNotFoundError, ProcessLookupError):  # a child that ended meanwhile; its parent holds its time
                if current == pid:
                    raise
        return FamilyCounters(cpu_ticks, threads or None)

    def traffic(self, pid: int) -> NamespaceTraffic:
        """Counters of the network namespace in which a process lives."""
        tx_bytes, rx_bytes = parse_net_dev(self._text(f"{pid}/net/dev"))
        return NamespaceTraffic(tx_bytes, rx_bytes, parse_snmp_retransmits(self._text(f"{pid}/net/snmp")))

    def host(self) -> HostCounters:
        """Processors of the machine: how busy, how often switched, how long waited for."""
        lines = self._text("stat").splitlines()
        # a guest's time is in its host's user time: it is not added
        user, nice, system, idle, iowait, irq, softirq, steal = (int(field) for field in lines[0].split()[1:9])
        return HostCounters(
            num_processors=sum(line.startswith("cpu") for line in lines) - 1,
            busy_ticks=user + nice + system + irq + softirq + steal,
            idle_ticks=idle + iowait,
            num_switches=next(int(line.split()[1]) for line in lines if line.startswith("ctxt ")),
            wait_ns=parse_host_schedstat(self._text_or_empty("schedstat")),
        )

    def load_average(self) -> float:
        """Threads running or ready, averaged over one minute."""
        return float(self._text("loadavg").split()[0])

    def memory(self) -> tuple[int, int]:
        """Total and available memory of the machine in bytes."""
        text = self._text("meminfo")
        return _kib(field_of(text, "MemTotal")), _kib(field_of(text, "MemAvailable"))

    def _text(self, name: str, directory: int | None = None) -> str:
        """A command's name is any bytes, often cut within a character: what is not UTF-8 is replaced, not refused."""
        path = f"{self._root}/{name}" if directory is None else name
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)  # half the time of a file object
        try:
            content = os.read(fd, READ_BYTES)
            while part := os.read(fd, READ_BYTES):
                content += part
        finally:
            os.close(fd)
        return content.decode(errors="replace")

    def _text_or_empty(self, name: str, directory: int | None = None) -> str:
        """Text of a file that may be gone by now, or that the kernel was built without."""
        try:
            return self._text(name, directory)
        except (FileNotFoundError, ProcessLookupError):
            return ""


def _kib(value: str) -> int:
    return int(value.split(maxsplit=1)[0]) * 1024


FORGET_AFTER_S = 3600.0
"""A counter not read for so long belongs to a job that ended; no window may last longer."""
MAX_KEYS = 65_536
"""Ranks and jobs of one node: reports could name any number."""

T = TypeVar("T")
V = TypeVar("V")


class WindowId(NamedTuple):
    """A window of a run; windows count from 0 in each generation."""

    job: str
    generation: int
    window: int


class Reading(NamedTuple, Generic[V]):
    """A reading of a key with its time and window."""

    at_s: float
    window: WindowId
    value: V


class Intervals(Generic[V]):
    """Remembers the newest reading of each key; 3 us an exchange, however many keys there are.

    The only memory of the collector. Losing it costs one window's differences.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._last: dict[Hashable, Reading[V]] = {}
        """Readings in order of age."""

    def newest(self, key: Hashable) -> Reading[V] | None:
        """The last reading that was remembered, of whatever window."""
        return self._last.get(key)

    def exchange(self, key: Hashable, value: V, window: WindowId) -> tuple[V, float] | None:
        """Store a reading; returns that of the window before and the seconds since, or `None` if there is none.

        A window that was read already, or an older one, is a message delivered again: it changes nothing, since the
        first reading is the one made nearest to the window's end.
        """
        now_s = self._clock()
        while self._last:  # too old or too many, from the oldest on: each is looked at once when it is due
            oldest = next(iter(self._last))
            if now_s - self._last[oldest].at_s <= FORGET_AFTER_S and len(self._last) < self._max_keys:
                break
            del self._last[oldest]
        last = self._last.get(key)
        if last is not None and window.job == last.window.job and window[1:] <= last.window[1:]:
            return None
        self._last.pop(key, None)
        self._last[key] = Reading(now_s, window, value)
        if last is None or last.window != window._replace(window=window.window - 1) or now_s <= last.at_s:
            return None
        return last.value, now_s - last.at_s


class _NodeReading(NamedTuple):
    host: HostCounters | None
    traffic: NamespaceTraffic | None
    seen_from: tuple[int, int] | None
    """The process, by pid and start time, whose network namespace it is."""


class Readings:
    """Reads /proc once per window and remembers the reading before: rates are over the collector's own interval."""

    def __init__(self, proc: Proc, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._processes = Intervals[FamilyCounters](clock)
        self._nodes = Intervals[_NodeReading](clock)

    def process(self, row: RankRow, window: WindowId) -> SystemMetrics:
        """CPU, waiting and memory of a verified process; unknown if it ended or is not readable.

        0.4 ms for a process of 20 threads, 3.2 ms for 8 such ranks; 0.1 ms for a single thread.
        """
        try:
            family = self._proc.family(row.pid)
            resident = self._proc.resident_bytes(row.pid)
            total, _ = self._proc.memory()
        except OSError:
            return SystemMetrics()
        used, of = resident, total
        if row.device_memory_bytes is not None and row.device_memory_total_bytes:
            used, of = row.device_memory_bytes, row.device_memory_total_bytes
        metrics = SystemMetrics(memory_bytes=resident, memory_ratio=used / of)
        last = self._processes.exchange((window.job, row.pid, row.pid_start_ticks), family, window)
        if last is None:
            return metrics
        before, interval_s = last
        cpu_s = max(0, family.cpu_ticks - before.cpu_ticks) / self._proc.ticks_per_s
        metrics = replace(metrics, cpu_time_ratio=cpu_s / interval_s)
        if family.threads is None or before.threads is None:
            return metrics
        # by thread: one that ended takes its last piece with it, rather than the whole sum back; one that is new, or
        # whose id was used before by another, counts from zero
        waited_ns = num_switches = 0
        for tid, counters in family.threads.items():
            start = before.threads.get(tid)
            if start is None or counters.num_switches < start.num_switches or counters.wait_ns < start.wait_ns:
                start = ThreadCounters(0, 0)
            waited_ns += min(int(interval_s * 1e9), counters.wait_ns - start.wait_ns)  # what is more was slept
            num_switches += counters.num_switches - start.num_switches
        return replace(
            metrics,
            run_queue_wait_ratio=waited_ns / 1e9 / interval_s,
            context_switches_per_s=num_switches / interval_s,
        )

    def node(self, row: RankRow | None, window: WindowId) -> NodeMetrics:
        """The machine, and the network namespace of the process in `row` (a node's ranks share one).

        Its `interval_s` is known when the window before was read.
        """
        host, load = _or_none(self._proc.host), _or_none(self._proc.load_average)
        memory = _or_none(self._proc.memory)
        traffic = None if row is None else _or_none(lambda: self._proc.traffic(row.pid))
        seen_from = None if row is None else (row.pid, row.pid_start_ticks)
        metrics = NodeMetrics(
            load_per_cpu=None if host is None or load is None else load / max(1, host.num_processors),
            memory_used_ratio=None if memory is None else 1 - memory[1] / memory[0],
        )
        last = self._nodes.exchange(window.job, _NodeReading(host, traffic, seen_from), window)
        if last is None:
            return metrics
        before, interval_s = last
        metrics = replace(metrics, interval_s=interval_s)
        if traffic is not None and before.traffic is not None and seen_from == before.seen_from:
            tx_bytes, rx_bytes, retransmits = (max(0, n - b) for n, b in zip(traffic, before.traffic, strict=True))
            metrics = replace(metrics, tx_bytes=tx_bytes, rx_bytes=rx_bytes, retransmits=retransmits)
        if host is None or before.host is None:
            return metrics
        busy = max(0, host.busy_ticks - before.host.busy_ticks)
        idle = max(0, host.idle_ticks - before.host.idle_ticks)  # waiting for a disk is known to count backwards
        metrics = replace(
            metrics,
            cpu_time_ratio=busy / (busy + idle) if busy + idle else None,
            context_switches_per_s=max(0, host.num_switches - before.host.num_switches) / interval_s,
        )
        if host.wait_ns is None or before.host.wait_ns is None:
            return metrics
        waited_s = max(0, host.wait_ns - before.host.wait_ns) / 1e9
        return replace(metrics, run_queue_wait_ratio=waited_s / interval_s / max(1, host.num_processors))


def _or_none(read: Callable[[], T]) -> T | None:
    """Content of a file, or `None` if it is missing or not readable."""
    try:
        return read()
    except OSError:
        return None
