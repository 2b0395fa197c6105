"""Train a real job on this machine three times: with fixed, divided and adaptive batch sizes.

A 4-process gloo job trains a small CNN on Fashion-MNIST to one held-out accuracy: as plain DDP does; with the same
global batch divided by measured speed; and with an adaptive global batch. Its ranks are PACED: they sleep for a fixed
time per sample, one of them three times longer.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamix.cli.arguments import (
    STANDARD_OUTPUT,
    add_json_argument,
    add_option,
    add_png_argument,
    count,
    number,
    output_directory,
)
from dynamix.cli.commands.capture import capture
from dynamix.cli.errors import CommandError, explained
from dynamix.cli.output import write_json
from dynamix.cli.services import SERVICES, ServiceProcess, bus_environment, wait_until_ready
from dynamix.cli.terminal import ProgressLine, formatted, print_table, sizes_text
from dynamix.recording.job_view import JobView
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import DIE_WITH_PARENT, EmbeddedServer
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode_any
from dynamix.schemas.streams import FEED

NUM_TRAINING_IMAGES = 60_000
LOOKS = 3
"""Evaluations in a row whose mean must be at the target: a single one differs from the next by about a percent."""
MAX_WINDOWS, MAX_PACE_S = 100_000, 10.0
"""Beyond these a typing error is more likely than a wish."""
LAST_MESSAGES_TIMEOUT_S = 5.0
MAX_ERROR_CHARACTERS = 3000
RUN_COLOURS = ("#888888", "#0b6e4f", "#c44e52")
TORCH_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a restart of the ranks fails under gloo
}


# --- what is run, and what came of it


class Variant(NamedTuple):
    """One run of the job: its policy, the arguments of `attach` for it, and a description."""

    policy: str
    arguments: dict[str, Any]
    what: str


VARIANTS = (
    Variant("static", {"policy": "static"}, "as plain DDP"),
    Variant("split", {}, "the default: one global batch, divided by measured speed"),
    Variant("rule", {"global_batch": "adaptive"}, "the policy moves the global batch too"),
)


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, paces and the goal; equal for all runs."""

    data: str | None = None
    """Directory with Fashion-MNIST's four idx files; the usual places when not given."""
    target_accuracy: float = 0.83
    """Held-out accuracy, in the mean of `LOOKS` evaluations, at which the clock stops."""
    local_batch_size: int = 128
    """Per rank at the start."""
    window_steps: int = 10
    min_windows: int = 30
    """Train for at least this many windows, also when the target is reached before."""
    max_windows: int = 120
    """Give up after this many: the target was not reached."""
    num_ranks: int = 4
    pace_s_per_sample: float = 0.0005
    """Stated compute time of one sample on an ordinary rank: the ranks sleep to it."""
    slow_rank: int = 3
    slowdown: float = 3.0
    """Factor by which the slow rank is slower."""
    evaluate_every_samples: int = 5_120
    learning_rate: float = 0.05
    momentum: float = 0.9
    seed: int = 1

    @property
    def num_epochs(self) -> int:
        """Passes over the 60,000 training images that `max_windows` can need."""
        samples = self.max_windows * self.window_steps * self.local_batch_size * self.num_ranks
        return 1 + samples // NUM_TRAINING_IMAGES


