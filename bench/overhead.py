"""What steering costs a training: `python -m bench.overhead [--json FILE] [--pairs N]`, about three minutes.

One job of two gloo ranks on the CPU, with a real broker, k = 20 and steps paced to 50 ms by a sleep of FIXED length (a
sleep to a deadline would hide what we cost). Each window is answered by an action over the broker, which is adopted;
the learning rate is scaled on every step. Two figures from the same run, of rank 0, which does the most:

direct  time between entering and leaving our code on the training thread, by part, the timers' own cost included, in
        blocks of their own between the pairs: in turn by the wall clock, which includes waiting for a core, and in CPU
        time of the thread. The launch of the all-reduce stands apart: plain DDP launches the same one, from C++. Judged
        is the wall-clock sum without it. What we do in gloo's threads and the bus client's thread is not on the
        training thread; the former is listed.
paired  blocks of steps with the session against blocks of the same model in plain DDP, without any communication hook,
        with torch's loader and sampler, in the same processes, in the order on off off on. It has everything in it:
        DDP calling into Python, all threads, caches, the machine's noise; no timers run. Beside the wall clock it
        gives CPU time.

Not included: attaching, the services themselves, and the first two windows.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from bench.output import add_output_arguments, exit_code, write_json
from bench.overhead_table import print_table
from bench.paired import compare
from bench.stopwatch import Clock, Stopwatch
from torch import nn
from torch._C import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dynamix import trainer as dynamix
from dynamix.runtime.bus import ALL, Bus
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.runtime.provision import provision
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Report
from dynamix.trainer import Session
from dynamix.trainer.data.loader import Loader
from dynamix.trainer.data.sampler import PlanSampler
from dynamix.trainer.gradient import weighting
from dynamix.trainer.gradient.learning_rate import LearningRateScaler
from dynamix.trainer.gradient.time_slots import TimeSlots
from dynamix.trainer.gradient.weighting import GradientHook
from dynamix.trainer.measurement.clock import HostClock
from dynamix.trainer.steering.fast_loop import FastLoop
from dynamix.trainer.steering.steering import Steering

WINDOW_STEPS = 20
HIDDEN = {"small": 32, "large": 512}
"""Sizes of the hidden layer: what weighing and norms cost grows with the model, the rest does not."""
NUM_RANKS = 2
LOCAL_BATCH_SIZE = 32
BASE_GLOBAL_BATCH_SIZE = 48
"""Not the batch in use, so that the learning rate is scaled on every step."""
BLOCK_STEPS = 4
WARM_UP_BLOCKS = 2 * WINDOW_STEPS // BLOCK_STEPS
TARGET_DIRECT_PERCENT = 1.0
TARGET_PAIRED_PERCENT = 5.0

LAUNCH = "launch of the all-reduce"
TORCHS_LOADER = "torch's DataLoader"

Step = Callable[[], None]


class Options(NamedTuple):
    """What to run."""

    num_pairs: int
    step_s: float
    hidden: int
    tracking: bool
    """Whether the actions ask for the fast loop: compute times on every all-reduce, a filter after every step."""


class Block(NamedTuple):
    """Cost of one block, per step."""

    wall_s: float
    cpu_s: float
    """Of all threads of the process."""


class Measured(NamedTuple):
    """What rank 0 found."""

    pairs: list[tuple[Block, Block]]
    """With the session, and without."""
    here_s: dict[str, dict[str, float]]
    """By clock: per step, by part, on the training thread."""
    elsewhere_s: dict[str, dict[str, float]]
    """The same in other threads."""


def watch_our_code() -> Stopwatch:
    """Time everything of ours that a step runs through; before anything is attached."""
    watch = Stopwatch()
    watch.wrap(GradientHook, "reduce", "hook: the rest")
    watch.wrap(GradientHook, "launch", LAUNCH)
    watch.wrap(LearningRateScaler, "before_step", "optimizer hooks")
    watch.wrap(LearningRateScaler, "after_step", "optimizer hooks")
    watch.wrap(HostClock, "before_update", "optimizer hooks")
    watch.wrap(Session, "step", "session.step")
    watch.wrap(GradientHook, "weigh", "hook: weighing")
    watch.wrap(weighting, "squared_norm", "hook: norms")
    watch.wrap(Future, "then", "hook: callback")  # DDP takes a future from Python only with one
    watch.wrap(GradientHook, "finish", "hook: reduced")
    watch.wrap(GradientHook, "finish_measured", "hook: reduced")
    watch.wrap(Steering, "after_step", "session.step: end of a window")
    watch.wrap(TimeSlots, "extend", "hook: weighing, with times")
    watch.wrap(TimeSlots, "receive", "hook: times taken off")
    watch.wrap(FastLoop, "observe", "session.step: filter and split")
    watch.wrap_iteration(Loader, "loader")
    watch.wrap_iteration(PlanSampler, "sampler")
    watch.wrap_iteration(DataLoader, TORCHS_LOADER)  # runs inside of our loader: taken off it
    return watch


def make_model(hidden: int) -> nn.Module:
    """A small CNN for 28 x 28 images; nearly all of its parameters are in the hidden layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, pace_s: float) -> torch.Tensor:
    """What the user's loop does in one step."""
    inputs, targets = batch
    loss = nn.functional.cross_entropy(model(inputs), targets)
    time.sleep(pace_s)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def plain_arm(data: TensorDataset, hidden: int, pace_s: float) -> Step:
    """A step without us: DDP as it is, torch's sampler and loader."""
    model = DistributedDataParallel(make_model(hidden))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=LOCAL_BATCH_SIZE, sampler=DistributedSampler(data), drop_last=True)
    batches = _for_ever(loader)

    def step() -> None:
        train_step(model, optimizer, next(batches), pace_s)

    return step


