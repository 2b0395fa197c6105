"""The picture of bench.cluster: step time of every run, and below it what each rank's state showed."""

from collections.abc import Sequence
from pathlib import Path

from bench.cluster.display import describe
from bench.cluster.plan import Plan
from bench.cluster.summary import Result
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.runtime.output_files import whole

ROWS = (
    ("compute time [ms]", "compute_time_s", 1e3),
    ("sync time [ms]", "sync_time_s", 1e3),
    ("received [MB/s]", "rx_bytes_per_s", 1e-6),
    ("sent again", "retransmits", 1.0),
    ("round trip [ms]", "srtt_us", 1e-3),
    ("CPU time ratio", "cpu_time_ratio", 1.0),
    ("run-queue wait ratio", "run_queue_wait_ratio", 1.0),
)
"""Title, signal and scale."""


def draw(results: Sequence[Result], plan: Plan, path: Path) -> None:
    """Write a PNG: a column per run."""
    figure = Figure(figsize=(3 + 4 * len(results), 2.2 * (1 + len(ROWS))), layout="constrained")
    grid = figure.add_gridspec(1 + len(ROWS), len(results))
    _step_times(figure.add_subplot(grid[0, :]), results, plan)
    for row, (title, signal, scale) in enumerate(ROWS, start=1):
        for column, result in enumerate(results):
            axes = figure.add_subplot(grid[row, column])
            _ranks(axes, result, signal, scale)
            axes.set_title(f"{title}, {result.label}", fontsize="small")
            axes.set(xlim=(0, max(1, plan.num_windows - 1)), ylim=(0, _top(results, signal, scale)))
    figure.axes[1].legend(fontsize="x-small")
    figure.suptitle(describe(plan))
    with whole(path, make_parents=True) as file:
        figure.savefig(file, dpi=110, format="png")


def _step_times(axes: Axes, results: Sequence[Result], plan: Plan) -> None:
    for result in results:
        axes.plot([1e3 * step_s for step_s in result.step_times_s], label=result.label)
    if plan.num_warm_up_windows:
        axes.axvspan(0, plan.num_warm_up_windows - 0.5, color="#eeeeee")
    highest_ms = 1e3 * max(step_s for result in results for step_s in result.step_times_s)
    axes.set(title="Step time; shaded: not measured", xlabel="window", ylabel="ms", ylim=(0, 1.05 * highest_ms))
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _ranks(axes: Axes, result: Result, signal: str, scale: float) -> None:
    for rank in result.ranks:
        values = [None if value is None else value * scale for value in rank.windows[signal]]
        axes.plot(
            range(len(values)),
            [float("nan") if value is None else value for value in values],
            label=f"rank {rank.rank}",
            linewidth=1,
        )
    axes.grid(alpha=0.3)


def _top(results: Sequence[Result], signal: str, scale: float) -> float:
    """The same for all columns, so that they can be compared."""
    values = [value for result in results for rank in result.ranks for value in rank.windows[signal]]
    return 1.05 * scale * max((value for value in values if value), default=1 / scale)