class DemoStep(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the training script's own log, written by rank 0 after each step."""

    step: int
    trained_s: float
    """Training time so far, without evaluation."""
    step_time_s: float
    samples: int
    accuracy: float | None = None
    """Held-out accuracy, on the steps where it was evaluated."""


class DemoRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as `--json` writes it."""

    policy: str
    time_to_target_s: float | None
    """Training seconds to the evaluation at which the target was reached; `null` if it was not."""
    target_accuracy: float
    final_accuracy: float | None
    median_step_time_s: float
    num_steps: int
    num_windows: int
    num_actions_applied: int
    local_batch_sizes: list[tuple[int, ...]]
    """Per window, per rank."""
    steps: list[DemoStep]


def is_at_target(accuracies: Sequence[float], target_accuracy: float) -> bool:
    """Whether the mean of the newest evaluations has reached the target."""
    return len(accuracies) >= LOOKS and statistics.fmean(accuracies[-LOOKS:]) >= target_accuracy


def summarise(plan: DemoPlan, policy: str, steps: list[DemoStep], view: JobView) -> DemoRun:
    """Combine the script's own log and the job as its messages describe it."""
    accuracies: list[float] = []
    reached_s = None
    for step in steps:
        if step.accuracy is not None:
            accuracies.append(step.accuracy)
            if reached_s is None and is_at_target(accuracies, plan.target_accuracy):
                reached_s = step.trained_s
    sizes = [window.sizes for window in view.history]
    return DemoRun(
        policy=policy,
        time_to_target_s=reached_s,
        target_accuracy=plan.target_accuracy,
        final_accuracy=accuracies[-1] if accuracies else None,
        median_step_time_s=statistics.median(step.step_time_s for step in steps),
        num_steps=len(steps),
        num_windows=len(sizes),
        num_actions_applied=sum(window.applied is not None for window in view.windows.values()),
        local_batch_sizes=sizes,
        steps=steps,
    )


# --- the command


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    plan = DemoPlan()
    parser.add_argument("--data", metavar="DIR", help="directory with Fashion-MNIST's four idx files")
    what = "keep each run as a capture, DIR/POLICY.dxc"
    parser.add_argument("--captures", metavar="DIR", type=output_directory, help=what)
    add_json_argument(parser)
    add_png_argument(parser, "write the picture (default: %(default)s)", default="dynamix-demo.png")
    add_option(parser, "--target", plan.target_accuracy, "held-out accuracy to reach", type=number(0, 1, above=True))
    what = "least number of windows per run"
    add_option(parser, "--windows", plan.min_windows, what, type=count(1, MAX_WINDOWS))
    add_option(parser, "--pace", plan.pace_s_per_sample, "seconds per sample of a rank", type=number(0, MAX_PACE_S))


def run(arguments: argparse.Namespace) -> int:
    """Run the jobs one after the other; 0 when all reached the target."""
    from dynamix.lab.workloads.datasets import fashion_mnist

    with explained(OSError, ValueError, TimeoutError, TrainingFailedError):
        if arguments.captures is not None:
            arguments.captures.mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):  # fail now rather than after a minute
            fashion_mnist(split, arguments.data)
        plan = DemoPlan(
            data=arguments.data,
            target_accuracy=arguments.target,
            min_windows=arguments.windows,
            max_windows=max(DemoPlan().max_windows, arguments.windows),
            pace_s_per_sample=arguments.pace,
        )
        with ProgressLine() as progress:
            about = (__doc__ or "").partition("\n\n")[2]
            progress.write_line(f"{about}Target: {plan.target_accuracy:.0%}, the mean of {LOOKS} evaluations.")
            try:
                runs = asyncio.run(run_demo(plan, progress, arguments.captures))
            except asyncio.CancelledError:
                raise CommandError("ended by SIGTERM", exit_code=128 + signal.SIGTERM) from None
    draw(runs, plan, arguments.png)
    if arguments.json != STANDARD_OUTPUT:
        show(runs)
    print(f"Picture: {arguments.png}", file=sys.stderr)
    write_json({"runs": runs}, arguments.json)
    return 0 if all(run.time_to_target_s is not None for run in runs) else 1


# --- the runs


class TrainingFailedError(RuntimeError):
    """The training job ended with an error; the message has the output of its first failing rank."""


async def run_demo(plan: DemoPlan, progress: ProgressLine, captures: Path | None) -> list[DemoRun]:
    """Carry out the plan once per variant, one after the other, against the same services.

    `captures` is a directory for a capture of each run, named by its policy.

    Raises TrainingFailedError, TimeoutError when a service does not become ready, or CancelledError after SIGTERM, when
    nothing that it started is left.
    """
    task = asyncio.current_task()
    assert task is not None, "called from a task"
    # The signal would end the process at once, with its jobs and files left behind.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    runs = []
    async with services(progress.write_line) as running:
        for variant in VARIANTS:
            given = "".join(f', {name}="{value}"' for name, value in variant.arguments.items())
            progress.write_line(f"{variant.policy}: attach(model, optimizer, dataset{given}), {variant.what}")
            job = f"demo-{variant.policy}-{subjects.new_run_id()}"
            runs.append(await run_job(plan, variant, job, running, progress))
            if captures is not None:
                await capture(running.bus, job, captures / f"{variant.policy}.dxc", asyncio.Event(), past=True)
    return runs


