"""What steering costs a training: `python -m bench.overhead [--json FILE]`, about two minutes.

One job of two gloo ranks on the CPU, with a real broker, k = 20 and steps paced to 50 ms by a sleep of FIXED length (a
sleep to a deadline would hide what we cost). Two figures from the same run:

direct  time between entering and leaving our code on the training thread: the loader's bookkeeping without DataLoader,
        the hook beyond torch's own (which also scales, and starts an all-reduce), the optimizer hooks, `session.step`
        with the window's gather, report and broadcast, waiting for the other rank included. The timers' own cost is in.
paired  blocks of steps with the session against blocks of the same model with torch's own all-reduce hook and a plain
        DataLoader, in the same processes, in the order on off off on. It has everything in it: the client's thread,
        caches, the machine's noise.

Not included: attaching, the services on other cores or machines, and the first window, which matches sockets once more.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dynamix import trainer as dynamix
from dynamix.runtime.bus import Bus
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.runtime.provision import provision
from dynamix.trainer import Session
from dynamix.trainer.clock import HostClock
from dynamix.trainer.learning_rate import LearningRateScaler
from dynamix.trainer.loader import Loader
from dynamix.trainer.weighting import GradBucket, GradientHook

STEP_S = 0.05
WINDOW_STEPS = 20
LOCAL_BATCH_SIZE = 32
BLOCK_STEPS = 4
WARM_UP_BLOCKS = 10
TARGET_DIRECT_PERCENT = 1.0
TARGET_PAIRED_PERCENT = 5.0

Step = Callable[[], None]
Reduced = torch.futures.Future[torch.Tensor]


class Stopwatch:
    """Sums the time spent in named parts, less what is subtracted from them."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.arm = "hook"
        """The part that an all-reduce is taken off: of the arm that trains now."""

    def wrap(self, owner: Any, method: str, part: str) -> None:
        """Time every call of a method."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return original(*args, **kwargs)

        setattr(owner, method, timed)

    def wrap_hooks(self) -> None:
        """Time both communication hooks less the all-reduce that they start. DDP looks at a hook's signature."""
        ours = GradientHook.reduce

        def reduce(hook: GradientHook, state: object, bucket: GradBucket) -> Reduced:
            with self.part("hook"):
                return ours(hook, state, bucket)

        GradientHook.reduce = reduce  # type: ignore[method-assign]
        self.wrap(GradientHook, "_finish", "hook")
        start = dist.all_reduce

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            with self.part(self.arm, sign=-1.0):
                return start(*args, **kwargs)

        dist.all_reduce = all_reduce

    def torch_hook(self, state: Any, bucket: GradBucket) -> Reduced:
        """The hook of torch itself, timed: what it costs is no cost of ours."""
        with self.part("torch's hook"):
            return allreduce_hook(state, bucket)

    @contextlib.contextmanager
    def part(self, name: str, sign: float = 1.0) -> Iterator[None]:
        """Add the time inside to a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += sign * (time.perf_counter() - began)

    def wrap_all(self) -> None:
        """Time everything of ours that a step runs through, before anything is attached."""
        self.wrap_hooks()
        self.wrap(Session, "step", "session.step")
        self.wrap(LearningRateScaler, "_before_step", "optimizer hooks")
        self.wrap(LearningRateScaler, "_after_step", "optimizer hooks")
        self.wrap(HostClock, "before_update", "optimizer hooks")


def make_model() -> nn.Module:
    """A small CNN for 28 x 28 images, 0.4 M parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, pace_s: float) -> torch.Tensor:
    """What the user's loop does in one step."""
    inputs, targets = batch
    loss = nn.functional.cross_entropy(model(inputs), targets)
    time.sleep(pace_s)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def plain_arm(data: TensorDataset, pace_s: float, watch: Stopwatch) -> Step:
    """A step without us: torch's own hook, sampler and loader."""
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(None, watch.torch_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=LOCAL_BATCH_SIZE, sampler=DistributedSampler(data), drop_last=True)
    batches = _for_ever(loader)

    def step() -> None:
        watch.arm = "torch's hook"
        train_step(model, optimizer, next(batches), pace_s)

    return step


def steered_arm(data: TensorDataset, pace_s: float, watch: Stopwatch) -> tuple[Step, Session]:
    """A step of the same model with a session."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = dynamix.attach(
        model, optimizer, data, local_batch_size=LOCAL_BATCH_SIZE, window_steps=WINDOW_STEPS, name="overhead"
    )
    session.loader._batches = _TimedBatches(session.loader._batches, watch)  # noqa: SLF001 - to time it apart
    batches = _for_ever(session.loader)

    def step() -> None:
        watch.arm = "hook"
        with watch.part("loader"):
            batch = next(batches)
        session.step(train_step(model, optimizer, batch, pace_s))

    return step, session


class _TimedBatches:
    """A DataLoader whose own work is taken off the loader's part."""

    def __init__(self, batches: DataLoader[Any], watch: Stopwatch) -> None:
        self._batches = batches
        self._watch = watch

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._batches)
        while True:
            with self._watch.part("loader", sign=-1.0):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


def _for_ever(loader: DataLoader[Any] | Loader) -> Iterator[Any]:
    while True:
        yield from loader


