"""Costs of the kernel probe: `python -m bench.kernel [--quick]`, some five minutes, as root.

Everything is over loopback on this machine, in a control group of its own, below a cgroup version 2 without other
programs. The kernel times each program (as kernel.bpf_stats_enabled does) under several kinds of traffic and in a gloo
job. Beside them runs a program that does nothing: what the clock takes of each figure. Getting to a program is in none.
"""

import contextlib
import ctypes
import multiprocessing
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from bench.harness import BenchmarkError, Report, Table, Target, Timed, Timing, parser, run
from bench.hosts import HostsError, remove_cgroup

from dynamix.collector.ebpf import syscall
from dynamix.collector.ebpf.probe import INGRESS, PROGRAMS, SOCKETS, SocketProbe, attached, opened, v2_mount
from dynamix.collector.ebpf.syscall import ProbeError
from dynamix.runtime.die_with_parent import begin_worker

GBIT = 1e9 / 8


# --- the probe's programs --------------------------------------------------------------------------------------------

_PROG_LOAD, _PROG_QUERY, _ENABLE_STATS, _CGROUP_SKB = 5, 16, 32, 8
_MAX_PROGRAMS = 64
"""Most programs that the kernel permits at one place (BPF_CGROUP_MAX_PROGS)."""
_RETURN_1 = bytes.fromhex("b700000001000000 9500000000000000")
"""Two instructions: r0 = 1, exit."""
_LICENSE = b"Apache-2.0\0"
EMPTY, PREFIX = "bench_empty", "dynamix-bench-"


@contextlib.contextmanager
def _made_groups(mount: Path) -> Iterator[tuple[Path, Path]]:
    """A control group for the processes that are measured, and one without any; those of killed benchmarks go."""
    for old in mount.glob(f"{PREFIX}*"):
        if not Path("/proc", old.name.removeprefix(PREFIX)).exists():
            remove_cgroup(old)
    top = mount / f"{PREFIX}{os.getpid()}"
    groups = top / "busy", top / "empty"
    for directory in groups:
        directory.mkdir(parents=True)
    try:
        yield groups
    finally:
        remove_cgroup(top)


