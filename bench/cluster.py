"""Time to a held-out accuracy on real clocks: `python -m bench.cluster [--case NAME] [--arm NAME]`, as root.

Real gloo ranks, one on each of four hosts (bench.hosts) with a share of the processor and a shaped link, train a CNN on
Fashion-MNIST until the mean of three looks at the held-out accuracy is at the target. Training times are compared; the
clock stops while the accuracy is looked up. Broker, reward and arbitrator are at the switch, a collector on each host.

Settings that an arm lists in `tried` are compared under the first seed, each until the best one so far was at the
target, or until it is clearly behind; the best takes part under all seeds, the first one included, which flatters it.
Arms run in turn with paired seeds. Each run is kept in --work: killed, the same command goes on where it was; another
version of the code begins again. Needs Linux, iproute2 and Fashion-MNIST (`make data`), and a machine without other
work. Tables: the name of --name, one row per case and arm; `NAME-searched`, the settings that were tried.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from bench.harness import (
    ROOT,
    BenchmarkError,
    Cell,
    Interval,
    Panel,
    Report,
    Table,
    Target,
    broker_with_bus,
    mean_of,
    parser,
    run,
)
from bench.hosts import Hosts, HostsError, Link, Namespace, end_of
from bench.others import OTHERS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dynamix.cli.services import ServiceProcess, bus_environment
from dynamix.lab.simulator.episode import EPISODE_PACKAGES, versions
from dynamix.lab.workloads import Part, make_optimizer, workload_named
from dynamix.lab.workloads.datasets import MissingDataError
from dynamix.recording.fingerprint import source_digest
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.requests import Answer
from dynamix.runtime.die_with_parent import begin_worker
from dynamix.runtime.embedded import DIE_WITH_PARENT
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Live
from dynamix.schemas.streams import FEED, REPORTS
from dynamix.trainer import attach

WORKLOAD, NUM_HOSTS = "fashion-28-cnn", 4
SCRIPT_SIZE, BASE_GLOBAL_BATCH_SIZE, LEARNING_RATE = 32, 128, 0.02
"""The script as written: its rate is for four ranks of 32; other batches scale it by the square root rule."""
T = TypeVar("T")


# --- what is compared ------------------------------------------------------------------------------------------------


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train."""

    options: dict[str, Any] | None = None
    """Arguments of `attach`; `None`: a script without a session."""
    local_batch_size: int = SCRIPT_SIZE
    """To begin with."""
    tried: tuple[dict[str, Any], ...] = ()
    """Changes of these fields; the best is searched for under the first seed."""
    size_from: str = ""
    """An arm above it whose best size this one begins with."""
    by_node: bool = False
    """Whether the ranks of a host sum gradients first."""
    sharded: bool = False
    """Whether they share one copy of the model (HSDP)."""
    package: str = ""
    """The package that it needs beside torch, from `make others`; such an arm runs only if it is named."""
    program: str = ""
    """The program of bench.others that runs in place of the plain script."""
    settings: dict[str, float] = {}
    """Its arguments."""


def _steered(policy: str, **options: Any) -> dict[str, Any]:
    return {"policy": policy, "global_batch": "adaptive", **options}


_SIZES = tuple({"local_batch_size": size} for size in (32, 64, 128, 256, 16, 8))
_FIXED = {"global_batch": "fixed"}
_LOCAL = {"track": 1.0, "every": 4.0, "codec": "int8"}
ARMS: dict[str, Arm] = {
    "plain": Arm(),
    "static": Arm(tried=_SIZES),
    "proportional": Arm(options=_steered("proportional", **_FIXED), size_from="static"),
    "goodput": Arm(
        options=_steered("goodput"),
        tried=(
            {},
            {"options": _steered("goodput", policy_options={"track": 1.0, "hysteresis": 0.0})},
            {"options": _steered("goodput", policy_options={"track": 1.0, "noise_multiplier": 4.0})},
        ),
    ),
    "split": Arm(options=_steered("split", **_FIXED), size_from="static"),
    "rule": Arm(options=_steered("rule")),
    "ppo": Arm(options=_steered("ppo")),
    "static-local": Arm(
        options=_steered("static", **_FIXED, exchange="local", policy_options=_LOCAL), size_from="static"
    ),
    "rule-local": Arm(options=_steered("rule", exchange="local")),
    "split-nodes": Arm(options=_steered("split", **_FIXED), by_node=True),
    "rule-nodes-local": Arm(options=_steered("rule", exchange="local"), by_node=True),
    "hsdp": Arm(sharded=True),
    "rule-hsdp-local": Arm(options=_steered("rule", exchange="local"), sharded=True),
    "adaptdl": Arm(
        options=_steered("adaptdl"), package="adaptdl", tried=tuple({"local_batch_size": one} for one in (32, 16, 64))
    ),
    **{
        name: Arm(
            program=name,
            package=one.package,
            settings=one.tried[0],
            tried=tuple({"settings": setting} for setting in one.tried),
        )
        for name, one in OTHERS.items()
    },
}
"""`-local`: gradients may be rounded, and parameters be averaged every few steps."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A case: which hosts or links are slow."""

    name: str
    title: str
    cores: float = 0.4
    """Seconds of processor per second that each host has; what is left of two processors is for the services."""
    slow_cpus: dict[int, float] = {}
    """The same for single ranks."""
    slow_links: dict[int, str] = {}
    """Rates of single ranks' links, in both directions, as `tc` writes them."""
    later_after_s: float = 0.0
    """Training time after which `later_cpus` holds."""
    later_cpus: dict[int, float] = {}
    ranks_per_host: int = 1
    time_limit_s: float = 80.0
    """Training time after which a run has missed the target."""

    def cores_of(self, rank: int, trained_s: float) -> float:
        """The share of the processor that a rank's host has at a training time."""
        later = self.later_cpus if trained_s >= self.later_after_s else {}
        return later.get(rank, self.slow_cpus.get(rank, self.cores))


