"""Several hosts on one machine: network namespaces joined by a bridge, with slow links and shares of the processor.

`with Hosts(4) as hosts, hosts.entered(): hosts[0].popen([...])`, for root, with iproute2 and util-linux. Nothing of the
machine's own network is changed. Names of namespaces and cgroups say which process made them: a second process, the
janitor (`python -m bench.hosts NAME`), removes them when the owner is done or dead, however it died, and the next start
of any hosts removes what a janitor that was killed too has left.
"""

import contextlib
import ctypes
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import IO, NamedTuple, Self

from dynamix.collector.ebpf.probe import v2_mount
from dynamix.collector.procfs import NamespaceTraffic, Proc, parse_net_dev, parse_snmp_retransmits
from dynamix.runtime.embedded import DIE_WITH_PARENT

ROOT = Path(__file__).parents[1]
"""Where `python -m` finds the janitor, whatever the current directory of this process is."""
NETWORK = IPv4Network("10.75.0.0/16")
"""Seen by these hosts alone: the machine's own network may use the same addresses."""
BRIDGE, INTERFACE = "bridge", "eth0"
MAX_HOSTS = 1023
"""Ports of a bridge."""
JANITOR_TIMEOUT_S = REMOVAL_TIMEOUT_S = 60.0
PAUSE_S = 0.01
"""Processes end, and cgroups become free, some time after they were told to; nothing tells when."""
Output = int | IO[bytes] | None


class HostsError(RuntimeError):
    """Hosts could not be made, changed or removed; the text says what is missing and how to fix it."""


def end_of(log: Path) -> str:
    """The end of a log, from its first traceback on where there is one."""
    text = log.read_text(errors="replace")
    start = text.find("Traceback")
    return text[start : start + 3000] if start >= 0 else text[-3000:]


# --- networks --------------------------------------------------------------------------------------------------------

NETNS = Path("/run/netns")
"""Where `ip netns` keeps a file for each namespace."""
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
_CLONE_NEWNET = 0x40000000


def program_path(program: str) -> str:
    """Where a program is; raises HostsError when it is nowhere."""
    if found := shutil.which(program):
        return found
    raise HostsError(f"no {program} on PATH: apt-get install {PACKAGES[program]}")


def _run(*command: str) -> str:
    """Run a program; returns its output. Raises HostsError with its own words when it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostsError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        hint = ": the capabilities CAP_NET_ADMIN and CAP_SYS_ADMIN are needed" if "permitted" in done.stderr else ""
        raise HostsError(f"{' '.join(command)} failed: {done.stderr.strip()}{hint}")
    return done.stdout


class Namespace(NamedTuple):
    """A network namespace that `ip netns` knows."""

    name: str

    @property
    def path(self) -> Path:
        """The file that stands for it."""
        return NETNS / self.name

    def create(self) -> None:
        """Make it, with its loopback up. Raises HostsError, as all commands here."""
        _run("ip", "netns", "add", self.name)
        self.ip("link", "set", "lo", "up")

    def remove(self) -> None:
        """Forget it, if it is known; it ends with its last process and socket."""
        self._run_if_known("ip", "netns", "delete", self.name)

    def ip(self, *arguments: str) -> None:
        """Run `ip` in it."""
        _run("ip", "-n", self.name, *arguments)

    def tc(self, *arguments: str) -> None:
        """Run `tc` in it."""
        _run("tc", "-n", self.name, *arguments)

    def pids(self) -> list[int]:
        """The processes whose main thread is in it; none when it is gone."""
        return [int(pid) for pid in self._run_if_known("ip", "netns", "pids", self.name).split()]

    def traffic(self) -> NamespaceTraffic:
        """Bytes of its interfaces, loopback left out, and RetransSegs, since it was made."""
        with self.entered():
            here = Path("/proc/thread-self/net")
            tx_bytes, rx_bytes = parse_net_dev((here / "dev").read_text())
            return NamespaceTraffic(tx_bytes, rx_bytes, parse_snmp_retransmits((here / "snmp").read_text()))

    def _run_if_known(self, *command: str) -> str:
        """Run a command about it; the janitor may remove it at any time."""
        try:
            return _run(*command)
        except HostsError:
            if self.path.exists():
                raise
            return ""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let the calling thread, and what it starts, live in this network; nothing else of it changes.

        Raises:
            OSError: when it may not, or the namespace is gone.
        """
        with Path("/proc/thread-self/ns/net").open("rb") as before, self.path.open("rb") as inside:
            _set_network(inside.fileno())
            try:
                yield
            finally:
                _set_network(before.fileno())


