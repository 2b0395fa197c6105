"""The figure of a calibration: virtual and real step times, window by window and against each other."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.cli.figures import COLOURS, finish, save
from dynamix.lab.calibration import Calibration

_REAL, _VIRTUAL, _DISTURBED = COLOURS[0], COLOURS[3], COLOURS[4]
_BAND = 0.1
"""Drawn around the diagonal, relative."""


def draw(calibration: Calibration, source: str, path: str) -> None:
    """Write a PNG."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    over_windows, against = figure.subplots(1, 2, width_ratios=(1.6, 1))
    _over_windows(over_windows, calibration)
    _against(against, calibration)
    figure.suptitle(
        f"{source}: virtual step times are off by {calibration.median_error:.1%} in the median, "
        f"{calibration.p90_error:.1%} at the 90th percentile ({calibration.num_windows} windows)"
    )
    save(figure, path)


def _over_windows(axes: Axes, calibration: Calibration) -> None:
    windows = [comparison.window for comparison in calibration.comparisons]
    real = [comparison.step_time_s * 1000 for comparison in calibration.comparisons]
    virtual = [comparison.virtual_step_time_s * 1000 for comparison in calibration.comparisons]
    axes.plot(windows, real, color=_REAL, label="real", linewidth=1.5)
    axes.plot(windows, virtual, color=_VIRTUAL, label="virtual, fitted to other windows", linewidth=1)
    finish(axes, title="Step time, mean of each window", xlabel="window", ylabel="ms")


def _against(axes: Axes, calibration: Calibration) -> None:
    for disturbed in (False, True):
        chosen = [c for c in calibration.comparisons if bool(c.slow_ranks or c.is_congested) == disturbed]
        axes.scatter(
            [comparison.step_time_s * 1000 for comparison in chosen],
            [comparison.virtual_step_time_s * 1000 for comparison in chosen],
            s=14,
            color=_DISTURBED if disturbed else _REAL,
            label="a rank straggled, or congestion" if disturbed else "undisturbed",
        )
    most = max(max(c.step_time_s, c.virtual_step_time_s) for c in calibration.comparisons) * 1050
    axes.plot([0, most], [0, most], color="black", linewidth=0.8)
    for factor in (1 - _BAND, 1 + _BAND):
        axes.plot([0, most], [0, factor * most], color="black", linewidth=0.6, linestyle=":")
    finish(axes, title=f"Virtual against real, ±{_BAND:.0%} dotted", xlabel="real, ms", ylabel="virtual, ms")
    axes.set_xlim(0, most)
    axes.set_ylim(0, most)
