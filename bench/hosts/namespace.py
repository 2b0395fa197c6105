"""A network namespace: commands and counters in it, and a thread that enters it for a while.

Made with `ip` and `tc` (iproute2); `nsenter` (util-linux) starts programs there.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dynamix.collector.procfs.proc import NamespaceTraffic, parse_net_dev, parse_snmp_retransmits

DIRECTORY = Path("/run/netns")
"""Where `ip netns` keeps a file for each."""

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
TIMEOUT_S = 20.0
_CLONE_NEWNET = 0x40000000


class HostsError(RuntimeError):
    """Hosts could not be made, changed or removed; the text says what is missing and how to fix it."""


def check_requirements() -> None:
    """Make sure that this process may make hosts.

    Raises:
        HostsError: naming what is missing.
    """
    if os.geteuid() != 0:
        raise HostsError(
            f"hosts are made of network namespaces and cgroups, for which one must be root, not uid {os.geteuid()}: "
            "use sudo, or a container with --privileged"
        )
    for program in PACKAGES:
        program_path(program)


def program_path(program: str) -> str:
    """Where a program is.

    Raises:
        HostsError: when it is nowhere.
    """
    if found := shutil.which(program):
        return found
    raise HostsError(f"no {program} on PATH: apt-get install {PACKAGES[program]}")


def _run(*command: str) -> str:
    """Run a program; returns what it said.

    Raises:
        HostsError: when it fails, with its own words.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
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
        return DIRECTORY / self.name

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