CASES = {
    case.name: case
    for case in (
        Case(name="unequal-processors", title="rank 3 on a third of a processor's share", slow_cpus={3: 0.13}),
        Case(name="slow-link", title="rank 2's link at 30 Mbit/s", slow_links={2: "30mbit"}),
        Case(name="slow-links", title="all links at 40 Mbit/s", slow_links=dict.fromkeys(range(4), "40mbit")),
        Case(name="slower-links", title="all links at 20 Mbit/s", slow_links=dict.fromkeys(range(4), "20mbit")),
        Case(name="slow-down", title="rank 1 falls to a third after 5 s", later_after_s=5.0, later_cpus={1: 0.13}),
        Case(name="equal", title="all equal (harm check)"),
        Case(
            name="two-nodes",
            title="two hosts of two ranks, 30 Mbit/s",
            cores=0.8,
            slow_links={0: "30mbit", 1: "30mbit"},
            ranks_per_host=2,
            time_limit_s=200.0,
        ),
    )
}
LIMITS: Mapping[str, Mapping[tuple[str, str], float]] = {
    "unequal-processors": {("rule", "static"): 0.70, ("rule", "goodput"): 0.95, ("rule", "proportional"): 1.0},
    "slow-link": {("rule", "static"): 1.0},
    "slow-links": {("rule", "static"): 1.0, ("rule-local", "rule"): 0.6},
    "slow-down": {("rule", "static"): 0.65},
    "equal": {("rule", "static"): 1.03, ("split", "static"): 1.03, ("rule-local", "rule"): 1.03},
    "two-nodes": {("split-nodes", "plain"): 0.6, ("rule-nodes-local", "plain"): 0.35},
}
"""Targets: at most this ratio of one arm's time to another's."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that determine a run, except for the machine."""

    case: Case
    arm: Arm
    name: str
    """Name of the arm."""
    seed: int
    target: float
    """Held-out accuracy."""
    grid_s: float
    """Training time between two looks at the accuracy."""

    @property
    def key(self) -> str:
        """Digest of that, of the code and of the libraries; names, titles and limits are left out."""
        case = msgspec.structs.replace(self.case, name="", title="", time_limit_s=0.0)
        arm = msgspec.structs.replace(self.arm, tried=(), size_from="")
        about = {
            "run": msgspec.to_builtins(msgspec.structs.replace(self, case=case, arm=arm, name=""), str_keys=True),
            "code": source_digest((*EPISODE_PACKAGES, "dynamix.runtime")),
            "program": OTHERS[self.arm.program].source if self.arm.program else "",
            "bench": [Path(__file__).read_text(), (Path(__file__).parent / "hosts.py").read_text()],
            "versions": versions(),
        }
        return hashlib.sha256(msgspec.json.encode(about, order="sorted")).hexdigest()[:16]


class Point(msgspec.Struct, frozen=True):
    """One look at the accuracy."""

    trained_s: float
    num_steps: int
    accuracy: float
    processor_s: float
    """Processor time that all hosts have used since they were made."""


LOOKS = 3
"""Looks at the accuracy whose mean counts: the accuracy of one differs by about 1 % from that of the next."""
EARLY, BEHIND = 0.4, 0.05
"""From this share of the best run so far on, a run so far below it in accuracy is given up."""


def _newest(points: Sequence[Point]) -> float:
    looks = points[-LOOKS:]
    return sum(point.accuracy for point in looks) / len(looks)


def is_at(points: Sequence[Point], accuracy: float) -> bool:
    """Whether the mean accuracy of the newest looks has reached a target: a single one may be lucky."""
    return len(points) >= LOOKS and _newest(points) >= accuracy


def crossed_s(points: Sequence[Point], accuracy: float) -> float:
    """Training time at which the mean of a run that is at the target crossed it, in a straight line between looks."""
    before, now = (_newest(points[:-1]) if len(points) > LOOKS else accuracy), _newest(points)
    above = (now - accuracy) / (now - before) if now > before else 0.0
    return points[-1].trained_s - above * (points[-1].trained_s - points[-2].trained_s)