def timed_block(step: Step) -> float:
    """Seconds per step over one block; both ranks begin together."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(BLOCK_STEPS):
        step()
    return (time.perf_counter() - began) / BLOCK_STEPS


def run_rank(rank: int, store: str, num_pairs: int, results: Any) -> None:
    """One rank of the job; rank 0 sends what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    watch = Stopwatch()
    watch.wrap_all()
    data = TensorDataset(torch.randn(20_000, 1, 28, 28), torch.randint(0, 10, (20_000,)))
    unpaced = plain_arm(data, 0.0, watch)
    pace_s = STEP_S - statistics.median(timed_block(unpaced) for _ in range(WARM_UP_BLOCKS))
    pace = torch.tensor([max(pace_s, 0.0)], dtype=torch.float64)
    dist.broadcast(pace, src=0)
    off = plain_arm(data, pace.item(), watch)
    on, session = steered_arm(data, pace.item(), watch)
    for _ in range(max(WARM_UP_BLOCKS, 2 * WINDOW_STEPS // BLOCK_STEPS)):
        timed_block(off)
        timed_block(on)
    watch.seconds.clear()

    pairs: list[tuple[float, float]] = []
    for number in range(num_pairs):
        if number % 2 == 0:
            with_session, without = timed_block(on), timed_block(off)
        else:
            without, with_session = timed_block(off), timed_block(on)
        pairs.append((with_session, without))
        if rank == 0 and (number + 1) % 20 == 0:
            sys.stderr.write(f"  {number + 1} of {num_pairs} pairs\n")
    session.close()
    if rank == 0:
        num_steps = num_pairs * BLOCK_STEPS
        results.put((pairs, {part: seconds / num_steps for part, seconds in watch.seconds.items()}))
    dist.barrier()
    dist.destroy_process_group()


def bootstrap_interval(values: np.ndarray[Any, np.dtype[np.float64]], num: int = 10_000) -> tuple[float, float]:
    """95 % interval of the mean, by resampling pairs."""
    generator = np.random.default_rng(0)
    means = [float(values[generator.integers(0, len(values), len(values))].mean()) for _ in range(num)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def summarise(pairs: list[tuple[float, float]], parts_s: dict[str, float]) -> dict[str, Any]:
    """Both figures, in percent of the step without us."""
    table = np.array(pairs)
    step_s = float(np.median(table[:, 1]))
    difference = 100 * (table[:, 0] - table[:, 1]) / table[:, 1].mean()
    low, high = bootstrap_interval(difference)
    parts_s["hook"] -= parts_s.pop("torch's hook")
    direct = {part: 100 * seconds / step_s for part, seconds in sorted(parts_s.items())}
    return {
        "step_ms": 1000 * step_s,
        "window_steps": WINDOW_STEPS,
        "num_pairs": len(pairs),
        "block_steps": BLOCK_STEPS,
        "direct_percent": sum(direct.values()),
        "direct_parts_percent": direct,
        "direct_parts_us": {part: 1e6 * seconds for part, seconds in sorted(parts_s.items())},
        "paired_mean_percent": float(difference.mean()),
        "paired_median_percent": float(np.median(difference)),
        "paired_interval_percent": [low, high],
        "direct_met": sum(direct.values()) <= TARGET_DIRECT_PERCENT,
        "paired_met": high <= TARGET_PAIRED_PERCENT,
    }


def print_table(summary: dict[str, Any]) -> None:
    """The summary for people."""
    print(f"\nstep without us: {summary['step_ms']:.2f} ms (paced), k = {summary['window_steps']}, 2 gloo ranks\n")
    print(f"{'our code on the training thread':34} {'us per step':>12} {'% of step':>10}")
    for part, percent in summary["direct_parts_percent"].items():
        print(f"  {part:32} {summary['direct_parts_us'][part]:12.1f} {percent:10.3f}")
    total_us = sum(summary["direct_parts_us"].values())
    verdict = "met" if summary["direct_met"] else "MISSED"
    print(f"  {'sum':32} {total_us:12.1f} {summary['direct_percent']:10.3f}   target <= 1 %: {verdict}\n")
    low, high = summary["paired_interval_percent"]
    verdict = "met" if summary["paired_met"] else "MISSED"
    print(f"on against off, {summary['num_pairs']} pairs of {summary['block_steps']} steps (on off off on):")
    print(
        f"  mean {summary['paired_mean_percent']:+.2f} %, 95 % interval [{low:+.2f}, {high:+.2f}] %, median "
        f"{summary['paired_median_percent']:+.2f} %   target: upper bound <= 5 %: {verdict}\n"
    )


async def measure(num_pairs: int) -> dict[str, Any]:
    """Run the job beside a broker."""
    async with EmbeddedServer() as server:
        bus = await Bus.connect(server.settings, name="bench")
        await provision(bus)
        environ = {
            "DYNAMIX_NATS_URL": server.settings.url,
            "DYNAMIX_NATS_USER": server.settings.user,
            "DYNAMIX_NATS_PASSWORD": server.settings.password,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        try:
            return summarise(*await asyncio.to_thread(run_job, num_pairs, environ))
        finally:
            await bus.close()


def run_job(num_pairs: int, environ: dict[str, str]) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Both ranks in processes of their own.

    Raises:
        RuntimeError: when a rank failed.
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    os.environ.update(environ)  # inherited: OMP reads its own when torch is imported
    with tempfile.TemporaryDirectory() as directory:
        args = (f"file://{directory}/store", num_pairs, results)
        ranks = [context.Process(target=run_rank, args=(rank, *args)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError("a rank of the benchmark failed; see its traceback above")
        found: tuple[list[tuple[float, float]], dict[str, float]] = results.get()
        return found


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures here; - is standard output")
    parser.add_argument("--pairs", type=int, default=240, help="pairs of blocks (default: 240)")
    arguments = parser.parse_args()
    seconds = 2 * arguments.pairs * BLOCK_STEPS * STEP_S
    sys.stderr.write(f"overhead: {arguments.pairs} pairs of blocks, about {seconds:.0f} s\n")
    summary = asyncio.run(measure(arguments.pairs))
    print_table(summary)
    if arguments.json == "-":
        print(json.dumps(summary, indent=2))
    elif arguments.json:
        Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.json).write_text(json.dumps(summary, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
