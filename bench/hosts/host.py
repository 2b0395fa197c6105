"""One host: a network of its own behind one link, a share of the processor, and processes that live there.

Its link is a rate and the queue in front of it, as `tc tbf` takes them.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface
from pathlib import Path
from typing import IO, Self

from dynamix.runtime.embedded import DIE_WITH_PARENT

from .cgroups import Cgroup
from .namespace import HostsError, Namespace, program_path

INTERFACE = "eth0"
JOIN = 'for procs in $0; do echo 0 > "$procs" || exit; done; exec "$@"'
"""Shell script that moves itself to cgroups and becomes a program; the pid stays, and dies with the parent."""

Output = int | IO[bytes] | None

_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?bit)")

MIN_RATE = 8_000
MIN_BURST_BYTES = 4096
"""Two packets and their headers; tbf drops what is larger than the burst."""
BURST_S = 0.001
"""Burst of a fast link: tbf then wakes up a thousand times a second, not at every packet."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A slow link, the same in both directions, with a token bucket and a bounded queue at each of its ends.

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
        if self.queue_limit_bytes < MIN_BURST_BYTES:
            raise HostsError(
                f"a queue of {self.queue_limit_bytes} bytes lets nothing pass: use at least {MIN_BURST_BYTES}"
            )

    @classmethod
    def parse(cls, text: str, **options: int) -> Self:
        """The link of a rate as `tc` writes it: a number and bit, kbit, mbit or gbit (powers of ten).

        Raises:
            HostsError: for anything else.
        """
        found = _RATE.fullmatch(text.strip().lower())
        if found is None:
            raise HostsError(f"{text!r} is not a rate: write a number and bit, kbit, mbit or gbit, such as 20mbit")
        return cls(rate=float(found[1]) * _UNITS[found[2]], **options)

    @property
    def burst_bytes(self) -> int:
        """What may pass at once after a pause."""
        return max(MIN_BURST_BYTES, int(self.rate / 8 * BURST_S))

    @property
    def tbf(self) -> list[str]:
        """Arguments of `tc qdisc replace ... root tbf`."""
        return [
            *("rate", f"{self.rate:.0f}bit"),
            *("burst", str(self.burst_bytes)),
            *("limit", str(self.queue_limit_bytes)),
        ]


class Host:
    """A host as its cluster made it.

    Attributes:
        index: from 0.
        address: of its interface `eth0`.
        namespace: its network.
    """

    def __init__(self, index: int, interface: IPv4Interface, namespace: Namespace, switch: Namespace, cgroup: Cgroup):
        self.index = index
        self.address = str(interface.ip)
        self.namespace = namespace
        self._interface = interface
        self._switch = switch
        self._cgroup = cgroup
        self._link: Link | None = None
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def cgroup(self) -> Path:
        """The host's cgroup of version 2: what is attached to it sees this host's sockets alone."""
        return self._cgroup.unified

    @property
    def cgroup_procs(self) -> tuple[Path, ...]:
        """The files that a process writes its pid to, or 0, to have this host's share of the processor."""
        return self._cgroup.procs

    @property
    def port(self) -> str:
        """The switch's end of its link."""
        return f"port{self.index}"

    def create(self, bridge: str) -> None:
        """Make it, and join it to a bridge in the switch's namespace."""
        self._cgroup.create()
        self.namespace.create()
        peer = ("peer", "name", INTERFACE, "netns", self.namespace.name)
        self._switch.ip("link", "add", self.port, "type", "veth", *peer)
        self._switch.ip("link", "set", self.port, "master", bridge, "up")
        self.namespace.ip("address", "add", str(self._interface), "dev", INTERFACE)
        self.namespace.ip("link", "set", INTERFACE, "up")

    def set_link(self, link: Link | None) -> None:
        """Make its link slow in both directions, or (None) as fast as memory, which loses what is queued.

        Raises:
            HostsError: when `tc` fails.
        """
        for namespace, interface in ((self.namespace, INTERFACE), (self._switch, self.port)):
            if link is not None:
                namespace.tc("qdisc", "replace", "dev", interface, "root", "tbf", *link.tbf)
            elif self._link is not None:
                namespace.tc("qdisc", "delete", "dev", interface, "root")
        self._link = link

    def cut(self) -> None:
        """Pull the plug of its link at the switch, until `restore`: whatever is sent is lost, connections stay."""
        self._switch.ip("link", "set", self.port, "down")

    def restore(self) -> None:
        """Plug its link in again."""
        self._switch.ip("link", "set", self.port, "up")

    def set_cores(self, cores: float | None) -> None:
        """Give all its processes together so many seconds of processor per second; None: as many as there are.

        In periods of 20 ms, so that work of fewer than `cores` x 20 ms after a pause is not slowed down at all.

        Raises:
            HostsError: for less than 0.05, and where the machine has no controller for it.
        """
        self._cgroup.set_cores(cores)

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
