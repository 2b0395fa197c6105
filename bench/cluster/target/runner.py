"""Runs jobs on hosts, one after the other with the same services: starts, slows down, evaluates, ends, captures."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np
import torch
from bench.hosts import Host, Hosts
from bench.hosts.services import ClusterError, ClusterServices, end_of, node_of, services

from dynamix.cli.source import Source
from dynamix.lab.workloads import Part, workload_named
from dynamix.recording.capture import CaptureHeader, CaptureWriter
from dynamix.recording.capture.record import kind_of_subject
from dynamix.runtime.bus import Bus
from dynamix.runtime.embedded import DIE_WITH_PARENT

from .cases import TargetCase
from .messages import Attached, CheckIn, CheckInAnswer, RankPlace, read_frame, write_frame
from .outcomes import TargetOutcome, TargetPoint, TargetRun, is_at_target, is_behind
from .ranks import WORKLOAD

ROOT = Path(__file__).parents[3]
FIRST_PORT, NUM_PORTS = 29500, 1000
"""Free, since the network belongs to these hosts alone; each run has another one."""
READY_TIMEOUT_S = 120.0
ATTACH_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
NOT_DECIDED = 4
"""Windows of a run, at its start and at its end, without a decision that ruled."""
WALL_PER_TRAINED = 4.0
"""A run is ended when it takes more than so many seconds per second of training time up to its limit."""
EVALUATED_AT_ONCE = 500
"""The fastest, and in this memory format twice as fast as in the usual one."""
NUM_SCREENED = 2_000
NEAR = 0.03
"""Below the target by more than this, three standard errors, the accuracy of so many samples is enough."""

Watcher = Callable[[TargetRun, TargetPoint], None]


class RankLink(NamedTuple):
    """The connection to one rank."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class HeldOut:
    """Held-out accuracy of parameters that rank 0 sends; computed beside the hosts, while the job stands still.

    All 10,000 samples take 0.4 s on two cores; so the first 2,000 of them say whether the target is near at all.
    """

    def __init__(self, part: Part) -> None:
        self._workload = workload_named(WORKLOAD)
        self._model = self._workload.model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._part = part

    @classmethod
    def read(cls, data: str | None) -> Self:
        """Read the held-out samples."""
        return cls(workload_named(WORKLOAD).load(None if data is None else Path(data)).validation)

    def accuracy(self, parameters: bytes, target: float) -> float:
        """Share of the held-out samples that are classified rightly; of the first ones, where it is far below."""
        torch.set_num_threads(os.cpu_count() or 1)  # of this thread
        values = torch.from_numpy(np.frombuffer(parameters, dtype=np.float32).copy())
        own = list(self._model.parameters())
        for parameter, part in zip(own, torch.split(values, [one.numel() for one in own]), strict=True):
            parameter.data.copy_(part.view(parameter.shape))
        total = len(self._part.labels)
        screened = self._num_correct(0, NUM_SCREENED)
        if screened / NUM_SCREENED < target - NEAR:
            return screened / NUM_SCREENED
        return (screened + self._num_correct(NUM_SCREENED, total)) / total

    def _num_correct(self, first: int, end: int) -> float:
        correct = 0.0
        with torch.inference_mode():
            for start in range(first, end, EVALUATED_AT_ONCE):
                inputs, labels = (tensor[start : start + EVALUATED_AT_ONCE] for tensor in self._part)
                correct += self._workload.num_correct(self._model(inputs), labels)
        return correct


