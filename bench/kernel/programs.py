"""The measured control groups, and the probe's programs, loaded once and attached as often as it takes.

Beside them stands a program that does nothing, and the kernel times all of them: what the collector does not ask for.
"""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from bench.hosts.cgroups import remove_cgroup

from dynamix.collector.ebpf import syscall
from dynamix.collector.ebpf.attachment import KINDS, Attachment, opened, remove_stale_programs
from dynamix.collector.ebpf.probe import SocketProbe
from dynamix.collector.procfs.proc import Proc

_PROG_LOAD, _ENABLE_STATS = 5, 32
_CGROUP_SKB = 8
_RETURN_1 = bytes.fromhex("b700000001000000 9500000000000000")
"""Two instructions: r0 = 1, exit."""
_LICENSE = b"Apache-2.0\0"
EMPTY = "bench_empty"

PREFIX = "dynamix-bench-"


class Groups(NamedTuple):
    """Their directories."""

    busy: Path
    """The processes that send and receive."""
    empty: Path
    """No process ever."""


@contextlib.contextmanager
def made_groups(mount: Path) -> Iterator[Groups]:
    """Both, below the mount of version 2, with what killed benchmarks left removed; the processes must end before."""
    for old in mount.glob(f"{PREFIX}*"):
        if not Path("/proc", old.name.removeprefix(PREFIX)).exists():
            remove_cgroup(old)
    top = mount / f"{PREFIX}{os.getpid()}"
    groups = Groups(top / "busy", top / "empty")
    for directory in groups:
        directory.mkdir(parents=True)
    try:
        yield groups
    finally:
        remove_cgroup(top)


class RunTime(NamedTuple):
    """Runs of one program, since it was loaded or between two moments."""

    time_ns: int
    num_runs: int

    @property
    def ns_per_run(self) -> float | None:
        """`None` when it did not run."""
        return self.time_ns / self.num_runs if self.num_runs else None


class Programs:
    """Descriptors of the probe's programs, kept after the probe itself is gone.

    Args:
        home: a control group to load them on.
    """

    def __init__(self, home: Path) -> None:
        with contextlib.ExitStack() as stack:
            with SocketProbe(home), opened(home) as group:
                identities = [identity for kind in KINDS for identity in syscall.attached(group, kind)]
                self._descriptors = tuple(stack.enter_context(_held(syscall.open_program(i))) for i in identities)
            self._empty = stack.enter_context(_empty_program())
            self._undo = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @contextlib.contextmanager
    def attached(self, directory: Path) -> Iterator[None]:
        """Attach the programs to a control group, as the collector does."""
        with contextlib.closing(Attachment(directory, self._descriptors)):
            yield

    @contextlib.contextmanager
    def measured(self, directory: Path) -> Iterator[None]:
        """Attached, timed by the kernel, and after them, for comparison, a program that does nothing."""
        with (
            self.attached(directory),
            opened(directory) as group,
            _held(syscall.attach_link(self._empty, group, syscall.INGRESS)),
            _run_times_counted(),
        ):
            yield

    def run_times(self) -> dict[str, RunTime]:
        """Run times of the programs by name, counted while `measured`."""
        infos = [syscall.program_info(descriptor) for descriptor in (*self._descriptors, self._empty)]
        return {info.name: RunTime(info.run_time_ns, info.num_runs) for info in infos}

    def map_bytes(self) -> dict[str, int]:
        """Kernel memory of each map."""
        identities = {i for descriptor in self._descriptors for i in syscall.program_info(descriptor).map_ids}
        found = {}
        for identity in identities:
            with _held(syscall.open_map(identity)) as table:
                found[syscall.map_name(table)] = _locked_bytes(table)
        return dict(sorted(found.items()))


def since(before: dict[str, RunTime], after: dict[str, RunTime]) -> dict[str, RunTime]:
    """What ran between two moments."""
    return {
        name: RunTime(now.time_ns - before[name].time_ns, now.num_runs - before[name].num_runs)
        for name, now in after.items()
    }


def others_attached(directory: Path) -> int:
    """Programs on a control group above ours, which cost our sockets too; what dead collectors left is removed."""
    remove_stale_programs(directory, Proc())
    with opened(directory) as group:
        return sum(len(syscall.attached(group, kind)) for kind in KINDS)


@contextlib.contextmanager
def _held(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _locked_bytes(table: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{table}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("memlock:"))


@contextlib.contextmanager
def _run_times_counted() -> Iterator[None]:
    """What kernel.bpf_stats_enabled=1 does, for as long as we live: nothing to put back, however we end (Linux 5.8)."""
    with _held(_call(_ENABLE_STATS, struct.pack("=I", 0))):
        yield


@contextlib.contextmanager
def _empty_program() -> Iterator[int]:
    """Descriptor of a program for ingress that lets every packet pass: what clock and jump cost by themselves."""
    code, license_ = ctypes.create_string_buffer(_RETURN_1), ctypes.create_string_buffer(_LICENSE)
    attribute = struct.pack(
        "=IIQQ", _CGROUP_SKB, len(_RETURN_1) // 8, ctypes.addressof(code), ctypes.addressof(license_)
    )
    attribute += struct.pack("=IIQII16s", 0, 0, 0, 0, 0, EMPTY.encode())
    with _held(_call(_PROG_LOAD, attribute)) as descriptor:
        yield descriptor


def _call(command: int, attribute: bytes) -> int:
    buffer = ctypes.create_string_buffer(attribute, 128)
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(syscall.NUMBERS[os.uname().machine], command, buffer, len(buffer))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