class RunningServices(NamedTuple):
    """Broker and services that the runs share."""

    bus: Bus
    environ: dict[str, str]
    """Variables by which a job finds the broker."""
    directory: Path
    """Directory of temporary files."""


@contextlib.asynccontextmanager
async def services(announce: Callable[[str], None]) -> AsyncIterator[RunningServices]:
    """An embedded broker with its streams and every service in a process of its own, ready."""
    async with EmbeddedServer() as server, contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamix-demo-")))
        bus = await Bus.connect(server.settings, name="demo")
        stack.push_async_callback(bus.close)
        await provision(bus)
        environ = {**bus_environment(server.settings), "DYNAMIX_NODE": "demo-node"}
        log = stack.enter_context((directory / "services.log").open("wb"))
        children = [ServiceProcess(name, environ, log) for name in SERVICES]
        for child in children:
            stack.callback(child.stop)
            child.start()
        await wait_until_ready(bus, SERVICES)
        named = ", ".join(f"{child.name} (pid {child.pid})" for child in children)
        announce(f"nats-server (pid {server.pid}) and {named} are ready")
        yield RunningServices(bus, environ, directory)


async def run_job(
    plan: DemoPlan, variant: Variant, job: str, running: RunningServices, progress: ProgressLine
) -> DemoRun:
    """Run one training job under torchrun, and show it as its messages come. Raises TrainingFailedError."""
    view, more = JobView(job, most_windows=1 << 20), asyncio.Event()

    async def follow() -> None:
        wanted = [subjects.of("window", job, subjects.ANY), subjects.of("applied", job)]
        async with running.bus.consume(FEED.name, wanted, start="all") as consumer:
            async for batch in consumer:
                for message in batch:
                    view.fold(decode_any(message.subject, message.payload), message.timestamp_ns)
                show_window(progress, variant.policy, view)
                more.set()

    follower = asyncio.create_task(follow())
    try:
        steps = await _train(plan, variant, job, running)
        with contextlib.suppress(TimeoutError):  # the job has drained: its last messages are on their way
            async with asyncio.timeout(LAST_MESSAGES_TIMEOUT_S):
                while len(view.history) < len(steps) // plan.window_steps:
                    more.clear()
                    await more.wait()
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
    run = summarise(plan, variant.policy, steps, view)
    show_window(progress, variant.policy, view, run.final_accuracy)
    progress.finish()
    return run


async def _train(plan: DemoPlan, variant: Variant, job: str, running: RunningServices) -> list[DemoStep]:
    """Run the training script under torchrun until it ends; its log. Raises TrainingFailedError."""
    steps_log, output = running.directory / f"{job}.jsonl", running.directory / f"{job}.log"
    argument = msgspec.json.encode((plan, variant.arguments, str(steps_log), os.getpid())).decode()
    command = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid())]
    command += [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.num_ranks}"]
    command += ["-m", "dynamix.cli.commands.demo.job", argument]
    own = {"DYNAMIX_JOB": job, "DYNAMIX_TRAINER_POLICY": variant.policy}
    with output.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **TORCH_ENVIRONMENT, **running.environ, **own}, stdout=log, stderr=log
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            await process.wait()
            raise
    if code != 0:
        text = output.read_text(errors="replace")
        start = max(0, text.find("Traceback"))  # of the first failing rank; torchrun reports the others after it
        error = text[start : start + MAX_ERROR_CHARACTERS]
        raise TrainingFailedError(f"the training job ({variant.policy}) ended with code {code}:\n{error}")
    return [msgspec.json.decode(line, type=DemoStep) for line in steps_log.read_bytes().splitlines()]


# --- on the terminal