def _set_network(descriptor: int) -> None:
    """setns(2), which Python has from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter the network namespace: {os.strerror(number)}")


# --- shares of the processor -----------------------------------------------------------------------------------------

PERIOD_US = 20_000
"""Short, so that a throttled process stands still for milliseconds, not for tenths of a second."""
MIN_QUOTA_US = 1_000
"""The kernel takes no less."""


class Hierarchies(NamedTuple):
    """Where cgroups are mounted: version 2, which probes attach to, and where the controller `cpu` is, if anywhere.

    In a hybrid set-up the controller is with version 1; else both are the same.
    """

    unified: Path
    cpu: Path | None

    @property
    def roots(self) -> tuple[Path, ...]:
        """Each of the two once."""
        return (self.unified,) if self.cpu is None or self.cpu == self.unified else (self.unified, self.cpu)


def find_hierarchies() -> Hierarchies:
    """The hierarchies of this machine, by /proc/self/mountinfo (proc(5)). Raises HostsError without version 2."""
    mounts = Path("/proc/self/mountinfo").read_text()
    unified = v2_mount(mounts)
    if unified is None:
        raise HostsError(
            "cgroup version 2 is not mounted: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none "
            "/sys/fs/cgroup/unified"
        )
    if "cpu" in (unified / "cgroup.controllers").read_text().split():
        return Hierarchies(unified, unified)
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup" and "cpu" in options.split(","):
            return Hierarchies(unified, Path(before.split()[4]))
    return Hierarchies(unified, None)


def remove_cgroup(directory: Path) -> None:
    """Remove a cgroup and those right below it, once their last process has ended. Raises HostsError after a minute."""
    deadline = time.monotonic() + REMOVAL_TIMEOUT_S
    while directory.is_dir():
        try:
            for child in directory.iterdir():
                if child.is_dir():
                    child.rmdir()
            directory.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:  # busy: a process of it has not quite ended
            if time.monotonic() > deadline:
                raise HostsError(f"cannot remove the cgroup {directory}: {error}") from error
            time.sleep(PAUSE_S)


# --- hosts -----------------------------------------------------------------------------------------------------------

JOIN = 'for procs in $0; do echo 0 > "$procs" || exit; done; exec "$@"'
"""Shell script that moves itself to cgroups and becomes a program; the pid stays, and dies with the parent."""
_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MIN_RATE = 8_000
MIN_BURST_BYTES = 4096
"""Two packets and their headers; tbf drops what is larger than the burst."""
BURST_S = 0.001
"""Burst of a fast link: tbf then wakes up a thousand times a second, not at every packet."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A slow link, the same in both directions: a token bucket and a bounded queue at each of its ends.

    With the default queue it only takes its time: what a job of a few megabytes has in flight fits in. With 4,500 to
    10,000 bytes the queue overflows at every burst, and TCP retransmits thousands of segments.
    """

    rate: float
    """Bits per second."""
    queue_limit_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        """Raise HostsError for what tbf cannot do."""
        if self.rate < MIN_RATE:
            raise HostsError(f"a link of {self.rate:g} bit/s is below {MIN_RATE}: a packet would take seconds")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The link of a rate as `tc` writes it, such as 20mbit. Raises HostsError for anything else."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.strip().lower())
        if found is None:
            raise HostsError(f"invalid rate {text!r}: write a number and bit, kbit, mbit or gbit, such as 20mbit")
        return cls(rate=float(found[1]) * _UNITS[found[2]])

    @property
    def tbf(self) -> list[str]:
        """Arguments of `tc qdisc replace ... root tbf`."""
        burst_bytes = max(MIN_BURST_BYTES, int(self.rate / 8 * BURST_S))
        return f"rate {self.rate:.0f}bit burst {burst_bytes} limit {self.queue_limit_bytes}".split()


class Host:
    """A network behind one link, a share of the processor, and processes that live there.

    Attributes:
        index: from 0.
        address: of its interface `eth0`.
        namespace: its network.
        cgroup: of version 2: what is attached to it sees this host's sockets alone.
        cgroup_procs: files that a process writes its pid to, or 0, to have this host's share of the processor.
    """

    def __init__(self, index: int, name: str, switch: Namespace, hierarchies: Hierarchies) -> None:
        self.index = index
        self.address = str(NETWORK[2 + index])
        self.namespace = Namespace(f"{name}.{index}")
        self.cgroup = hierarchies.unified / name / str(index)
        self._cpu = None if hierarchies.cpu is None else hierarchies.cpu / name / str(index)
        cgroups = dict.fromkeys(path for path in (self.cgroup, self._cpu) if path is not None)
        self.cgroup_procs = tuple(path / "cgroup.procs" for path in cgroups)
        self._switch = switch
        self._port = f"port{index}"
        self._link: Link | None = None
        self._children: list[subprocess.Popen[bytes]] = []

    def create(self) -> None:
        """Make it, and join it to the switch."""
        try:
            for procs in self.cgroup_procs:
                procs.parent.mkdir(parents=True)
            if self._cpu == self.cgroup:
                for parent in self.cgroup.parents[1], self.cgroup.parent:
                    (parent / "cgroup.subtree_control").write_text("+cpu")
        except OSError as error:
            raise HostsError(
                f"cannot make the cgroup {self.cgroup}: {error}; the hierarchy must be writable and, with the "
                "controller cpu, its root must hold no processes of its own (in a container: --cgroupns=host)"
            ) from error
        self.namespace.create()
        peer = ("peer", "name", INTERFACE, "netns", self.namespace.name)
        self._switch.ip("link", "add", self._port, "type", "veth", *peer)
        self._switch.ip("link", "set", self._port, "master", BRIDGE, "up")
        interface = IPv4Interface((self.address, NETWORK.prefixlen))
        self.namespace.ip("address", "add", str(interface), "dev", INTERFACE)
        self.namespace.ip("link", "set", INTERFACE, "up")

    def set_link(self, link: Link | None) -> None:
        """Make its link slow in both directions, or (None) as fast as memory, which loses what is queued."""
        for namespace, interface in ((self.namespace, INTERFACE), (self._switch, self._port)):
            if link is not None:
                namespace.tc("qdisc", "replace", "dev", interface, "root", "tbf", *link.tbf)
            elif self._link is not None:
                namespace.tc("qdisc", "delete", "dev", interface, "root")
        self._link = link

    def cut(self, *, is_cut: bool = True) -> None:
        """Pull the plug of its link at the switch, or put it in again: what is sent is lost, connections stay."""
        self._switch.ip("link", "set", self._port, "down" if is_cut else "up")

    def set_cores(self, cores: float | None) -> None:
        """Give all its processes together so many seconds of processor per second; None: as many as there are.

        In periods of 20 ms: work of fewer than `cores` x 20 ms after a pause is not slowed down at all. Raises
        HostsError for less than 0.05, and where the machine has no controller for it.
        """
        if cores is not None and cores < MIN_QUOTA_US / PERIOD_US:
            raise HostsError(f"{cores:g} cores: the kernel shares out at least {MIN_QUOTA_US / PERIOD_US:g}")
        if self._cpu is None:
            if cores is not None:
                raise HostsError("no cgroup hierarchy has the controller cpu: boot with it, or give no share of cores")
            return
        quota = None if cores is None else round(cores * PERIOD_US)
        if self._cpu == self.cgroup:
            (self._cpu / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD_US}")
        else:
            (self._cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._cpu / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))

    def command(self, *program: str) -> list[str]:
        """How to start a program there: in its network and cgroups, with the same pid, dying with this process.

        For the kernel the thread that starts it is the parent: use one that lives as long as the program shall.
        """
        procs = " ".join(map(str, self.cgroup_procs))
        guard = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid())]
        network = [program_path("nsenter"), f"--net={self.namespace.path}"]
        return [*guard, *network, "sh", "-c", JOIN, procs, *program]

    def popen(
        self,
        program: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: Output = subprocess.DEVNULL,
        stdout: Output = None,
        stderr: Output = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program there, in a process group of its own; it is killed when the hosts are removed."""
        child = subprocess.Popen(
            self.command(*program), env=env, stdin=stdin, stdout=stdout, stderr=stderr, process_group=0
        )
        self._children.append(child)
        return child

    def end_children(self) -> None:
        """Kill what `popen` started and still runs, and wait for its end."""
        for child in self._children:
            child.kill()
        while self._children:
            self._children.pop().wait()


