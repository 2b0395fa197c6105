"""The picture of a simulation: accuracy, batch sizes and step time over virtual time."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.runtime.output_files import whole

from .simulation import Simulation

SINGLE_WORKERS = 16
"""Of more workers, lines would hide each other: their range is drawn instead."""


def draw(simulation: Simulation, path: Path) -> None:
    """Write a PNG to `path`; raises OSError when that cannot be."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(1.3, 1.3, 1))
    _accuracy(axes[0], simulation)
    _sizes(axes[1], simulation)
    _step_time(axes[2], simulation)
    axes[2].set_xlabel("virtual time [s]")
    figure.suptitle(
        f"{simulation.scenario}: {simulation.workload} on {simulation.world_size} workers under {simulation.policy}"
    )
    with whole(path) as file:
        figure.savefig(file, dpi=130, format="png")


def _accuracy(axes: Axes, simulation: Simulation) -> None:
    points = simulation.evaluations
    axes.plot([point.time_s for point in points], [point.accuracy for point in points], color="#0b6e4f")
    axes.axhline(simulation.target_accuracy, color="black", linewidth=0.8, linestyle="--")
    reached = simulation.time_to_target_s
    if reached is not None:
        axes.axvline(reached, color="#0b6e4f", linewidth=1, linestyle=":")
    said = "missed" if reached is None else f"reached at {reached:g} s"
    axes.set(ylabel="validation accuracy", title=f"target {simulation.target_accuracy:g}: {said}")
    axes.grid(alpha=0.3)


def _sizes(axes: Axes, simulation: Simulation) -> None:
    """Sizes at the last step of each window; equal workers share a line."""
    starts = [0.0, *(line.time_s for line in simulation.windows)]
    by_worker = [(*sizes, sizes[-1]) for sizes in zip(*(w.local_batch_sizes for w in simulation.windows), strict=True)]
    if len(by_worker) <= SINGLE_WORKERS:
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, sizes in enumerate(by_worker):
            alike.setdefault(sizes, []).append(rank)
        for sizes, ranks in alike.items():
            axes.step(starts, sizes, where="post", label=f"rank {', '.join(map(str, ranks))}")
    else:
        lowest, highest = ([bound(column) for column in zip(*by_worker, strict=True)] for bound in (min, max))
        axes.fill_between(starts, lowest, highest, step="post", alpha=0.4, label="smallest to largest")
    total = [sum(sizes) / len(sizes) for sizes in zip(*by_worker, strict=True)]
    axes.step(starts, total, where="post", color="black", linewidth=1, linestyle="--", label="mean")
    axes.set(ylabel="local batch size")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    axes.grid(alpha=0.3)


def _step_time(axes: Axes, simulation: Simulation) -> None:
    starts = [0.0, *(line.time_s for line in simulation.windows)]
    times = [line.step_time_s * 1000 for line in simulation.windows]
    axes.step(starts, [*times, times[-1]], where="post", color="#4c72b0")
    axes.set(ylabel="step time [ms]")
    axes.set_ylim(0, 1.1 * max(times))
    axes.grid(alpha=0.3)
