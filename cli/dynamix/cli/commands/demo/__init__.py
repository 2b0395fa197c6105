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
import webbrowser
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from dynamix.cli.arguments import (
    STANDARD_OUTPUT,
    add_json_argument,
    add_option,
    add_png_argument,
    count,
    number,
    output_directory,
    seed,
)
from dynamix.cli.errors import MISUSED, CommandError, explained
from dynamix.cli.output import write_json
from dynamix.cli.terminal import UNKNOWN, ProgressLine, bar, formatted, print_table
from dynamix.runtime.bus import Bus
from dynamix.runtime.extensions import extension_names
from dynamix.runtime.settings import SettingsError, read
from dynamix.schemas.policies import DEFAULT_POLICY, OUR_POLICIES
from dynamix.schemas.spelling import suggestion

from .plan import LOOKS, DemoPlan, DemoRun, Variant, variants

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dynamix.recording.job_view import JobView

DEFAULTS = DemoPlan()
MAX_WINDOWS, MAX_PACE_S, MAX_SLOWDOWN = 100_000, 10.0, 1000.0
"""Beyond these a typing error is more likely than a wish."""
PLAIN_EVERY_S = 5.0
BAR_WIDTH = 10
RUN_COLOURS = ("#888888", "#0b6e4f", "#c44e52")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--data", metavar="DIR", help="directory with Fashion-MNIST's four idx files")
    parser.add_argument("--dashboard", action="store_true", help="show the jobs as a web page while they train")
    what = "keep each run as a capture, DIR/POLICY.dxc"
    parser.add_argument("--captures", metavar="DIR", type=output_directory, help=what)
    add_json_argument(parser)
    add_png_argument(parser, "write the picture (default: %(default)s)", default="dynamix-demo.png")
    what = "what moves the adaptive global batch of the last run"
    add_option(parser, "--policy", DEFAULT_POLICY, what, type=_policy)
    what = "held-out accuracy to reach"
    add_option(parser, "--target", DEFAULTS.target_accuracy, what, type=number(0, 1, above=True))
    what = "least number of windows per run"
    add_option(parser, "--windows", DEFAULTS.min_windows, what, type=count(1, MAX_WINDOWS))
    what = "seconds per sample of a rank"
    add_option(parser, "--pace", DEFAULTS.pace_s_per_sample, what, type=number(0, MAX_PACE_S))
    what = "how many times slower rank 3 is"
    add_option(parser, "--slowdown", DEFAULTS.slowdown, what, type=number(0, MAX_SLOWDOWN, above=True))
    what = "of the order of the samples and of the model's parameters"
    add_option(parser, "--seed", DEFAULTS.seed, what, type=seed)


