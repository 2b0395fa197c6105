"""The eBPF probe: load, attach, read. It blocks: half a second to open, 3 us to read a socket.

The layouts here and those of `sockets.bpf.c` must be changed together. Links attach the programs (Linux 5.7): they end
with this process, kill -9 included.
"""

import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from . import syscall
from .syscall import ProbeError

SOURCE = Path(__file__).with_name("sockets.bpf.c")
MAX_OPEN = 131_072
"""Slots for TCP sockets under the control group, a power of two; 8 MB of kernel memory."""
NUM_WAYS = 8
"""Slots that a socket may be in: where it is and the order of the ways are as in the C program."""
SCATTER = 0x9E3779B97F4A7C15
MAX_CLOSED = 4096
"""Closed sockets kept for the next reading, the newest."""

INGRESS, SOCKETS = "dynamix_ingress", "dynamix_sockets"
PROGRAMS = {INGRESS: syscall.INGRESS, SOCKETS: syscall.SOCK_OPS}
"""Programs, and where they are attached."""
MAPS = ("sockets", "closed", "left_out")

LOAD_TIMEOUT_S = 60.0
_LOADER = f"{__package__}.loader"
_ERROR_CHARACTERS = 600
_UID_UNKNOWN = 2**64 - 1
_KEY, _INDEX = struct.Struct("=Q"), struct.Struct("=I")
_COUNTERS = struct.Struct("=QQQQQQQQ")
"""Cookie and owner, then `Counters`, then nothing."""
_NUMBER = struct.Struct("=Q")


class Counters(NamedTuple):
    """Counters of one socket since its connection began."""

    received_bytes: int
    acked_bytes: int
    retransmits: int
    """Retransmitted segments."""
    srtt_sum_us: int
    """Sum of the smoothed round trip times before each of `num_rtts` samples but the first."""
    num_rtts: int


class SocketProbe:
    """Counters of every TCP socket that was opened under a control group since the probe was attached there.

    Args:
        directory: the control group's, version 2: its processes and those of all groups below it.

    Attributes:
        programs: descriptors of `PROGRAMS`, in their order.

    Raises:
        ProbeError: when it cannot be loaded or attached; the message has the reason.
    """

    def __init__(self, directory: Path) -> None:
        with ExitStack() as stack:
            descriptors = _load()
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            self.programs = descriptors[: len(PROGRAMS)]
            maps = dict(zip(MAPS, descriptors[len(PROGRAMS) :], strict=True))
            self._sockets = syscall.BpfMap(maps["sockets"], _INDEX, _COUNTERS)
            self._closed = syscall.BpfMap(maps["closed"], _KEY, _COUNTERS)
            self._left_out = syscall.BpfMap(maps["left_out"], _INDEX, _NUMBER)
            try:
                stack.enter_context(attached(self.programs, directory))
            except OSError as error:
                raise ProbeError(f"cannot attach to {directory}: {error.strerror}; see `dynamix doctor`") from error
            self._undo = stack.pop_all()

    def read(self, cookie: int, uid: int) -> Counters | None:
        """Counters of a socket, open or closed of late.

        `None` when it was opened before the probe or elsewhere, closed long ago, or belongs to another user.
        """
        for way in range(NUM_WAYS):  # it is nearly always in the first
            found = self._sockets.look_up(((cookie * SCATTER % 2**64 >> 32) + way) % MAX_OPEN)
            if found is not None and found[0] == cookie:
                break
        else:
            found = self._closed.look_up(cookie)
        if found is None:
            return None
        _, owner, *counters, _ = found
        return Counters(*counters) if owner in (uid, _UID_UNKNOWN) else None

    def num_left_out(self) -> int:
        """Sockets that were not counted because the table was full."""
        found = self._left_out.look_up(0)
        assert found is not None, "the kernel makes every entry of an array"
        return found[0]

    def cost(self) -> list[syscall.ProgramInfo]:
        """The kernel's statistics of each program; its times count while kernel.bpf_stats_enabled is 1."""
        return [syscall.program_info(program) for program in self.programs]

    def close(self) -> None:
        """Detach and forget everything."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_probe(cgroup: str = "") -> SocketProbe:
    """A probe on the sockets of a control group, or of the whole hierarchy; blocks for half a second.

    Raises:
        ProbeError: saying what is missing.
    """
    try:
        mount = v2_mount(Path("/proc/self/mountinfo").read_text())
        if mount is None:
            raise ProbeError("no control groups of version 2 are mounted")
        directory = Path(cgroup) if cgroup else mount
        if not (directory / "cgroup.procs").is_file():
            raise ProbeError(
                f"{directory} is no control group of version 2: DYNAMIX_COLLECTOR_CGROUP names one under {mount}"
            )
        return SocketProbe(directory)
    except OSError as error:
        raise ProbeError(f"{error.filename or cgroup or 'eBPF'}: {error.strerror}") from error


def v2_mount(mountinfo: str) -> Path | None:
    """Mount point of the version 2 hierarchy, also beside version 1 (hybrid), by /proc/<pid>/mountinfo (proc(5))."""
    for line in mountinfo.splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4]))
    return None


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    """Descriptor of a control group's directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def attached(programs: list[int], directory: Path) -> Iterator[None]:
    """Attach programs, given in the order of `PROGRAMS`, to a control group until the end of the block."""
    with ExitStack() as links, opened(directory) as group:
        for program, kind in zip(programs, PROGRAMS.values(), strict=True):
            links.callback(os.close, syscall.attach_link(program, group, kind))
        yield


def _load() -> list[int]:
    """Descriptors of programs and maps, from a process that compiles them and ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # Never from the working directory, which may be anybody's: the loader has the collector's capabilities.
        command = [sys.executable, "-P", "-m", _LOADER, str(theirs.fileno())]
        with subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as child:
            theirs.close()
            try:
                _, complaints = child.communicate(timeout=LOAD_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                child.kill()
                raise ProbeError(f"compiling took longer than {LOAD_TIMEOUT_S:g} s") from error
        if child.returncode:
            said = " ".join(complaints.decode(errors="replace").split())[-_ERROR_CHARACTERS:]
            if "not permitted" in said:
                raise ProbeError(
                    "this process may not load programs: it lacks one of CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN"
                )
            raise ProbeError(f"cannot load: {said or f'exit code {child.returncode}'}")
        wanted = len(PROGRAMS) + len(MAPS)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, wanted, socket.MSG_CMSG_CLOEXEC)
    if len(descriptors) < wanted:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProbeError(f"{wanted} descriptors do not fit: raise the limit of open files (RLIMIT_NOFILE)")
    return descriptors