def is_behind(points: Sequence[Point], best: Sequence[Point]) -> bool:
    """Whether a run is so far below where the best one so far was at that time that it need not go on."""
    number = len(points)
    if number < max(2 * LOOKS, EARLY * len(best)) or number > len(best):
        return False
    return _newest(points) < _newest(best[:number]) - BEHIND


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as its file has it."""

    reached_s: float | None
    """Training time at which the target was reached; `None`: missed."""
    limit_s: float
    """Training time after which the run was ended."""
    points: list[Point]
    """Empty: the program failed."""

    @property
    def counted_s(self) -> float:
        """Time to the target; the limit for a run that missed it."""
        return self.limit_s if self.reached_s is None else self.reached_s

    def __str__(self) -> str:
        if not self.points:
            return "failed"
        return f"> {self.limit_s:.0f}" if self.reached_s is None else f"{self.reached_s:.1f}"


# --- one rank, forked from a process that has torch and the data -----------------------------------------------------


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs, and what it trains."""

    rank: int
    world_size: int
    wanted: Run
    namespace: str
    cgroup_procs: list[str]
    environ: dict[str, str]
    socket: str
    log: str


class Rank:
    """Input of an arm's function: its data, a model, and the clock that all ranks share.

    It calls `begin` once when it could train, and `after_step` after every step until that returns True. All ranks must
    know at which step they wait for a look, or the faster ones would compute a step for nothing: so they check in
    together now and then, by one small all-reduce, and rank 0 says how many steps later they check in again. These are
    a few less than it takes to the next point of the grid, so that steps that became slower are noticed before. The
    clock runs until the slowest rank has checked in: what it still had to do is training.

    Attributes:
        accuracy: the newest one; `None` before the first look.
        is_local: whether the ranks' parameters may differ.
        is_alone: whether each rank makes steps of its own number, until the time of a look.
    """

    def __init__(self, place: Place, dataset: TensorDataset, link: Connection) -> None:
        self.place, self.dataset = place, dataset
        self.accuracy: float | None = None
        self.options = place.wanted.arm.options or {}
        self.is_local, self.is_alone = self.options.get("exchange") == "local", False
        self.local_batch_size = place.wanted.arm.local_batch_size
        global_batch_size = place.world_size * self.local_batch_size
        self.learning_rate = LEARNING_RATE * math.sqrt(global_batch_size / BASE_GLOBAL_BATCH_SIZE)
        self._link = link
        self._workload = workload_named(WORKLOAD)
        self._num_steps, self._steps_left, self._planned = 0, 2, 2
        self._trained_s, self._due_s, self._step_s = 0.0, place.wanted.grid_s, 0.0

    def made_model(
        self, learning_rate: float, wrapped: Callable[[nn.Module], Any] | None = None
    ) -> tuple[Any, torch.optim.Optimizer]:
        """The model under DDP or HSDP, and SGD with momentum; equal for equal seeds."""
        torch.manual_seed(self.place.wanted.seed)
        wrapped = wrapped or (self._sharded if self.place.wanted.arm.sharded else DistributedDataParallel)
        model = wrapped(self._workload.model())
        return model, make_optimizer("sgd", model.parameters(), learning_rate)

    def _sharded(self, model: nn.Module) -> Any:
        """A copy on each host; without a session torch itself sums the copies."""
        wanted, num_ranks = self.place.wanted, self.place.wanted.case.ranks_per_host
        mesh = init_device_mesh("cpu", (self.place.world_size // num_ranks, num_ranks), mesh_dim_names=("host", "rank"))
        return fully_shard(model, mesh=mesh if wanted.arm.options is None else mesh["rank"])

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on a batch; returns its loss."""
        loss = self._workload.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    def begin(self) -> None:
        """Wait until all ranks could train and the hosts are slow."""
        self._link.send(self.place.rank)
        self._link.recv()
        self._resumed_s = self._checked_in_s = time.perf_counter()

    def after_step(self, model: nn.Module) -> bool:
        """Count a step of all ranks; whether it was the last one."""
        self._num_steps += 1
        self._steps_left -= 1
        is_first, now_s = self.place.rank == 0, time.perf_counter()
        if now_s - self._resumed_s < self._due_s - self._trained_s if self.is_alone else self._steps_left:
            return False
        self._step_s, self._checked_in_s = (now_s - self._checked_in_s) / self._planned, now_s
        is_due = self._trained_s + now_s - self._resumed_s >= self._due_s
        (steps,) = _agreed(0 if is_due or not is_first else self._planned_steps(now_s - self._resumed_s))
        if steps == 0:
            self._trained_s += time.perf_counter() - self._resumed_s
            while self._due_s <= self._trained_s:
                self._due_s += self.place.wanted.grid_s
            whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
            parameters = nn.utils.parameters_to_vector(whole).detach()
            if self.is_local:  # between two averagings each rank has its own
                dist.all_reduce(parameters)
                parameters /= self.place.world_size
            found = (0.0, 0.0, 0.0)
            if is_first:
                self._link.send((self._trained_s, self._num_steps, parameters.numpy().tobytes()))
                stop, accuracy = self._link.recv()
                found = (self._planned_steps(0.0), float(stop), accuracy)
            steps, is_last, self.accuracy = _agreed(*found)
            self._resumed_s = self._checked_in_s = time.perf_counter()
            if is_last:
                return True
        self._steps_left = self._planned = int(steps)
        return False

    def _planned_steps(self, running_s: float) -> int:
        steps = (self._due_s - self._trained_s - running_s) / self._step_s
        return max(1, round(steps) if steps < 8 else int(0.8 * steps))  # a check-in costs a millisecond or more


def _agreed(*values: float) -> list[float]:
    """The values of rank 0, once all ranks are here; the others have zeros."""
    agreed = torch.tensor(values if dist.get_rank() == 0 else [0.0] * len(values), dtype=torch.float64)
    dist.all_reduce(agreed)
    found: list[float] = agreed.tolist()
    return found


def _data(rank: Rank) -> tuple[DistributedSampler[Any], DataLoader[Any]]:
    sampler: DistributedSampler[Any] = DistributedSampler(rank.dataset, seed=rank.place.wanted.seed)
    return sampler, DataLoader(rank.dataset, batch_size=rank.local_batch_size, sampler=sampler)


def train_plainly(rank: Rank) -> None:
    """Train as a script without a session does, with torch's sampler and loader."""
    model, optimizer = rank.made_model(rank.learning_rate)
    sampler, loader = _data(rank)
    rank.begin()
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            rank.train_step(model, optimizer, inputs, targets)
            if rank.after_step(model):
                return


def train_steered(rank: Rank) -> None:
    """Train with a session."""
    model, optimizer = rank.made_model(LEARNING_RATE)
    sampler, loader = _data(rank)
    session, batches = attach(model, optimizer, loader, base_global_batch_size=BASE_GLOBAL_BATCH_SIZE, **rank.options)
    rank.begin()
    with session:
        for epoch in session.epochs(100):
            sampler.set_epoch(epoch)
            for inputs, targets in batches:
                session.step(rank.train_step(model, optimizer, inputs, targets))
                if rank.after_step(model):
                    return
                if rank.accuracy is not None:
                    session.evaluated(rank.accuracy)


def _fork(place: Place, dataset: TensorDataset) -> int:
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
        arm = place.wanted.arm
        train = train_plainly if arm.options is None else train_steered
        if arm.program:
            train = partial(OTHERS[arm.program].train, **arm.settings)
        with Namespace(place.namespace).entered(), Client(place.socket, "AF_UNIX") as link:
            dist.init_process_group("gloo")
            train(Rank(place, dataset, link))
            dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is in the log, and this process must end here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_ranks() -> None:
    """Fork ranks until standard input ends, a line of JSON for each run; answer their pids, then their exit codes.

    To start Python, import torch and read the data four times would take longer than to train.
    """
    torch.set_num_threads(1)
    import_module("torch._dynamo")  # DDP does, in seconds that every rank of every run would spend again
    dataset = TensorDataset(*workload_named(WORKLOAD).load(None).train)
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        places = msgspec.json.decode(line, type=list[Place])
        program = places[0].wanted.arm.program
        service = OTHERS[program].service if program else ""
        command = [sys.executable, "-c", service]
        beside = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)] if service else []
        pids = [_fork(place, dataset) for place in places]
        print(msgspec.json.encode(pids).decode(), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for process in beside:
            process.kill()
            process.communicate()
        print(msgspec.json.encode(codes).decode(), flush=True)


# --- services and runs -----------------------------------------------------------------------------------------------

ATTACH_TIMEOUT_S, READY_TIMEOUT_S = 60.0, 120.0
WALL_PER_TRAINED = 4.0
"""A run is ended when it takes more than so many seconds per second of training time up to its limit."""
NOT_DECIDED = 4
"""Windows of a run, at its start and at its end, without a decision in effect."""
NUM_SCREENED, NEAR, EVALUATED_AT_ONCE = 2_000, 0.03, 500
"""So many samples are enough where their accuracy is further below the target than this, three standard errors."""


@contextlib.asynccontextmanager
async def _services(hosts: Hosts, log: Path) -> AsyncIterator[tuple[Bus, dict[str, str]]]:
    """Broker, reward and arbitrator at the switch, a collector on each host, before any rank; all ready.

    eBPF knows the sockets that are opened while it is attached. The calling thread must have entered the switch.
    """
    missing = {("reward", "control"), ("arbitrator", "control")} | {
        ("collector", f"host-{host.index}") for host in hosts
    }
    async with broker_with_bus("bench-cluster", hosts.address) as (server, bus):
        environ = {**os.environ, **bus_environment(server.settings), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output, contextlib.ExitStack() as stack:
            for name in ("reward", "arbitrator"):
                service = ServiceProcess(name, {**environ, "DYNAMIX_NODE": "control"}, output)
                stack.callback(service.stop)
                service.start()
            for host in hosts:
                own = {**environ, "DYNAMIX_NODE": f"host-{host.index}", "DYNAMIX_COLLECTOR_CGROUP": str(host.cgroup)}
                host.popen([sys.executable, "-m", "dynamix.collector"], env=own, stdout=output, stderr=output)
            try:
                async with asyncio.timeout(READY_TIMEOUT_S), bus.subscribe(subjects.of("live", "*", "*")) as beats:
                    async for message in beats:
                        beat = decode(Live, message.subject, message.payload)
                        if beat.counters.get("ready"):
                            missing.discard((beat.service, beat.node))
                        if not missing:
                            break
            except TimeoutError:
                names = ", ".join(map(" of ".join, sorted(missing)))
                raise BenchmarkError(
                    f"not ready after {READY_TIMEOUT_S:g} s: {names}; their log:\n{end_of(log)}"
                ) from None
            yield bus, environ


class HeldOut:
    """Held-out accuracy of parameters that rank 0 sends; computed beside the hosts, while the job waits."""

    def __init__(self) -> None:
        self._workload = workload_named(WORKLOAD)
        self._model = self._workload.model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._part: Part = self._workload.load(None).validation

    def accuracy(self, parameters: bytes, target: float) -> float:
        """Share of the samples that are classified rightly; of the first 2,000, where that is far below the target."""
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


class Runner:
    """Runs jobs on hosts, one after the other with the same services; made by `with_runner`."""

    def __init__(
        self, hosts: Hosts, environ: Mapping[str, str], logs: Path, counted: Callable[[str], tuple[int, int]]
    ) -> None:
        """`counted`: how many windows of a job were reported, and how many decisions were applied."""
        self._hosts, self._environ, self._logs, self._counted = hosts, environ, logs, counted
        self._held_out = HeldOut()
        self._num_runs = 0
        self._directory = tempfile.TemporaryDirectory(prefix="dynamix-cluster-")
        self._socket = str(Path(self._directory.name) / "ranks.sock")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.settimeout(ATTACH_TIMEOUT_S)
        self._listening.bind(self._socket)
        self._listening.listen(len(hosts))
        guard = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid())]
        with (logs / "spawner.log").open("wb") as log:
            self._spawner = subprocess.Popen(
                [*guard, sys.executable, "-m", "bench.cluster", "--fork-ranks"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )
        self._said()  # ranks can be forked

    def close(self) -> None:
        """End everything, also a run under way."""
        self._spawner.kill()
        self._spawner.communicate()
        self._listening.close()
        self._directory.cleanup()

    def run(self, wanted: Run, limit_s: float, best: Sequence[Point] = ()) -> Outcome:
        """Train once, up to a limit of training time or until it is clearly behind the best run so far.

        Raises:
            BenchmarkError: when a rank fails, or the job was hardly steered.
        """
        self._num_runs += 1
        job, points, links = f"cluster-{wanted.seed}-{secrets.token_hex(4)}", list[Point](), dict[int, Connection]()
        places = [self._place(wanted, job, rank) for rank in range(len(self._hosts))]
        assert self._spawner.stdin is not None
        self._spawner.stdin.write(msgspec.json.encode(places) + b"\n")
        self._spawner.stdin.flush()
        pids = msgspec.json.decode(self._said(), type=list[int])
        try:
            for _ in places:
                link = self._accepted(job, pids)
                links[self._received(link, ATTACH_TIMEOUT_S, job)] = link
            self._set_speeds(wanted.case, 0.0)
            for link in links.values():
                link.send(None)
            self._train(
                wanted, links[0], points, lambda: points[-1].trained_s >= limit_s or is_behind(points, best), job
            )
            self._free()
            codes = msgspec.json.decode(self._said(), type=list[int])
            pids = []
            if any(codes):
                raise BenchmarkError(f"ranks ended with the codes {codes}:\n{self._first_error(job)}")
        finally:
            self._free()
            for link in links.values():
                link.close()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if pids:
                self._said()
        if wanted.arm.options is not None:
            self._check_steered(wanted, job)
        trained_s = points[-1].trained_s
        reached = is_at(points, wanted.target) and trained_s <= limit_s
        return Outcome(
            reached_s=crossed_s(points, wanted.target) if reached else None,
            limit_s=min(limit_s, trained_s) if is_behind(points, best) else limit_s,
            points=points,
        )

    def _train(self, wanted: Run, link: Connection, points: list[Point], is_over: Callable[[], bool], job: str) -> None:
        """Answer rank 0 at each point of the grid, until it is told to stop."""
        limit_s, before_s = ATTACH_TIMEOUT_S + WALL_PER_TRAINED * wanted.case.time_limit_s, 0.0
        end_s = time.monotonic() + limit_s
        while True:
            trained_s, num_steps, parameters = self._received(link, limit_s, job)
            accuracy = self._held_out.accuracy(parameters, wanted.target)
            points.append(Point(trained_s, num_steps, accuracy, self._processor_s()))
            stop = is_at(points, wanted.target) or is_over() or time.monotonic() > end_s
            self._set_speeds(wanted.case, trained_s, before_s)
            before_s = trained_s
            link.send((stop, accuracy))
            if stop:
                return

    def _place(self, wanted: Run, job: str, rank: int) -> Place:
        host = self._hosts[rank // wanted.case.ranks_per_host]
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._hosts)),
            "MASTER_ADDR": self._hosts[0].address,
            "MASTER_PORT": str(29500 + self._num_runs % 1000),  # free: the network belongs to these hosts alone
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        if wanted.arm.options is not None:
            environ |= {**self._environ, "DYNAMIX_JOB": job, "DYNAMIX_NODE": f"host-{host.index}"}
            environ["DYNAMIX_TRAINER_NODES"] = "on" if wanted.arm.by_node else "off"  # links are fast until `begin`
        return Place(
            rank=rank,
            world_size=len(self._hosts),
            wanted=wanted,
            namespace=host.namespace.name,
            cgroup_procs=list(map(str, host.cgroup_procs)),
            environ=environ,
            socket=self._socket,
            log=str(self._log(job, rank)),
        )

    def _accepted(self, job: str, pids: Sequence[int]) -> Connection:
        """The connection of a rank; raises BenchmarkError when none comes."""
        try:
            accepted, _ = self._listening.accept()
        except (TimeoutError, OSError):
            raise BenchmarkError(f"ranks {pids} did not attach:\n{self._first_error(job)}") from None
        accepted.setblocking(True)
        return Connection(accepted.detach())

    def _received(self, link: Connection, timeout_s: float, job: str) -> Any:
        with contextlib.suppress(EOFError, ConnectionResetError):
            if link.poll(timeout_s):
                return link.recv()
        raise BenchmarkError(f"{job}: a rank ended, or took too long:\n{self._first_error(job)}")

    def _said(self) -> bytes:
        assert self._spawner.stdout is not None
        line = self._spawner.stdout.readline()
        if not line:
            raise BenchmarkError(f"the process that forks ranks ended:\n{end_of(self._logs / 'spawner.log')}")
        return line

    def _check_steered(self, wanted: Run, job: str) -> None:
        """Refuse a run that the services left alone: it would count as one of its policy.

        The first windows and the last ones have no decision in effect, and late ones are normal on a busy machine.
        """
        num_reports, num_applied = self._counted(job)
        num_windows = num_reports // (len(self._hosts) // wanted.case.ranks_per_host)
        if not num_windows or 2 * num_applied < num_windows - NOT_DECIDED:
            raise BenchmarkError(
                f"{wanted.case.name}, {wanted.name}: {num_applied} decisions applied in {num_windows} windows: the "
                f"services have stopped or are too slow, see {self._logs}/services.log; run it again on an idle machine"
            )

    def _first_error(self, job: str) -> str:
        logs = [log for host in self._hosts if (log := self._log(job, host.index)).exists()]
        texts = [end_of(log) for log in logs if "Traceback" in log.read_text(errors="replace")]
        return texts[0] if texts else "none of their logs says why"

    def _log(self, job: str, rank: int) -> Path:
        return self._logs / f"{job}-{rank}.log"

    def _processor_s(self) -> float:
        texts = [(host.cgroup / "cpu.stat").read_text().split() for host in self._hosts]
        return sum(int(text[text.index("usage_usec") + 1]) for text in texts) / 1e6

    def _set_speeds(self, case: Case, trained_s: float, before_s: float | None = None) -> None:
        """Give links and shares of the processor, at the start or where they change: each share begins a new period."""
        for rank, host in enumerate(self._hosts):
            cores = case.cores_of(rank, trained_s)
            if before_s is None:
                host.set_link(Link.parse(case.slow_links[rank]) if rank in case.slow_links else None)
            if before_s is None or cores != case.cores_of(rank, before_s):
                host.set_cores(cores)

    def _free(self) -> None:
        for host in self._hosts:
            host.set_link(None)
            host.set_cores(None)


