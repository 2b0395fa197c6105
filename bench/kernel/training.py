"""A real gloo job whose ranks live in the measured control group and train in blocks of steps when asked."""

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from bench.kernel.endpoints import Block, EndpointError
from bench.kernel.groups import join

NUM_RANKS = 4
WARM_UP_STEPS = 5
BLOCK_TIMEOUT_S = 120.0


class Job(NamedTuple):
    """One way to train; the models and steps are those of bench.overhead, without a session."""

    name: str
    model: str
    pause_s: float
    """Slept in each step."""


PACED = Job("DDP, steps of about 50 ms", "small", 0.04)
UNPACED = Job("DDP, as fast as it goes", "small", 0.0)
LARGE = Job("DDP, as fast as it goes, 0.4 M parameters", "large", 0.0)
JOBS = (PACED, UNPACED, LARGE)


class Training:
    """The running ranks: `with training(...)`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def block(self, job: Job, num_steps: int) -> Block:
        """Train so many steps; CPU time is of all ranks."""
        self._pipe.send((JOBS.index(job), num_steps))
        try:
            if self._pipe.poll(BLOCK_TIMEOUT_S):
                wall_s, cpu_s = self._pipe.recv()
                return Block(num_steps, 0, wall_s, cpu_s)
        except EOFError:
            pass
        raise EndpointError("the training job has failed: see above")


@contextlib.contextmanager
def training(group: Path) -> Iterator[Training]:
    """Ranks that have trained a few steps of each job; their sockets are opened here, so attach before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.overhead", "torch._dynamo"])  # imported once, not by each rank
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
        ranks = Training(ours)
        for job in JOBS:
            ranks.block(job, WARM_UP_STEPS)
        yield ranks


def _run_rank(rank: int, group: Path, directory: str, pipe: Connection | None) -> None:
    """Train as rank 0 is told, again and again, until nobody is there to tell."""
    import torch  # noqa: PLC0415 - seconds; only ranks pay them
    import torch.distributed as dist  # noqa: PLC0415 - the same
    from bench.overhead import HIDDEN, plain_arm  # noqa: PLC0415 - the same
    from torch.utils.data import TensorDataset  # noqa: PLC0415 - the same

    join(group)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=NUM_RANKS)
    data = TensorDataset(torch.randn(20_000, 1, 28, 28), torch.randint(0, 10, (20_000,)))
    steps = [plain_arm(data, HIDDEN[job.model], job.pause_s) for job in JOBS]
    while True:
        told = torch.tensor([0, 0] if pipe is None else _told(pipe))
        dist.broadcast(told, src=0)
        which, num_steps = told.tolist()
        if not num_steps:
            break
        dist.barrier()
        wall_s, own_cpu_s = _timed(steps[which], num_steps)
        cpu_s = torch.tensor([own_cpu_s], dtype=torch.float64)
        dist.all_reduce(cpu_s)
        if pipe is not None:
            pipe.send((wall_s, cpu_s.item()))
    dist.destroy_process_group()


def _timed(step: Callable[[], None], num_steps: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        step()
    return time.perf_counter() - wall, time.process_time() - cpu


def _told(pipe: Connection) -> tuple[int, int]:
    """Which job and how many steps; none when nobody is there to tell."""
    try:
        which, num_steps = pipe.recv()
    except EOFError:
        return 0, 0
    return which, num_steps
