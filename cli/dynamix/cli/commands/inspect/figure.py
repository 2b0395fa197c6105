"""The figure of a capture: sizes and decisions, step time, accuracy and reward, over the job's windows."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.cli.figures import COLOURS, draw_sizes, finish, save
from dynamix.cli.inspection.inspection import Inspection
from dynamix.cli.inspection.window import CapturedWindow

_DECIDED, _APPLIED, _LINE, _HELD_OUT = "#dd8452", "#0b6e4f", COLOURS[0], COLOURS[3]


def draw(inspection: Inspection, path: str) -> None:
    """Write a PNG; the generations of a job stand one after the other."""
    windows = inspection.sorted_windows()
    figure = Figure(figsize=(12, 10), layout="constrained")
    sizes, times, accuracy, reward = figure.subplots(4, 1, sharex=True, height_ratios=(2, 1, 1.2, 1))
    _sizes(sizes, windows)
    times.plot(_x(windows), _of_job(windows, "step_time_s", 1000.0), color=_LINE)
    finish(times, ylabel="step time, ms")
    _accuracy(accuracy, windows)
    reward.plot(_x(windows), _known([window.mean_reward for window in windows]), color=_APPLIED)
    finish(reward, from_zero=False, ylabel="mean reward")
    _generations((sizes, times, accuracy, reward), windows)
    reward.set_xlabel("window" if windows[-1].generation == windows[0].generation else "window, over all generations")
    policies = sorted({window.action.policy for window in windows if window.action})
    figure.suptitle(f"{inspection.header.job}, {len(windows)} windows under {', '.join(policies) or 'no policy'}")
    save(figure, path)


def _sizes(axes: Axes, windows: Sequence[CapturedWindow]) -> None:
    """The sizes; below them, windows whose action changed the sizes, and windows that began under a new decision."""
    x = _x(windows)
    ranks = sorted({rank for window in windows for rank in window.local_batch_sizes})
    draw_sizes(axes, x, [_known([window.local_batch_sizes.get(rank) for window in windows]) for rank in ranks], "mid")
    actions = [(place, window.action) for place, window in zip(x, windows, strict=True) if window.action]
    changed = [place for place, action in actions if action.split == "tracking" or any(action.deltas)]
    began = [place for place, window in zip(x, windows, strict=True) if window.applied]
    bottom = axes.get_xaxis_transform()
    for places, height, marker, colour, label in (
        (changed, 0.07, "^", _DECIDED, "decided a change"),
        (began, 0.02, "|", _APPLIED, "adopted"),
    ):
        height_of = [height] * len(places)
        axes.plot(places, height_of, marker, color=colour, markersize=6, transform=bottom, label=label)
    finish(axes, beside=1.0, ylabel="local batch size", title="Sizes in use")


def _accuracy(axes: Axes, windows: Sequence[CapturedWindow]) -> None:
    axes.plot(_x(windows), _of_job(windows, "accuracy"), color=_LINE, label="training")
    axes.plot(_x(windows), _of_job(windows, "held_out_accuracy"), color=_HELD_OUT, label="held out", marker=".")
    loss = axes.twinx()
    loss.plot(_x(windows), _of_job(windows, "loss"), color="#999999", linewidth=1, linestyle="--")
    loss.set_ylabel("loss")
    axes.plot([], [], color="#999999", linewidth=1, linestyle="--", label="loss, right")
    finish(axes, from_zero=False, beside=1.05, ylabel="accuracy")


def _generations(all_axes: Sequence[Axes], windows: Sequence[CapturedWindow]) -> None:
    """A line where the job was restarted."""
    places = _x(windows)
    for index in range(1, len(windows)):
        if windows[index].generation != windows[index - 1].generation:
            for axes in all_axes:
                axes.axvline(places[index] - 0.5, color="black", linewidth=0.8, linestyle=":")


def _of_job(windows: Sequence[CapturedWindow], field: str, factor: float = 1.0) -> list[float]:
    values = [getattr(window.metrics, field, None) for window in windows]
    return [value * factor for value in _known(values)]


def _known(values: Sequence[float | None]) -> list[float]:
    """Numbers to draw: NaN, which is not drawn, for unknown ones."""
    return [math.nan if value is None else float(value) for value in values]


def _x(windows: Sequence[CapturedWindow]) -> list[int]:
    """The place of each window: its index, after the last window of the generation before it."""
    places: list[int] = []
    start = 0
    for window, before in zip(windows, (None, *windows), strict=False):
        if before is not None and window.generation != before.generation:
            start = places[-1] + 1
        places.append(start + window.window)
    return places