class _StreamInfo(Answer):
    state: dict[str, Any] = msgspec.field(default_factory=dict)


async def _num_stored(bus: Bus, stream: str, subject: str) -> int:
    """How many messages of a subject a stream has."""
    info = await bus.requests.ask(f"STREAM.INFO.{stream}", {"subjects_filter": subject}, _StreamInfo)
    return sum((info.state.get("subjects") or {}).values())


async def _with_runner(hosts: Hosts, work: Callable[[Runner], T], logs: Path) -> T:
    loop = asyncio.get_running_loop()
    async with _services(hosts, logs / "services.log") as (bus, environ):

        async def count(job: str) -> tuple[int, int]:
            reports, applied = subjects.of("report", job, subjects.ANY), subjects.of("applied", job)
            return await _num_stored(bus, REPORTS.name, reports), await _num_stored(bus, FEED.name, applied)

        def counted(job: str) -> tuple[int, int]:
            return asyncio.run_coroutine_threadsafe(count(job), loop).result()

        runner = await asyncio.to_thread(Runner, hosts, environ, logs, counted)
        try:
            return await asyncio.to_thread(work, runner)  # the bus answers meanwhile
        finally:
            runner.close()


def with_runner(work: Callable[[Runner], T], logs: Path | None = None) -> T:
    """Do some work with hosts, services and a runner on them.

    Raises:
        HostsError: when there can be no such hosts here, or this user may not make them.
    """
    with tempfile.TemporaryDirectory(prefix="dynamix-logs-") as directory, Hosts(NUM_HOSTS) as hosts, hosts.entered():
        return asyncio.run(_with_runner(hosts, work, logs or Path(directory)))