class TargetRunner:
    """Runs jobs on hosts; made by `target_runner`."""

    def __init__(
        self,
        hosts: Hosts,
        running: ClusterServices,
        held_out: HeldOut,
        spawner: Process,
        *,
        logs: Path,
        directory: Path,
    ):
        self._hosts = hosts
        self._services = running
        self._held_out = held_out
        self._spawner = spawner
        self._logs = logs
        self._socket = directory / "ranks.sock"
        self._links: asyncio.Queue[RankLink] = asyncio.Queue()
        self._num_runs = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Take connections of ranks."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._links.put(RankLink(reader, writer))

        async with await asyncio.start_unix_server(accept, self._socket):
            yield

    async def run(
        self, run: TargetRun, limit_s: float, capture: Path, watch: Watcher, best_so_far: Sequence[TargetPoint] = ()
    ) -> TargetOutcome:
        """Train once, up to a limit of training time or until it is clearly behind the best run so far.

        Raises:
            ClusterError: when a rank fails, or the job was hardly steered.
        """
        began_s = time.monotonic()
        self._num_runs += 1
        job = f"target-{run.arm.policy or 'ddp'}-{secrets.token_hex(4)}"
        points: list[TargetPoint] = []

        def is_over() -> bool:
            at_end = is_at_target(points, run.target_accuracy) or points[-1].trained_s >= limit_s
            return at_end or is_behind(points, best_so_far)

        pids = await self._fork(run, job)
        links: list[RankLink] = []
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                links = await self._attached(len(pids))
            self._set_speeds(run.case, 0.0)
            for link in links:
                write_frame(link.writer, CheckInAnswer())
            with contextlib.suppress(TimeoutError):  # then it has missed the target
                async with asyncio.timeout(ATTACH_TIMEOUT_S + WALL_PER_TRAINED * limit_s):
                    await self._train(run, links, points, watch, is_over)
                self._free()
                async with asyncio.timeout(END_TIMEOUT_S):
                    codes, pids = await self._said(list[int]), []
                self._check(codes, job)
        except asyncio.IncompleteReadError:
            raise ClusterError(f"{run.label}: rank 0 ended:\n{self._first_error(job)}") from None
        except TimeoutError:
            raise ClusterError(f"{run.label}: the ranks did not attach:\n{self._first_error(job)}") from None
        finally:
            self._free()
            for link in links:
                link.writer.close()
            await self._kill(pids)
        trained_s = points[-1].trained_s if points else 0.0
        reached = is_at_target(points, run.target_accuracy) and trained_s <= limit_s
        if run.arm.policy is not None:
            captured = await write_capture(self._services.bus, job, capture)
            check_steered(run, captured["report"], captured["applied"], self._logs)
        return TargetOutcome(
            case=run.case.name,
            arm=run.arm.label,
            seed=run.seed,
            time_to_target_s=trained_s if reached else None,
            limit_s=min(limit_s, trained_s) if is_behind(points, best_so_far) else limit_s,
            points=points,
            wall_s=time.monotonic() - began_s,
        )

    async def _train(
        self,
        run: TargetRun,
        links: list[RankLink],
        points: list[TargetPoint],
        watch: Watcher,
        is_over: Callable[[], bool],
    ) -> None:
        """CheckInAnswer rank 0 at each point of the grid, until it is told to stop."""
        reader, writer = links[0]
        before_s = 0.0
        while True:
            found = await read_frame(reader, CheckIn)
            accuracy = await asyncio.to_thread(self._held_out.accuracy, found.parameters, run.target_accuracy)
            points.append(
                TargetPoint(
                    trained_s=found.trained_s,
                    accuracy=accuracy,
                    num_steps=found.num_steps,
                    num_samples=found.num_samples,
                    local_batch_sizes=found.local_batch_sizes,
                )
            )
            watch(run, points[-1])
            stop = is_over()
            self._set_speeds(run.case, found.trained_s, before_s)
            before_s = found.trained_s
            write_frame(writer, CheckInAnswer(stop=stop, accuracy=accuracy))
            if stop:
                return

    async def _fork(self, run: TargetRun, job: str) -> list[int]:
        places = [self._place(run, job, host) for host in self._hosts]
        assert self._spawner.stdin is not None
        self._spawner.stdin.write(msgspec.json.encode(places) + b"\n")
        return await self._said(list[int])

    def _place(self, run: TargetRun, job: str, host: Host) -> RankPlace:
        environ = {
            "RANK": str(host.index),
            "WORLD_SIZE": str(len(self._hosts)),
            "MASTER_ADDR": self._hosts[0].address,
            "MASTER_PORT": str(FIRST_PORT + self._num_runs % NUM_PORTS),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        if run.arm.policy is not None:
            environ |= {**self._services.environ, "DYNAMIX_JOB": job, "DYNAMIX_NODE": node_of(host)}
        return RankPlace(
            rank=host.index,
            world_size=len(self._hosts),
            arm=run.arm,
            seed=run.seed,
            grid_s=run.grid_s,
            namespace=host.namespace.name,
            cgroup_procs=list(map(str, host.cgroup_procs)),
            environ=environ,
            socket=str(self._socket),
            log=str(self._log(job, host.index)),
        )

    async def _attached(self, number: int) -> list[RankLink]:
        """The connections of all ranks, by rank, once all are ready to train."""
        by_rank: dict[int, RankLink] = {}
        while len(by_rank) < number:
            link = await self._links.get()
            by_rank[(await read_frame(link.reader, Attached)).rank] = link
        return [by_rank[rank] for rank in sorted(by_rank)]

    async def _said(self, kind: type[list[int]]) -> list[int]:
        assert self._spawner.stdout is not None
        line = await self._spawner.stdout.readline()
        if not line:
            raise ClusterError(f"the process that forks ranks ended:\n{end_of(self._logs / 'spawner.log')}")
        return msgspec.json.decode(line, type=kind)

    def _check(self, codes: list[int], job: str) -> None:
        if any(codes):
            raise ClusterError(f"ranks ended with the codes {codes}:\n{self._first_error(job)}")

    async def _kill(self, pids: list[int]) -> None:
        """End ranks that still run; none is reaped before its exit code is said."""
        if not pids or self._spawner.returncode is not None:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._said(list[int])

    def _first_error(self, job: str) -> str:
        logs = [log for host in self._hosts if (log := self._log(job, host.index)).exists()]
        texts = [end_of(log) for log in logs if "Traceback" in log.read_text(errors="replace")]
        return texts[0] if texts else "none of them said why"

    def _log(self, job: str, rank: int) -> Path:
        return self._logs / f"{job}-{rank}.log"

    def _set_speeds(self, case: TargetCase, trained_s: float, before_s: float | None = None) -> None:
        """Give links and shares of the processor, at the start or where they change: each share begins a new period."""
        for rank, host in enumerate(self._hosts):
            cores = case.cores_of(rank, trained_s)
            if before_s is None:
                host.set_link(case.link_of(rank))
            if before_s is None or cores != case.cores_of(rank, before_s):
                host.set_cores(cores)

    def _free(self) -> None:
        for host in self._hosts:
            host.set_link(None)
            host.set_cores(None)


@contextlib.asynccontextmanager
async def target_runner(hosts: Hosts, logs: Path, data: str | None) -> AsyncIterator[TargetRunner]:
    """Services, the process that forks ranks, and a runner; the calling thread must have entered the switch.

    Raises:
        ClusterError: when one of them does not start.
    """
    guard = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid())]
    command = [*guard, sys.executable, "-m", "bench.cluster.target.ranks", *([] if data is None else [data])]
    async with contextlib.AsyncExitStack() as stack:
        log = stack.enter_context((logs / "spawner.log").open("wb"))
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        spawner = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=environ, stdin=PIPE, stdout=PIPE, stderr=log, process_group=0
        )
        stack.push_async_callback(_end, spawner)
        running = await stack.enter_async_context(services(hosts, "auto", logs))
        held_out = await asyncio.to_thread(HeldOut.read, data)
        assert spawner.stdout is not None
        async with asyncio.timeout(READY_TIMEOUT_S):
            if not await spawner.stdout.readline():
                raise ClusterError(f"the process that forks ranks ended:\n{end_of(logs / 'spawner.log')}")
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamix-cluster-"))
        runner = TargetRunner(hosts, running, held_out, spawner, logs=logs, directory=Path(directory))
        await stack.enter_async_context(runner.listening())
        yield runner


async def write_capture(bus: Bus, job: str, path: Path) -> Counter[str]:
    """Write what is stored of a job; returns how many messages of each kind it has."""
    found: Counter[str] = Counter()
    async with Source(bus, job, past=True, stop=asyncio.Event()) as source:
        with CaptureWriter(path, CaptureHeader.of(job), overwrite=True) as writer:
            while batch := await source.read():
                for record in batch:
                    writer.write_record(record)
                    found[kind_of_subject(record.subject)] += 1
            writer.finish(source.reason)
    return found


def check_steered(run: TargetRun, num_reports: int, num_applied: int, logs: Path) -> None:
    """Refuse a run that the services left alone: it would count as one of its policy.

    The first windows and the last ones have no decision that ruled, and late ones are normal on a busy machine.

    Raises:
        ClusterError: when less than half of the other windows had one.
    """
    num_windows = num_reports // run.case.num_hosts
    if not num_windows or 2 * num_applied < num_windows - NOT_DECIDED:
        raise ClusterError(
            f"{run.label}: only {num_applied} decisions were applied in {num_windows} windows: its services have "
            f"stopped or are too slow; see services.log in {logs}, and run it again on a machine without other work"
        )


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
