"""This process as the kernel identifies it: what distinguishes a pid from a later one of that number (Linux)."""

import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class ProcessIdentity(NamedTuple):
    """Enough for a collector to find the process and to believe that it is the one."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot."""
    namespace: int
    """Inode of the pid namespace in which `pid` counts."""
    uid: int


def this_process() -> ProcessIdentity:
    """Identity of the calling process."""
    pid = os.getpid()
    return ProcessIdentity(pid, start_ticks(pid), (PROC / "self/ns/pid").stat().st_ino, os.getuid())


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot: field 22 of /proc/<pid>/stat (proc(5))."""
    stat = (PROC / str(pid) / "stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[19])  # the command name may hold spaces and brackets


def fingerprint(pid: int) -> str:
    """Names a process of this machine apart from every other in time and place."""
    seen = (PROC / str(pid)).exists()  # a parent is not when it is outside of our pid namespace
    return f"{boot_id()}/{pid}/{start_ticks(pid) if seen else 0}"


def boot_id() -> str:
    """Names this machine since it was started; random (random(4))."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()
