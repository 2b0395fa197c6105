"""From settings to an attached probe."""

from pathlib import Path

from dynamix.collector.errors import ProbeError

from .cgroup import v2_mount
from .probe import SocketProbe

_MOUNTINFO = Path("/proc/self/mountinfo")


def open_probe(cgroup: str = "") -> SocketProbe:
    """A probe on the sockets of a control group, or of the whole hierarchy; blocks for half a second.

    Raises:
        ProbeError: saying what is missing.
    """
    try:
        return SocketProbe(_directory(cgroup))
    except OSError as error:
        raise ProbeError(f"{error.filename or cgroup or 'eBPF'}: {error.strerror}") from error


def _directory(cgroup: str) -> Path:
    mount = v2_mount(_MOUNTINFO.read_text())
    if mount is None:
        raise ProbeError("no control groups of version 2 are mounted")
    directory = Path(cgroup) if cgroup else mount
    if not (directory / "cgroup.procs").is_file():
        raise ProbeError(
            f"{directory} is no control group of version 2: DYNAMIX_COLLECTOR_CGROUP names one under {mount}"
        )
    return directory