def _policy(text: str) -> str:
    """An argument's type: a policy that the demo's own arbitrator has; there is no other on its new broker."""
    known = sorted({*OUR_POLICIES, *extension_names("dynamix.policies")})
    if text not in known:
        raise argparse.ArgumentTypeError(f"no policy is called {text[:64]!r}{suggestion(text[:64], known)}")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Run the jobs one after the other; 0 when all reached the target."""
    from dynamix.lab.workloads.datasets import fashion_mnist

    from .runner import TrainingFailedError, run_demo

    with explained(OSError, ValueError, TimeoutError, TrainingFailedError):
        for split in ("train", "test"):  # fail now rather than after a minute
            fashion_mnist(split, arguments.data)
        plan = DemoPlan(
            data=arguments.data,
            target_accuracy=arguments.target,
            min_windows=arguments.windows,
            max_windows=max(DEFAULTS.max_windows, arguments.windows),
            pace_s_per_sample=arguments.pace,
            slowdown=arguments.slowdown,
            seed=arguments.seed,
        )
        compared = variants(arguments.policy)
        with DemoProgress(plan) as progress:
            progress.write_line(introduction(plan, compared))
            page = _page(progress.write_line) if arguments.dashboard else None
            shown = (progress.write_line, progress.show_window)
            try:
                runs = asyncio.run(run_demo(plan, compared, *shown, page=page, captures=arguments.captures))
            except asyncio.CancelledError:
                raise CommandError("ended by SIGTERM", exit_code=128 + signal.SIGTERM) from None
    draw(runs, plan, arguments.png)
    show(runs, stderr=arguments.json == STANDARD_OUTPUT)
    print(f"Picture: {arguments.png}", file=sys.stderr)
    write_json({"runs": [run.summary for run in runs]}, arguments.json)
    return 0 if all(run.summary.time_to_target_s is not None for run in runs) else 1


def _page(announce: Callable[[str], None]) -> Callable[[Bus], contextlib.AbstractAsyncContextManager[None]]:
    """What serves a bus as a page, on a free port unless a setting names one.

    Raises CommandError when a setting cannot be used, and ModuleNotFoundError without the extra `dashboard`.
    """
    from dynamix.cli.dashboard import DashboardSettings, token_of
    from dynamix.cli.dashboard.server import served

    given = {name: value for name, value in os.environ.items() if name.startswith("DYNAMIX_") and value}
    with explained(SettingsError, exit_code=MISUSED):
        settings = read(DashboardSettings, "dashboard", {"DYNAMIX_DASHBOARD_PORT": "0", **given})
    token = token_of(settings)

    @contextlib.asynccontextmanager
    async def shown(bus: Bus) -> AsyncIterator[None]:
        async with served(bus, settings, token) as server:
            announce(f"The page: {server.url} (until the demo ends)")
            if sys.stderr.isatty() and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                await asyncio.to_thread(webbrowser.open, server.url)
            yield

    return shown


# --- on the terminal


def introduction(plan: DemoPlan, compared: Sequence[Variant]) -> str:
    """Introduce the runs: what is real about them, and how the script's call differs."""
    width = max(len(variant.policy) for variant in compared)
    calls = "".join(
        f"  {variant.policy:{width}}  {_call(plan, variant)}\n  {'':{width}}  {variant.what}\n" for variant in compared
    )
    return (
        f"A {plan.num_ranks}-process gloo job trains a small CNN on Fashion-MNIST to {plan.target_accuracy:.0%} "
        f"held-out accuracy, the mean of {LOOKS} evaluations, {len(compared)} times with one seed.\n"
        f"Its ranks are PACED: they sleep to {plan.pace_s_per_sample * 1000:g} ms per sample, rank "
        f"{plan.slow_rank} to {plan.slowdown:g} times that. Data, gradients, processes and messages are real.\n"
        f"One call differs in its script:\n{calls}"
        "Shown per window: local batch sizes, step time, held-out accuracy, actions applied."
    )


def _call(plan: DemoPlan, variant: Variant) -> str:
    named = "".join(f', {name}="{value}"' for name, value in variant.arguments.items())
    return f"attach(model, optimizer, dataset, local_batch_size={plan.local_batch_size}{named})"


class DemoProgress(ProgressLine):
    """A line per run, redrawn for each window."""

    def __init__(self, plan: DemoPlan) -> None:
        super().__init__(PLAIN_EVERY_S, keep=True)
        self._plan = plan
        self._policy = ""

    def show_window(self, policy: str, view: "JobView", final_accuracy: float | None = None) -> None:
        """Show the newest window of the run under a policy; at its end with the last accuracy."""
        if policy != self._policy:
            self.finish()
            self._policy = policy
        if (metrics := view.metrics) is None:
            return
        done, least = view.window + 1, self._plan.min_windows
        of_least = f" of at least {least}" if done < least else ""
        accuracy = final_accuracy or metrics.held_out_accuracy
        held_out = "" if accuracy is None else f", {accuracy:.1%}"
        num_applied = sum(window.applied is not None for window in view.windows.values())
        self.show(
            f"{policy}: {bar(min(1.0, done / least), BAR_WIDTH)} window {done}{of_least}: "
            f"{'/'.join(map(str, view.local_batch_sizes))}, {metrics.step_time_s * 1000:.0f} ms{held_out}, "
            f"{num_applied} applied",
            now=final_accuracy is not None,
        )


