"""The probe's programs, loaded once as the collector loads them, attached and detached as often as it takes."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from bench.kernel import bpf

from dynamix.collector.ebpf import syscall
from dynamix.collector.ebpf.attachment import KINDS, Attachment, opened, remove_stale_programs
from dynamix.collector.ebpf.probe import SocketProbe
from dynamix.collector.procfs.proc import Proc


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
            self._empty = stack.enter_context(bpf.empty_program())
            self._undo = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @contextlib.contextmanager
    def attached(self, directory: Path) -> Iterator[None]:
        """On a control group, as the collector attaches them."""
        with contextlib.closing(Attachment(directory, self._descriptors)):
            yield

    @contextlib.contextmanager
    def measured(self, directory: Path) -> Iterator[None]:
        """Attached, timed by the kernel, and after them, for comparison, a program that does nothing."""
        with (
            self.attached(directory),
            opened(directory) as group,
            _held(syscall.attach_link(self._empty, group, syscall.INGRESS)),
            bpf.run_times_counted(),
        ):
            yield

    def run_times(self) -> dict[str, RunTime]:
        """By name; they count while `measured`."""
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


def others_attached(directories: Sequence[Path]) -> int:
    """Programs on control groups above ours, which would cost our sockets too; what dead collectors left is removed."""
    num = 0
    for directory in directories:
        remove_stale_programs(directory, Proc())
        with opened(directory) as group:
            num += sum(len(syscall.attached(group, kind)) for kind in KINDS)
    return num


@contextlib.contextmanager
def _held(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _locked_bytes(table: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{table}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("memlock:"))