# --- a campaign ------------------------------------------------------------------------------------------------------


class CaseOutcomes(NamedTuple):
    """All runs of a case."""

    case: Case
    arms: dict[str, Arm]
    """Those that were found best."""
    outcomes: dict[str, list[Outcome]]
    """By arm, one per seed."""
    tried: dict[str, list[tuple[Arm, Outcome]]]
    """By arm that was searched for, its settings under the first seed."""


class Keeper:
    """Runs what is not known yet, and keeps each run in a file."""

    def __init__(self, runner: Runner, directory: Path, target: float, grid_s: float) -> None:
        self._runner, self._directory, self._target, self._grid_s = runner, directory, target, grid_s
        directory.mkdir(parents=True, exist_ok=True)

    def run(self, case: Case, name: str, arm: Arm, seed: int, best: Outcome | None = None) -> Outcome:
        """Run it, or find it among those that are kept; given up when it is later than the best so far, or behind."""
        wanted = Run(case=case, arm=arm, name=name, seed=seed, target=self._target, grid_s=self._grid_s)
        path = self._directory / f"{case.name}-{seed}-{wanted.key}.json"
        limit_s, points = (case.time_limit_s, list[Point]()) if best is None else (best.counted_s, best.points)
        if path.exists():
            known = msgspec.json.decode(path.read_bytes(), type=Outcome)
            if known.reached_s is not None or known.limit_s >= limit_s or is_behind(known.points, points):
                return known
        try:
            outcome = self._runner.run(wanted, limit_s, points)
        except BenchmarkError as error:
            if not arm.program:
                raise
            sys.stderr.write(f"{error}\n")  # another's program that fails has missed the target
            outcome = Outcome(reached_s=None, limit_s=limit_s, points=[])
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(outcome))
        part.replace(path)  # whole, or not at all
        sys.stderr.write(f"  {case.name}, {name}, {arm.local_batch_size} per rank, seed {seed}: {outcome} s\n")
        return outcome


