"""The probe: load, attach, read. It blocks: half a second to open, 3 us to read a socket."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from dynamix.collector.procfs.proc import Proc

from . import syscall
from .attachment import Attachment, remove_stale_programs, this_owner, v2_mount
from .program import COUNTERS, INDEX, KEY, MAPS, MAX_OPEN, NUM_WAYS, NUMBER, OWNER, PROGRAMS, SCATTER, Counters
from .syscall import ProbeError

LOAD_TIMEOUT_S = 60.0
_LOADER = f"{__package__}.loader"
_ERROR_CHARACTERS = 600
_UID_UNKNOWN = 2**64 - 1
_MOUNTINFO = Path("/proc/self/mountinfo")


class SocketProbe:
    """Counters of every TCP socket that was opened under a control group since the probe was attached there.

    Args:
        directory: the control group's, version 2: its processes and those of all groups below it.
        links: see `Attachment`.

    Raises:
        ProbeError: when it cannot be loaded or attached; the text says why.
    """

    def __init__(self, directory: Path, *, links: bool = True) -> None:
        with ExitStack() as stack:
            self.num_stale_removed = 0
            with suppress(PermissionError):  # without CAP_SYS_ADMIN; then links are used, which leave nothing
                self.num_stale_removed = remove_stale_programs(directory, Proc())
            descriptors = _load()
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            self._programs = tuple(descriptors[: len(PROGRAMS)])
            maps = dict(zip(MAPS, descriptors[len(PROGRAMS) :], strict=True))
            self._sockets = syscall.BpfMap(maps["sockets"], INDEX, COUNTERS)
            self._closed = syscall.BpfMap(maps["closed"], KEY, COUNTERS)
            self._left_out = syscall.BpfMap(maps["left_out"], INDEX, NUMBER)
            try:
                syscall.BpfMap(maps["owner"], INDEX, OWNER).update(0, *this_owner(Proc()))
                attachment = Attachment(directory, self._programs, links=links)
            except OSError as error:
                raise ProbeError(f"cannot attach to {directory}: {error.strerror}; see `dynamix doctor`") from error
            stack.callback(attachment.close)
            self._undo = stack.pop_all()

    def read(self, cookie: int, uid: int) -> Counters | None:
        """Counters of a socket, open or closed of late.

        `None` when it was opened before the probe or elsewhere, closed long ago, or belongs to another user.
        """
        found = self._open(cookie) or self._closed.look_up(cookie)
        if found is None:
            return None
        _, owner, *counters, _ = found
        return Counters(*counters) if owner in (uid, _UID_UNKNOWN) else None

    def _open(self, cookie: int) -> tuple[int, ...] | None:
        """The slot of a socket; the first one looked at is nearly always it."""
        for way in range(NUM_WAYS):
            found = self._sockets.look_up(((cookie * SCATTER % 2**64 >> 32) + way) % MAX_OPEN)
            if found is not None and found[0] == cookie:
                return found
        return None

    def num_left_out(self) -> int:
        """Sockets that were not counted because the table was full."""
        found = self._left_out.look_up(0)
        assert found is not None, "the kernel makes every entry of an array"
        return found[0]

    def cost(self) -> dict[str, syscall.ProgramInfo]:
        """The kernel's statistics of each program; its times count while kernel.bpf_stats_enabled is 1."""
        infos = [syscall.program_info(program) for program in self._programs]
        return {info.name: info for info in infos}

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
        return SocketProbe(_directory(cgroup))
    except OSError as error:
        raise ProbeError(f"{error.filename or cgroup or 'eBPF'}: {error.strerror}") from error


def _directory(cgroup: str) -> Path:
    mount = v2_mount(_MOUNTINFO.read_text())
    if mount is None:
        raise ProbeError("no control groups of version 2 are mounted")
    directory = Path(cgroup) if cgroup else mount
    if not (directory / "cgroup.procs").is_file():
        raise ProbeError(
            f"{directory} is no control group of version 2: DYNAMIX_COLLECTOR_CGROUP names one under {mount}"
        )
    return directory


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
            raise ProbeError(_reason(complaints.decode(errors="replace"), child.returncode))
        wanted = len(PROGRAMS) + len(MAPS)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, wanted, socket.MSG_CMSG_CLOEXEC)
    if len(descriptors) < wanted:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProbeError(f"{wanted} descriptors do not fit: raise the limit of open files (RLIMIT_NOFILE)")
    return descriptors


def _reason(complaints: str, exit_code: int) -> str:
    """The loader's error in one sentence; the compiler's own words if it is unknown."""
    if "not permitted" in complaints:
        return "this process may not load programs: it lacks one of CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN"
    said = " ".join(complaints.split())[-_ERROR_CHARACTERS:]
    return f"cannot load: {said or f'exit code {exit_code}'}"