def show_window(progress: ProgressLine, policy: str, view: JobView, final_accuracy: float | None = None) -> None:
    """Show the newest window of the run under a policy; at its end with the last accuracy."""
    if (metrics := view.metrics) is None:
        return
    accuracy = final_accuracy or metrics.held_out_accuracy
    held_out = "" if accuracy is None else f", {accuracy:.1%}"
    num_applied = sum(window.applied is not None for window in view.windows.values())
    progress.show(
        f"{policy}: window {view.window + 1}: {sizes_text(view.local_batch_sizes)}, "
        f"{metrics.step_time_s * 1000:.0f} ms{held_out}, {num_applied} applied",
        now=final_accuracy is not None,
    )


def show(runs: Sequence[DemoRun]) -> None:
    """Print a line for each run, with ratios to the first."""

    def with_ratio(value: float | None, first: float | None, form: str) -> str:
        if value is None:
            return "not reached"
        return form.format(value) + ("" if first is None or value == first else f" ({value / first:.2f}x)")

    headings = ("policy", "to target", "final", "median step", "applied", "last sizes")
    first = runs[0]
    rows = [
        (
            run.policy,
            with_ratio(run.time_to_target_s, first.time_to_target_s, "{:.1f} s"),
            formatted(run.final_accuracy, "{:.1%}"),
            with_ratio(run.median_step_time_s * 1000, first.median_step_time_s * 1000, "{:.0f} ms"),
            f"{run.num_actions_applied} of {run.num_windows}",
            sizes_text(run.local_batch_sizes[-1] if run.local_batch_sizes else ()),
        )
        for run in runs
    ]
    print_table(headings, rows, left=("policy",), title="Same seed, same data, same target")


def draw(runs: Sequence[DemoRun], plan: DemoPlan, path: str) -> None:
    """Write a PNG of the runs to `path`; the first one's sizes are not drawn, since they never change."""
    from matplotlib.figure import Figure

    from dynamix.cli.figures import COLOURS, finish, save

    k = plan.window_steps
    figure = Figure(figsize=(12, 8), layout="constrained")
    grid = figure.add_gridspec(len(runs), 2, width_ratios=(1.15, 1))
    accuracy = figure.add_subplot(grid[:, 0])
    times = figure.add_subplot(grid[-1, 1], sharex=accuracy)
    for run, colour in zip(runs, RUN_COLOURS, strict=False):
        reached = run.time_to_target_s
        label = run.policy + (": target not reached" if reached is None else f": {reached:.1f} s to the target")
        points = [(step.trained_s, step.accuracy) for step in run.steps if step.accuracy is not None]
        accuracy.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=label)
        if reached is not None:
            accuracy.axvline(reached, color=colour, linestyle=":", linewidth=1)
        windows = [run.steps[first : first + k] for first in range(0, len(run.steps) - k + 1, k)]
        medians = [statistics.median(step.step_time_s * 1000 for step in window) for window in windows]
        times.plot([window[-1].trained_s for window in windows], medians, color=colour, label=run.policy)
    accuracy.axhline(plan.target_accuracy, color="black", linewidth=0.8, linestyle="--")
    place = (0.01, plan.target_accuracy)
    accuracy.annotate(f"target {plan.target_accuracy:g}", place, xycoords=("axes fraction", "data"), va="bottom")
    accuracy.set_xlabel("training time [s], evaluation left out")
    finish(accuracy, from_zero=False, title="Held-out accuracy", ylabel="accuracy")
    finish(times, title="Step time, median of each window", xlabel="training time [s]", ylabel="ms")
    for row, run in enumerate(runs[1:]):
        axes = figure.add_subplot(grid[row, 1], sharex=accuracy)
        by_window = run.local_batch_sizes
        starts = [0.0, *(step.trained_s for step in run.steps[k - 1 :: k])][: len(by_window) + 1]
        for rank, sizes in enumerate(zip(*by_window[:1], *by_window, strict=True)):
            label = f"rank {rank}" + (f" ({plan.slowdown:g}x slower)" if rank == plan.slow_rank else "")
            axes.step(starts, sizes[: len(starts)], where="pre", label=label, color=COLOURS[rank % len(COLOURS)])
        finish(axes, title=f"Local batch sizes, {run.policy}", ylabel="samples per step")
    figure.suptitle(
        f"{plan.num_ranks} ranks, rank {plan.slow_rank} paced {plan.slowdown:g} times slower; "
        f"{plan.local_batch_size} samples each at the start, Fashion-MNIST"
    )
    save(figure, path)
