"""What /proc says of processes, network namespaces and the machine. The parsers are pure; `Proc` reads the files."""

import os
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """Of /proc/<pid>/stat: CPU time in clock ticks, with the time of children that were waited for."""

    cpu_ticks: int
    start_ticks: int


class NamespaceTraffic(NamedTuple):
    """Counters of one network namespace since it was made, loopback left out of the bytes."""

    tx_bytes: int
    rx_bytes: int
    retransmits: int


def parse_stat(text: str) -> ProcessStat:
    """Parse /proc/<pid>/stat. The command name may hold spaces and parentheses: fields count from the last one."""
    fields = text[text.rindex(")") + 2 :].split()
    utime, stime, cutime, cstime = (int(field) for field in fields[11:15])
    return ProcessStat(cpu_ticks=utime + stime + cutime + cstime, start_ticks=int(fields[19]))


def parse_status(text: str) -> dict[str, str]:
    """Parse the `Key: value` lines of /proc/<pid>/status or /proc/meminfo."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key: value.strip() for key, value in pairs}


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
    """RetransSegs of /proc/<pid>/net/snmp: segments sent again by the whole namespace."""
    names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


class Proc:
    """Reads below `root` (a captured tree in tests). A process that is gone or closed to us raises OSError."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self.ticks_per_s = os.sysconf("SC_CLK_TCK")

    def stat(self, pid: int) -> ProcessStat:
        """CPU time and start time of one process."""
        return parse_stat(self._text(f"{pid}/stat"))

    def uid(self, pid: int) -> int:
        """Real user id of a process."""
        return int(parse_status(self._text(f"{pid}/status"))["Uid"].split()[0])

    def pid_namespace(self, pid: int) -> int | None:
        """Inode of a process's pid namespace if it is our own, else `None`.

        Another user's /proc/<pid>/ns/pid takes CAP_SYS_PTRACE; its status takes nothing, and names one pid per
        namespace from here down: a single one says that it lives in the namespace of this /proc, which is ours.
        """
        nested = len(parse_status(self._text(f"{pid}/status"))["NSpid"].split()) > 1
        return None if nested else (self._root / "self/ns/pid").stat().st_ino

    def resident_bytes(self, pid: int) -> int:
        """Resident memory of a process."""
        return _kib(parse_status(self._text(f"{pid}/status")).get("VmRSS", "0 kB"))

    def family_cpu_ticks(self, pid: int) -> int:
        """CPU ticks of a process and its living descendants; a dead child's are in its parent's."""
        total, waiting = 0, [pid]
        while waiting:
            current = waiting.pop()
            try:
                total += self.stat(current).cpu_ticks
                waiting += self._children(current)
            except FileNotFoundError:  # a child that ended meanwhile; its parent holds its time
                if current == pid:
                    raise
        return total

    def traffic(self, pid: int) -> NamespaceTraffic:
        """Counters of the network namespace in which a process lives."""
        tx_bytes, rx_bytes = parse_net_dev(self._text(f"{pid}/net/dev"))
        return NamespaceTraffic(tx_bytes, rx_bytes, parse_snmp_retransmits(self._text(f"{pid}/net/snmp")))

    def load_per_cpu(self) -> float:
        """One-minute load average over the number of processors."""
        processors = sum(line.startswith("cpu") for line in self._text("stat").splitlines()) - 1
        return float(self._text("loadavg").split()[0]) / max(1, processors)

    def memory(self) -> tuple[int, int]:
        """Total and available memory of the machine in bytes."""
        fields = parse_status(self._text("meminfo"))
        return _kib(fields["MemTotal"]), _kib(fields["MemAvailable"])

    def _children(self, pid: int) -> list[int]:
        threads = (self._root / str(pid) / "task").iterdir()
        return [int(child) for thread in threads for child in _text_or_empty(thread / "children").split()]

    def _text(self, name: str) -> str:
        return (self._root / name).read_text()


def _text_or_empty(path: Path) -> str:
    """Text of a file that may be gone by now, or that the kernel was built without."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _kib(value: str) -> int:
    return int(value.split(maxsplit=1)[0]) * 1024
