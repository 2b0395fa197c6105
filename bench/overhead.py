"""Costs of a session on the training thread: `python -m bench.overhead [--model large] [--tracking] [--pairs N]`.

One job of two gloo ranks on the CPU, with a real broker, k = 20 and steps paced to 50 ms by a sleep of FIXED length (a
sleep to a deadline would hide what we cost). Each window is answered by an action, which is adopted; the learning rate
is scaled on every step. Some two minutes.

Blocks of steps with the session are compared with blocks of the same model in plain DDP, with torch's loader and
sampler, in the same processes and in random order. The target is on the CPU time of the training thread of rank 0:
all of ours is in it, and what plain DDP does is not.

With --short-steps, as root: jobs on equal hosts with 0.4 of a processor each (bench.hosts), 32 samples per rank and no
sleep, in turn under several seeds. Processor time is the length of a step times that share: what the host could have
computed meanwhile, waiting for other ranks included; beside it what the hosts' control groups count.

Not included: attaching, the services, the first two windows.
"""

import asyncio
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from bench.harness import (
    BenchmarkError,
    Cell,
    Interval,
    Report,
    Rounds,
    Table,
    Target,
    Timed,
    Timing,
    broker_with_bus,
    mean_of,
    parser,
    run,
)
from bench.hosts import HostsError
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import messages, subjects
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import decode
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.streams import FEED, REPORTS
from dynamix.trainer import Session, attach
from dynamix.trainer.data.loader import Loader

NUM_RANKS = 2
WINDOW_STEPS = 20
BLOCK_STEPS = 4
WARM_UP_BLOCKS = 2 * WINDOW_STEPS // BLOCK_STEPS
HIDDEN = {"small": 32, "large": 512}
"""Sizes of the hidden layer: what weighing and norms cost grows with the model, the rest does not."""
LOCAL_BATCH_SIZE = 32
BASE_GLOBAL_BATCH_SIZE = 48
"""Not the batch in use, so that the learning rate is scaled on every step."""
Step = Callable[[], None]


# --- a step, in plain DDP and with a session -------------------------------------------------------------------------


def made_data() -> TensorDataset:
    """Images of noise: what they show does not change what a step costs."""
    return TensorDataset(torch.randn(20_000, 1, 28, 28), torch.randint(0, 10, (20_000,)))


def _replica(hidden: int) -> tuple[DistributedDataParallel, torch.optim.SGD]:
    """A small CNN for 28 x 28 images; nearly all of its parameters are in the hidden layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
    replica = DistributedDataParallel(model)
    return replica, torch.optim.SGD(replica.parameters(), lr=0.01)


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, pace_s: float) -> torch.Tensor:
    inputs, targets = batch
    loss = nn.functional.cross_entropy(model(inputs), targets)
    time.sleep(pace_s)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def _repeated(loader: DataLoader[Any] | Loader) -> Iterator[Any]:
    while True:
        yield from loader


def plain_arm(data: TensorDataset, hidden: int, pace_s: float) -> tuple[Step, DistributedDataParallel]:
    """A step without a session, and its model: DDP with torch's sampler and loader. bench.kernel trains it, too."""
    model, optimizer = _replica(hidden)
    loader = DataLoader(data, batch_size=LOCAL_BATCH_SIZE, sampler=DistributedSampler(data), drop_last=True)
    batches = _repeated(loader)

    def step() -> None:
        _train_step(model, optimizer, next(batches), pace_s)

    return step, model


def _steered_arm(data: TensorDataset, hidden: int, pace_s: float, bus: BusSettings) -> tuple[Step, Session]:
    model, optimizer = _replica(hidden)
    session = attach(
        model,
        optimizer,
        data,
        local_batch_size=LOCAL_BATCH_SIZE,
        base_global_batch_size=BASE_GLOBAL_BATCH_SIZE,
        window_steps=WINDOW_STEPS,
        name="overhead",
        policy="static",
        connect=bus,
    )
    batches = _repeated(session.loader)
    return lambda: session.step(_train_step(model, optimizer, next(batches), pace_s)), session


# --- one rank of the paired job --------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The work of every rank."""

    num_pairs: int
    step_s: float
    hidden: int
    bus: BusSettings


class Measured(msgspec.Struct, frozen=True):
    """The measurements of rank 0."""

    on: list[Timing]
    off: list[Timing]
    num_parameters: int


def _timed_block(step: Step) -> Timing:
    dist.barrier()
    with Timed(BLOCK_STEPS) as done:
        for _ in range(BLOCK_STEPS):
            step()
    return done.timing


