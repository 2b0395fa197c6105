"""The picture of a capture: sizes and decisions, step time, accuracy and reward, over the job's windows."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.cli.inspection.inspection import Inspection
from dynamix.cli.inspection.window import Window
from dynamix.runtime.output_files import whole

SINGLE_RANKS = 16
"""Of more ranks, lines would hide each other: their range is drawn instead."""
_COLOURS = ("#4c72b0", "#55a868", "#8172b3", "#c44e52", "#ccb974", "#64b5cd", "#937860", "#da8bc3")
_DECIDED, _APPLIED, _LINE, _HELD_OUT = "#dd8452", "#0b6e4f", "#4c72b0", "#c44e52"


def draw(inspection: Inspection, path: Path) -> None:
    """Write a PNG; the generations of a job stand one after the other."""
    windows = inspection.sorted_windows()
    figure = Figure(figsize=(12, 10), layout="constrained")
    sizes, times, accuracy, reward = figure.subplots(4, 1, sharex=True, height_ratios=(2, 1, 1.2, 1))
    _sizes(sizes, windows)
    _decisions(sizes, windows)
    _step_time(times, windows)
    _accuracy(accuracy, windows)
    _reward(reward, windows)
    _generations((sizes, times, accuracy, reward), windows)
    reward.set_xlabel("window" if windows[-1].generation == windows[0].generation else "window, over all generations")
    policies = sorted({window.action.policy for window in windows if window.action})
    figure.suptitle(f"{inspection.header.job}, {len(windows)} windows under {', '.join(policies) or 'no policy'}")
    with whole(path) as file:
        figure.savefig(file, dpi=130, format="png")


def _sizes(axes: Axes, windows: Sequence[Window]) -> None:
    ranks = sorted({rank for window in windows for rank in window.local_batch_sizes})
    if len(ranks) <= SINGLE_RANKS:
        alike: dict[tuple[int | None, ...], list[int]] = {}
        for rank in ranks:
            alike.setdefault(tuple(window.local_batch_sizes.get(rank) for window in windows), []).append(rank)
        for line, equal in alike.items():
            label = f"rank {', '.join(map(str, equal))}"
            axes.step(_x(windows), _known(line), where="mid", label=label, color=_COLOURS[equal[0] % len(_COLOURS)])
    else:
        lows, highs, middles = (_each(windows, of) for of in (min, max, statistics.median))
        axes.fill_between(_x(windows), lows, highs, step="mid", alpha=0.35, label=f"all {len(ranks)} ranks")
        axes.step(_x(windows), middles, where="mid", color=_LINE, label="median")
    axes.set(ylabel="local batch size", title="Sizes that ruled")
    axes.set_ylim(bottom=0)


def _each(windows: Sequence[Window], of: Callable[[tuple[int, ...]], float]) -> list[float]:
    return _known([of(window.sizes) if window.sizes else None for window in windows])


def _decisions(axes: Axes, windows: Sequence[Window]) -> None:
    """Ticks below: windows whose action changed the sizes, and windows that a new decision began to rule."""
    changed = [
        x
        for x, window in zip(_x(windows), windows, strict=True)
        if window.action and (window.action.split == "tracking" or any(window.action.deltas))
    ]
    began = [x for x, window in zip(_x(windows), windows, strict=True) if window.applied]
    bottom = axes.get_xaxis_transform()
    axes.plot(
        changed, [0.07] * len(changed), "^", color=_DECIDED, markersize=5, transform=bottom, label="decided a change"
    )
    axes.plot(began, [0.02] * len(began), "|", color=_APPLIED, markersize=8, transform=bottom, label="adopted")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    axes.grid(alpha=0.3)


def _step_time(axes: Axes, windows: Sequence[Window]) -> None:
    axes.plot(_x(windows), _of_job(windows, "step_time_s", 1000.0), color=_LINE)
    axes.set(ylabel="step time, ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _accuracy(axes: Axes, windows: Sequence[Window]) -> None:
    axes.plot(_x(windows), _of_job(windows, "accuracy"), color=_LINE, label="training")
    axes.plot(_x(windows), _of_job(windows, "held_out_accuracy"), color=_HELD_OUT, label="held out", marker=".")
    axes.set(ylabel="accuracy")
    loss = axes.twinx()
    loss.plot(_x(windows), _of_job(windows, "loss"), color="#999999", linewidth=1, linestyle="--", label="loss, right")
    loss.set_ylabel("loss")
    handles, labels = axes.get_legend_handles_labels()
    others, more = loss.get_legend_handles_labels()
    axes.legend(handles + others, labels + more, fontsize="small", loc="center left", bbox_to_anchor=(1.05, 0.5))
    axes.grid(alpha=0.3)


def _reward(axes: Axes, windows: Sequence[Window]) -> None:
    axes.plot(_x(windows), _known([window.mean_reward for window in windows]), color=_APPLIED)
    axes.set(ylabel="mean reward")
    axes.grid(alpha=0.3)


def _generations(all_axes: Sequence[Axes], windows: Sequence[Window]) -> None:
    """A line where the job was restarted."""
    places = _x(windows)
    for index in range(1, len(windows)):
        if windows[index].generation != windows[index - 1].generation:
            for axes in all_axes:
                axes.axvline(places[index] - 0.5, color="black", linewidth=0.8, linestyle=":")


def _of_job(windows: Sequence[Window], field: str, factor: float = 1.0) -> list[float]:
    values = [getattr(window.metrics, field, None) for window in windows]
    return [value * factor for value in _known(values)]


def _known(values: Sequence[float | None]) -> list[float]:
    """What is not known is not drawn."""
    return [float("nan") if value is None else float(value) for value in values]


def _x(windows: Sequence[Window]) -> list[int]:
    """Where each window stands: its index, behind the last window of the generation before it."""
    places: list[int] = []
    start = 0
    for window, before in zip(windows, (None, *windows), strict=False):
        if before is not None and window.generation != before.generation:
            start = places[-1] + 1
        places.append(start + window.window)
    return places