class Hosts(list[Host]):
    """Hosts `0 ... num_hosts - 1` and the switch between them; a context manager, for root.

    The bridge is in a namespace of its own, the switch, where a control plane may live too: `address` is its address
    there, and `entered` lets the calling thread and what it starts reach the hosts.
    """

    def __init__(self, num_hosts: int) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise HostsError(f"{num_hosts} hosts: use 1 to {MAX_HOSTS}, the ports of a bridge")
        super().__init__()
        self._num_hosts = num_hosts
        self._janitor: subprocess.Popen[bytes] | None = None
        self.name = Name.make()
        self.switch = Namespace(f"{self.name}.switch")
        self.address = str(NETWORK[1])

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise HostsError(
                f"hosts are made of network namespaces and cgroups, for which one must be root, not uid "
                f"{os.geteuid()}: use sudo, or a container with --privileged"
            )
        for program in PACKAGES:
            program_path(program)
        remove_stale()
        self._janitor = self._start_janitor()
        try:
            hierarchies = find_hierarchies()
            self.switch.create()
            self.switch.ip("link", "add", BRIDGE, "type", "bridge", "mcast_snooping", "0")
            self.switch.ip("address", "add", f"{self.address}/{NETWORK.prefixlen}", "dev", BRIDGE)
            self.switch.ip("link", "set", BRIDGE, "up")
            for index in range(self._num_hosts):
                self.append(Host(index, str(self.name), self.switch, hierarchies))
                self[-1].create()
        except BaseException:
            self.__exit__()
            raise
        return self

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Let the calling thread, and what it starts, live at `address`; its files and pids stay as they are."""
        return self.switch.entered()

    def __exit__(self, *_: object) -> None:
        """End what runs on the hosts, and wait until everything is removed; raises HostsError for what could not be."""
        janitor, self._janitor = self._janitor, None
        if janitor is None:
            return
        for host in self:
            host.end_children()
        self.clear()
        with janitor:
            assert janitor.stdin is not None
            janitor.stdin.close()
            if janitor.wait(JANITOR_TIMEOUT_S):  # it was killed, or failed: remove what it left
                remove(self.name)

    def _start_janitor(self) -> subprocess.Popen[bytes]:
        """Start it before anything is made: then nothing is left when this process dies while making hosts."""
        command = [sys.executable, "-m", "bench.hosts", str(self.name)]
        janitor = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=ROOT
        )
        assert janitor.stdout is not None
        if janitor.stdout.readline() != b"ready\n":
            janitor.kill()
            janitor.communicate()
            raise HostsError("the janitor process did not start: its error is above")
        return janitor


# --- removal ---------------------------------------------------------------------------------------------------------

_PATTERN = re.compile(r"dynamix-hosts-(\d+)-(\d+)-(\d+)")
_numbers = itertools.count()


class Name(NamedTuple):
    """Names everything of one set of hosts."""

    pid: int
    """The owner's process id."""
    start_ticks: int
    """The owner's start time in clock ticks since boot: tells it from a later process with its pid."""
    number: int
    """An owner may have several sets."""

    def __str__(self) -> str:
        return f"dynamix-hosts-{self.pid}-{self.start_ticks}-{self.number}"

    @classmethod
    def make(cls) -> Self:
        """A new name, owned by this process."""
        return cls(os.getpid(), Proc().stat(os.getpid()).start_ticks, next(_numbers))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The name at the beginning of a namespace's or a cgroup's name; `None` for what is none of ours."""
        found = _PATTERN.match(text)
        return None if found is None else cls(*map(int, found.groups()))

    def wait_for_owner(self, *pipes: int, timeout_ms: int | None = None) -> bool:
        """Wait until its owner, or one of the pipes, has ended; whether that happened in time."""
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if Proc().stat(self.pid).start_ticks != self.start_ticks:
                return True
            poll = select.poll()
            for descriptor in (process, *pipes):
                poll.register(descriptor, select.POLLIN | select.POLLHUP)
            return bool(poll.poll(timeout_ms))
        except FileNotFoundError:
            return True
        finally:
            os.close(process)


def remove(name: Name) -> None:
    """Remove everything of one set of hosts; what is gone already is no error. Raises HostsError for what stays."""
    namespaces = [Namespace(path.name) for path in _entries(NETNS) if Name.parse(path.name) == name]
    directories = [path for root in find_hierarchies().roots if (path := root / str(name)).is_dir()]
    _end_processes(name, namespaces, directories)
    for directory in directories:
        remove_cgroup(directory)
    for namespace in namespaces:
        with contextlib.suppress(HostsError):  # the switch has none; a socket may keep a namespace, but no link
            namespace.ip("link", "delete", INTERFACE)
    for namespace in namespaces:
        namespace.remove()


def remove_stale() -> None:
    """Remove all hosts whose owner and janitor both died."""
    entries = [path for place in (NETNS, *find_hierarchies().roots) for path in _entries(place)]
    for name in sorted({name for path in entries if (name := Name.parse(path.name)) is not None}):
        if name.wait_for_owner(timeout_ms=0):
            remove(name)


def _entries(directory: Path) -> list[Path]:
    """Sorted; nothing where there is no such directory, as before the first namespace."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _end_processes(name: Name, namespaces: Collection[Namespace], directories: Collection[Path]) -> None:
    """Kill until none is left: some may have been about to start others. The owner may be on the switch itself."""
    deadline = time.monotonic() + REMOVAL_TIMEOUT_S
    while True:
        pids = {pid for namespace in namespaces for pid in namespace.pids()}
        for procs in (procs for directory in directories for procs in directory.rglob("cgroup.procs")):
            with contextlib.suppress(OSError):  # the cgroup was removed meanwhile
                pids.update(map(int, procs.read_text().split()))
        pids -= {name.pid, os.getpid()}
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise HostsError(f"{name}: processes {sorted(pids)} do not die: see their state in /proc/PID/status")
        time.sleep(PAUSE_S)


def main(argument: str) -> int:
    """The janitor: wait for the end of standard input or of the owner, then remove; 0 when everything is gone.

    A child that the owner forked may hold the pipe as well, so the owner's death is waited for too. It has a session of
    its own and ignores the signals that ask it to end: those are for the owner.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    name = Name.parse(argument)
    assert name is not None, argument
    print("ready", flush=True)
    name.wait_for_owner(sys.stdin.fileno())
    try:
        remove(name)
    except (HostsError, OSError) as error:
        sys.stderr.write(f"the hosts {name} are not removed: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
