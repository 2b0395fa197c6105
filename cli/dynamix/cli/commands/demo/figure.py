"""The demo's figure: accuracy over training time, local batch sizes and step time over windows."""

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.cli.figures import COLOURS, finish, save

from .plan import DemoPlan, DemoRun

_POLICY_COLOURS = {"static": "#888888", "proportional": "#0b6e4f"}


def draw(runs: Sequence[DemoRun], plan: DemoPlan, path: str) -> None:
    """Write a PNG of the runs to `path`."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1))
    _accuracy(figure.add_subplot(grid[:, 0]), runs, plan)
    _batch_sizes(figure.add_subplot(grid[0, 1]), runs[-1], plan)
    _step_time(figure.add_subplot(grid[1, 1]), runs, plan)
    figure.suptitle(
        f"{plan.num_ranks} ranks, rank {plan.slow_rank} paced {plan.slowdown:g} times slower; "
        f"global batch {plan.local_batch_size * plan.num_ranks}, Fashion-MNIST"
    )
    save(figure, path)


def _accuracy(axes: Axes, runs: Sequence[DemoRun], plan: DemoPlan) -> None:
    for run in runs:
        colour = _POLICY_COLOURS.get(run.summary.policy)
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
    for rank, sizes in enumerate(zip(*run.summary.local_batch_sizes, strict=True)):
        label = f"rank {rank}" + (f" ({plan.slowdown:g}x slower)" if rank == plan.slow_rank else "")
        axes.step(range(len(sizes)), sizes, where="post", label=label, color=COLOURS[rank % len(COLOURS)])
    finish(axes, title=f"Local batch sizes, {run.summary.policy}", xlabel="window", ylabel="samples per step")


def _step_time(axes: Axes, runs: Sequence[DemoRun], plan: DemoPlan) -> None:
    for run in runs:
        steps = [line.step_time_s * 1000 for line in run.progress]
        k = plan.window_steps
        medians = [statistics.median(steps[start : start + k]) for start in range(0, len(steps) - k + 1, k)]
        axes.plot(medians, color=_POLICY_COLOURS.get(run.summary.policy), label=run.summary.policy)
    finish(axes, title="Step time, median of each window", xlabel="window", ylabel="ms")
