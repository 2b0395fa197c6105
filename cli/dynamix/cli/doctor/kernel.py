"""Checks of what the kernel lets this user see: /proc, TCP_INFO, eBPF."""

import importlib.util
import os
import socket
from pathlib import Path
from typing import NamedTuple

from .finding import Finding, lacking, there

TCP_INFO_BYTES = 136
"""Up to tcpi_bytes_received: bytes acknowledged and received are since Linux 4.1."""
PROC_FILES = ("stat", "status", "net/dev", "net/snmp")
DEBIAN_BCC = Path("/usr/lib/python3/dist-packages/bcc")


class Capability(NamedTuple):
    """A bit of CapEff in /proc/self/status."""

    name: str
    bit: int


NEEDED_FOR_BPF = (Capability("CAP_BPF", 39), Capability("CAP_PERFMON", 38), Capability("CAP_NET_ADMIN", 12))
SYS_ADMIN = Capability("CAP_SYS_ADMIN", 21)


def kernel(root: Path = Path("/")) -> list[Finding]:
    """Everything the kernel has a say in; `root` is where /proc and /sys are looked for."""
    effective = effective_capabilities((root / "proc/self/status").read_text())
    return [
        proc(root),
        tcp_info(),
        bcc(DEBIAN_BCC),
        capabilities(effective),
        cgroup(root),
        types(root, os.uname().release),
    ]


def proc(root: Path) -> Finding:
    """What the collector reads of processes and namespaces."""
    unreadable = [name for name in PROC_FILES if not os.access(root / "proc/self" / name, os.R_OK)]
    if unreadable:
        listed = ", ".join(unreadable)
        return lacking("/proc", "always", f"cannot read {listed}", "mount /proc as usual in this container or sandbox")
    if not os.access(root / "proc/1/stat", os.R_OK):
        return lacking(
            "/proc",
            "training",
            "other users' processes are hidden",
            "run collector and ranks as one user, or mount /proc without hidepid",
        )
    return there("/proc", "always", "readable")


def tcp_info() -> Finding:
    """Bytes and retransmissions of one's own sockets: exact, and without privileges."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as one:
        size = len(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    if size >= TCP_INFO_BYTES:
        return there("TCP_INFO", "training", f"{size} bytes, with traffic and retransmissions")
    return lacking("TCP_INFO", "training", f"{size} bytes only", "a newer kernel; until then traffic is per namespace")


def bcc(debian: Path) -> Finding:
    """The module that compiles eBPF programs; it comes from the distribution, never from PyPI."""
    if importlib.util.find_spec("bcc") is not None:
        return there("bcc", "ebpf", "importable")
    if debian.is_dir():
        mend = f"put a directory with nothing but a link to {debian} on PYTHONPATH"
        return lacking("bcc", "ebpf", "installed, but not visible in this environment", mend)
    return lacking("bcc", "ebpf", "not installed", "apt-get install python3-bpfcc (PyPI's `bcc` is something else)")


def capabilities(effective: int) -> Finding:
    """What loading eBPF programs takes."""
    missing = [one.name for one in NEEDED_FOR_BPF if not _has(effective, one)]
    if not missing or _has(effective, SYS_ADMIN):
        return there("eBPF rights", "ebpf", "this process may load and attach programs")
    return lacking("eBPF rights", "ebpf", f"without {', '.join(missing)}", "grant the collector these capabilities")


def cgroup(root: Path) -> Finding:
    """Version 2, to which traffic programs are attached."""
    if (root / "sys/fs/cgroup/cgroup.controllers").exists():
        return there("cgroup v2", "ebpf", str(root / "sys/fs/cgroup"))
    return lacking("cgroup v2", "ebpf", "not mounted", "boot with systemd.unified_cgroup_hierarchy=1")


def types(root: Path, release: str) -> Finding:
    """Where eBPF programs learn the kernel's structures: its own type information, or its headers."""
    if (root / "sys/kernel/btf/vmlinux").exists():
        return there("kernel types", "ebpf", "/sys/kernel/btf/vmlinux")
    if (root / "lib/modules" / release / "build").exists():
        return there("kernel types", "ebpf", f"headers of {release}")
    return lacking(
        "kernel types", "ebpf", f"neither BTF nor headers of {release}", "apt-get install linux-headers-amd64"
    )


def effective_capabilities(status: str) -> int:
    """CapEff of /proc/self/status."""
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)


def _has(effective: int, capability: Capability) -> bool:
    return bool(effective >> capability.bit & 1)
