"""Files of /proc about processes, network namespaces and the machine. The parsers are pure; `Proc` reads."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

READ_BYTES = 1 << 16
SCHEDSTAT_VERSIONS = ("15", "16", "17")
"""Layouts of /proc/schedstat in which field 8 of a processor's line is what its threads waited (Linux 2.6.26 and later;
Documentation/scheduler/sched-stats.rst). The numbers of another layout would be guesses."""


class ProcessStat(NamedTuple):
    """Fields of /proc/<pid>/stat; CPU time in clock ticks, including that of children that were waited for."""

    cpu_ticks: int
    start_ticks: int
    state: str = "R"
    """One letter, as proc(5) has them."""


class ThreadCounters(NamedTuple):
    """Fields of /proc/<pid>/task/<tid>/schedstat, since the thread began."""

    wait_ns: int
    """Ready to run, waiting for a processor; time in which a CPU quota kept it from one is in it (tried on 6.18).

    Linux since 6.12 now and then adds a whole sleep, when it moves a thread that just fell asleep to another processor:
    on 6.18, 4 seconds of 20 held one among 12 processes that slept 0.5 s at a time beside 3 busy ones.
    """
    num_switches: int
    """Times that it got a processor: the same number as the context switches in its status, which is dearer to read."""


class ProcessOwner(NamedTuple):
    """User and namespace of a process."""

    uid: int
    """Real user id."""
    pid_namespace: int | None
    """Inode of its pid namespace if it is our own, else `None`."""


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


def parse_stat(text: str) -> ProcessStat:
    """Parse /proc/<pid>/stat. The command name may hold spaces and parentheses: fields count from the last one."""
    fields = text[text.rindex(")") + 2 :].split()
    utime, stime, cutime, cstime = (int(field) for field in fields[11:15])
    return ProcessStat(cpu_ticks=utime + stime + cutime + cstime, start_ticks=int(fields[19]), state=fields[0])


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


def parse_thread_schedstat(text: str) -> ThreadCounters | None:
    """Parse /proc/<pid>/task/<tid>/schedstat: ns run, ns waited, times run.

    `None` for a thread that has not run yet, and where the kernel does not count: both read as three zeros.
    """
    _, wait_ns, num_switches = (int(field) for field in text.split())
    return ThreadCounters(wait_ns, num_switches) if num_switches else None


def parse_host_stat(text: str) -> HostCounters:
    """Parse /proc/stat, which says nothing of waiting. A guest's time is in its host's user time: it is not added."""
    lines = text.splitlines()
    user, nice, system, idle, iowait, irq, softirq, steal = (int(field) for field in lines[0].split()[1:9])
    return HostCounters(
        num_processors=sum(line.startswith("cpu") for line in lines) - 1,
        busy_ticks=user + nice + system + irq + softirq + steal,
        idle_ticks=idle + iowait,
        num_switches=next(int(line.split()[1]) for line in lines if line.startswith("ctxt ")),
        wait_ns=None,
    )


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
        return parse_stat(self._text(f"{pid}/stat"))

    def pid_namespace(self, pid: int) -> int | None:
        """Inode of a process's pid namespace if it is our own, else `None`."""
        return self.owner(pid).pid_namespace

    def owner(self, pid: int) -> ProcessOwner:
        """Whose a process is.

        Another user's /proc/<pid>/ns/pid takes CAP_SYS_PTRACE; its status takes nothing, and names one pid per
        namespace from here down: a single one says that it lives in the namespace of this /proc, which is ours.
        """
        status = self._text(f"{pid}/status")
        nested = len(field_of(status, "NSpid").split()) > 1
        return ProcessOwner(int(field_of(status, "Uid").split()[0]), None if nested else self._pid_namespace())

    def _pid_namespace(self) -> int:
        if self._own_pid_namespace is None:
            self._own_pid_namespace = (self._root / "self/ns/pid").stat().st_ino
        return self._own_pid_namespace

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
                waiting += self._add_threads(current, threads)
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
        wait_ns = parse_host_schedstat(self._text_or_empty("schedstat"))
        return parse_host_stat(self._text("stat"))._replace(wait_ns=wait_ns)

    def load_average(self) -> float:
        """Threads running or ready, averaged over one minute."""
        return float(self._text("loadavg").split()[0])

    def memory(self) -> tuple[int, int]:
        """Total and available memory of the machine in bytes."""
        text = self._text("meminfo")
        return _kib(field_of(text, "MemTotal")), _kib(field_of(text, "MemAvailable"))

    def _add_threads(self, pid: int, threads: dict[int, ThreadCounters]) -> list[int]:
        """Put a process's threads into `threads`; the children that they began."""
        children: list[int] = []
        tasks = os.open(f"{self._root}/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # below it, so that the kernel looks up the process once and not twice a thread
            for tid in os.listdir(tasks):  # noqa: PTH208 - of a descriptor
                text = self._text_or_empty(f"{tid}/schedstat", tasks)
                if text and (counters := parse_thread_schedstat(text)) is not None:
                    threads[int(tid)] = counters
                children += map(int, self._text_or_empty(f"{tid}/children", tasks).split())
        finally:
            os.close(tasks)
        return children

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