class Programs:
    """The probe's programs, kept after the probe itself is gone, and one that does nothing beside them."""

    def __init__(self, home: Path) -> None:
        with contextlib.ExitStack() as stack:
            with SocketProbe(home) as probe:
                self._descriptors = [stack.enter_context(_held(os.dup(program))) for program in probe.programs]
            code, license_ = ctypes.create_string_buffer(_RETURN_1), ctypes.create_string_buffer(_LICENSE)
            addresses = ctypes.addressof(code), ctypes.addressof(license_)
            attribute = struct.pack("=IIQQ", _CGROUP_SKB, len(_RETURN_1) // 8, *addresses)
            attribute += struct.pack("=IIQII16s", 0, 0, 0, 0, 0, EMPTY.encode())
            self._empty = stack.enter_context(_held(_call(_PROG_LOAD, attribute)))
            self._undo = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def attached(self, directory: Path) -> contextlib.AbstractContextManager[None]:
        """Attach the programs to a control group, as the collector does."""
        return attached(self._descriptors, directory)

    @contextlib.contextmanager
    def measured(self, directory: Path) -> Iterator[None]:
        """Attached, and timed by the kernel as kernel.bpf_stats_enabled=1 does, for as long as we live (Linux 5.8)."""
        with (
            self.attached(directory),
            opened(directory) as group,
            _held(syscall.attach_link(self._empty, group, syscall.INGRESS)),
            _held(_call(_ENABLE_STATS, struct.pack("=I", 0))),
        ):
            yield

    def run_times(self) -> dict[str, tuple[int, int]]:
        """Nanoseconds and number of runs of the programs by name, counted while `measured`."""
        infos = [syscall.program_info(descriptor) for descriptor in (*self._descriptors, self._empty)]
        return {info.name: (info.run_time_ns, info.num_runs) for info in infos}


def programs_of(group: Path) -> list[int]:
    """Ids of our kinds of programs that are attached to this very control group."""
    found: list[int] = []
    with opened(group) as directory:
        for kind in PROGRAMS.values():
            ids = (ctypes.c_uint32 * _MAX_PROGRAMS)()
            _call(_PROG_QUERY, struct.pack("=IIIIQI", directory, kind, 0, 0, ctypes.addressof(ids), len(ids)))
            found += filter(None, ids)
    return found


@contextlib.contextmanager
def _held(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _call(command: int, attribute: bytes) -> int:
    buffer = ctypes.create_string_buffer(attribute, 128)
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(syscall.NUMBERS[os.uname().machine], command, buffer, len(buffer))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


# --- traffic between two processes -----------------------------------------------------------------------------------

TRAFFIC = {"4 bulk streams": (4, 1 << 17, "Gbit"), "64 bytes to and fro, 2 streams": (2, 64, "message")}
"""Streams, bytes of a message, and what is counted; Gbits are only sent, messages come back."""
BULK = next(iter(TRAFFIC))


def _traffic(kind: str, duration_s: float) -> Timing:
    """Send over loopback for so long, from a child of this process to this one; both are in the measured group."""
    num_streams, size, item = TRAFFIC[kind]
    is_echoed = item == "message"
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listening:
        child = os.fork()
        if not child:
            try:
                ends = [socket.create_connection(listening.getsockname()[:2]) for _ in range(num_streams)]
                with ThreadPoolExecutor(num_streams) as pool:
                    list(pool.map(partial(_send, size, is_echoed, time.monotonic() + duration_s), ends))
            finally:
                os._exit(0)
        with Timed() as done, ThreadPoolExecutor(num_streams) as pool:
            ends = [listening.accept()[0] for _ in range(num_streams)]
            num_bytes = sum(pool.map(partial(_drain, size, is_echoed), ends))
    os.waitpid(child, 0)
    return done.timing._replace(num_bytes=num_bytes, num_items=num_bytes / (size if is_echoed else GBIT))


def _send(size: int, is_echoed: bool, until_s: float, end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    chunk = bytes(size)
    while time.monotonic() < until_s:
        end.sendall(chunk)
        if is_echoed:
            end.recv(size, socket.MSG_WAITALL)
    end.shutdown(socket.SHUT_WR)


def _drain(size: int, is_echoed: bool, end: socket.socket) -> int:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer, num_bytes = bytearray(size), 0
    while received := end.recv_into(buffer):
        num_bytes += received
        if is_echoed:
            end.sendall(buffer[:received])
    return num_bytes


def _begin_traffic(group: Path, parent: int) -> None:
    begin_worker(parent)
    (group / "cgroup.procs").write_text(str(os.getpid()))


# --- a gloo job ------------------------------------------------------------------------------------------------------

NUM_RANKS = 4
JOBS = {
    "DDP, 27 k parameters, steps of about 50 ms": ("small", 0.04),
    "the same, as fast as it goes": ("small", 0.0),
    "DDP, 0.4 M parameters, as fast as it goes": ("large", 0.0),
}
"""Model of bench.overhead, and what each step sleeps."""
PACED = next(iter(JOBS))


@contextlib.contextmanager
def _training(group: Path) -> Iterator[Callable[[str, int], Timing]]:
    """Ranks in the measured group that train so many steps of a job when asked; CPU time is of all ranks.

    They have trained a few steps of each job. Their sockets are opened here, so attach before.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dynamix.trainer", "torch._dynamo"])  # imported once, not by each rank
    with tempfile.TemporaryDirectory(prefix="dynamix-kernel-") as directory, contextlib.ExitStack() as stack:
        ours, theirs = context.Pipe()
        stack.callback(ours.close)
        for rank in range(NUM_RANKS):
            pipe = theirs if rank == 0 else None
            process = context.Process(target=_run_rank, args=(rank, group, directory, pipe), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
        theirs.close()

        def train(job: str, num_steps: int) -> Timing:
            ours.send((list(JOBS).index(job), num_steps))
            with contextlib.suppress(EOFError):
                if ours.poll(120):
                    timing: Timing = ours.recv()
                    return timing
            raise BenchmarkError("the training job has failed: its traceback is above")

        for job in JOBS:
            train(job, 5)
        yield train


def _run_rank(rank: int, group: Path, directory: str, pipe: Connection | None) -> None:
    """Train as rank 0 is told, block after block, until the benchmark has ended."""
    import torch  # noqa: PLC0415 - seconds; only ranks pay them
    import torch.distributed as dist  # noqa: PLC0415 - the same
    from bench.overhead import HIDDEN, made_data, plain_arm  # noqa: PLC0415 - the same

    (group / "cgroup.procs").write_text(str(os.getpid()))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=NUM_RANKS)
    data = made_data()
    steps = [plain_arm(data, HIDDEN[model], pause_s)[0] for model, pause_s in JOBS.values()]
    while True:
        asked = (0, 0)
        if pipe is not None:
            with contextlib.suppress(EOFError):
                asked = pipe.recv()
        told = torch.tensor(asked)
        dist.broadcast(told, src=0)
        which, num_steps = told.tolist()
        if not num_steps:
            break
        dist.barrier()
        with Timed(num_steps) as done:
            for _ in range(num_steps):
                steps[which]()
        cpu_s = torch.tensor([done.timing.cpu_s], dtype=torch.float64)
        dist.all_reduce(cpu_s)
        if pipe is not None:
            pipe.send(done.timing._replace(cpu_s=cpu_s.item()))
    dist.destroy_process_group()


# --- what is measured ------------------------------------------------------------------------------------------------


def _timed_row(programs: Programs, busy: Path, name: str, item: str, traffic: Callable[[], Timing]) -> list[Any]:
    with programs.measured(busy):
        before = programs.run_times()
        block = traffic()
        after = programs.run_times()
    ran = {name: (ns - before[name][0], runs - before[name][1]) for name, (ns, runs) in after.items()}
    ns_per_run = {name: ns / runs if runs else None for name, (ns, runs) in ran.items()}
    ours_ns = ran[INGRESS][0] + ran[SOCKETS][0]
    return [
        name,
        f"{block.per_s:,.3g} {item}/s",
        ran[INGRESS][1] / block.wall_s,
        ns_per_run[INGRESS],
        ns_per_run[EMPTY],
        ran[SOCKETS][1] / block.wall_s,
        ns_per_run[SOCKETS],
        100 * ours_ns / (1e9 * block.wall_s * (os.cpu_count() or 1)),
        block.num_bytes / block.wall_s / GBIT,
    ]


def measure(mount: Path, timed_s: float, num_steps: int) -> Report:
    """Let the kernel time the programs in all kinds of traffic, and in the job."""
    times = list[list[Any]]()
    with _made_groups(mount) as (busy, empty), Programs(empty) as programs:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1, _begin_traffic, (busy, os.getpid())) as pool:
            for kind, (_, _, item) in TRAFFIC.items():
                block = partial(pool.apply, _traffic, (kind, timed_s))
                times.append(_timed_row(programs, busy, kind, item, block))
        with contextlib.ExitStack() as stack:
            with programs.attached(busy):  # so that the probe knows the sockets of the job
                train = stack.enter_context(_training(busy))
            for name in JOBS:
                times.append(_timed_row(programs, busy, name, "step", partial(train, name, num_steps)))
    by_name = {row[0]: row for row in times}
    bulk, paced = by_name[BULK], by_name[PACED]
    columns = ["while", "rate", "runs of cgroup_skb / s", "ns a run", "ns, empty program", "runs of sock_ops / s"]
    return Report(
        [Table("kernel", [*columns, "ns a run of it", "% of the machine", "Gbit/s"], times)],
        [
            Target("ns of a run of cgroup_skb, bulk", bulk[3], at_most=200.0),
            Target("Gbit/s over loopback, bulk", bulk[8], at_least=10.0),
            Target("percent of the machine, bulk", bulk[7], at_most=1.0),
            Target("percent of the machine, DDP job", paced[7], at_most=0.1),
        ],
    )


def _clean_mount(*, tolerant: bool) -> Path:
    """Where version 2 is mounted, with nothing attached to it; raises BenchmarkError when this cannot be measured."""
    if os.geteuid() != 0:
        raise BenchmarkError("only root may time programs, make control groups and look at what is attached: use sudo")
    mount = v2_mount(Path("/proc/self/mountinfo").read_text())
    if mount is None:
        raise BenchmarkError("no control groups of version 2 are mounted: see `dynamix doctor`")
    num = len(programs_of(mount))
    if num and not tolerant:
        raise BenchmarkError(
            f"{num} programs are attached to {mount} and would count in every arm: stop the collectors first "
            "(--no-targets measures all the same)"
        )
    return mount


def main() -> int:
    """Measure, print, write; 1 when a target is missed, 2 where this machine or user cannot."""
    made = parser("kernel", __doc__)
    made.add_argument("--quick", action="store_true", help="a little of everything: shows that it runs")
    options = made.parse_args()
    amount = (0.1, 2) if options.quick else (3.0, 200)
    cannot = (ProbeError, HostsError, OSError)
    return run("kernel", options, lambda: measure(_clean_mount(tolerant=options.no_targets), *amount), *cannot)


if __name__ == "__main__":
    sys.exit(main())
