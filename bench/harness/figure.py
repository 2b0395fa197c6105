"""Figures of curves: rows of panels side by side."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynamix.runtime.output_files import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW_POINTS = 20
"""Up to so many points of a curve are marked."""
MOST_IN_AXES = 6
"""A legend of more curves stands beside the axes."""
PANEL_INCHES = (5.0, 4.0)


class Curve(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a panel."""

    label: str
    points: list[tuple[float, float]]
    style: str = ""
    """Line and markers as matplotlib's format strings write them."""


class Panel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pair of axes."""

    title: str
    x: str
    y: str
    curves: list[Curve]
    logarithmic: bool = False
    """Whether both axes are, to base 2."""
    limit: float | None = None
    """A target, drawn as a dashed line."""
    shaded_until: float | None = None
    """Where the part that is not judged ends."""
    places: list[str] = []
    """What stands at 0, 1, 2 ... of x, where it counts no numbers."""
    counts: bool = False
    """Whether x counts things: whole numbers only."""


def draw(rows: Sequence[Sequence[Panel]], path: Path, title: str = "") -> None:
    """Write a PNG. Panels of one row have the same scale, and share its width."""
    width, height = PANEL_INCHES
    figure = new_figure(width * max(map(len, rows)), height * len(rows))
    for part, panels in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        grid = part.subplots(1, len(panels), squeeze=False, sharey=len({panel.y for panel in panels}) == 1)
        for axes, panel in zip(grid[0], panels, strict=True):
            _draw_panel(axes, panel)
    if title:
        figure.suptitle(title)
    save(figure, path)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, sizes in inches."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - a second, which each spawned process would pay, too

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as a PNG into a folder that may not exist yet."""
    with whole(path, make_parents=True) as file:
        figure.savefig(file, dpi=110, format="png")


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    for curve in panel.curves:
        xs, ys = zip(*curve.points, strict=True) if curve.points else ((), ())
        style = curve.style or ("o-" if len(curve.points) <= FEW_POINTS else "-")
        axes.plot(xs, [math.nan if y is None else y for y in ys], style, markersize=3, label=curve.label)
    if panel.logarithmic:
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            getattr(axes, f"set_{name}scale")("log", base=2)
            axis.set_major_formatter(lambda value, _: f"{value:g}")
    if panel.places:
        axes.set_xticks(range(len(panel.places)), panel.places)
    if panel.counts:
        axes.locator_params("x", integer=True)
    if panel.limit is not None:
        axes.axhline(panel.limit, color="black", linewidth=0.8, linestyle="--")
    if panel.shaded_until is not None:
        axes.axvspan(0, panel.shaded_until, color="#eeeeee")
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    axes.grid(alpha=0.3)
    if len(panel.curves) > MOST_IN_AXES:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))  # it would cover the curves
    else:
        axes.legend(fontsize="small")
