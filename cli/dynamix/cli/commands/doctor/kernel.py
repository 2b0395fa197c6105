"""Checks of what the kernel shows to every user: /proc and TCP_INFO."""

import os
import socket
from pathlib import Path

from .check import DoctorCheck, failed, passed

TCP_INFO = "TCP_INFO"
TCP_INFO_BYTES = 136
"""Up to tcpi_bytes_received: bytes acknowledged and received are since Linux 4.1."""
PROC_FILES = ("stat", "status", "net/dev", "net/snmp")


def kernel(root: Path = Path("/")) -> list[DoctorCheck]:
    """What the collector reads without privileges; `root` is where /proc is looked for."""
    return [proc(root), run_queue(root), tcp_info()]


def proc(root: Path) -> DoctorCheck:
    """What the collector reads of processes and namespaces."""
    unreadable = [name for name in PROC_FILES if not os.access(root / "proc/self" / name, os.R_OK)]
    if unreadable:
        listed = ", ".join(unreadable)
        return failed("/proc", "always", f"cannot read {listed}", "mount /proc as usual in this container or sandbox")
    if not os.access(root / "proc/1/stat", os.R_OK):
        return failed(
            "/proc",
            "training",
            "other users' processes are hidden",
            "run collector and ranks as one user, or mount /proc without hidepid",
        )
    return passed("/proc", "always", "readable")


def run_queue(root: Path) -> DoctorCheck:
    """Waiting for a processor: without it that feature of the state is masked, all else works."""
    if os.access(root / "proc/self/schedstat", os.R_OK):
        return passed("schedstat", "training", "waiting for a processor is measured")
    fix = "a kernel with CONFIG_SCHED_INFO; until then this feature is masked"
    return failed("schedstat", "training", "this kernel does not say how long processes wait for a processor", fix)


def tcp_info() -> DoctorCheck:
    """Bytes and retransmissions of one's own sockets: exact, and without privileges."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as one:
        size = len(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    if size >= TCP_INFO_BYTES:
        return passed(TCP_INFO, "training", f"{size} bytes, with traffic and retransmissions")
    return failed(TCP_INFO, "training", f"{size} bytes only", "a newer kernel; until then traffic is per namespace")
