"""The ranks of every run: `python -m bench.cluster.target.ranks`, forked from one process that has torch and the data.

To start Python, import torch and read the data four times would take longer than to train. A line of JSON on standard
input, a list of `RankPlace`, starts a run; answered are its pids and, when all have ended, their exit codes.
"""

import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from bench.hosts.namespace import Namespace
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dynamix.lab.workloads import make_optimizer, workload_named
from dynamix.runtime.die_with_parent import begin_worker
from dynamix.trainer import attach

from .arms import BASE_GLOBAL_BATCH_SIZE
from .clock import FIRST_STEPS, TrainingClock
from .messages import Attached, CheckIn, CheckInAnswer, RankPlace, exchange

if TYPE_CHECKING:
    from dynamix.trainer.session import Session

WORKLOAD = "fashion-28-cnn"
NUM_EPOCHS = 100
"""More than a run can need."""

Batches = Iterator[tuple[Tensor, Tensor]]


class RankClock:
    """The training clock as all ranks see it: they check in together, and rank 0 says what follows."""

    def __init__(self, place: RankPlace, model: nn.Module, link: socket.socket) -> None:
        self._place = place
        self._model = model
        self._link = link
        self._clock = TrainingClock(place.grid_s, time.perf_counter())
        self._total_steps = 0
        self._steps_left = FIRST_STEPS
        self.accuracy: float | None = None
        """The newest one."""

    def after_step(self, num_samples: int, local_batch_sizes: tuple[int, ...]) -> bool:
        """Count a step of all ranks; whether it was the last one."""
        self._total_steps += 1
        self._steps_left -= 1
        if self._steps_left:
            return False
        is_first = self._place.rank == 0
        (steps,) = _agreed(self._clock.check_in(time.perf_counter()) if is_first else 0)
        if steps == 0:
            found = (0.0, 0.0, 0.0)
            if is_first:
                self._clock.stop(time.perf_counter())
            parameters = self._parameters()
            if is_first:
                answer = self._ask(num_samples, local_batch_sizes, parameters)
                found = (self._clock.plan_steps(), answer.stop, answer.accuracy)
            steps, stop, self.accuracy = _agreed(*found)
            self._clock.go_on(time.perf_counter())
            if stop:
                return True
        self._steps_left = int(steps)
        return False

    def _parameters(self) -> Tensor:
        """All of them; between two averagings of local steps each rank has its own, and their mean is looked at."""
        parameters = torch.nn.utils.parameters_to_vector(self._model.parameters()).detach()
        if self._place.arm.exchange == "local":
            dist.all_reduce(parameters)
            parameters /= self._place.world_size
        return parameters

    def _ask(self, num_samples: int, local_batch_sizes: tuple[int, ...], parameters: Tensor) -> CheckInAnswer:
        check_in = CheckIn(
            trained_s=self._clock.trained_s,
            num_steps=self._total_steps,
            num_samples=num_samples,
            local_batch_sizes=local_batch_sizes,
            parameters=parameters.numpy().tobytes(),
        )
        return exchange(self._link, check_in)


def _agreed(*values: float) -> list[float]:
    """The values of rank 0, once all ranks are here; the others have zeros."""
    agreed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(agreed)
    found: list[float] = agreed.tolist()
    return found


class TrainingScript:
    """What every script begins with, and its step."""

    def __init__(self, place: RankPlace) -> None:
        torch.manual_seed(place.seed)
        self._workload = workload_named(WORKLOAD)
        self.model = DistributedDataParallel(self._workload.model())
        rate = place.arm.learning_rate(place.world_size)
        self.optimizer = make_optimizer("sgd", self.model.parameters(), rate)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on a batch; returns its loss."""
        loss = self._workload.loss(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss


def train_plainly(place: RankPlace, dataset: TensorDataset, link: socket.socket) -> None:
    """Train as a script without a session does, until rank 0 is told to stop."""
    script, size = TrainingScript(place), place.arm.local_batch_size
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=place.seed)
    loader = DataLoader(dataset, batch_size=size, sampler=sampler)
    sizes = (size,) * place.world_size
    exchange(link, Attached(rank=place.rank))
    clock = RankClock(place, script.model.module, link)
    for step, (inputs, targets) in zip(count(1), _epochs(loader, sampler)):
        script.step(inputs, targets)
        if clock.after_step(step * sum(sizes), sizes):
            return


def _epochs(loader: DataLoader[Any], sampler: "DistributedSampler[Any]") -> Batches:
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def train_steered(place: RankPlace, dataset: TensorDataset, link: socket.socket) -> None:
    """Train with a session, until rank 0 is told to stop."""
    script = TrainingScript(place)
    session = attach(
        script.model,
        script.optimizer,
        dataset,
        local_batch_size=place.arm.local_batch_size,
        global_batch=place.arm.global_batch,
        window_steps=place.arm.window_steps,
        max_local_batch_size=place.arm.max_local_batch_size,
        base_global_batch_size=BASE_GLOBAL_BATCH_SIZE,
        policy=place.arm.policy,
        policy_options=place.arm.options,
        exchange=place.arm.exchange,
        seed=place.seed,
    )
    exchange(link, Attached(rank=place.rank))
    clock = RankClock(place, script.model.module, link)
    with session:
        for inputs, targets in _session_epochs(session):
            session.step(script.step(inputs, targets))
            if clock.after_step(session.position, session.local_batch_sizes):
                return
            if clock.accuracy is not None:
                session.evaluated(clock.accuracy)


def _session_epochs(session: "Session") -> Batches:
    for _ in session.epochs(NUM_EPOCHS):
        yield from session.loader


def fork(place: RankPlace, dataset: TensorDataset) -> int:
    """Start a rank on its host; returns its pid."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        begin_worker(parent)
        log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        for procs in place.cgroup_procs:
            Path(procs).write_text("0")
        os.environ.update(place.environ)
        with Namespace(place.namespace).entered(), socket.socket(socket.AF_UNIX) as link:
            link.connect(place.socket)
            dist.init_process_group("gloo")
            train = train_plainly if place.arm.policy is None else train_steered
            train(place, dataset, link)
            dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is in the log, and this process must end here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(directory: str | None = None) -> None:
    """Fork ranks until the input ends; the data are in a directory, or in the usual places."""
    torch.set_num_threads(1)
    import_module("torch._dynamo")  # DDP does, in seconds that every rank of every run would spend again
    dataset = TensorDataset(*workload_named(WORKLOAD).load(None if directory is None else Path(directory)).train)
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        pids = [fork(place, dataset) for place in msgspec.json.decode(line, type=list[RankPlace])]
        print(msgspec.json.encode(pids).decode(), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(msgspec.json.encode(codes).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