def compare(case: Case, chosen: Sequence[str], seeds: Sequence[int], keeper: Keeper) -> CaseOutcomes:
    """Search for the best settings under the first seed, then run all chosen arms under all seeds."""
    needed = {*chosen, *(ARMS[name].size_from for name in chosen if ARMS[name].size_from)}
    best: dict[str, Arm] = {}
    tried: dict[str, list[tuple[Arm, Outcome]]] = {}
    for name in (name for name in ARMS if name in needed):
        arm = ARMS[name]
        if arm.size_from:
            arm = msgspec.structs.replace(arm, local_batch_size=best[arm.size_from].local_batch_size)
        best[name] = arm
        first: Outcome | None = None
        for changes in arm.tried:
            setting = msgspec.structs.replace(arm, **changes)
            outcome = keeper.run(case, name, setting, seeds[0], first)
            tried.setdefault(name, []).append((setting, outcome))
            if outcome.reached_s is not None and (first is None or outcome.reached_s < first.counted_s):
                best[name], first = setting, outcome
    outcomes: dict[str, list[Outcome]] = {name: [] for name in best}
    for number, seed in enumerate(seeds):
        for name in list(outcomes) if number % 2 == 0 else list(reversed(outcomes)):
            outcomes[name].append(keeper.run(case, name, best[name], seed))
    return CaseOutcomes(case, best, outcomes, tried)


