"""Checks of what the eBPF probe needs, the probe that the collector takes, and a trial."""

import ctypes
import errno
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dynamix.collector.ebpf.loader import DISTRIBUTION_DIRECTORIES, find_bcc, find_headers
from dynamix.collector.ebpf.probe import open_probe, v2_mount
from dynamix.collector.ebpf.syscall import NUMBERS, ProbeError
from dynamix.collector.window import WantedProbe

from . import DoctorCheck
from .checks import TCP_INFO

OLDEST = (5, 8)
"""CAP_BPF and CAP_PERFMON; links came with 5.7."""
NEEDED = {"CAP_BPF": 39, "CAP_PERFMON": 38, "CAP_NET_ADMIN": 12}
"""Bits of CapEff in /proc/self/status."""
SYS_ADMIN = 21
INITIAL_USER_NAMESPACE = ["0", "0", "4294967295"]
INITIAL_CGROUP_NAMESPACE = "cgroup:[4026531835]"
"""Its inode has one number on all machines (PROC_CGROUP_INIT_INO)."""
HOW_TO_GRANT = (
    "run as root, or grant the collector these capabilities: docs/operations.md, Kernel probes, has the lines for "
    "systemd, containers and setpriv"
)
FILTERED = "2"
"""Mode of `Seccomp:` in /proc/<pid>/status: a filter is active."""

_PROG_LOAD, _CGROUP_SKB = 5, 8
_LET_EVERY_PACKET_PASS = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 1, 0x95, 0, 0, 0)
"""r0 = 1; return r0."""
PAYLOAD_BYTES, NUM_PIECES = 1_000_000, 100
"""A piece fits into the smallest of socket buffers: one thread sends and receives."""
SO_COOKIE = 57
"""asm-generic/socket.h; Python has no name for it."""


def programs(root: Path = Path("/"), system: os.uname_result | None = None) -> list[DoctorCheck]:
    """Everything that `auto` needs to choose eBPF; `root` is where /proc, /sys and headers are looked for."""
    system = system or os.uname()
    status = (root / "proc/self/status").read_text()
    directory = find_bcc()
    if directory is not None:
        bcc = DoctorCheck("bcc", "ebpf", str(directory))
    else:  # the module that compiles the program; it comes from the distribution and is found by its path
        fix = "apt-get install python3-bpfcc, dnf install python3-bcc (PyPI's `bcc` is something else)"
        bcc = DoctorCheck("bcc", "ebpf", f"not in this environment, nor at {DISTRIBUTION_DIRECTORIES[0]}", fix)
    return [
        release(system.release),
        rights(status),
        acceptance(root, status, load_smallest_program),
        cgroup(root),
        bcc,
        headers(root, system),
    ]


def chosen(
    kernel: Sequence[DoctorCheck], programs: Sequence[DoctorCheck], wanted: WantedProbe
) -> tuple[WantedProbe, DoctorCheck]:
    """The probe that a collector of this user and these settings takes, and why, as a check."""
    missing = ", ".join(check.name for check in programs if not check.present)
    if wanted == "ebpf" and missing:
        what = f"the collector refuses to start: eBPF is wanted and lacks {missing}"
        fix = "what stands above, or DYNAMIX_COLLECTOR_PROBE=auto"
        return wanted, DoctorCheck("probe", "training", what, fix)
    if wanted != "auto":
        return wanted, DoctorCheck("probe", "training", f"{wanted}, as DYNAMIX_COLLECTOR_PROBE says")
    has_tcp_info = next(check for check in kernel if check.name == TCP_INFO).present
    probe: WantedProbe = "ebpf" if not missing else "tcp_info" if has_tcp_info else "proc"
    because = f"eBPF lacks {missing}" if missing else "`dynamix doctor --ebpf` tries it"
    return probe, DoctorCheck("probe", "training", f"`auto` takes {probe}: {because}")


def release(text: str) -> DoctorCheck:
    """The kernel's version."""
    if tuple(int(number) for number in re.findall(r"\d+", text)[:2]) >= OLDEST:
        return DoctorCheck("kernel", "ebpf", text)
    return DoctorCheck("kernel", "ebpf", f"{text} is too old", "Linux 5.8 or newer")


def rights(status: str) -> DoctorCheck:
    """The capabilities that loading and attaching programs takes, by /proc/self/status."""
    if _has(status, SYS_ADMIN):
        return DoctorCheck("rights", "ebpf", f"CAP_SYS_ADMIN ({', '.join(NEEDED)} would do)")
    missing = [name for name, bit in NEEDED.items() if not _has(status, bit)]
    if missing:
        return DoctorCheck("rights", "ebpf", f"without {', '.join(missing)}", HOW_TO_GRANT)
    return DoctorCheck("rights", "ebpf", ", ".join(NEEDED))


def acceptance(root: Path, status: str, load: Callable[[], None]) -> DoctorCheck:
    """Whether the kernel takes a program at all, or what refuses it: a filter, a security module or a sandbox."""
    try:
        load()
    except OSError as error:
        code, what = error.errno, f"refused: {error.strerror}"
    else:
        return DoctorCheck("bpf()", "ebpf", "the kernel took a program of two instructions")
    lockdown = _text(root / "sys/kernel/security/lockdown").strip()
    if code == errno.ENOSYS:
        what, fix = "there is no such call here", "run the collector outside of this sandbox"
    elif code == errno.EINVAL:
        what += ": no programs on control groups"
        fix = "a kernel with CONFIG_BPF_SYSCALL and CONFIG_CGROUP_BPF"
    elif not rights(status).present:
        what, fix = f"{what}, for want of rights", "the capabilities above"
    elif _text(root / "proc/self/uid_map").split() not in ([], INITIAL_USER_NAMESPACE):
        what += ": the rights count in this user namespace only"
        fix = "start the collector outside of it: rootless containers cannot load programs"
    elif _field(status, "Seccomp") == FILTERED:
        what += " by a system call filter"
        fix = "allow it: SystemCallFilter=bpf in a unit; Docker 23 and containerd 1.7 or newer do, with CAP_BPF"
    else:
        what += " by a security module" + (f" (lockdown: {lockdown})" if lockdown else "")
        fix = "the kernel's log says by which"
    return DoctorCheck("bpf()", "ebpf", what, fix)


