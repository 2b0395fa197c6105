"""Several hosts on one machine: made, joined by a bridge, and removed again whatever happens."""

import contextlib
import subprocess
import sys
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import Self

from .cgroups import Cgroup, find_hierarchies
from .host import Host
from .namespace import HostsError, Namespace, check_requirements
from .removal import Name, remove, remove_stale_programs

NETWORK = IPv4Network("10.75.0.0/16")
"""Seen by these hosts alone: the machine's own network may use the same addresses."""
BRIDGE = "bridge"
MAX_HOSTS = 1023
"""Ports of a bridge."""
JANITOR_TIMEOUT_S = 60.0
REPOSITORY = Path(__file__).parents[2]
"""Where `python -m` finds the janitor, whatever the current directory of this process is."""


class Hosts(list[Host]):
    """Hosts `0 ... num_hosts - 1` and the switch between them; a context manager, for root.

    The bridge is in a namespace of its own, the switch, where a control plane may live too: `address` is its address
    there, and `entered` lets the calling thread and what it starts reach the hosts. Nothing is added to the machine's
    own network. A second process, the janitor, removes everything when this one is done or dead, however it died; if
    the janitor was killed too, the next start of any hosts does.

    Args:
        num_hosts: how many.
        cores: seconds of processor per second and host to begin with (`Host.set_cores`); None: no limit.
    """

    def __init__(self, num_hosts: int, *, cores: float | None = None) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise HostsError(f"{num_hosts} hosts: use 1 to {MAX_HOSTS}, the ports of a bridge")
        super().__init__()
        self._num_hosts = num_hosts
        self._cores = cores
        self._janitor: subprocess.Popen[bytes] | None = None
        self.name = Name.make()
        self.switch = Namespace(f"{self.name}.switch")
        self.address = str(NETWORK[1])

    def __enter__(self) -> Self:
        check_requirements()
        remove_stale_programs()
        self._janitor = self._start_janitor()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Let the calling thread, and what it starts, live at `address`; its files and pids stay as they are."""
        return self.switch.entered()

    def close(self) -> None:
        """End what runs on the hosts, and wait until everything is removed.

        Raises:
            HostsError: naming what could not be.
        """
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
        command = [sys.executable, "-m", "bench.hosts.janitor", str(self.name)]
        janitor = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=REPOSITORY
        )
        assert janitor.stdout is not None
        if janitor.stdout.readline() != b"ready\n":
            janitor.kill()
            janitor.communicate()
            raise HostsError("the janitor process did not start: see what it said above")
        return janitor

    def _make(self) -> None:
        hierarchies = find_hierarchies()
        self.switch.create()
        self.switch.ip("link", "add", BRIDGE, "type", "bridge", "mcast_snooping", "0")
        self.switch.ip("address", "add", f"{self.address}/{NETWORK.prefixlen}", "dev", BRIDGE)
        self.switch.ip("link", "set", BRIDGE, "up")
        for index in range(self._num_hosts):
            host = Host(
                index,
                interface=IPv4Interface((NETWORK[2 + index], NETWORK.prefixlen)),
                namespace=Namespace(f"{self.name}.{index}"),
                switch=self.switch,
                cgroup=Cgroup(hierarchies, str(self.name), index),
            )
            host.create(BRIDGE)
            host.set_cores(self._cores)
            self.append(host)