def show(runs: Sequence[DemoRun], *, stderr: bool) -> None:
    """Print a line for each run, with ratios to the first."""
    headings = ("policy", "to target", "final", "median step", "applied", "last sizes")
    first = runs[0].summary
    rows = [
        (
            summary.policy,
            _with_ratio(summary.time_to_target_s, first.time_to_target_s, "{:.1f} s"),
            formatted(summary.final_accuracy, "{:.1%}"),
            _with_ratio(summary.median_step_time_s * 1000, first.median_step_time_s * 1000, "{:.0f} ms"),
            f"{summary.num_actions_applied} of {summary.num_windows}",
            "/".join(map(str, summary.local_batch_sizes[-1])) if summary.local_batch_sizes else UNKNOWN,
        )
        for summary in (run.summary for run in runs)
    ]
    print_table(headings, rows, left=("policy",), title="Same seed, same data, same target", stderr=stderr)


def _with_ratio(value: float | None, first: float | None, form: str) -> str:
    if value is None:
        return "not reached"
    ratio = "" if first is None or value == first else f" ({value / first:.2f}x)"
    return form.format(value) + ratio


# --- as a figure


def draw(runs: Sequence[DemoRun], plan: DemoPlan, path: str) -> None:
    """Write a PNG of the runs to `path`; the first one's sizes are not drawn, since they never change."""
    from matplotlib.figure import Figure

    from dynamix.cli.figures import finish, save

    figure = Figure(figsize=(12, 8), layout="constrained")
    grid = figure.add_gridspec(len(runs), 2, width_ratios=(1.15, 1))
    _draw_accuracy(accuracy := figure.add_subplot(grid[:, 0]), runs, plan)
    for row, run in enumerate(runs[1:]):
        _draw_sizes(figure.add_subplot(grid[row, 1], sharex=accuracy), run, plan)
    times = figure.add_subplot(grid[-1, 1], sharex=accuracy)
    k = plan.window_steps
    for run, colour in zip(runs, RUN_COLOURS, strict=False):
        ends, steps = _window_ends(run, plan), [line.step_time_s * 1000 for line in run.progress]
        medians = [statistics.median(steps[k * window : k * (window + 1)]) for window in range(len(ends))]
        times.plot(ends, medians, color=colour, label=run.summary.policy)
    finish(times, title="Step time, median of each window", xlabel="training time [s]", ylabel="ms")
    figure.suptitle(
        f"{plan.num_ranks} ranks, rank {plan.slow_rank} paced {plan.slowdown:g} times slower; "
        f"{plan.local_batch_size} samples each at the start, Fashion-MNIST"
    )
    save(figure, path)


def _draw_accuracy(axes: "Axes", runs: Sequence[DemoRun], plan: DemoPlan) -> None:
    from dynamix.cli.figures import finish

    for run, colour in zip(runs, RUN_COLOURS, strict=False):
        reached = run.summary.time_to_target_s
        label = run.summary.policy + (": target not reached" if reached is None else f": {reached:.1f} s to the target")
        points = [(step.trained_s, step.accuracy) for step in run.progress if step.accuracy is not None]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=label)
        if reached is not None:
            axes.axvline(reached, color=colour, linestyle=":", linewidth=1)
    axes.axhline(plan.target_accuracy, color="black", linewidth=0.8, linestyle="--")
    place = (0.01, plan.target_accuracy)
    axes.annotate(f"target {plan.target_accuracy:g}", place, xycoords=("axes fraction", "data"), va="bottom")
    axes.set_xlabel("training time [s], evaluation left out")
    finish(axes, from_zero=False, title="Held-out accuracy", ylabel="accuracy")


def _draw_sizes(axes: "Axes", run: DemoRun, plan: DemoPlan) -> None:
    from dynamix.cli.figures import COLOURS, finish

    by_window = run.summary.local_batch_sizes
    times = [0.0, *_window_ends(run, plan)][: len(by_window) + 1]
    for rank, sizes in enumerate(zip(*by_window[:1], *by_window, strict=True)):
        label = f"rank {rank}" + (f" ({plan.slowdown:g}x slower)" if rank == plan.slow_rank else "")
        axes.step(times, sizes[: len(times)], where="pre", label=label, color=COLOURS[rank % len(COLOURS)])
    finish(axes, title=f"Local batch sizes, {run.summary.policy}", ylabel="samples per step")


def _window_ends(run: DemoRun, plan: DemoPlan) -> list[float]:
    """Training time at the end of each whole window."""
    return [line.trained_s for line in run.progress[plan.window_steps - 1 :: plan.window_steps]]