def run_rank(rank: int, directory: str, plan: Plan) -> None:
    """Measure both arms in rounds; rank 0 writes what it measured."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=NUM_RANKS)
    data = made_data()
    unpaced, _ = plain_arm(data, plan.hidden, 0.0)
    taken_s = statistics.median(1 / _timed_block(unpaced).per_s for _ in range(WARM_UP_BLOCKS))
    pace = torch.tensor([max(plan.step_s - taken_s, 0.0)], dtype=torch.float64)
    dist.broadcast(pace, src=0)  # all ranks sleep as long as rank 0 must
    off, model = plain_arm(data, plan.hidden, pace.item())
    on, session = _steered_arm(data, plan.hidden, pace.item(), plan.bus)
    session.ignore(model)

    rounds = Rounds(*(("on", "off"), plan.num_pairs), label="" if rank else "overhead", num_warm_up=WARM_UP_BLOCKS)
    for arm in rounds:
        rounds.record(_timed_block(on if arm == "on" else off))
    session.close()
    if rank == 0:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        found = Measured(rounds.timings["on"], rounds.timings["off"], num_parameters)
        Path(directory, "measured.json").write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()


def _run_job(plan: Plan) -> Measured:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dynamix.trainer", "torch._dynamo"])  # imported once, not by each rank
    with tempfile.TemporaryDirectory() as directory:
        ranks = [context.Process(target=run_rank, args=(rank, directory, plan)) for rank in range(NUM_RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise BenchmarkError("a rank failed: its traceback is above")
        return msgspec.json.decode(Path(directory, "measured.json").read_bytes(), type=Measured)


async def _answer(bus: Bus, *, tracking: bool, counts: dict[str, int]) -> None:
    """Stand in for the services: answer each report with an action of the same sizes."""
    action = messages.Action(
        job="none",
        generation=0,
        window=0,
        allocation=Allocation((LOCAL_BATCH_SIZE,) * NUM_RANKS, "tracking" if tracking else "fixed"),
        deltas=(0,) * NUM_RANKS,
        policy="static",
        policy_version=0,
        watermark=0,
    )
    last, wanted = 0, subjects.of("report", subjects.ANY, subjects.ANY)
    async with bus.consume(REPORTS.name, [wanted], start="all", durable="answering") as consumer:
        async for batch in consumer:
            for message in batch:
                report = decode(messages.Report, message.subject, message.payload)
                counts["windows"] += 1
                changed = {"job": report.job, "window": report.window, "watermark": message.sequence}
                action = seal(msgspec.structs.replace(action, **changed), action.hash)
                last = await bus.publish_next(action, expected_last=last)


async def _count_adopted(bus: Bus, counts: dict[str, int]) -> None:
    async with bus.consume(FEED.name, [subjects.of("applied", subjects.ANY)], start="all") as consumer:
        async for batch in consumer:
            counts["applied"] += len(batch)


def _percent_more(on: npt.NDArray[np.float64], off: npt.NDArray[np.float64]) -> Interval:
    """The excess of `on` over `off`, in percent of the mean of `off`, one value per pair; bootstrapped interval."""
    from scipy.stats import bootstrap  # noqa: PLC0415 - a second, which each spawned process would pay, too

    percent = 100 * (on - off) / off.mean()
    found = bootstrap((percent,), np.mean, n_resamples=10_000, method="percentile", random_state=0)
    return Interval(float(percent.mean()), *map(float, found.confidence_interval))


async def measure(num_pairs: int, step_s: float, model: str, *, tracking: bool) -> Report:
    """Run the job beside a broker."""
    counts = {"windows": 0, "applied": 0}
    async with broker_with_bus("bench") as (server, bus):
        working = asyncio.gather(_answer(bus, tracking=tracking, counts=counts), _count_adopted(bus, counts))
        plan = Plan(num_pairs, step_s, HIDDEN[model], server.settings)
        found = await asyncio.to_thread(_run_job, plan)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    on, off = (
        np.array([(timing.wall_s, timing.cpu_s, timing.thread_s) for timing in timings]) / BLOCK_STEPS
        for timings in (found.on, found.off)
    )
    names = ("wall clock", "CPU time of all threads", "CPU time of the training thread")
    more = [_percent_more(on[:, at], off[:, at]) for at in range(len(names))]
    rows: list[list[Cell]] = [
        [name, 1e3 * float(off[:, at].mean()), 1e3 * float(on[:, at].mean()), more[at]] for at, name in enumerate(names)
    ]
    of_step = float(off[:, 2].mean()) / step_s
    thread = more[2]._replace(**{name: of_step * value for name, value in more[2]._asdict().items()})
    rows.append(["CPU time of the training thread, of the whole step", None, None, thread])
    note = (
        f"Model `{model}`, {found.num_parameters} parameters, steps of {1e3 * step_s:g} ms, {num_pairs} pairs of "
        f"{BLOCK_STEPS} steps; {counts['applied']} actions applied in {counts['windows']} windows."
    )
    return Report(
        [Table("overhead", ["per step", "plain DDP, ms", "with a session, ms", "more, %"], rows, [note])],
        [
            Target("CPU time of the training thread, % of the step", thread.value, at_most=1.0),
            Target("wall clock in pairs, upper bound of the interval, %", more[0].high, at_most=5.0),
        ],
    )


# --- short steps on hosts --------------------------------------------------------------------------------------------

WARM_UP_S = 2.0


def measure_short_steps(num_seeds: int, seconds: float) -> Report:
    """Train in turn with and without a session on four equal hosts; raises HostsError where there can be none."""
    from bench import cluster  # noqa: PLC0415 - it needs root

    arms = {
        "plain DDP": cluster.Arm(),
        "a session, sizes stay, windows of 10 steps": cluster.Arm(options={"policy": "static", "window_steps": 10}),
        "the same, windows of 3 steps": cluster.Arm(options={"policy": "static", "window_steps": 3}),
        "the same, windows by default": cluster.Arm(options={"policy": "static"}),
        "the ranks divide the batch (`split`)": cluster.Arm(options={"policy": "split", "global_batch": "fixed"}),
    }
    case = cluster.CASES["equal"]
    passed: dict[str, list[float]] = {name: [] for name in arms}
    counted: dict[str, list[float]] = {name: [] for name in arms}
    generator = random.Random(num_seeds)

    def train_all(runner: "cluster.Runner") -> None:
        for seed in range(1, 1 + num_seeds):
            for name in generator.sample(list(arms), len(arms)):
                wanted = cluster.Run(case=case, arm=arms[name], name=name, seed=seed, target=1.0, grid_s=1.0)
                points = runner.run(wanted, seconds).points
                first, last = next(one for one in points if one.trained_s >= WARM_UP_S), points[-1]
                steps = last.num_steps - first.num_steps
                passed[name].append(1e3 * case.cores * (last.trained_s - first.trained_s) / steps)
                counted[name].append(1e3 * (last.processor_s - first.processor_s) / steps / cluster.NUM_HOSTS)
                sys.stderr.write(f"  seed {seed}, {name}: {passed[name][-1]:.2f} ms\n")

    cluster.with_runner(train_all)
    rows: list[list[Cell]] = []
    for name in arms:
        row: list[Cell] = [name]
        for times in (passed, counted):
            more = [one - plain for one, plain in zip(times[name], times["plain DDP"], strict=True)]
            row += [mean_of(times[name]), None if name == "plain DDP" else mean_of(more)]
        rows.append(row)
    columns = ["processor time of a step", "ms", "beside plain DDP", "counted, ms", "beside plain DDP, counted"]
    return Report([Table("short-steps", columns, rows, [f"{num_seeds} runs of {seconds:g} s each."])])


def main() -> int:
    """Measure, print, write; exit code 1 when a target is missed."""
    made = parser(
        *("overhead", __doc__),
        ("--pairs", 240, "pairs of blocks"),
        ("--step-ms", 50.0, "length of a step"),
        ("--seeds", 6, "runs of each arm with --short-steps"),
        ("--seconds", 8.0, f"training time of such a run, of which the first {WARM_UP_S:g} do not count"),
    )
    made.add_argument("--model", choices=HIDDEN, default="small", help="27 k parameters as in the demo, or 0.4 M")
    made.add_argument("--tracking", action="store_true", help="the fast loop: ranks divide the batch after every step")
    made.add_argument("--short-steps", action="store_true", help="steps without a sleep, on hosts; as root")
    options = made.parse_args()
    if options.pairs < 2 or options.pairs % 2 or options.step_ms <= 0:
        made.error("--pairs must be even and at least 2, and --step-ms above 0")
    if options.short_steps:
        return run("overhead", options, lambda: measure_short_steps(options.seeds, options.seconds), HostsError)
    paced = partial(measure, options.pairs, options.step_ms / 1000, options.model, tracking=options.tracking)
    return run("overhead", options, lambda: asyncio.run(paced()))


if __name__ == "__main__":
    sys.exit(main())