def ratio_of(found: CaseOutcomes, name: str, base: str) -> Interval | None:
    """Geometric mean of an arm's times over another's, in pairs of one seed, with Student's interval of the logarithms.

    `None` where one of the two was not run.
    """
    if name not in found.outcomes or base not in found.outcomes:
        return None
    pairs = zip(found.outcomes[name], found.outcomes[base], strict=True)
    logs = mean_of([math.log(ours.counted_s / theirs.counted_s) for ours, theirs in pairs])
    return Interval(*(None if bound is None else math.exp(bound) for bound in logs))  # type: ignore[arg-type]


def report_of(found: Sequence[CaseOutcomes], name: str, target: float, note: str) -> Report:
    """Tables, targets and curves."""
    known = ("plain", "static", "goodput", "proportional", "rule", "rule-local")
    bases = [base for base in known if any(base in one.outcomes for one in found)]
    columns = ["case", "arm", "setting", "time to target, s", "changed lines", *(f"vs {base}" for base in bases)]
    rows, tried, targets, panels = list[list[Cell]](), list[list[Cell]](), list[Target](), list[Panel]()
    for one in found:
        for arm, outcomes in one.outcomes.items():
            ratios = [None if arm == base else ratio_of(one, arm, base) for base in bases]
            times = " / ".join(map(str, outcomes))
            rows.append([one.case.name, arm, _setting(one.arms[arm]), times, _num_lines(one.arms[arm]), *ratios])
        for arm, settings in one.tried.items():
            tried += [[one.case.name, arm, _setting(setting), str(outcome)] for setting, outcome in settings]
        for (arm, base), limit in LIMITS.get(one.case.name, {}).items():
            ratio = ratio_of(one, arm, base)
            if ratio is not None:
                targets.append(Target(f"{one.case.name}: {arm} / {base}", ratio.value, at_most=limit))
        curves = {
            arm: [(at.trained_s, at.accuracy) for at in runs[0].points]
            for arm, runs in one.outcomes.items()
            if runs[0].points
        }
        panels.append(Panel(one.case.title, "training time [s]", "held-out accuracy", dict(curves), limit=target))
    table = Table(name, columns, rows, [note])
    searched = [Table(f"{name}-searched", columns[:4], tried)] if tried else []
    return Report([table, *searched], targets, panels)


