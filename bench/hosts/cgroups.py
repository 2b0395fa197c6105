"""Cgroups of a host: one of version 2, which probes attach to, and the one that holds its share of the processor.

Where version 2 has the controller `cpu` they are the same. In a hybrid set-up the controller is with version 1.
"""

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dynamix.collector.ebpf.attachment import v2_mount

from .namespace import HostsError

PERIOD_US = 20_000
"""Short, so that a throttled process stands still for milliseconds, not for tenths of a second."""
MIN_QUOTA_US = 1_000
"""The kernel takes no less."""

REMOVAL_TIMEOUT_S = 20.0
REMOVAL_PAUSE_S = 0.01
"""Processes end, and cgroups become free, some time after they were told to; nothing tells when."""

MOUNTINFO = Path("/proc/self/mountinfo")


class Hierarchies(NamedTuple):
    """Where cgroups are mounted."""

    unified: Path
    """Version 2."""
    cpu: Path | None
    """Where the controller `cpu` is: version 2 or 1; `None` without one."""

    @property
    def roots(self) -> tuple[Path, ...]:
        """Each of the two once."""
        return (self.unified,) if self.cpu is None or self.cpu == self.unified else (self.unified, self.cpu)


def v1_cpu_mount(mountinfo: str) -> Path | None:
    """Mount point of version 1's controller `cpu`, by /proc/<pid>/mountinfo (proc(5))."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(before.split()[4])
    return None


def find_hierarchies(mountinfo: Path = MOUNTINFO) -> Hierarchies:
    """The hierarchies of this machine.

    Raises:
        HostsError: without version 2.
    """
    mounts = mountinfo.read_text()
    unified = v2_mount(mounts)
    if unified is None:
        raise HostsError(
            "cgroup version 2 is not mounted: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none "
            "/sys/fs/cgroup/unified"
        )
    has_controller = "cpu" in (unified / "cgroup.controllers").read_text().split()
    return Hierarchies(unified, unified if has_controller else v1_cpu_mount(mounts))


class Cgroup:
    """The cgroups of one host, made by `create`; processes join both."""

    def __init__(self, hierarchies: Hierarchies, name: str, index: int) -> None:
        part = Path(name, str(index))
        self._hierarchies = hierarchies
        self.unified = hierarchies.unified / part
        self._cpu = None if hierarchies.cpu is None else hierarchies.cpu / part

    def create(self) -> None:
        """Make them.

        Raises:
            HostsError: where this process may not.
        """
        try:
            for procs in self.procs:
                procs.parent.mkdir(parents=True)
            if self._cpu == self.unified:
                for parent in (self._hierarchies.unified, self.unified.parent):
                    (parent / "cgroup.subtree_control").write_text("+cpu")
        except OSError as error:
            raise HostsError(
                f"cannot make the cgroup {self.unified}: {error}; the hierarchy must be writable and, with the "
                "controller cpu, its root must hold no processes of its own (in a container: --cgroupns=host)"
            ) from error

    @property
    def procs(self) -> tuple[Path, ...]:
        """The files that a process writes its pid to."""
        own = {} if self._cpu is None else {self._cpu: None}
        return tuple(directory / "cgroup.procs" for directory in {self.unified: None, **own})

    def set_cores(self, cores: float | None) -> None:
        """Give its processes so many seconds of processor per second together, or as many as there are.

        Raises:
            HostsError: for less than the kernel can share out, and without the controller.
        """
        least = MIN_QUOTA_US / PERIOD_US
        if cores is not None and cores < least:
            raise HostsError(f"{cores:g} cores are less than {least:g}, which is the least the kernel shares out")
        if self._cpu is None:
            if cores is None:
                return
            raise HostsError("no cgroup hierarchy has the controller cpu: boot with it, or give no share of cores")
        quota = None if cores is None else round(cores * PERIOD_US)
        if self._cpu == self.unified:
            (self._cpu / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD_US}")
        else:
            (self._cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._cpu / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))


def pids_below(directories: Iterable[Path]) -> set[int]:
    """All processes of some cgroups and of those below them."""
    pids: set[int] = set()
    for procs in (procs for directory in directories for procs in directory.rglob("cgroup.procs")):
        with contextlib.suppress(OSError):  # the cgroup was removed meanwhile
            pids.update(map(int, procs.read_text().split()))
    return pids


def remove_cgroup(directory: Path) -> None:
    """Remove a cgroup and those right below it, which become free some time after their last process was told to end.

    Raises:
        HostsError: when they are not free after `REMOVAL_TIMEOUT_S`.
    """
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
            time.sleep(REMOVAL_PAUSE_S)