def cgroup(root: Path) -> DoctorCheck:
    """Version 2, to which the programs are attached: alone, or beside version 1."""
    mountinfo = _text(root / "proc/self/mountinfo")
    mount = v2_mount(mountinfo)
    if mount is None:
        fix = "mount -t cgroup2 none /sys/fs/cgroup/unified, or boot with systemd.unified_cgroup_hierarchy=1"
        return DoctorCheck("cgroup v2", "ebpf", "not mounted", fix)
    try:
        namespace = str((root / "proc/self/ns/cgroup").readlink())
    except OSError:
        namespace = INITIAL_CGROUP_NAMESPACE
    seen = [line.split()[3] for line in mountinfo.splitlines() if line.split()[4] == str(mount)]
    # In a control group namespace of its own, a mount of "/" shows nothing above it; a later mount covers an earlier.
    if namespace != INITIAL_CGROUP_NAMESPACE and seen[-1:] == ["/"]:
        what = f"{mount} shows this container only: ranks elsewhere are not counted"
        fix = "`cgroup: host` (compose), --cgroupns=host (docker), or mount the host's /sys/fs/cgroup"
        return DoctorCheck("cgroup v2", "ebpf", what, fix)
    return DoctorCheck("cgroup v2", "ebpf", f"{mount}{', beside version 1' if ' - cgroup ' in mountinfo else ''}")


def headers(root: Path, system: os.uname_result) -> DoctorCheck:
    """The headers that BCC compiles with; it cannot use the kernel's type information (BTF) instead."""
    found = find_headers(root, system)
    if found is None:
        fix = "apt-get install linux-headers-amd64 (-arm64, -generic; dnf: kernel-devel): any version will do"
        return DoctorCheck("headers", "ebpf", f"none of {system.release}, nor of another kernel in /usr/src", fix)
    of = "of this kernel" if found.own else "of another kernel, which will do"
    return DoctorCheck("headers", "ebpf", f"{found.build}, {of}")


def _has(status: str, bit: int) -> bool:
    return bool(int(_field(status, "CapEff"), 16) >> bit & 1)


def _field(status: str, name: str) -> str:
    return next((line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:")), "0")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def load_smallest_program() -> None:
    """Load a program for a control group's packets and drop it at once; it is attached nowhere.

    Raises OSError as the kernel refuses it; ENOSYS also where the call's number is not known.
    """
    instructions = ctypes.create_string_buffer(_LET_EVERY_PACKET_PASS)
    license_ = ctypes.create_string_buffer(b"Apache-2.0")
    attribute = ctypes.create_string_buffer(72)
    addresses = (ctypes.addressof(instructions), ctypes.addressof(license_))
    struct.pack_into("=IIQQ", attribute, 0, _CGROUP_SKB, 2, *addresses)
    libc = ctypes.CDLL(None, use_errno=True)
    program = libc.syscall(NUMBERS.get(os.uname().machine, -1), _PROG_LOAD, attribute, len(attribute))
    if program < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    os.close(program)


def try_ebpf(cgroup: str) -> DoctorCheck:
    """Open the probe on a control group, as the collector would, count a connection and close it."""
    try:
        open_s, received_bytes = run_trial(cgroup)
    except (ProbeError, OSError) as error:
        fix = "what is lacking above; else see docs/operations.md, Kernel probes"
        return DoctorCheck("trial", "ebpf", str(error), fix)
    if received_bytes != PAYLOAD_BYTES:
        counted = "nothing" if received_bytes is None else f"{received_bytes:,} bytes"
        what = f"attached, but counted {counted} of a connection's {PAYLOAD_BYTES:,}"
        fix = "empty DYNAMIX_COLLECTOR_CGROUP, or run this inside of that control group"
        return DoctorCheck("trial", "ebpf", what, fix)
    what = f"loaded in {open_s:.2f} s, counted {PAYLOAD_BYTES:,} bytes exactly, detached"
    return DoctorCheck("trial", "ebpf", what)


def run_trial(cgroup: str) -> tuple[float, int | None]:
    """Load and attach, send over loopback and read, detach: seconds to open the probe, and the bytes that it counted.

    The bytes are `None` when the probe did not know the connection. Raises ProbeError when it cannot be opened.
    """
    start = time.perf_counter()
    with open_probe(cgroup) as probe:
        open_s = time.perf_counter() - start
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            socket.create_connection(listening.getsockname()) as sender,
            listening.accept()[0] as receiver,
        ):
            for _ in range(NUM_PIECES):
                sender.sendall(bytes(PAYLOAD_BYTES // NUM_PIECES))
                receiver.recv(PAYLOAD_BYTES // NUM_PIECES, socket.MSG_WAITALL)
            (cookie,) = struct.unpack("=Q", receiver.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))
            counters = probe.read(cookie, os.getuid())
    return open_s, None if counters is None else counters.received_bytes