def _num_lines(arm: Arm) -> int:
    """Lines that a user of the plain script adds or changes; ours: the import and `attach`."""
    return OTHERS[arm.program].num_lines if arm.program else 0 if arm.options is None else 2


def _setting(arm: Arm) -> str:
    options = {name: value for name, value in (arm.options or arm.settings).items() if name != "global_batch"}
    return f"@{arm.local_batch_size} {msgspec.json.encode(options).decode() if options else ''}".strip()


def measure(options: argparse.Namespace) -> Report:
    """Run what is not known yet, and put all together."""
    chosen = [CASES[name] for name in options.case or CASES]
    cases = [msgspec.structs.replace(case, time_limit_s=options.limit or case.time_limit_s) for case in chosen]
    names = options.arm or [name for name, arm in ARMS.items() if not arm.package]
    for name in names:
        if ARMS[name].package and find_spec(ARMS[name].package) is None:
            raise BenchmarkError(
                f"{name}: the package {ARMS[name].package} is not installed: run it with `make others`"
            )
    seeds = range(1, 1 + options.seeds)
    logs = options.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    def work(runner: Runner) -> list[CaseOutcomes]:
        keeper = Keeper(runner, options.work / "runs", options.target, options.grid)
        return [compare(case, names, seeds, keeper) for case in cases]

    found = with_runner(work, logs)
    titles = "; ".join(f"{case.name}: {case.title}" for case in cases)
    note = (
        f"Training time to {options.target:.0%} held-out accuracy in the mean of {LOOKS} looks, one every "
        f"{options.grid:g} s; seeds 1 to {options.seeds}; brackets: 95 % interval; > N: missed at N s. {titles}."
    )
    return report_of(found, options.name, options.target, note)


def main() -> int:
    """Run, print, write; 1 when a target is missed, 2 when it cannot run here."""
    if sys.argv[1:2] == ["--fork-ranks"]:
        fork_ranks()
        return 0
    made = parser(
        *("cluster", __doc__),
        ("--target", 0.85, "held-out accuracy, between 0 and 1"),
        ("--grid", 1.0, "seconds of training time between two looks at the accuracy"),
        ("--seeds", 3, "number of seeds of model and data"),
        ("--limit", 0.0, "seconds of training time after which a run has missed the target; 0: the case's own"),
        ("--name", "cluster", "of the tables"),
    )
    made.add_argument("--case", action="append", choices=CASES, help="only this; may be repeated")
    made.add_argument(
        "--arm", action="append", choices=ARMS, help="only this, and what it starts from; may be repeated"
    )
    made.add_argument("--work", type=Path, default=ROOT / "out" / "cluster", help="keeps runs (default: out/cluster)")
    options = made.parse_args()
    if not 0 < options.target <= 1 or options.grid <= 0 or options.seeds < 1:
        made.error("--target is between 0 and 1, --grid above 0, --seeds at least 1")
    return run("cluster", options, lambda: measure(options), HostsError, MissingDataError)


if __name__ == "__main__":
    sys.exit(main())
