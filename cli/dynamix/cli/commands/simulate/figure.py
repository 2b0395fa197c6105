"""The figure of a simulation: accuracy, batch sizes and step time over virtual time."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.cli.figures import COLOURS, draw_sizes, finish, save

from .simulation import Simulation

_ACCURACY = "#0b6e4f"


def draw(simulation: Simulation, path: str) -> None:
    """Write a PNG."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    accuracy, sizes, times = figure.subplots(3, 1, sharex=True, height_ratios=(1.3, 1.3, 1))
    _accuracy(accuracy, simulation)
    _sizes(sizes, simulation)
    step_times = [window.step_time_s * 1000 for window in simulation.windows]
    times.step(_starts(simulation), [*step_times, step_times[-1]], where="post", color=COLOURS[0])
    finish(times, ylabel="step time [ms]", xlabel="virtual time [s]")
    scenario = simulation.episode.scenario
    what = f"{scenario.name}: {scenario.workload} on {scenario.world_size} workers"
    figure.suptitle(f"{what} under {simulation.policy}")
    save(figure, path)


def _accuracy(axes: Axes, simulation: Simulation) -> None:
    points, reached = simulation.episode.evaluations, simulation.episode.time_to_target_s
    target = simulation.episode.scenario.target_accuracy
    axes.plot([point.time_s for point in points], [point.accuracy for point in points], color=_ACCURACY)
    axes.axhline(target, color="black", linewidth=0.8, linestyle="--")
    if reached is not None:
        axes.axvline(reached, color=_ACCURACY, linewidth=1, linestyle=":")
    result = "missed" if reached is None else f"reached at {reached:g} s"
    finish(axes, from_zero=False, ylabel="validation accuracy", title=f"target {target:g}: {result}")


def _sizes(axes: Axes, simulation: Simulation) -> None:
    """Sizes at the last step of each window."""
    by_rank = [(*sizes, sizes[-1]) for sizes in zip(*(w.local_batch_sizes for w in simulation.windows), strict=True)]
    draw_sizes(axes, _starts(simulation), by_rank, "post")
    mean = [sum(sizes) / len(sizes) for sizes in zip(*by_rank, strict=True)]
    axes.step(_starts(simulation), mean, where="post", color="black", linewidth=1, linestyle="--", label="mean")
    finish(axes, beside=1.0, ylabel="local batch size")


def _starts(simulation: Simulation) -> list[float]:
    """The virtual time at the start of each window, and at the end of the last."""
    return [0.0, *(window.time_s for window in simulation.windows)]
