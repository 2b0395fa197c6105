"""The demo's figure: accuracy, local batch sizes and step time over training time."""

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.cli.figures import COLOURS, finish, save

from .plan import DemoPlan, DemoRun

_COLOURS = ("#888888", "#0b6e4f", "#c44e52")
"""A colour for each run, in their order."""


def draw(runs: Sequence[DemoRun], plan: DemoPlan, path: str) -> None:
    """Write a PNG of the runs to `path`; the first one's sizes are not drawn, since they never change."""
    steered = runs[1:]
    figure = Figure(figsize=(12, 8), layout="constrained")
    grid = figure.add_gridspec(1 + len(steered), 2, width_ratios=(1.15, 1))
    _accuracy(accuracy := figure.add_subplot(grid[:, 0]), runs, plan)
    for row, run in enumerate(steered):
        _batch_sizes(figure.add_subplot(grid[row, 1], sharex=accuracy), run, plan)
    _step_time(figure.add_subplot(grid[-1, 1], sharex=accuracy), runs, plan)
    figure.suptitle(
        f"{plan.num_ranks} ranks, rank {plan.slow_rank} paced {plan.slowdown:g} times slower; "
        f"{plan.local_batch_size} samples each at the start, Fashion-MNIST"
    )
    save(figure, path)


def _accuracy(axes: Axes, runs: Sequence[DemoRun], plan: DemoPlan) -> None:
    for run, colour in zip(runs, _COLOURS, strict=False):
        reached = run.summary.time_to_target_s
        label = run.summary.policy + (": target not reached" if reached is None else f": {reached:.1f} s to the target")
        times = [step.trained_s for step in run.progress if step.accuracy is not None]
        accuracies = [step.accuracy for step in run.progress if step.accuracy is not None]
        axes.plot(times, accuracies, marker="o", markersize=3, color=colour, label=label)
        if reached is not None:
            axes.axvline(reached, color=colour, linestyle=":", linewidth=1)
    axes.axhline(plan.target_accuracy, color="black", linewidth=0.8, linestyle="--")
    place = (0.01, plan.target_accuracy)
    axes.annotate(f"target {plan.target_accuracy:g}", place, xycoords=("axes fraction", "data"), va="bottom")
    axes.set_xlabel("training time [s], evaluation left out")
    finish(axes, from_zero=False, title="Held-out accuracy", ylabel="accuracy")


def _batch_sizes(axes: Axes, run: DemoRun, plan: DemoPlan) -> None:
    by_window = run.summary.local_batch_sizes
    times = [0.0, *_window_ends(run, plan)][: len(by_window) + 1]
    for rank, sizes in enumerate(zip(*by_window[:1], *by_window, strict=True)):
        label = f"rank {rank}" + (f" ({plan.slowdown:g}x slower)" if rank == plan.slow_rank else "")
        axes.step(times, sizes[: len(times)], where="pre", label=label, color=COLOURS[rank % len(COLOURS)])
    finish(axes, title=f"Local batch sizes, {run.summary.policy}", ylabel="samples per step")


def _step_time(axes: Axes, runs: Sequence[DemoRun], plan: DemoPlan) -> None:
    k = plan.window_steps
    for run, colour in zip(runs, _COLOURS, strict=False):
        ends, steps = _window_ends(run, plan), [line.step_time_s * 1000 for line in run.progress]
        medians = [statistics.median(steps[k * window : k * (window + 1)]) for window in range(len(ends))]
        axes.plot(ends, medians, color=colour, label=run.summary.policy)
    finish(axes, title="Step time, median of each window", xlabel="training time [s]", ylabel="ms")


def _window_ends(run: DemoRun, plan: DemoPlan) -> list[float]:
    """Training time at the end of each whole window."""
    return [line.trained_s for line in run.progress[plan.window_steps - 1 :: plan.window_steps]]
