"""A network namespace: commands and counters in it, and a thread that enters it for a while."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dynamix.collector.procfs.proc import NamespaceTraffic, parse_net_dev, parse_snmp_retransmits

from .commands import HostsError, run

DIRECTORY = Path("/run/netns")
"""Where `ip netns` keeps a file for each."""

_CLONE_NEWNET = 0x40000000
_OWN = "/proc/thread-self/ns/net"


class Namespace(NamedTuple):
    """A network namespace that `ip netns` knows."""

    name: str

    @property
    def path(self) -> Path:
        """The file that stands for it."""
        return DIRECTORY / self.name

    def create(self) -> None:
        """Make it, with its loopback up. Raises HostsError, as all commands here."""
        run("ip", "netns", "add", self.name)
        self.ip("link", "set", "lo", "up")

    def remove(self) -> None:
        """Forget it, if it is known; it ends with its last process and socket."""
        self._run_if_known("ip", "netns", "delete", self.name)

    def ip(self, *arguments: str) -> None:
        """Run `ip` in it."""
        run("ip", "-n", self.name, *arguments)

    def tc(self, *arguments: str) -> None:
        """Run `tc` in it."""
        run("tc", "-n", self.name, *arguments)

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
            return run(*command)
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
        before = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            inside = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _set_network(inside)
            finally:
                os.close(inside)
            try:
                yield
            finally:
                _set_network(before)
        finally:
            os.close(before)


def _set_network(descriptor: int) -> None:
    """setns(2), which Python has from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter the network namespace: {os.strerror(number)}")