def steered_arm(data: TensorDataset, hidden: int, pace_s: float, bus: BusSettings) -> tuple[Step, Session]:
    """A step of the same model with a session."""
    model = DistributedDataParallel(make_model(hidden))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = dynamix.attach(
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
    batches = _for_ever(session.loader)

    def step() -> None:
        session.step(train_step(model, optimizer, next(batches), pace_s))

    return step, session


def _for_ever(loader: DataLoader[Any] | Loader) -> Iterator[Any]:
    while True:
        yield from loader


def timed_block(step: Step) -> Block:
    """The cost of one block; both ranks begin together."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(BLOCK_STEPS):
        step()
    return Block((time.perf_counter() - wall) / BLOCK_STEPS, (time.process_time() - cpu) / BLOCK_STEPS)


def run_rank(rank: int, directory: str, options: Options, bus: BusSettings) -> None:
    """One rank of the job; rank 0 writes what it measured."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=NUM_RANKS)
    measured = measure_rank(options, bus, speaks=rank == 0)
    if rank == 0:
        Path(directory, "measured.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def measure_rank(options: Options, bus: BusSettings, *, speaks: bool) -> Measured:
    """Both arms in turn."""
    watch = watch_our_code()
    data = TensorDataset(torch.randn(20_000, 1, 28, 28), torch.randint(0, 10, (20_000,)))
    pace_s = _agree_on_pace(data, options)
    off = plain_arm(data, options.hidden, pace_s)
    on, session = steered_arm(data, options.hidden, pace_s, bus)
    for _ in range(WARM_UP_BLOCKS):
        timed_block(off)
        timed_block(on)
    pairs: list[tuple[Block, Block]] = []
    for number in range(options.num_pairs):
        pairs.append(_pair(on, off, on_first=number % 2 == 0))
        watch.clock = list(Clock)[number % len(Clock)]
        timed_block(on)
        watch.clock = None
        if speaks and (number + 1) % 20 == 0:
            sys.stderr.write(f"  {number + 1} of {options.num_pairs} pairs\n")
    session.close()
    here, elsewhere = (
        {clock.value: _per_step(seconds, options) for clock, seconds in by_clock.items()}
        for by_clock in (watch.here, watch.elsewhere)
    )
    return Measured(pairs, here, elsewhere)


def _agree_on_pace(data: TensorDataset, options: Options) -> float:
    """Seconds to sleep in each step so that a plain one takes `options.step_s`: rank 0's."""
    unpaced = plain_arm(data, options.hidden, 0.0)
    taken_s = statistics.median(timed_block(unpaced).wall_s for _ in range(WARM_UP_BLOCKS))
    pace = torch.tensor([max(options.step_s - taken_s, 0.0)], dtype=torch.float64)
    dist.broadcast(pace, src=0)
    return pace.item()


def _pair(on: Step, off: Step, *, on_first: bool) -> tuple[Block, Block]:
    if on_first:
        return timed_block(on), timed_block(off)
    without = timed_block(off)
    return timed_block(on), without


def _per_step(seconds: dict[str, float], options: Options) -> dict[str, float]:
    """Of what is ours; each clock ran after every other pair."""
    num_steps = options.num_pairs // len(Clock) * BLOCK_STEPS
    return {part: total / num_steps for part, total in sorted(seconds.items()) if part != TORCHS_LOADER}


class Answerer:
    """Stands in for the services: answers each report with an action of the same sizes."""

    def __init__(self, bus: Bus, *, tracking: bool) -> None:
        self.num_reports = 0
        self.num_applied = 0
        self._bus = bus
        self._last = Action(
            job="none",
            generation=0,
            window=0,
            local_batch_sizes=(LOCAL_BATCH_SIZE,) * NUM_RANKS,
            deltas=(0,) * NUM_RANKS,
            policy="static",
            policy_version=0,
            watermark=0,
            split="tracking" if tracking else "fixed",
        )
        self._last_sequence = 0

    async def run(self) -> None:
        """Answer until cancelled."""
        async with self._bus.consume("FEED", ["dynamix.v1.report.>", "dynamix.v1.applied.>"], start=ALL) as consumer:
            async for batch in consumer:
                for message in batch:
                    if ".applied." in message.subject:
                        self.num_applied += 1
                    else:
                        await self._answer(decode(Report, message.subject, message.payload), message.sequence)

    async def _answer(self, report: Report, sequence: int) -> None:
        self.num_reports += 1
        action = msgspec.structs.replace(self._last, job=report.job, window=report.window, watermark=sequence)
        self._last = seal(action, self._last.hash)
        self._last_sequence = await self._bus.publish_action(self._last, expected_last=self._last_sequence)


async def measure(options: Options) -> dict[str, Any]:
    """Run the job beside a broker."""
    loads = [os.getloadavg()[0]]
    async with EmbeddedServer() as server:
        bus = await Bus.connect(server.settings, name="bench")
        try:
            await provision(bus)
            answerer = Answerer(bus, tracking=options.tracking)
            answering = asyncio.create_task(answerer.run())
            measured = await asyncio.to_thread(run_job, options, server.settings)
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        finally:
            await bus.close()
    loads.append(os.getloadavg()[0])
    windows = {"num_windows": answerer.num_reports, "num_actions_applied": answerer.num_applied}
    return {**windows, "load_average": loads, **summarise(measured, options)}


def run_job(options: Options, bus: BusSettings) -> Measured:
    """All ranks in processes of their own.

    Raises:
        RuntimeError: when a rank failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        ranks = [context.Process(target=run_rank, args=(rank, directory, options, bus)) for rank in range(NUM_RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError("a rank of the benchmark failed; see its traceback above")
        pairs, *sums = json.loads(Path(directory, "measured.json").read_text())
    return Measured([(Block(*on), Block(*off)) for on, off in pairs], *sums)


def summarise(measured: Measured, options: Options) -> dict[str, Any]:
    """Both figures, the direct one in percent of the step that was asked for."""
    table = np.array(measured.pairs)  # pair, arm, clock
    wall, cpu = (compare(table[:, 0, clock], table[:, 1, clock]) for clock in range(2))
    direct = {
        clock: _direct(parts, measured.elsewhere_s[clock], options.step_s) for clock, parts in measured.here_s.items()
    }
    return {
        "step_ms": 1000 * options.step_s,
        "tracking": options.tracking,
        "window_steps": WINDOW_STEPS,
        "num_ranks": NUM_RANKS,
        "num_parameters": sum(parameter.numel() for parameter in make_model(options.hidden).parameters()),
        "num_pairs": len(measured.pairs),
        "block_steps": BLOCK_STEPS,
        "launch_part": LAUNCH,
        "direct_wall": direct[Clock.WALL.value],
        "direct_cpu": direct[Clock.CPU.value],
        "paired_wall": wall,
        "paired_cpu": cpu,
        "targets": [
            _target(
                "direct: our code on the training thread",
                direct[Clock.WALL.value]["ours_percent"],
                TARGET_DIRECT_PERCENT,
            ),
            _target("paired: upper bound of the interval", wall["interval_percent"][1], TARGET_PAIRED_PERCENT),
        ],
    }


def _direct(here_s: dict[str, float], elsewhere_s: dict[str, float], step_s: float) -> dict[str, Any]:
    """One clock's sums, with the launch of the all-reduce (gross) and without (ours)."""
    gross_s = sum(here_s.values())
    ours_s = gross_s - here_s[LAUNCH]
    return {
        "training_thread_us": _microseconds(here_s),
        "other_threads_us": _microseconds(elsewhere_s),
        "gross_us": 1e6 * gross_s,
        "gross_percent": 100 * gross_s / step_s,
        "ours_us": 1e6 * ours_s,
        "ours_percent": 100 * ours_s / step_s,
    }


def _microseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {part: 1e6 * value for part, value in seconds.items()}


def _target(name: str, percent: float, limit: float) -> dict[str, Any]:
    return {"name": name, "percent": percent, "limit_percent": limit, "met": percent <= limit}


def main() -> int:
    """Measure, print, write; exit code 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__.splitlines()[0])
    add_output_arguments(parser)
    parser.add_argument("--pairs", type=int, default=240, help="pairs of blocks (default: 240)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="length of a step (default: 50)")
    parser.add_argument(
        "--model", choices=HIDDEN, default="small", help="27 k parameters as in the demo, or 0.4 M (default: small)"
    )
    parser.add_argument(
        "--tracking", action="store_true", help="let the ranks divide the global batch after every step"
    )
    arguments = parser.parse_args()
    if arguments.pairs < 2 or arguments.pairs % 2 or arguments.step_ms <= 0:
        parser.error("--pairs must be even and at least 2, and --step-ms above 0")
    options = Options(arguments.pairs, arguments.step_ms / 1000, HIDDEN[arguments.model], arguments.tracking)
    seconds = 3 * options.num_pairs * BLOCK_STEPS * options.step_s
    sys.stderr.write(f"overhead: {options.num_pairs} pairs of blocks, about {seconds:.0f} s\n")
    summary = asyncio.run(measure(options))
    if arguments.json != "-":
        print_table(summary)
    write_json(summary, arguments.json)
    missed = [target["name"] for target in summary["targets"] if not target["met"]]
    return exit_code("overhead", missed, arguments)


if __name__ == "__main__":
    sys.exit(main())
