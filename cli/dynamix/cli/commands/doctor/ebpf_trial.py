"""A trial of the eBPF probe: load it, attach it, let it count a connection of this process, detach it."""

import os
import socket
import struct
import time

import msgspec

from dynamix.collector.ebpf.probe import SocketProbe, open_probe
from dynamix.collector.ebpf.syscall import ProbeError

from .check import DoctorCheck, failed, passed

PAYLOAD_BYTES, NUM_PIECES = 1_000_000, 100
"""A piece fits into the smallest of socket buffers: one thread sends and receives."""
SO_COOKIE = 57
"""asm-generic/socket.h; Python has no name for it."""


class ProbeTrial(msgspec.Struct, frozen=True):
    """The measured result."""

    open_s: float
    """Compiling, loading and attaching."""
    received_bytes: int | None
    """What the probe counted of `PAYLOAD_BYTES`; `None` when it did not know the connection."""


def try_ebpf(cgroup: str) -> DoctorCheck:
    """Open the probe on a control group, as the collector would, and close it."""
    try:
        trial = run_trial(cgroup)
    except (ProbeError, OSError) as error:
        return failed("trial", "ebpf", str(error), "what is lacking above; else see docs/operations.md, Kernel probes")
    if trial.received_bytes != PAYLOAD_BYTES:
        counted = "nothing" if trial.received_bytes is None else f"{trial.received_bytes:,} bytes"
        fix = "empty DYNAMIX_COLLECTOR_CGROUP, or run this inside of that control group"
        return failed("trial", "ebpf", f"attached, but counted {counted} of a connection's {PAYLOAD_BYTES:,}", fix)
    return passed("trial", "ebpf", f"loaded in {trial.open_s:.2f} s, counted {PAYLOAD_BYTES:,} bytes exactly, detached")


def run_trial(cgroup: str) -> ProbeTrial:
    """Load and attach, send and read, detach.

    Raises:
        ProbeError: when the probe cannot be opened.
    """
    start = time.perf_counter()
    with open_probe(cgroup) as probe:
        return ProbeTrial(time.perf_counter() - start, _count(probe))


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
