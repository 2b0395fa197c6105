"""One host: a network of its own behind one link, a share of the processor, and processes that live there."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Interface
from pathlib import Path
from typing import IO

from dynamix.collector.procfs.proc import NamespaceTraffic
from dynamix.runtime.embedded import DIE_WITH_PARENT

from .cgroups import Cgroup
from .commands import program_path
from .link import Link
from .namespace import Namespace

INTERFACE = "eth0"
ENTER = Path(__file__).with_name("enter.py")

Output = int | IO[bytes] | None


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
        """Its cgroup of version 2: what is attached to it sees this host's sockets alone."""
        return self._cgroup.unified

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

    def set_cores(self, cores: float | None) -> None:
        """Give all its processes together so many seconds of processor per second; None: as many as there are.

        In periods of 20 ms, so that work of fewer than `cores` x 20 ms after a pause is not slowed down at all.

        Raises:
            HostsError: for less than 0.05, and where the machine has no controller for it.
        """
        self._cgroup.set_cores(cores)

    def traffic(self) -> NamespaceTraffic:
        """Bytes of its interface and segments retransmitted by all its sockets, since it was made."""
        return self.namespace.traffic()

    def command(self, *program: str) -> list[str]:
        """How to start a program there: in its network and cgroups, with the same pid, dying with this process.

        For the kernel the thread that starts it is the parent: use one that lives as long as the program shall.
        """
        procs = ":".join(str(path) for path in self._cgroup.procs)
        guard = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid())]
        network = [program_path("nsenter"), f"--net={self.namespace.path}"]
        return [*guard, *network, sys.executable, "-I", "-S", str(ENTER), procs, *program]

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
        for child in self._children:
            child.wait()
        self._children.clear()
