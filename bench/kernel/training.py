"""A real gloo job whose ranks live in the measured control group and train in blocks of steps when asked."""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from bench.harness.command import BenchmarkError
from bench.harness.rounds import Timed, Timing

NUM_RANKS = 4
WARM_UP_STEPS = 5
BLOCK_TIMEOUT_S = 120.0


class TrainingKind(NamedTuple):
    """One way to train; the models and steps are those of bench.overhead, without a session."""

    name: str
    model: str
    pause_s: float
    """Slept in each step."""


PACED = TrainingKind("DDP, steps of about 50 ms", "small", 0.04)
UNPACED = TrainingKind("DDP, as fast as it goes", "small", 0.0)
LARGE = TrainingKind("DDP, as fast as it goes, 0.4 M parameters", "large", 0.0)
TRAINING = (PACED, UNPACED, LARGE)


class Training:
    """The running ranks: `with training(...)`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def block(self, kind: TrainingKind, num_steps: int) -> Timing:
        """Train so many steps; CPU time is of all ranks."""
        self._pipe.send((TRAINING.index(kind), num_steps))
        try:
            if self._pipe.poll(BLOCK_TIMEOUT_S):
                timing: Timing = self._pipe.recv()
                return timing
        except EOFError:
            pass
        raise BenchmarkError("the training job has failed: see above")


@contextlib.contextmanager
def training(group: Path) -> Iterator[Training]:
    """Ranks that have trained a few steps of each job; their sockets are opened here, so attach before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.overhead.training", "torch._dynamo"])  # imported once, not by each rank
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
        for kind in TRAINING:
            ranks.block(kind, WARM_UP_STEPS)
        yield ranks


def _run_rank(rank: int, group: Path, directory: str, pipe: Connection | None) -> None:
    """Train as rank 0 is told, block after block, until the benchmark has ended."""
    import torch  # noqa: PLC0415 - seconds; only ranks pay them
    import torch.distributed as dist  # noqa: PLC0415 - the same
    from bench.overhead.training import HIDDEN, made_data, plain_arm  # noqa: PLC0415 - the same

    (group / "cgroup.procs").write_text(str(os.getpid()))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=NUM_RANKS)
    data = made_data()
    steps = [plain_arm(data, HIDDEN[kind.model], kind.pause_s)[0] for kind in TRAINING]
    while True:
        told = torch.tensor([0, 0] if pipe is None else _told(pipe))
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


def _told(pipe: Connection) -> tuple[int, int]:
    """Which job and how many steps; none when the benchmark has ended."""
    try:
        which, num_steps = pipe.recv()
    except EOFError:
        return 0, 0
    return which, num_steps
